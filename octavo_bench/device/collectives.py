"""What the GPUs of a host exchange: Octavo's kernels compared with NCCL's and torch's, and the links' speed.

Run as ``python -m octavo_bench.device.collectives RANK SIZE MEMORY WORK``, with an inherited descriptor of the ranks'
memory and the work as JSON, it is one rank, which times what the GPUs exchange in step with the other ranks, and prints
its result as one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops.collective import Collective
from octavo.runtime.ranks.process_group import ProcessGroupCollective, device_collective
from octavo_kernels.cpu.rank_memory import MappedRankMemory, make_memory
from octavo_kernels.triton.collective import SLOT_BYTES, SMALL_WORDS, WORD_BYTES, PeerCollective
from octavo_kernels.triton.graph_timing import median_milliseconds, microseconds
from octavo_kernels.triton.peer_memory import mapped_buffers


def measure(rows: Sequence[int], widths: Sequence[int], seconds: float = 300.0) -> dict[str, Any]:
    """Times of rank 0, of ``rows`` by ``widths`` numbers, over all visible GPUs. Raises ``ConfigError``."""
    size = torch.cuda.device_count()
    if size < 2:
        raise ConfigError(f"collectives: needs at least 2 GPUs; {size} visible")
    descriptor, work = make_memory(size), json.dumps({"rows": list(rows), "widths": list(widths)})
    ranks = [_start(rank, size, descriptor, work) for rank in range(size)]
    os.close(descriptor)
    try:
        printed = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        raise ConfigError(f"collectives: the ranks did not end within {seconds:.0f} s") from None
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise ConfigError(f"collectives: the ranks ended with {[rank.returncode for rank in ranks]}")
    return {"ranks": size, **json.loads(printed[0].splitlines()[-1])}


def _start(rank: int, size: int, descriptor: int, work: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "octavo_bench.device.collectives", str(rank), str(size), str(descriptor), work]
    return subprocess.Popen(command, pass_fds=[descriptor], stdout=subprocess.PIPE, text=True)


CALLS = 32
"""Exchanges in a graph, as a model has in a step."""
LINK_BYTES = 256 << 20
COPY_BLOCK = 4096
_distributed: Any = dist  # torch has no types for it
Exchange = Callable[[], object]
FORCED = {
    "octavo_small": (SMALL_WORDS * WORD_BYTES, 0),
    "octavo_one_shot": (0, SLOT_BYTES),
    "octavo_two_shot": (0, 0),
}
"""The largest small messages, and those of one shot, that make all-reduces take one way."""


def main() -> None:
    """Measure, and print the result."""
    rank, size, descriptor = map(int, sys.argv[1:4])
    work = json.loads(sys.argv[4])
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    host = MappedRankMemory(descriptor, rank, size).collective
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "link_gb_s": link_rates(host, device)}
    ours = device_collective(host, device)
    group = ProcessGroupCollective(host, device)
    found["rows"] = [
        {"kind": kind, "rows": rows, "width": width, "bytes": rows * width * 2, **times(ours, group, host, rows, width)}
        for kind, times in KINDS.items()
        for width in work["widths"]
        for rows in work["rows"]
    ]
    print(json.dumps(found), flush=True)
    _distributed.destroy_process_group()


def _all_reduce(ours: Collective, group: Collective, host: Collective, rows: int, width: int) -> dict[str, Any]:
    """Microseconds of one exchange of bfloat16 in a CUDA graph, by each way."""
    x_TD = torch.randn(rows, width, device="cuda").bfloat16()
    found: dict[str, Any] = {"octavo": _timed(lambda: ours.all_reduce(x_TD), host)}
    if isinstance(ours, PeerCollective):
        found |= _forced(ours, x_TD, host)
    found["nccl"] = _timed(lambda: _distributed.all_reduce(x_TD), host)
    return found | _symmetric(x_TD, host)


def _forced(ours: PeerCollective, x_TD: Tensor, host: Collective) -> dict[str, Any]:
    """All-reduces that take one way each, where messages are not too long for it."""
    found, chosen = dict[str, Any](), (ours.small_bytes, ours.one_shot_bytes)
    for name, limits in FORCED.items():
        if name == "octavo_two_shot" or x_TD.nbytes <= max(limits):
            ours.small_bytes, ours.one_shot_bytes = limits
            found[name] = _timed(lambda: ours.all_reduce(x_TD), host)
    ours.small_bytes, ours.one_shot_bytes = chosen
    return found


def _with_residual(ours: Collective, group: Collective, host: Collective, rows: int, width: int) -> dict[str, Any]:
    x_TD = torch.randn(rows, width, device="cuda").bfloat16()
    residual_TD = torch.zeros_like(x_TD)

    def nccl() -> None:
        _distributed.all_reduce(x_TD)
        residual_TD.add_(x_TD)

    return {
        "octavo": _timed(lambda: ours.all_reduce(x_TD, residual_TD), host),
        "octavo_without_peer_access": _timed(lambda: group.all_reduce(x_TD, residual_TD), host),
        "nccl": _timed(nccl, host),
    }


def _all_gather(ours: Collective, group: Collective, host: Collective, rows: int, width: int) -> dict[str, Any]:
    x_TD = torch.randn(rows, width, device="cuda").bfloat16()
    found = {"octavo": _timed(lambda: ours.all_gather(x_TD), host)}
    return found | {"nccl": _timed(lambda: group.all_gather(x_TD), host)}


def _exchange(ours: Collective, group: Collective, host: Collective, rows: int, width: int) -> dict[str, Any]:
    """Every rank keeps a part of its rows by columns, and sends one to each of the others."""
    x_TPX = torch.randn(rows, host.size, width // host.size, device="cuda").bfloat16()
    other, order = torch.empty(host.size, rows, width // host.size, device="cuda").bfloat16(), (1, 0, 2)

    def nccl() -> None:
        _distributed.all_to_all_single(other.view(-1), x_TPX.permute(order).reshape(-1))

    return {"octavo": _timed(lambda: ours.exchange(x_TPX), host), "nccl": _timed(nccl, host)}


KINDS = {
    "all_reduce": _all_reduce,
    "all_reduce_with_residual": _with_residual,
    "all_gather": _all_gather,
    "exchange": _exchange,
}


def _symmetric(x_TD: Tensor, host: Collective) -> dict[str, Any]:
    """The same by torch's kernels over symmetric memory, without multicast."""
    from torch.distributed import _symmetric_memory as symmetric

    name = _distributed.group.WORLD.group_name
    shared_TD = symmetric.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    symmetric.rendezvous(shared_TD, name)
    shared_TD.copy_(x_TD)
    ways: dict[str, Exchange] = {
        "torch_one_shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(shared_TD, "sum", name),
        "torch_two_shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared_TD, "sum", name),
    }
    return {kind: _timed(way, host) for kind, way in ways.items()}


def _timed(exchange: Exchange, host: Collective) -> float:
    torch.cuda.synchronize()
    host.all_gather(torch.zeros(1))  # all begin together
    return round(microseconds([exchange] * CALLS, with_pdl=True), 2)


@triton.jit
def _copy_kernel(source, target, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    kind: tl.constexpr = tl.pointer_type(tl.int32)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target.to(kind) + i, tl.load(source.to(kind) + i))


def link_rates(host: Collective, device: torch.device) -> dict[str, float] | None:
    """GB/s at which a kernel of rank 0 reads from rank 1's memory and writes to it, alone and when all ranks do.

    ``None`` where the GPUs cannot access each other's memory.
    """
    addresses_W = mapped_buffers(host, LINK_BYTES, device)
    if addresses_W is None:
        return None
    places = addresses_W.tolist()
    own, other = places[host.rank], places[(host.rank + 1) % host.size]
    found = {}
    for name, source, target in (("read", other, own), ("write", own, other)):
        for kind, takes_part in (("alone", host.rank == 0), ("all_at_once", True)):
            torch.cuda.synchronize()
            host.all_gather(torch.zeros(1))
            if takes_part:
                found[f"{name}_{kind}"] = _copy_rate(source, target)
    return found


def _copy_rate(source: int, target: int) -> float:
    programs = LINK_BYTES // 4 // COPY_BLOCK
    copy = _copy_kernel[(programs,)]
    took = median_milliseconds(lambda: copy(source, target, COPY_BLOCK, num_warps=8))
    return round(LINK_BYTES / took / 1e6, 1)


if __name__ == "__main__":
    main()

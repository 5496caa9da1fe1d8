"""One rank that sums and gathers with others over peer memory, alone, in a graph, and while modules are loaded.

Run as ``python -m tests.gpu.rank_exchange RANK SIZE MEMORY``; prints a digest of all results.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import time
import zlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.runtime.ranks.process_group import device_collective
from octavo_kernels.cpu.rank_memory import MappedRankMemory
from octavo_kernels.triton.collective import SLOT_BYTES, PeerCollective

ROWS = (1, 2, 3, 17, 64, 513, 4096, 9001)
WIDTH = 1024
NUM_REPLAYS = 100
CHAIN = 64
"""Sums in a graph, one right after the other."""


def parts(rows: int, size: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, WIDTH, generator=generator).to("cuda", dtype) for _ in range(size)]


def main() -> None:
    rank, size, descriptor = map(int, sys.argv[1:])
    torch.cuda.set_device(rank % torch.cuda.device_count())
    collective = device_collective(MappedRankMemory(descriptor, rank, size).collective, torch.device("cuda"))
    delays, digest = random.Random(rank), 0
    for dtype in (torch.float32, torch.bfloat16):
        for rows in ROWS:
            own = parts(rows, size, dtype)
            residual = parts(rows + 1, 1, dtype)[0][:rows].contiguous()
            exact = sum(part.double() for part in own) + residual.double()
            found = collective.all_reduce(own[rank].clone(), residual.clone())
            if isinstance(collective, PeerCollective):
                check_other_ways(collective, own[rank], residual, found)
            limit = 1e-5 if dtype == torch.float32 else 0.04
            torch.testing.assert_close(found.double(), exact, atol=limit, rtol=limit)
            assert torch.equal(collective.all_gather(own[rank]), torch.stack(own))
            sent = torch.stack(own).view(size, rows, size, -1)
            assert torch.equal(collective.exchange(sent[rank]), sent[:, :, rank])
            digest = zlib.crc32(found.cpu().view(torch.uint8).numpy().tobytes(), digest)
            time.sleep(delays.random() * 0.01)
    digest = replayed(collective, rank, size, digest)
    replay_while_loading(collective, rank, size)
    print(digest)


def check_other_ways(collective: PeerCollective, own: Tensor, residual: Tensor, expected: Tensor) -> None:
    """The same bits in one shot and in two."""
    chosen = collective.small_bytes, collective.one_shot_bytes
    for limits in ((0, SLOT_BYTES), (0, 0)):
        collective.small_bytes, collective.one_shot_bytes = limits
        assert torch.equal(collective.all_reduce(own.clone(), residual.clone()), expected)
    collective.small_bytes, collective.one_shot_bytes = chosen


def replayed(collective: object, rank: int, size: int, digest: int) -> int:
    """A graph of two sums, replayed with other numbers each time."""
    x = torch.zeros(4, WIDTH, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        first = collective.all_reduce(x.clone())  # type: ignore[attr-defined]
        second = collective.all_reduce(first * (rank + 1))  # type: ignore[attr-defined]
        graph.capture_end()
        for number in range(NUM_REPLAYS):
            x.fill_(number + rank)
            graph.replay()
            stream.synchronize()
            expected = sum(number + r for r in range(size)) * sum(range(1, size + 1))
            assert (second == expected).all(), (number, second.flatten()[:4], expected)
            digest = zlib.crc32(second.cpu().numpy().tobytes(), digest)
    return digest


def replay_while_loading(collective: Any, rank: int, size: int) -> None:
    """Long chains of sums while another thread loads modules, which makes a multiprocessor fetch instructions again.

    Then the warps of a program run far apart.
    """
    num_replays = 2000 if torch.cuda.device_count() >= size else 5  # on a shared GPU, ranks run by turns
    x = torch.full((1, 4 * WIDTH), float(rank + 1), device="cuda", dtype=torch.bfloat16)
    stream, is_over = torch.cuda.Stream(), threading.Event()
    loading = threading.Thread(target=load_modules, args=(torch.cuda.current_device(), is_over))
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        sums = [collective.all_reduce(x.clone()) for _ in range(CHAIN)]
        graph.capture_end()
        loading.start()
        try:
            for _ in range(num_replays):
                graph.replay()
            stream.synchronize()
        finally:
            is_over.set()
    loading.join()
    assert all((found == sum(range(1, size + 1))).all() for found in sums)


@triton.jit
def _add_one(x: tl.tensor, BLOCK: tl.constexpr) -> None:
    i = tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i) + 1)


def load_modules(device: int, is_over: threading.Event) -> None:
    torch.cuda.set_device(device)
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.zeros(256, device="cuda")
        image = _add_one[(1,)](x, BLOCK=256).asm["cubin"]
        driver = ctypes.CDLL("libcuda.so.1")
        while not is_over.is_set():
            module = ctypes.c_void_p()
            assert driver.cuModuleLoadData(ctypes.byref(module), image) == 0
            assert driver.cuModuleUnload(module) == 0


if __name__ == "__main__":
    main()

"""Registers, spills and shared memory of the kernels of a model's steps, compiled for a GPU that need not be there.

    python -m octavo_bench.kernel_resources gemma-3-4b --gpu l40s

Tensors have shapes and no numbers, so that a model of any size takes seconds for each kernel. Weights are dense. It
shows what keeps a kernel from running at all (more shared memory than a program may have) or from running well: spills,
and programs so large that a multiprocessor holds one. Kernels are chosen by the model of cost, not by tables.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from rich.console import Console
from rich.table import Table
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from octavo.models.layer_cache import kv_groups
from octavo.models.registry import load_model, read_config
from octavo.ops import dispatch
from octavo.ops.attention.attention import GroupRows, PagedRows
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.kv_storage import KVStorage
from octavo.weights.dummy import DummyCheckpoint
from octavo_fleet.sim.shapes import SHAPES
from octavo_kernels.hopper.pipelined_configs import KEPT_BYTES
from octavo_kernels.triton import launch
from octavo_kernels.triton.tuning.linear_cost import Gpu

META = torch.device("meta")
REGISTERS, UNIT = 65536, 8
"""Of a multiprocessor; what registers of a thread come in."""
BLOCK_SIZE, LAYERS, VOCABULARY = 64, 6, 4096
"""Layers enough for every kind of a model; of the vocabulary, which decides only the size of one product, a part."""


class TargetGpu(NamedTuple):
    """A GPU: compute capability, shared memory of a program, multiprocessors, warps of each, bytes a microsecond."""

    capability: int
    shared_bytes: int
    multiprocessors: int
    warps: int
    bandwidth: float


TARGETS = {
    "a100": TargetGpu(80, 163 * 1024, 108, 64, 2.0e6),
    "rtx-3090": TargetGpu(86, 99 * 1024, 82, 48, 0.94e6),
    "l40s": TargetGpu(89, 99 * 1024, 142, 48, 0.86e6),
    "h100": TargetGpu(90, 227 * 1024, 132, 64, 3.35e6),
    "rtx-5090": TargetGpu(120, 99 * 1024, 170, 48, 1.79e6),
}
STEPS: dict[str, tuple[list[int], int]] = {
    "1 sequence": ([1], 100),
    "16 sequences": ([1] * 16, 300),
    "64 sequences": ([1] * 64, 1200),
    "256 sequences": ([1] * 256, 600),
    "mixed batch": ([510, 1, 1], 600),
    "long context": ([1], 32768),
    "prompt": ([2048], 2048),
}
"""Rows of each sequence, and their context."""


def _row(step: str, kernel: Any, target: TargetGpu) -> dict[str, Any]:
    """What a compiled kernel takes."""
    registers, spilled = _usage(kernel.asm["cubin"])
    warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    taken = -(-registers // UNIT) * UNIT * 32 * warps
    by_shared = (target.shared_bytes + KEPT_BYTES) // (shared + KEPT_BYTES)
    return {
        "step": step,
        "kernel": kernel.metadata.name.strip("_").removesuffix("_kernel"),
        "warps": warps,
        "registers": registers,
        "spilled_bytes": spilled,
        "shared_bytes": shared,
        "programs": min(REGISTERS // taken, by_shared, target.warps // warps),
    }


def _usage(binary: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, by the disassembler that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", text.stdout)
    assert found is not None, text.stdout
    return int(found[1]), int(found[2])


def pretend(target: TargetGpu) -> None:
    """From now on, compile for this GPU, and choose kernels for it where tensors have no numbers."""

    class Device:
        """As much of Triton's driver as compiling takes."""

        get_current_target = staticmethod(lambda: GPUTarget("cuda", target.capability, 32))
        get_current_device = staticmethod(lambda: 0)
        get_current_stream = staticmethod(lambda device: 0)

    driver.set_active(Device())
    choose = dispatch.Op._choose
    dispatch.Op._choose = lambda self, device, dtype: choose(self, "cuda", dtype)  # type: ignore[method-assign]
    is_hopper = target.capability == 90
    gpu = Gpu(target.multiprocessors, target.bandwidth, target.shared_bytes, has_copy_engine=target.capability >= 90)
    told: dict[str, Callable[[torch.device], Any]] = {
        "shared_bytes": lambda device: target.shared_bytes,
        "num_multiprocessors": lambda device: target.multiprocessors,
        "has_gluon": lambda device: is_hopper and triton.__version__.startswith(launch.GLUON_VERSION),
        "has_assembly": lambda device: True,
        "gpu_of": lambda device: gpu,
    }
    for module in [module for name, module in sys.modules.items() if name.startswith("octavo_kernels.")]:
        for name in told.keys() & vars(module).keys():
            setattr(module, name, told[name])


def shortened(config: Mapping[str, Any], num_layers: int = LAYERS) -> dict[str, Any]:
    """A ``config.json`` with so many layers, and of the vocabulary a part."""
    every = config["num_hidden_layers"]
    own = {key: value[:num_layers] for key, value in config.items() if type(value) is list and len(value) == every}
    vocabulary = min(config["vocab_size"], VOCABULARY)
    return {**config, **own, "num_hidden_layers": num_layers, "vocab_size": vocabulary}


def launches(
    config: dict[str, Any], target: TargetGpu, steps: Mapping[str, tuple[list[int], int]]
) -> Iterator[tuple[str, set[Any]]]:
    """The kernels that each of these steps launches; ``pretend`` comes first."""
    known, form = read_config(config), WeightFormat(torch.bfloat16, META, packs=True)
    launch._compiling.set(frozenset())
    launch._pdl.set(target.capability >= 90)
    model = load_model(known, DummyCheckpoint(config, {}, 0, "meta"), form).model
    groups = kv_groups(known.cache)
    storage = KVStorage(known.cache, groups, [1] * len(groups), BLOCK_SIZE, torch.bfloat16, META)
    for step, (query_lens, context) in steps.items():
        T, S = sum(query_lens), len(query_lens)
        tables = GroupRows(_ints(T, dtype=torch.int64), _ints(S, -(-context // BLOCK_SIZE)))
        rows = PagedRows(
            (tables,) * len(groups),
            _ints(S + 1),
            _ints(S),
            max(query_lens),
            has_long_context=context > 4096,
            state_slots_S=_ints(S),
        )
        ids, kernels = _ints(T, dtype=torch.int64), set[Any]()
        launch._compiling.set(kernels)
        with torch.inference_mode():
            model.logits(model.forward(ids, ids, storage.layers, rows)[:S])
        yield step, kernels


def resources(
    config: dict[str, Any], target: TargetGpu, steps: Mapping[str, tuple[list[int], int]]
) -> Iterator[dict[str, Any]]:
    """What the kernels of these steps take, step by step; ``pretend`` comes first."""
    for step, kernels in launches(config, target, steps):
        # Launches with other sizes are often the same code.
        found = [_row(step, kernel, target) for kernel in {kernel.hash: kernel for kernel in kernels}.values()]
        yield from sorted(found, key=lambda row: (row["kernel"], row["registers"]))


def _ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def main() -> int:
    """Print the table; 1 if a kernel cannot run."""
    parser = argparse.ArgumentParser(prog="python -m octavo_bench.kernel_resources", description=__doc__)
    parser.add_argument("model", choices=SHAPES, help="a public model's shape")
    parser.add_argument("--gpu", choices=TARGETS, default="h100")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="default: all")
    args = parser.parse_args()
    target = TARGETS[args.gpu]
    pretend(target)
    table = Table("step", "kernel", "warps", "registers", "spilled bytes", "shared KiB", "programs on an SM")
    can_run = True
    for row in resources(shortened(SHAPES[args.model]), target, {step: STEPS[step] for step in args.steps}):
        fits = row["shared_bytes"] <= target.shared_bytes
        can_run &= fits
        style = "red" if not fits else "yellow" if row["spilled_bytes"] or row["programs"] < 2 else ""
        shared = f"{row['shared_bytes'] / 1024:.1f}"
        cells = (row["step"], row["kernel"], row["warps"], row["registers"], row["spilled_bytes"], shared)
        table.add_row(*map(str, (*cells, row["programs"] if fits else "cannot run")), style=style)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0 if can_run else 1


if __name__ == "__main__":
    sys.exit(main())

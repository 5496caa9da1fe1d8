"""CPUs without AVX-512 compute the same bits, with instructions and registers of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.ops import block_linear, linear, scaled_linear
from octavo.ops.linear.block_linear import PackedBlocks
from octavo.ops.linear.linear import Fused
from octavo_kernels.cpu.host import missing
from tests.ops.cpu_cases import attended, needs_float_kernels, random_blocks, random_ordered, random_values

pytestmark = needs_float_kernels

LEVEL = """
import sys, torch
from octavo_kernels.cpu import vector_ir
from octavo_kernels.cpu.linear import byte_dot
from tests.ops.test_cpu_levels import products, results
has_dots = "avxvnni" in sys.argv[2]
assert not vector_ir.HAS_VNNI
assert byte_dot.INSTRUCTION == (byte_dot.VPDPBUSD_256 if has_dots else byte_dot.VPMADDUBSW)
torch.save(products(["Q4_1", "Q8_0", "Q3_K"]) if has_dots else results(), sys.argv[1])
"""
AVX2 = "+sse,+sse2,+sse3,+ssse3,+sse4.1,+sse4.2,+popcnt,+cx16,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+movbe"


def products(kinds: list[str]) -> dict[str, torch.Tensor]:
    """With weights in blocks of these kinds."""
    torch.manual_seed(0)
    found, x, norm = {}, torch.randn(13, 256), torch.randn(256)
    for kind in kinds:
        packed = PackedBlocks.pack(random_blocks(kind, 64, 256))
        found[kind] = block_linear(x, packed, Fused(norm_K=norm, eps=1e-5, activation="silu"))
    return found


def results() -> dict[str, torch.Tensor]:
    """What kernels with registers and instructions of their own for AVX2 compute."""
    found = products(["Q4_1", "Q8_0", "Q3_K", "Q6_K", "Q5_1", "Q4_0", "Q2_K"])
    x, norm = torch.randn(13, 256), torch.randn(256)
    found["ordered"] = block_linear(x, random_ordered(64, 256), Fused(norm_K=norm, eps=1e-5, activation="silu"))
    found["dense"] = linear(x, torch.randn(37, 256))
    found["scaled"] = scaled_linear(x, random_values(37, 256, 128))
    for rows in (1, 2, 50):
        found[f"{rows} rows"] = attended(rows, 200, torch.float16)
    return found


@pytest.mark.nightly  # all of these kernels are compiled for a processor that is not this one
@pytest.mark.parametrize(
    ("cpu", "features"), [("haswell", AVX2), ("alderlake", f"{AVX2},+avxvnni")], ids=["AVX2", "AVX-VNNI"]
)
def test_without_avx512_the_bits_are_the_same(cpu: str, features: str, tmp_path: Path) -> None:
    absent = missing(tuple(name[1:] for name in features.split(",")))
    if absent is not None:
        pytest.skip(absent)
    path = f"{tmp_path}/results.pt"
    environment = {**os.environ, "NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": features}
    subprocess.run([sys.executable, "-c", LEVEL, path, features], env=environment, check=True)
    found = torch.load(path)
    expected = results()
    for name, result in found.items():
        assert torch.equal(result, expected[name]), name

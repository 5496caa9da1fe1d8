"""Products and experts by ``pipelined_gemm``, run without a GPU; on one, ``tests/gpu`` runs the compiled kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.ops.linear.grouped_linear import PackedGroups
from octavo.ops.moe import ClampedSwish, GroupedExperts, grouped_moe
from octavo_kernels.hopper import pipelined_epilogue, pipelined_gemm, pipelined_producer, pipelined_tiles
from octavo_kernels.hopper.pipelined_configs import PipelinedConfig
from octavo_kernels.hopper.pipelined_moe import MAX_ROWS, ROOM, pipelined_moe
from octavo_kernels.triton.experts.expert_tiles import sort_into_tiles, tile_rows
from octavo_kernels.triton.experts.gather_rows import gather_rows
from octavo_kernels.triton.grouped import grouped_numbers
from octavo_kernels.triton.grouped.grouped_linear import run_grouped
from tests.ops.triton.gluon_on_cpu import Kernel
from tests.ops.triton.test_grouped_linear import GroupedCase, random_groups
from tests.ops.triton.test_linear import PARTS
from tests.tiers import one_in
from tests.triton_interpreter import DEVICE, quick_first

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="there the kernel itself is tested")
FORMS: dict[str, tuple[str, int, int, bool, torch.dtype]] = {
    "int4": ("int4", 256, 128, False, torch.bfloat16),
    "int4 with zeros": ("int4", 192, 64, True, torch.float16),
    "int4, per output": ("int4", 200, 0, False, torch.float32),
    "uint4 with minima": ("uint4", 288, 32, False, torch.bfloat16),
    "uint4 with zeros and minima": ("uint4", 256, 128, True, torch.float16),
    "int8 with zeros": ("int8", 192, 32, True, torch.bfloat16),
    "int8, groups of 16": ("int8", 160, 16, False, torch.float16),
    "e4m3": ("e4m3", 256, 128, False, torch.float32),
    "e2m1": ("e2m1", 288, 32, False, torch.bfloat16),
    "e2m1, groups of 16": ("e2m1", 208, 16, False, torch.bfloat16),
}
"""Numbers, inputs, length of groups, whether there are zeros, type of scales; unsigned integers have minima."""


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    kernel = Kernel(pipelined_gemm, pipelined_epilogue, pipelined_producer, pipelined_tiles)
    monkeypatch.setattr(pipelined_gemm, "launch", kernel.launch)
    monkeypatch.setattr(grouped_numbers, "has_assembly", lambda device: True)


def weight_of(form: str, N: int, K: int | None = None) -> PackedGroups:
    number, inputs, group, zeros, dtype = FORMS[form]
    packed = random_groups("cpu", number, N, K or inputs, group, zeros)
    return replace(packed, scales_GN=packed.scales_GN.to(dtype))


@one_in(7)
@pytest.mark.parametrize("programs", quick_first(2, [1, 4, 3, 7]))
@pytest.mark.parametrize(
    ("T", "block_t", "parts"), [(1, 16, "norm and silu"), (37, 16, "bias and residual"), (70, 64, "bias and residual")]
)
@pytest.mark.parametrize("form", FORMS)
def test_products_agree_with_float64(form: str, T: int, block_t: int, parts: str, programs: int) -> None:
    """With a tile of several programs, programs of several tiles, and rings that are filled anew."""
    case = GroupedCase.random("cpu", T, weight_of(form, 160), **PARTS[parts])
    config = PipelinedConfig(64, block_t, warps=4, stages=2, programs=programs, registers=128)
    case.check(run_grouped(*case.arguments(), config))


@one_in(3)
@pytest.mark.parametrize("programs", quick_first(1, [5, 1, 40]))
@pytest.mark.parametrize("activation", ["silu", ClampedSwish(1.702, 7.0)], ids=["silu", "clamped"])
@pytest.mark.parametrize("form", ["int4", "e2m1", "int8 with zeros", "uint4 with minima"])
def test_experts_agree_with_the_reference(form: str, activation: Any, programs: int) -> None:
    """Of which one has no rows and one more than a tile, with outputs that are no multiple of a tile."""
    T, X, S = 21, 4, 2
    D, F = FORMS[form][1], {"int4": 128, "int8 with zeros": 96}.get(form, 160)
    gate_up, down = weight_of(form, X * 2 * F), weight_of(form, X * D, F)
    biases = [torch.randn(X, width).bfloat16() for width in (2 * F, D)]
    experts = GroupedExperts(X, gate_up, down, activation, *biases)
    ids = torch.stack([torch.zeros(T, dtype=torch.int64), torch.randint(1, X - 1, (T,))], dim=1)
    x, shares = torch.randn(T, D).bfloat16(), torch.rand(T, S)
    wide = experts._replace(gate_up_bias=biases[0].float(), down_bias=biases[1].float())
    expected = grouped_moe.reference(x.float(), ids, shares, wide)
    config = PipelinedConfig(64, 16, warps=4, stages=3, programs=programs, registers=128)
    gated, parts = x.new_empty(T * S, F), torch.empty(T * S, D)
    pipelined_moe(x, ids, shares, experts, (config, config), gated, parts)
    found = parts.view(T, S, D).sum(1)
    torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6 * expected.abs().max().item())
    tiles = sort_into_tiles(ids, X, tile_rows(T * S, X, MAX_ROWS, ROOM))
    assert tiles.block == config.block_t
    assert gather_rows(x, tiles.order_P, tiles.used).shape == (T * S, D)


@pytest.mark.parametrize("programs", [3, 40])
def test_ids_of_other_ranks_experts_add_nothing(programs: int) -> None:
    T, X, S, D, F = 21, 3, 2, 256, 128
    experts = GroupedExperts(X, weight_of("int4", X * 2 * F), weight_of("int4", X * D, F), num_routed=X + 2)
    ids = torch.stack([torch.zeros(T, dtype=torch.int64), torch.randint(1, X, (T,))], dim=1)
    x, shares = torch.randn(T, D).bfloat16(), torch.rand(T, S)
    config = PipelinedConfig(64, 16, warps=4, stages=3, programs=programs, registers=128)
    for local in (torch.where(ids == 1, -1, ids), torch.full_like(ids, -1)):
        gated, parts = torch.full((T * S, F), torch.nan, dtype=x.dtype), torch.full((T * S, D), torch.nan)
        pipelined_moe(x, local, shares, experts, (config, config), gated, parts)
        assert torch.equal(parts.isnan().any(1), local.flatten() < 0)
        expected = grouped_moe.reference(x.float(), local, shares, experts)
        found = parts.nan_to_num(0.0).view(T, S, D).sum(1)
        torch.testing.assert_close(found, expected, rtol=2**-6, atol=2**-6 * max(expected.abs().max().item(), 1))

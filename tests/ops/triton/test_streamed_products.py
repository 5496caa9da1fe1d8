"""One row by ``streamed_gemv`` and ``streamed_output_mlp``, run without a GPU; on one ``tests/gpu`` runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from octavo.ops.linear.grouped_linear import PackedGroups
from octavo_kernels.hopper import streamed_gemv, streamed_output_mlp, streamed_tiles
from octavo_kernels.hopper.streamed_configs import OutputMLPConfig, StreamedConfig
from octavo_kernels.triton.grouped import grouped_numbers
from octavo_kernels.triton.grouped.grouped_linear import run_grouped
from tests.ops.triton.gluon_on_cpu import Kernel
from tests.ops.triton.test_grouped_linear import GroupedCase, after_attention, random_groups
from tests.ops.triton.test_linear import PARTS
from tests.tiers import one_in
from tests.triton_interpreter import DEVICE, quick_first

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="there the kernels themselves are tested")
FORMS: dict[str, tuple[str, int, bool, torch.dtype]] = {
    "int4": ("int4", 128, False, torch.bfloat16),
    "int4, two chunks a group": ("int4", 256, False, torch.float16),
    "int4, groups of 32": ("int4", 32, False, torch.float32),
    "int4, per output": ("int4", 0, False, torch.bfloat16),
    "int4 with zeros": ("int4", 64, True, torch.bfloat16),
    "uint4 with minima": ("uint4", 32, False, torch.float32),
    "uint4 with zeros and minima": ("uint4", 128, True, torch.float16),
    "uint4 with minima, groups of 16": ("uint4", 16, False, torch.bfloat16),
    "int8 with zeros": ("int8", 32, True, torch.bfloat16),
    "int8, groups of 16": ("int8", 16, False, torch.float32),
    "int8, per output": ("int8", 0, False, torch.bfloat16),
    "e4m3": ("e4m3", 128, False, torch.bfloat16),
    "e2m1": ("e2m1", 32, False, torch.bfloat16),
    "e2m1, groups of 16": ("e2m1", 16, False, torch.bfloat16),
}
"""Numbers, length of groups, whether there are zeros, type of scales; unsigned integers have minima."""


@pytest.fixture(autouse=True)
def _on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(grouped_numbers, "has_assembly", lambda device: True)
    for module in (streamed_gemv, streamed_output_mlp):
        monkeypatch.setattr(module, "launch", Kernel(module, streamed_tiles).launch)
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 1)


def weight_of(form: str, N: int, K: int) -> PackedGroups:
    number, group, zeros, dtype = FORMS[form]
    packed = random_groups("cpu", number, N, K, group, zeros)
    return replace(packed, scales_GN=packed.scales_GN.to(dtype))


@one_in(5)
@pytest.mark.parametrize(
    ("parts", "config"),
    [
        ("norm and silu", StreamedConfig(4, 1, 2, programs=2)),
        ("bias and residual", StreamedConfig(4, 2, 3, programs=1)),
        ("plain", StreamedConfig(8, 1, 2, programs=5)),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_products_agree_with_float64(form: str, parts: str, config: StreamedConfig) -> None:
    """With one and several programs, of which not all have as many tiles, and rings that are filled anew."""
    case = GroupedCase.random("cpu", 1, weight_of(form, 96, 1024), **PARTS[parts])
    case.check(run_grouped(*case.arguments(), config))


@one_in(2)
@pytest.mark.parametrize(
    ("form", "warps"),
    quick_first(3, [("int4", 8), ("uint4 with minima", 8), *((form, 4) for form in FORMS if "chunks" not in form)]),
)
def test_what_follows_attention_agrees_with_float64(form: str, warps: int) -> None:
    """In one program, which has the steps of all three products in one ring; more wait for each other on a GPU."""
    D, A, F = 128 * warps, 256 * warps, 256 * warps
    weights = [weight_of(form, N, K) for N, K in ((D, A), (2 * F, D), (D, F))]
    attended, x, norm = (torch.randn(1, A).bfloat16(), torch.randn(1, D).bfloat16(), torch.rand(D).bfloat16() + 0.5)
    expected = after_attention(attended, x, norm, *weights)
    config = OutputMLPConfig(warps, (2, 1, 2), 3, 1)
    arguments: tuple[Any, ...] = (attended, x, weights[0], norm, 1e-6, *weights[1:], "silu", config)
    found = streamed_output_mlp.streamed_output_mlp(*arguments)
    error = (found.double() - expected).norm() / expected.norm()
    assert error < 0.01

"""Linear maps of packed groups on a GPU: real shapes, and graphs with programmatic dependent launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops.linear.grouped_linear import PackedGroups
from octavo.ops.linear.linear import Fused
from tests.gpu.graph_bits import assert_a_graph_gives_the_same_bits
from tests.ops.triton.test_grouped_linear import GroupedCase, after_attention, random_groups
from tests.ops.triton.test_linear import PARTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYERS, REPLAYS = 6, 30
NUMBERS = {"int4": 128, "uint4": 32, "int8": 0, "e4m3": 128, "e2m1": 16}
"""Numbers with the length of their groups, 0 for a scale per output."""
FORMS: dict[str, tuple[str, int, int, bool, torch.dtype]] = {
    "int4": ("int4", 1152, 128, False, torch.bfloat16),
    "int4, float32 scales": ("int4", 1024, 512, False, torch.float32),
    "int4, per output": ("int4", 1000, 0, False, torch.bfloat16),
    "uint4 with zeros": ("uint4", 1024, 128, True, torch.float16),
    "int4 with zeros, per output": ("int4", 1000, 0, True, torch.float32),
    "int8 with zeros": ("int8", 960, 64, True, torch.bfloat16),
    "int8, per output": ("int8", 1032, 0, False, torch.float16),
    "e4m3": ("e4m3", 1024, 128, False, torch.bfloat16),
    "e4m3, per output": ("e4m3", 1000, 0, False, torch.float32),
    "e2m1": ("e2m1", 1152, 128, False, torch.bfloat16),
    "e2m1, groups of 32": ("e2m1", 1056, 32, False, torch.bfloat16),
    "uint4 with zeros, groups of 64": ("uint4", 960, 64, True, torch.float16),
    "int8, groups of 32": ("int8", 992, 32, False, torch.float16),
    "uint4 with minima": ("uint4", 1056, 32, False, torch.float16),
    "int8, groups of 16": ("int8", 976, 16, False, torch.bfloat16),
    "e2m1, groups of 16": ("e2m1", 1008, 16, False, torch.bfloat16),
}
"""Numbers, inputs, length of groups, whether there are zeros, type of scales."""


class Chain:
    """Layers of maps that all depend on the one before, and on what was written two before."""

    def __init__(self, T: int, number: str, hidden: int = 512, ffn: int = 1024) -> None:
        self.start_TD = torch.randn(T, hidden, device="cuda").bfloat16()
        self.x_TD = torch.empty_like(self.start_TD)
        self.norm_D = torch.rand(hidden, device="cuda").bfloat16() + 0.5
        shapes = [(hidden, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)]
        group = NUMBERS[number]
        self.layers = [[random_groups("cuda", number, *shape, group) for shape in shapes] for _ in range(LAYERS)]

    def run(self) -> Tensor:
        from octavo.ops import grouped_linear

        self.x_TD.copy_(self.start_TD)
        x = self.x_TD
        for qkv, o, gate_up, down in self.layers:
            attended = grouped_linear(x, qkv, Fused(norm_K=self.norm_D, eps=1e-6))
            x = grouped_linear(attended, o, Fused(residual_TN=x))
            inner = grouped_linear(x, gate_up, Fused(norm_K=self.norm_D, eps=1e-6, activation="silu"))
            x = grouped_linear(inner, down, Fused(residual_TN=x))
        return x


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("T", [1, 5, 16, 64, 300])
def test_a_graph_with_dependent_launch_gives_the_bits_of_plain_launches(T: int, number: str) -> None:
    chain = Chain(T, number)
    expected = assert_a_graph_gives_the_same_bits(chain.run, chain.x_TD, REPLAYS)
    assert expected.isfinite().all()


@pytest.mark.parametrize("parts", ["norm and silu", "bias and residual"])
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("T", [1, 7, 16, 40, 200, 600])
def test_real_shapes_agree_with_float64(T: int, number: str, parts: str) -> None:
    from octavo.ops import grouped_linear

    given: dict[str, Any] = PARTS[parts]
    case = GroupedCase.random("cuda", T, random_groups("cuda", number, 6144, 4096, NUMBERS[number]), **given)
    case.check(grouped_linear(*case.arguments()))


def weight_of(form: str, N: int) -> PackedGroups:
    number, K, group, zeros, dtype = FORMS[form]
    packed = random_groups("cuda", number, N, K, group, zeros)
    minima_GN = packed.minima_GN if form == "uint4 with minima" else None
    return replace(packed, minima_GN=minima_GN, scales_GN=packed.scales_GN.to(dtype))


@pytest.mark.parametrize("T", [2, 9, 16, 17, 64, 100, 256])
@pytest.mark.parametrize(("parts", "N"), [("norm and silu", 1184), ("bias and residual", 608), ("plain", 48)])
@pytest.mark.parametrize("form", FORMS)
def test_pipelined_products_agree_with_float64(
    form: str, parts: str, N: int, T: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the default configuration, with tiles divided in all ways, and as ``grouped_linear`` uses it; ``int4`` also in
    all that are measured."""
    from octavo.ops import grouped_linear
    from octavo_kernels.hopper.pipelined_configs import PipelinedConfig, pipelined_configs
    from octavo_kernels.triton.config_tables import ConfigTable
    from octavo_kernels.triton.grouped.grouped_configs import config_for
    from octavo_kernels.triton.grouped.grouped_linear import run_grouped
    from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
    from octavo_kernels.triton.launch import has_gluon

    device = torch.device("cuda", 0)
    if not has_gluon(device):
        pytest.skip("needs a Hopper GPU and the Triton that the kernel is for")
    monkeypatch.setattr(ConfigTable, "of", lambda self, device: {})
    packed = weight_of(form, N)
    case = GroupedCase.random("cuda", T, packed, **PARTS[parts])
    product = GroupedProduct.of(packed, parts == "norm and silu", torch.bfloat16)
    config = config_for(T, product, device)
    assert isinstance(config, PipelinedConfig)
    tried = [replace(config, programs=programs) for programs in (1, 2, 7, 20, config.programs)]
    tried += pipelined_configs(product, T, device) if form == "int4" else []
    for one in tried:
        first, second = (run_grouped(*case.arguments(), one) for _ in range(2))
        case.check(first)
        assert torch.equal(first, second), "sums are added in one order"
    case.check(grouped_linear(*case.arguments()))


@pytest.mark.parametrize(("parts", "N"), [("norm and silu", 1184), ("bias and residual", 608), ("plain", 48)])
@pytest.mark.parametrize("form", FORMS)
def test_streamed_products_agree_with_float64(form: str, parts: str, N: int) -> None:
    """One row, in all configurations that are measured, and in those of the kernel for several."""
    from octavo_kernels.hopper.pipelined_configs import pipelined_configs
    from octavo_kernels.hopper.streamed_configs import streamed_configs
    from octavo_kernels.triton.grouped.grouped_linear import run_grouped
    from octavo_kernels.triton.grouped.grouped_product import GroupedProduct
    from octavo_kernels.triton.launch import has_gluon

    device = torch.device("cuda", 0)
    if not has_gluon(device):
        pytest.skip("needs a Hopper GPU and the Triton that the kernel is for")
    number, _, group, zeros, dtype = FORMS[form]
    packed = random_groups("cuda", number, N, 2048, group, zeros)
    packed = replace(packed, scales_GN=packed.scales_GN.to(dtype))
    case = GroupedCase.random("cuda", 1, packed, **PARTS[parts])
    product = GroupedProduct.of(packed, parts == "norm and silu", torch.bfloat16)
    tried = streamed_configs(product, device)
    assert bool(tried) == (len(packed.scales_GN) > 1 or not zeros)
    for config in [*tried, *pipelined_configs(product, 1, device)]:
        case.check(run_grouped(*case.arguments(), config))


@pytest.mark.parametrize("N", [37, 44])
@pytest.mark.parametrize("T", [2, 64])
def test_scales_that_copies_do_not_take_are_read_otherwise(T: int, N: int) -> None:
    """The scales of a group begin at no multiple of 16 bytes."""
    from octavo.ops import grouped_linear

    case = GroupedCase.random("cuda", T, weight_of("int4", N))
    case.check(grouped_linear(*case.arguments()))


def test_rows_at_any_address_are_taken() -> None:
    from octavo.ops import grouped_linear

    packed = weight_of("int4", 592)
    flat = torch.randn(16 * 1152 + 1, device="cuda").bfloat16()
    unaligned = flat[1:].view(16, 1152)
    assert torch.equal(grouped_linear(unaligned, packed), grouped_linear(unaligned.clone(), packed))
    beside = torch.randn(16, 2 * 1152, device="cuda").bfloat16()[:, 1152:]
    assert torch.equal(grouped_linear(beside, packed), grouped_linear(beside.contiguous(), packed))


def test_invariant_rows_have_the_same_bits_in_any_company() -> None:
    from octavo.ops import grouped_linear
    from octavo_kernels.triton.launch import invariant

    x_TK = torch.randn(700, 1024, device="cuda").bfloat16()
    packed = random_groups("cuda", "int4", 6144, 1024, 128)
    with invariant():
        whole = grouped_linear(x_TK, packed, Fused(activation="silu"))
        for T in (1, 2, 16, 63, 64, 65, 300):
            assert torch.equal(grouped_linear(x_TK[5 : 5 + T], packed, Fused(activation="silu")), whole[5 : 5 + T])


OUTPUT_MLPS: dict[str, tuple[str, int, bool, int, int, int]] = {
    "int4": ("int4", 128, False, 1024, 1024, 3072),
    "int4 of Qwen3-8B": ("int4", 128, False, 4096, 4096, 12288),
    "int4 of Llama-3.1-70B": ("int4", 128, False, 8192, 8192, 28672),
    "uint4 with zeros": ("uint4", 128, True, 1024, 2048, 3072),
    "int8, per output": ("int8", 0, False, 1024, 512, 1536),
    "e4m3": ("e4m3", 64, False, 1024, 1024, 2048),
    "uint4 with minima of Qwen3-8B": ("uint4", 32, False, 4096, 4096, 12288),
    "uint4 with zeros and minima, groups of 64": ("uint4", 64, True, 1024, 1024, 3072),
    "int8, groups of 16": ("int8", 16, False, 1024, 1024, 2048),
    "e2m1, groups of 16": ("e2m1", 16, False, 1024, 2048, 3072),
}
"""Numbers, groups, zeros, and the sizes of the model, of attention's outputs, and of the feed-forward layer."""


class OutputMLPs:
    """What follows attention, in several layers."""

    def __init__(self, form: str) -> None:
        number, group, zeros, D, A, F = OUTPUT_MLPS[form]
        self.start_1D, self.attended_1A = (torch.randn(1, size, device="cuda").bfloat16() for size in (D, A))
        self.norm_D = torch.rand(D, device="cuda").bfloat16() + 0.5
        shapes = [(D, A), (2 * F, D), (D, F)]
        self.layers = [[random_groups("cuda", number, *shape, group, zeros) for shape in shapes] for _ in range(3)]
        self.x_1D = self.start_1D.clone()

    def run(self) -> Tensor:
        from octavo.ops import grouped_output_mlp

        x = self.x_1D.copy_(self.start_1D)
        for output, gate_up, down in self.layers:
            x = grouped_output_mlp(self.attended_1A, x, output, self.norm_D, 1e-6, gate_up, down, "silu")
        return x

    def expected(self) -> Tensor:
        """In float64, but for the roundings to bfloat16 between products."""
        x = self.start_1D
        for weights in self.layers:
            x = after_attention(self.attended_1A, x, self.norm_D, *weights).bfloat16()
        return x.double()


@pytest.mark.parametrize("form", OUTPUT_MLPS)
def test_what_follows_attention_is_one_kernel_and_agrees_with_float64(form: str) -> None:
    from octavo_kernels.triton.grouped.grouped_output_mlp import config_of
    from octavo_kernels.triton.launch import has_gluon

    layers = OutputMLPs(form)
    if has_gluon(torch.device("cuda", 0)):
        assert all(config_of(*weights, layers.x_1D) is not None for weights in layers.layers)
    expected, found = layers.expected(), assert_a_graph_gives_the_same_bits(layers.run, layers.x_1D, REPLAYS)
    error = (found.double() - expected).norm() / expected.norm()
    assert error < 0.01

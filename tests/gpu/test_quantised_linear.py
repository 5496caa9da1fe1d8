"""Linear maps of packed groups on a GPU: real shapes, and graphs with programmatic dependent launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.triton.test_grouped_linear import GroupedCase, random_groups
from tests.ops.triton.test_linear import PARTS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYERS, REPLAYS = 6, 30
NUMBERS = {"int4": 128, "uint4": 32, "int8": 0, "e4m3": 128, "e2m1": 16}
"""Numbers with the length of their groups, 0 for a scale per output."""


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
            attended = grouped_linear(x, qkv, norm_K=self.norm_D, eps=1e-6)
            x = grouped_linear(attended, o, residual_TN=x)
            inner = grouped_linear(x, gate_up, norm_K=self.norm_D, eps=1e-6, activation="silu")
            x = grouped_linear(inner, down, residual_TN=x)
        return x


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("T", [1, 5, 16, 64, 300])
def test_a_graph_with_dependent_launch_gives_the_bits_of_plain_launches(T: int, number: str) -> None:
    from octavo.ops.triton.graph_timing import capture
    from octavo.ops.triton.launch import pdl

    chain = Chain(T, number)
    expected = chain.run().clone()
    assert expected.isfinite().all()
    with pdl():
        graph = capture([chain.run])
    for _ in range(REPLAYS):
        chain.x_TD.fill_(float("nan"))
        graph.replay()
        assert torch.equal(chain.x_TD, expected)


@pytest.mark.parametrize("parts", ["norm and silu", "bias and residual"])
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("T", [1, 7, 16, 40, 200, 600])
def test_real_shapes_agree_with_float64(T: int, number: str, parts: str) -> None:
    from octavo.ops import grouped_linear

    given: dict[str, Any] = PARTS[parts]
    case = GroupedCase.random("cuda", T, random_groups("cuda", number, 6144, 4096, NUMBERS[number]), **given)
    case.check(grouped_linear(*case.arguments()))


def test_invariant_rows_have_the_same_bits_in_any_company() -> None:
    from octavo.ops import grouped_linear
    from octavo.ops.triton.launch import invariant

    x_TK = torch.randn(700, 1024, device="cuda").bfloat16()
    packed = random_groups("cuda", "int4", 6144, 1024, 128)
    with invariant():
        whole = grouped_linear(x_TK, packed, activation="silu")
        for T in (1, 2, 16, 63, 64, 65, 300):
            assert torch.equal(grouped_linear(x_TK[5 : 5 + T], packed, activation="silu"), whole[5 : 5 + T])

"""Linear maps in a CUDA graph with programmatic dependent launch: the same bits as one kernel after another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops.linear.linear import Fused
from tests.gpu.graph_bits import assert_a_graph_gives_the_same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYERS, REPLAYS = 8, 50


def random(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.05


class Chain:
    """Layers of maps that all depend on the one before, and on what was written two before."""

    def __init__(self, T: int, hidden: int = 512, ffn: int = 1024) -> None:
        self.start_TD = random(T, hidden)
        self.x_TD = torch.empty_like(self.start_TD)
        self.norm_D = random(hidden) + 1
        shapes = [(hidden, hidden), (hidden, hidden), (2 * ffn, hidden), (hidden, ffn)]
        self.layers = [[random(*shape) for shape in shapes] for _ in range(LAYERS)]

    def run(self) -> Tensor:
        from octavo.ops import linear

        self.x_TD.copy_(self.start_TD)
        x = self.x_TD
        for qkv, o, gate_up, down in self.layers:
            attended = linear(x, qkv, Fused(norm_K=self.norm_D, eps=1e-6))
            x = linear(attended, o, Fused(residual_TN=x))
            x = linear(
                linear(x, gate_up, Fused(norm_K=self.norm_D, eps=1e-6, activation="silu")), down, Fused(residual_TN=x)
            )
        return x


@pytest.mark.parametrize("T", [1, 16, 64])
def test_a_graph_with_dependent_launch_gives_the_bits_of_plain_launches(T: int) -> None:
    chain = Chain(T)
    assert_a_graph_gives_the_same_bits(chain.run, chain.x_TD, REPLAYS)


def test_invariant_rows_have_the_same_bits_in_any_company() -> None:
    from octavo.ops import linear
    from octavo_kernels.triton.launch import invariant

    x_TK, weight_NK = random(700, 1024), random(6144, 1024)
    with invariant():
        whole = linear(x_TK, weight_NK, Fused(activation="silu"))
        for T in (1, 2, 16, 63, 64, 65, 300):
            assert torch.equal(linear(x_TK[5 : 5 + T], weight_NK, Fused(activation="silu")), whole[5 : 5 + T])

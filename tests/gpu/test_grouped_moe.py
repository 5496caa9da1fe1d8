"""Experts of packed groups on a GPU: real shapes, and graphs with programmatic dependent launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops.linear.grouped_linear import PackedGroups
from octavo.ops.moe import ClampedSwish, GroupedExperts, Routing, grouped_moe, route
from tests.gpu.graph_bits import assert_a_graph_gives_the_same_bits
from tests.ops.triton.test_grouped_linear import random_groups

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYERS, REPLAYS = 4, 20
FORMS = {
    "e2m1": ("e2m1", 32, False),
    "int4": ("int4", 128, False),
    "int4 with zeros": ("int4", 64, True),
    "uint4 with minima": ("uint4", 32, False),
    "e2m1, groups of 16": ("e2m1", 16, False),
    "int8": ("int8", 0, False),
    "e4m3": ("e4m3", 128, False),
}
"""Numbers, the length of their groups, 0 for a scale per output, and whether there are zeros. Groups are of 16 where
their length does not divide the inputs."""
SIZES = [(32, 4, 2880, 2880), (128, 8, 2048, 768), (8, 2, 1024, 1808)]
"""Experts, chosen ones, columns and width of an expert."""
TOKENS = (1, 2, 5, 16, 100, 700, 2100)


def joined(form: str, X: int, N: int, K: int) -> PackedGroups:
    number, group, zeros = FORMS[form]
    return random_groups("cuda", number, X * N, K, group if group == 0 or K % group == 0 else 16, zeros)


def make(form: str, X: int, D: int, F: int, biases: bool) -> GroupedExperts:
    given = [torch.randn(X, width, device="cuda").bfloat16() for width in (2 * F, D)] if biases else [None, None]
    gate_up, down = joined(form, X, 2 * F, D), joined(form, X, D, F)
    return GroupedExperts(X, gate_up, down, ClampedSwish(1.702, 7.0) if biases else "silu", *given)


def expected_of(x: Tensor, ids: Tensor, shares: Tensor, experts: GroupedExperts) -> Tensor:
    """In float64, of the weights' entries."""
    biases = (None if b is None else b.double() for b in (experts.gate_up_bias, experts.down_bias))
    wide = GroupedExperts(experts.num_experts, experts.gate_up, experts.down, experts.activation, *biases)
    return grouped_moe.reference(x.double(), ids, shares.double(), wide)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_real_shapes_agree_with_float64(size: tuple[int, int, int, int], form: str) -> None:
    """With experts that all, few and no tokens choose."""
    torch.manual_seed(size[0])
    X, S, D, F = size
    experts = make(form, X, D, F, biases=X == 32)
    for T in TOKENS:
        x, shares = torch.randn(T, D, device="cuda").bfloat16(), torch.rand(T, S, device="cuda")
        for likeliest in (0.0, 3.0):
            chance = torch.rand(T, X, device="cuda") + likeliest * torch.linspace(1, 0, X, device="cuda")
            ids = chance.topk(S).indices
            expected = expected_of(x, ids, shares, experts) + x.double()
            found, again = (grouped_moe(x, ids, shares, experts, x.clone()) for _ in range(2))
            error = ((found.double() - expected).norm() / expected.norm()).item()
            assert error < 2**-7, f"{T} tokens: {error}"
            assert torch.equal(found, again), "sums are added in one order"


class Chain:
    """Layers of routers and experts that all depend on the one before."""

    def __init__(self, T: int, form: str) -> None:
        torch.manual_seed(T)
        X, S, D, F = 16, 4, 512, 384
        self.start_TD = torch.randn(T, D, device="cuda").bfloat16()
        self.x_TD = torch.empty_like(self.start_TD)
        self.norm_D = torch.rand(D, device="cuda").bfloat16() + 0.5
        self.routing = Routing(S, True)
        self.layers = [
            ((torch.randn(X, D, device="cuda") * D**-0.5).bfloat16(), make(form, X, D, F, biases=False))
            for _ in range(LAYERS)
        ]

    def run(self) -> Tensor:
        self.x_TD.copy_(self.start_TD)
        x = self.x_TD
        for router, experts in self.layers:
            x = grouped_moe(*route(x, self.norm_D, 1e-6, router, self.routing), experts, x)
        return x


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [1, 2, 9, 40, 300])
def test_a_graph_with_dependent_launch_gives_the_bits_of_plain_launches(T: int, form: str) -> None:
    chain = Chain(T, form)
    expected = assert_a_graph_gives_the_same_bits(chain.run, chain.x_TD, REPLAYS)
    assert expected.isfinite().all()

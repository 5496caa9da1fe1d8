"""Mixtures of experts on a GPU: real shapes, and graphs with programmatic dependent launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops.moe import ClampedSwish, Experts, Routing, moe, route
from tests.gpu.graph_bits import assert_a_graph_gives_the_same_bits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

LAYERS, REPLAYS = 4, 20
SIZES = {"many": (32, 4, 512, 384), "few": (4, 2, 512, 384)}
"""Experts, chosen ones, columns and width of an expert."""
ROUTING = {"softmax": Routing(4, True), "groups": Routing(4, True, "sigmoid", 2.5, (4, 2))}


def random(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


class Chain:
    """Layers of routers and experts that all depend on the one before."""

    def __init__(self, T: int, size: str) -> None:
        torch.manual_seed(T)
        X, S, D, F = SIZES[size]
        self.start_TD = random(T, D)
        self.x_TD = torch.empty_like(self.start_TD)
        self.norm_D = random(D, scale=0.1) + 1
        self.routing = Routing(S, True)
        self.layers = [
            (random(X, D, scale=D**-0.5), Experts(random(X, 2 * F, D, scale=D**-0.5), random(X, D, F, scale=F**-0.5)))
            for _ in range(LAYERS)
        ]

    def run(self) -> Tensor:
        self.x_TD.copy_(self.start_TD)
        x = self.x_TD
        for router, experts in self.layers:
            x = moe(*route(x, self.norm_D, 1e-6, router, self.routing), experts, x)
        return x


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("T", [1, 2, 4, 9, 40, 300])
def test_a_graph_with_dependent_launch_gives_the_bits_of_plain_launches(T: int, size: str) -> None:
    chain = Chain(T, size)
    expected = assert_a_graph_gives_the_same_bits(chain.run, chain.x_TD, REPLAYS)
    assert expected.isfinite().all()


@pytest.mark.parametrize(
    ("X", "S", "D", "F"), [(128, 8, 2048, 768), (32, 4, 2880, 2880), (8, 2, 4096, 3584), (64, 6, 2048, 1408)]
)
def test_real_shapes_agree_with_float64(X: int, S: int, D: int, F: int) -> None:
    torch.manual_seed(X)
    activation, biases = (
        ("silu", (None, None)) if X != 32 else (ClampedSwish(1.702, 7.0), (random(X, 2 * F), random(X, D)))
    )
    experts = Experts(random(X, 2 * F, D, scale=D**-0.5), random(X, D, F, scale=F**-0.5), activation, *biases)
    wide = Experts(
        experts.gate_up.double(),
        experts.down.double(),
        activation,
        *(None if b is None else b.double() for b in biases),
    )
    for T in (1, 3, 16, 100, 700):
        x, shares = random(T, D), torch.rand(T, S, device="cuda")
        ids = torch.rand(T, X, device="cuda").topk(S).indices
        expected = moe.reference(x.double(), ids, shares.double(), wide) + x.double()
        found = moe(x, ids, shares, experts, x.clone())
        error = (found.double() - expected).norm() / expected.norm()
        assert error < 2**-8, f"{T} rows: {error}"


@pytest.mark.parametrize("name", ROUTING)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_routers_choose_the_best_experts(name: str, dtype: torch.dtype) -> None:
    routing = ROUTING[name]
    x, norm, weight = random(600, 2048), random(2048), random(128, 2048, scale=0.02).to(dtype)
    for T in (1, 8, 9, 600):
        _, ids, shares = route(x[:T], norm, 1e-6, weight, routing)
        _, expected, expected_shares = route.reference(x[:T], norm, 1e-6, weight.float(), routing)
        assert (ids == expected).all(dim=1).float().mean() > 0.99  # but for near ties
        assert (shares - expected_shares).abs().mean() < 1e-3


def test_invariant_rows_have_the_same_bits_in_any_company() -> None:
    from octavo_kernels.triton.launch import invariant

    chain = Chain(300, "many")
    router, experts = chain.layers[0]
    with invariant():
        whole = moe(*route(chain.start_TD, chain.norm_D, 1e-6, router, chain.routing), experts)
        for T in (1, 2, 8, 16, 65):
            rows = chain.start_TD[5 : 5 + T]
            assert torch.equal(moe(*route(rows, chain.norm_D, 1e-6, router, chain.routing), experts), whole[5 : 5 + T])

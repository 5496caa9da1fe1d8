"""What tests of kernels with programmatic dependent launch share."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Chain(Protocol):
    """Layers that all depend on the one before."""

    x_TD: Tensor
    """What all layers are added to."""

    def run(self) -> Tensor:
        """Fill ``x_TD`` anew, compute all layers, and return it."""
        ...


def assert_a_graph_gives_the_same_bits(chain: Chain, replays: int) -> Tensor:
    """Compare replays of a graph with dependent launch with plain launches, whose result is returned."""
    from octavo.ops.triton.graph_timing import capture
    from octavo.ops.triton.launch import pdl

    expected = chain.run().clone()
    with pdl():
        graph = capture([chain.run])
    for _ in range(replays):
        chain.x_TD.fill_(float("nan"))
        graph.replay()
        assert torch.equal(chain.x_TD, expected)
    return expected

"""What tests of kernels with programmatic dependent launch share."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def assert_a_graph_gives_the_same_bits(run: Callable[[], Tensor], x: Tensor, replays: int) -> Tensor:
    """Compare replays of a graph with dependent launch with plain launches, whose result is returned.

    ``run`` fills ``x`` anew, computes layers that all depend on the one before and end in it, and returns it.
    """
    from octavo_kernels.triton.graph_timing import capture
    from octavo_kernels.triton.launch import pdl

    expected = run().clone()
    with pdl():
        graph = capture([run])
    for _ in range(replays):
        x.fill_(float("nan"))
        graph.replay()
        assert torch.equal(x, expected)
    return expected

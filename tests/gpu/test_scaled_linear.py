"""FP8 weights times rows rounded to FP8 on a GPU: graphs with programmatic dependent launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ops.triton.test_scaled_linear import EPS, random_values

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs a device with FP8"
)


@pytest.mark.parametrize("T", [1, 16, 64, 300])
def test_a_graph_with_dependent_launch_gives_the_bits_of_plain_launches(T: int) -> None:
    from octavo.ops import scaled_linear
    from octavo.ops.triton.graph_timing import capture
    from octavo.ops.triton.launch import pdl

    shapes = [(512, 512), (512, 512), (2048, 512), (512, 1024)]
    layers = [[random_values(*shape) for shape in shapes] for _ in range(6)]
    start_TD, norm_D = torch.randn(T, 512, device="cuda").bfloat16(), torch.rand(512, device="cuda").bfloat16() + 0.5
    x_TD = torch.empty_like(start_TD)

    def run() -> Tensor:
        x = x_TD.copy_(start_TD)
        for qkv, o, gate_up, down in layers:
            attended = scaled_linear(x, qkv, norm_K=norm_D, eps=EPS)
            x = scaled_linear(attended, o, residual_TN=x)
            inner = scaled_linear(x, gate_up, norm_K=norm_D, eps=EPS, activation="silu")
            x = scaled_linear(inner, down, residual_TN=x)
        return x

    exact = run().clone()
    assert exact.isfinite().all()
    with pdl():
        graph = capture([run])
    for _ in range(30):
        x_TD.fill_(float("nan"))
        graph.replay()
        assert torch.equal(x_TD, exact)

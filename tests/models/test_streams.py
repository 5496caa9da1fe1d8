"""Residual streams side by side, of which only a few rows are in float32 at once."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo import ops
from octavo.models import hy_v4, qwen4
from octavo.ops import hyper_connections

T, S, D, MOST = 10, 4, 16, 200
CONFIG: Any = SimpleNamespace(
    hidden_size=D, num_streams=S, magnitude=2.0, stream_weight_eps=1e-6, norm_eps=1e-6, rank=8,
    norm=SimpleNamespace(offset=1.0),
)  # fmt: skip


class Weights:
    """Random ones."""

    form = SimpleNamespace(device="cpu")

    def exact(self, name: str, *shape: int) -> Tensor:
        return torch.randn(shape)

    def replicated(self, name: str, outputs: int, inputs: int) -> Callable[[Tensor], Tensor]:
        weight = torch.randn(outputs, inputs, dtype=torch.bfloat16)
        return lambda x: ops.linear(x, weight)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Numbers of the largest tensor of float32 that is made."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and found.dtype == torch.float32:
            self.numbers = max(self.numbers, found.untyped_storage().nbytes() // 4)
        return found


@pytest.mark.parametrize("family", [hy_v4, qwen4])
def test_a_few_rows_of_streams_are_wide_at_once(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    weights: Any = Weights()
    x_TX, y_TD = torch.randn(T, S * D).bfloat16(), torch.randn(T, D).bfloat16()
    before: Any
    after: Any
    if family is hy_v4:
        before, after = hy_v4.Streams(CONFIG, weights, "s", 2), hy_v4.added
    else:
        before, after = qwen4.Streams(CONFIG, weights, "s").mixed, lambda y, x, parts: qwen4._added(x, y, parts)

    def run() -> tuple[Tensor, ...]:
        sum_TD, parts_TS = before(x_TX)
        return sum_TD, parts_TS, after(y_TD, x_TX, parts_TS)

    expected = run()
    monkeypatch.setattr(hyper_connections, "MAX_SCRATCH", MOST)
    with Largest() as largest:  # type: ignore[no-untyped-call]
        found = run()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert 0 < largest.numbers <= MOST < x_TX.numel()

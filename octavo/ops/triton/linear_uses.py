"""The linear maps of a model as it calls them, collected from a forward pass that launches nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.linear import Activation
from octavo.ops.triton.launch import launching_nothing
from octavo.ops.triton.linear_cost import Product


@dataclass(frozen=True)
class LinearUse:
    """How a linear map is called, but for its rows."""

    N: int
    K: int
    dtype: torch.dtype = torch.bfloat16
    has_norm: bool = False
    has_residual: bool = False
    has_bias: bool = False
    activation: Activation | None = None

    def product(self, rows: int) -> Product:
        """The product for up to ``rows`` rows."""
        return Product(self.N, self.K, rows, self.activation is not None)


Uses = dict[LinearUse, list[Tensor]]
"""Uses in the order of the forward pass, and the weights [N, K] that are used so."""
_uses: ContextVar[Uses | None] = ContextVar("uses", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[Uses]:
    """Collect the linear maps called in this block, where no kernel is launched."""
    found: Uses = {}
    token = _uses.set(found)
    try:
        with launching_nothing():
            yield found
    finally:
        _uses.reset(token)


def note_use(
    weight_NK: Tensor,
    bias_N: Tensor | None,
    norm_K: Tensor | None,
    residual_TN: Tensor | None,
    activation: Activation | None,
) -> None:
    """Note a call, where calls are collected."""
    found = _uses.get()
    if found is not None:
        N, K = weight_NK.shape
        given = norm_K is not None, residual_TN is not None, bias_N is not None
        found.setdefault(LinearUse(N, K, weight_NK.dtype, *given, activation), []).append(weight_NK)

"""The matrix products of a model as it calls them, collected from a forward pass that launches nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.ops.linear.grouped_linear import PackedGroups
from octavo.ops.linear.linear import Activation, Fused
from octavo_kernels.triton.launch import launching_nothing


class ProductCall(NamedTuple):
    """A call of ``linear`` or ``grouped_linear``, but for its rows."""

    weight: Tensor | PackedGroups
    dtype: torch.dtype
    """Of activations."""
    has_norm: bool
    has_residual: bool
    has_bias: bool
    activation: Activation | None


_calls: ContextVar[list[ProductCall] | None] = ContextVar("calls", default=None)


@contextlib.contextmanager
def collecting() -> Iterator[list[ProductCall]]:
    """Collect the products called in this block, in their order; no kernel is launched in it."""
    found: list[ProductCall] = []
    token = _calls.set(found)
    try:
        with launching_nothing():
            yield found
    finally:
        _calls.reset(token)


def is_collecting() -> bool:
    """Whether products are noted, and none is computed."""
    return _calls.get() is not None


def note_call(x_TK: Tensor, weight: Tensor | PackedGroups, fused: Fused) -> None:
    """Note a call, where calls are collected."""
    found = _calls.get()
    if found is not None:
        has_norm, has_residual, has_bias = (x is not None for x in (fused.norm_K, fused.residual_TN, fused.bias_N))
        found.append(ProductCall(weight, x_TK.dtype, has_norm, has_residual, has_bias, fused.activation))

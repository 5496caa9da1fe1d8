"""Memory with guards around it: a kernel that writes beside its tensors, or reads what nobody wrote, is found out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

GUARD = 4096
FILLER = 0x7F
"""A byte of which all is made: NaN as a float, and an index far outside as a whole number."""


class Guarded:
    """Instead of ``torch.empty``: tensors full of rubbish, between guards."""

    def __init__(self, empty: Callable[..., Tensor]) -> None:
        self._empty = empty
        self._buffers: list[tuple[Tensor, int]] = []

    def __call__(self, *shape: Any, dtype: torch.dtype, device: Any) -> Tensor:
        sizes = shape if all(isinstance(size, int) for size in shape) else shape[0]
        used = math.prod(sizes) * dtype.itemsize
        buffer = self._empty(used + 2 * GUARD, dtype=torch.uint8, device=device).fill_(FILLER)
        self._buffers.append((buffer, used))
        return buffer[GUARD : GUARD + used].view(dtype).view(sizes)

    def check(self) -> None:
        """Assert that no guard was written to."""
        assert self._buffers
        for buffer, used in self._buffers:
            assert (buffer[:GUARD] == FILLER).all()
            assert (buffer[GUARD + used :] == FILLER).all()

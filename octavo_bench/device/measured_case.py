"""What is measured of a kernel: the same call on other weights or rows each time, and the work that it cannot do
without."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
EPS = 1e-6
ALONE_BYTES = 400_000_000
"""Read between two uses of the same weights or rows: several times any cache."""
MOST_CALLS = 256
Call = Callable[[], object]


class Floor(NamedTuple):
    """What a call cannot do without."""

    bytes: int
    flops: int


class Case(ABC):
    """A kernel with its weights or cache, for any number T of rows."""

    family: str
    name: str
    format: str = "bf16"
    """Of weights, or of the cache."""
    rate = "matmul_tflop_s"
    """The one of ``ceilings`` that its products have."""
    fewest_rows, most_rows = 1, 1 << 30

    @abstractmethod
    def calls(self, T: int) -> list[Call]:
        """The same for T rows with one weight after another."""

    @abstractmethod
    def work(self, T: int) -> Floor:
        """Of each of the calls, on average."""

    def error(self, T: int) -> float | None:
        """Norm of the difference from products of higher precision over their norm, for a few rows; ``None`` where
        tests alone look at it."""
        return None


def num_turns(num_bytes: int) -> int:
    """How many calls that read so many bytes of their own take turns."""
    return max(2, min(MOST_CALLS, -(-ALONE_BYTES // num_bytes)))


def random_rows(T: int, width: int) -> Tensor:
    """[T, width] of unit variance."""
    return torch.randn(T, width, device=DEVICE).to(DTYPE)

"""Random weights, for benchmarking and testing an architecture without its checkpoint."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from octavo.errors import CheckpointError
from octavo.weights.dtypes import stated_dtype

STANDARD_DEVIATION = 0.02
POOL_SIZE = 1_048_573
"""Size of the random pool that every tensor repeats, because drawing billions of numbers takes minutes.
It is prime, so that no two rows of a matrix are equal."""

NORMS = ("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")


class DummyCheckpoint:
    """Returns small random values for any name and shape, determined by name and seed alone.

    They have the dtype that the configuration names, as in the files of such a checkpoint, or else float32.
    """

    is_dummy = True
    has_blocks = False

    def __init__(
        self, config: dict[str, Any], generation_config: dict[str, Any], seed: int, device: str = "cpu"
    ) -> None:
        self.config = config
        self.generation_config = generation_config
        self.seed = seed
        self._dtype = stated_dtype(config) or torch.float32
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(POOL_SIZE, generator=generator).mul_(STANDARD_DEVIATION).to(device)

    def names(self) -> set[str]:
        """Empty: a dummy has tensors of any name."""
        return set()

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Raises ``CheckpointError``: a dummy tensor has the shape that ``load`` requests."""
        raise CheckpointError(f"tensor {name} is random and has no shape before it is loaded")

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Normally distributed values with standard deviation 0.02 and mean 0, or mean 1 for norm weights."""
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        pool = self._pool.roll(int.from_bytes(digest[:8], "little") % POOL_SIZE)
        if name.endswith(NORMS):
            pool += 1
        return repeated(pool.to(self._dtype), torch.Size(shape).numel()).view(shape)


def repeated(values_P: torch.Tensor, count: int) -> torch.Tensor:
    """These values again and again, ``count`` in all."""
    whole, rest = divmod(count, len(values_P))
    repeated = values_P.new_empty(count)
    repeated[: count - rest].view(whole, len(values_P)).copy_(values_P)
    repeated[count - rest :].copy_(values_P[:rest])
    return repeated

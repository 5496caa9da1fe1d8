"""Random weights: for measuring and testing an architecture without its checkpoint."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from octavo.errors import CheckpointError

STANDARD_DEVIATION = 0.02
POOL_SIZE = 1_048_573
"""Random numbers that are drawn; every tensor repeats them, since drawing billions takes minutes.
It is prime, so that no two rows of a matrix are equal."""

NORMS = ("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")


class DummyCheckpoint:
    """Answers any name and shape with small random float32 values that depend on name and seed alone."""

    is_dummy = True
    has_blocks = False

    def __init__(
        self, config: dict[str, Any], generation_config: dict[str, Any], seed: int, device: str = "cpu"
    ) -> None:
        self.config = config
        self.generation_config = generation_config
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(POOL_SIZE, generator=generator).mul_(STANDARD_DEVIATION).to(device)

    def names(self) -> set[str]:
        """Nothing: a dummy has whatever is asked of it."""
        return set()

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Raises ``CheckpointError``: the shape is that of the question."""
        raise CheckpointError(f"tensor {name} is made up when it is loaded, and has no shape before")

    def load(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Normal values with deviation 0.02, around 1 for the weights of norms and around 0 for all else."""
        digest = hashlib.sha256(f"{self.seed}:{name}".encode()).digest()
        pool = self._pool.roll(int.from_bytes(digest[:8], "little") % POOL_SIZE)
        if name.endswith(NORMS):
            pool += 1
        values = torch.empty(torch.Size(shape).numel(), device=pool.device)
        for part in torch.split(values, POOL_SIZE):
            part.copy_(pool[: len(part)])
        return values.reshape(shape)

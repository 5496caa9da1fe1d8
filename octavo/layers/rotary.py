"""Angles of the rotary position embedding, with the ways to stretch it over longer contexts.

Shapes: T tokens, R rotated pairs = head dim / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DefaultRope:
    """Pair i turns by ``theta ** (-i / R)`` radians a position (arXiv 2104.09864)."""

    theta: float

    def frequencies(self, head_dim: int) -> Tensor:
        """Radians a position of each pair; float32 [R], computed as checkpoints were trained with."""
        return 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


@dataclass(frozen=True)
class LinearRope(DefaultRope):
    """Every position counts ``1 / factor`` (position interpolation, arXiv 2306.15595)."""

    factor: float

    def frequencies(self, head_dim: int) -> Tensor:
        return DefaultRope.frequencies(self, head_dim) / self.factor


@dataclass(frozen=True)
class Llama3Rope(DefaultRope):
    """Llama 3.1's: slow pairs are slowed by ``factor``, fast ones stay, those between are blended.

    A pair is slow when it turns less than ``low_freq_factor`` times over the original context, and fast when it
    turns more than ``high_freq_factor`` times. Source: ``apply_scaling`` in Meta's reference implementation.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int

    def frequencies(self, head_dim: int) -> Tensor:
        plain = DefaultRope.frequencies(self, head_dim)
        turns = self.original_max_len / (2 * math.pi / plain)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = share.clamp(0, 1)
        return (1 - share) * plain / self.factor + share * plain


class Rotary:
    """Cosines and sines for the positions of a step; computed once and used by every layer."""

    def __init__(self, rope: DefaultRope, head_dim: int, device: torch.device) -> None:
        self.frequencies_R = rope.frequencies(head_dim).to(device)

    def __call__(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Two float32 [T, R] for int64 positions."""
        angles_TR = positions_T.unsqueeze(-1).float() * self.frequencies_R
        return angles_TR.cos(), angles_TR.sin()

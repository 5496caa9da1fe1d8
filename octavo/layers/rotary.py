"""Angles of the rotary position embedding, with the ways to stretch it over longer contexts.

Shapes: T tokens, R rotated pairs = rotary width / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops import rotary_angles


@dataclass(frozen=True)
class DefaultRope:
    """Pair i turns by ``theta ** (-i / R)`` radians a position (arXiv 2104.09864)."""

    theta: float

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        return 1.0

    def frequencies(self, width: int) -> Tensor:
        """Radians a position of each pair of a head's first ``width`` numbers; float32 [R].

        Computed in the types and order that checkpoints were trained with.
        """
        return 1.0 / self.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


@dataclass(frozen=True)
class LinearRope(DefaultRope):
    """Every position counts ``1 / factor`` (position interpolation, arXiv 2306.15595)."""

    factor: float

    def frequencies(self, width: int) -> Tensor:
        return DefaultRope.frequencies(self, width) / self.factor


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

    def frequencies(self, width: int) -> Tensor:
        plain = DefaultRope.frequencies(self, width)
        turns = self.original_max_len / (2 * math.pi / plain)
        share = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        share = share.clamp(0, 1)
        return (1 - share) * plain / self.factor + share * plain


@dataclass(frozen=True)
class YarnRope(DefaultRope):
    """YaRN (arXiv 2309.00071): pairs that turn often stay, those that turn rarely are slowed, a ramp between.

    ``fast`` and ``slow`` are turns over the original context between which the ramp lies (beta in the paper); with
    ``truncate`` its ends are moved outwards to whole pairs.
    """

    factor: float
    original_max_len: int
    scale: float
    """Of cosines and sines: the paper's way to sharpen attention over longer contexts."""
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True

    @property
    def attention_factor(self) -> float:
        return self.scale

    def frequencies(self, width: int) -> Tensor:
        plain = DefaultRope.frequencies(self, width)
        low, high = self._pair(self.fast, width), self._pair(self.slow, width)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
        share = 1 - ramp.clamp(0, 1)
        return plain / self.factor * (1 - share) + plain * share

    def _pair(self, turns: float, width: int) -> float:
        """The pair, as a real number, that turns this often over the original context."""
        return width * math.log(self.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


@dataclass(frozen=True)
class FactorsRope(DefaultRope):
    """Each pair has a number of its own that its frequency is divided by (LongRoPE, arXiv 2402.13753)."""

    factors: tuple[float, ...]
    scale: float = 1.0

    @property
    def attention_factor(self) -> float:
        return self.scale

    def frequencies(self, width: int) -> Tensor:
        powers = self.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        return 1.0 / (torch.tensor(self.factors, dtype=torch.float32) * powers)


class Rotary:
    """Cosines and sines for the positions of a step; computed once and used by every layer."""

    def __init__(self, rope: DefaultRope, width: int, device: torch.device) -> None:
        self.frequencies_R = rope.frequencies(width).to(device)
        self.factor = rope.attention_factor

    def __call__(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Two float32 [T, R] for int64 positions."""
        return rotary_angles(positions_T, self.frequencies_R, self.factor)

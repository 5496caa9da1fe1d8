"""Angles of the rotary position embedding, with its scaling methods for longer contexts.

Shapes: T tokens, R rotated pairs = rotary width / 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops import axis_angles, rotary_angles
from octavo.ops.attention.attention import RopeSet
from octavo.steps.limits import RopeSets


@dataclass(frozen=True)
class DefaultRope:
    """Pair i rotates by ``theta ** (-i / R)`` radians per position (arXiv 2104.09864)."""

    theta: float

    @property
    def sets(self) -> RopeSets | None:
        """When texts have which of several sets of frequencies; ``None``: there is one for all."""
        return None

    @property
    def attention_factor(self) -> float:
        """Factor applied to cosines and sines."""
        return 1.0

    def frequencies(self, width: int) -> Tensor:
        """Radians per position for each pair of a head's first ``width`` numbers; float32 [R].

        Uses the same types and order of operations as in training.
        """
        return 1.0 / self.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)


@dataclass(frozen=True)
class LinearRope(DefaultRope):
    """Positions are divided by ``factor`` (position interpolation, arXiv 2306.15595)."""

    factor: float

    def frequencies(self, width: int) -> Tensor:
        return DefaultRope.frequencies(self, width) / self.factor


@dataclass(frozen=True)
class Llama3Rope(DefaultRope):
    """Llama 3.1 scaling: low frequencies are divided by ``factor``, high ones kept, those between interpolated.

    A frequency is low if it makes fewer than ``low_freq_factor`` turns over the original context, and high if it makes
    more than ``high_freq_factor``. Source: ``apply_scaling`` in Meta's reference implementation.
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
    """YaRN (arXiv 2309.00071): high frequencies are kept, low ones divided by ``factor``, with a ramp between.

    ``fast`` and ``slow`` are the ends of the ramp in turns over the original context (beta in the paper); with
    ``truncate`` they are rounded outwards to integer pair indices.
    """

    factor: float
    original_max_len: int
    scale: float
    """Factor of cosines and sines, which sharpens attention over longer contexts."""
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
        """The fractional index of the pair that makes ``turns`` turns over the original context."""
        return width * math.log(self.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


@dataclass(frozen=True)
class FactorsRope(DefaultRope):
    """The frequency of each pair is divided by its own factor (LongRoPE, arXiv 2402.13753)."""

    factors: tuple[float, ...]
    scale: float = 1.0

    @property
    def attention_factor(self) -> float:
        return self.scale

    def frequencies(self, width: int) -> Tensor:
        powers = self.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        return 1.0 / (torch.tensor(self.factors, dtype=torch.float32) * powers)


@dataclass(frozen=True)
class ProportionalRope(DefaultRope):
    """The first ``share`` of the pairs rotate as in ``LinearRope``, the others not at all (Gemma 4)."""

    share: float
    factor: float = 1.0

    def frequencies(self, width: int) -> Tensor:
        plain = DefaultRope.frequencies(self, width) / self.factor
        plain[int(self.share * width // 2) :] = 0.0
        return plain


@dataclass(frozen=True)
class SwitchedRope(DefaultRope):
    """Texts longer than ``original`` have other frequencies than others."""

    original: int
    short: DefaultRope
    long: DefaultRope

    @property
    def sets(self) -> RopeSets:
        return RopeSets(self.original)

    @property
    def attention_factors(self) -> list[float]:
        """The factor of each set."""
        return [self.short.attention_factor, self.long.attention_factor]

    def frequencies(self, width: int) -> Tensor:
        """Of both sets, one behind the other: [2 R]."""
        return torch.cat((self.short.frequencies(width), self.long.frequencies(width)))


@dataclass(frozen=True)
class DynamicRope(DefaultRope):
    """Texts of n tokens, more than ``original``, have theta times ``(factor n / original - factor + 1) ** (w / (w -
    2))``, with the rotated width w: dynamic NTK-aware scaling (https://www.reddit.com/r/LocalLLaMA/comments/14mrgpr).

    There are frequencies for texts of up to ``longest`` tokens.
    """

    factor: float
    original: int
    longest: int

    @property
    def sets(self) -> RopeSets:
        return RopeSets(self.original, max(1, self.original // 16))

    @property
    def attention_factors(self) -> list[float]:
        """The factor of each set."""
        return [1.0] * (len(self._lengths))

    @property
    def _lengths(self) -> range:
        return range(self.original, self.longest + self.sets.step + 1)

    def frequencies(self, width: int) -> Tensor:
        """Of all sets, one behind the other."""
        lengths_S1 = torch.tensor(self._lengths, dtype=torch.float64).unsqueeze(1)
        grown_S1 = (self.factor * lengths_S1 / self.original - (self.factor - 1)) ** (width / (width - 2))
        powers_R = torch.arange(0, width, 2, dtype=torch.float64) / width
        return (1.0 / (self.theta * grown_S1) ** powers_R).float().flatten()


class Rotary:
    """Computes cosines and sines for the positions of a step, once for all layers."""

    def __init__(self, rope: DefaultRope, width: int, device: torch.device) -> None:
        self.frequencies_R = rope.frequencies(width).to(device)
        self.factor = rope.attention_factor
        self.factors_S: Tensor | None = None
        if isinstance(rope, SwitchedRope | DynamicRope):
            self.factors_S = torch.tensor(rope.attention_factors, dtype=torch.float32, device=device)
        self.axes_R: Tensor | None = None
        """int64: the axis by whose position each pair rotates, of models whose positions have several."""

    def __call__(self, positions_T: Tensor, shifts_AT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Two float32 [T, R] for int64 positions; ``shifts`` are added for each axis, or say which set of frequencies
        each row has: without them, all have those of short texts."""
        if self.factors_S is not None:
            sets_T = torch.zeros_like(positions_T) if shifts_AT is None else shifts_AT.view(-1)
            return rotary_angles(positions_T, self.frequencies_R, self.factor, RopeSet(sets_T, self.factors_S))
        if shifts_AT is None or self.axes_R is None:
            return rotary_angles(positions_T, self.frequencies_R, self.factor)
        return axis_angles(positions_T, shifts_AT, self.axes_R, self.frequencies_R, self.factor)

"""The interface of vision and audio towers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from octavo.models.config_keys import ConfigKeys, wrong
from octavo.types import AUDIO_DETAILS

logger = logging.getLogger(__name__)


class Pixels(NamedTuple):
    """An image, or audio, as towers take it."""

    pixels: Tensor
    """uint8 [tiles, rows, columns, 3]; [1, 1, all pixels, 3] of tiles that differ in size; [1, 1, samples, 3] of audio:
    16,000 samples a second, signed numbers of 24 bits, the lowest byte first."""
    details: tuple[int, ...]
    mean: Sequence[float]
    deviation: Sequence[float]

    @property
    def is_audio(self) -> bool:
        return self.details == AUDIO_DETAILS


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """What the runtime has to know of a tower."""

    hidden_size: int
    """Width of the decoder."""
    num_deep: int = 0
    """Further vectors of each embedding, for the first layers of the decoder."""
    axes: tuple[int, ...] = ()
    """The axis by which each pair of a head rotates: 0 time, 1 row, 2 column; empty: all by the token's position."""
    is_bidirectional: bool = False
    """Whether the rows of an image attend to each other in the decoder."""
    longest: int = 0
    """Positions of an image, where all have as many."""
    placeholders: tuple[int, ...] = ()
    """Ids of tokens that stand for images, videos and audio in a prompt, and that the model never samples."""

    @property
    def num_axes(self) -> int:
        """Axes of rotary positions; 0: they are those of tokens."""
        return 3 if self.axes else 0


class Tower(Protocol):
    """Computes the embeddings of an image, or of audio."""

    def __call__(self, image: Pixels, /) -> Tensor:
        """[tokens of the image, (1 + num_deep) * hidden_size]."""
        ...


def read_axes(text: ConfigKeys) -> tuple[int, ...]:
    """The axis of each rotated pair, from ``mrope_section``: the pairs of time, rows and columns one after the other,
    or with ``mrope_interleaved`` in turns, the rest being of time. Raises ``CheckpointError``."""
    parts = (text.child(name) for name in ("rope_parameters", "rope_scaling"))
    given: Mapping[str, Any] = next((part.values for part in parts if part is not None and part.values), {})
    sections = given.get("mrope_section")
    if not (
        isinstance(sections, list | tuple)
        and len(sections) == 3
        and all(type(n) is int and 0 <= n < 1024 for n in sections)
    ):
        raise wrong("mrope_section", sections, "three numbers of rotated pairs")
    if not given.get("mrope_interleaved"):
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], len(axes)), 3):
            axes[pair] = axis
    return tuple(axes)

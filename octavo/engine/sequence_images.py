"""The images of sequences: which embeddings a chunk needs, where it may end, and the rotary positions of its rows.

Shapes: P positions of the prompt, A axes of rotary positions, T rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.cache.embedding_cache import Embedded, EmbeddingCache, num_rows
from octavo.errors import InvalidParameter
from octavo.steps.messages import EncodeImages, ImageToEncode, SpanRows
from octavo.types import ImageInput, Scheduled, Sequence

Shifts = npt.NDArray[np.int64]


class ImageSettings(NamedTuple):
    """What the deciding tower knows of a model's images."""

    num_slots: int
    """Slots of the pool of embeddings."""
    num_axes: int = 0
    """Axes of rotary positions; 0: they are those of tokens."""
    is_bidirectional: bool = False
    """Whether the rows of an image attend to each other, so that no chunk may end between them."""
    longest: int = 0
    """Positions of the longest image, if chunks may not end within one."""


class SequenceImages:
    """The images of one sequence, by position."""

    def __init__(self, images: list[ImageInput], tokens: list[int], num_axes: int) -> None:
        self.spans = [(image, num_rows(image, tokens)) for image in images]
        self.tokens = tokens
        self.end = max(image.start + image.num_tokens for image in images)
        """Behind the last position of an image."""
        self.held: dict[bytes, Embedded] = {}
        """Of the images that are not yet computed, by digest; empty before admission and after the prompt."""
        self.shifts_AP, self.delta = rope_shifts(images, len(tokens), num_axes)

    def missing(self, start: int) -> list[tuple[ImageInput, int]]:
        """The images with positions from ``start`` on, and the rows of each."""
        return [(image, rows) for image, rows in self.spans if image.start + image.num_tokens > start]

    def entry(self, image: ImageInput) -> Embedded:
        """The image in the pool, which must be held."""
        return self.held[image.digest]

    def within(self, start: int, end: int) -> Iterator[ImageInput]:
        """The images with positions from ``start`` to ``end``."""
        for image, _ in self.spans if start < self.end else ():
            if image.start < end and image.start + image.num_tokens > start:
                yield image

    def shifts(self, start: int, end: int) -> Shifts:
        """What is added to positions ``start`` to ``end`` for each axis of rotary positions: [A, T]."""
        P = self.shifts_AP.shape[1]
        behind = np.full((len(self.shifts_AP), max(0, end - max(start, P))), self.delta, np.int64)
        return np.concatenate([self.shifts_AP[:, start:end], behind], axis=1)

    def slots(self, start: int, end: int) -> npt.NDArray[np.int64] | None:
        """The slot of each embedding from ``start`` to ``end``, -1 for tokens; ``None`` if there are only tokens."""
        found = None
        for image in self.within(start, end):
            if found is None:
                found = np.full(end - start, -1, np.int64)
            ids = np.array(self.tokens[image.start : image.start + image.num_tokens])
            of_span = np.full(len(ids), -1, np.int64)
            of_span[ids == image.token] = self.entry(image).slots
            first = max(start, image.start)
            last = min(end, image.start + image.num_tokens)
            found[first - start : last - start] = of_span[first - image.start : last - image.start]
        return found


def rope_shifts(images: list[ImageInput], num_tokens: int, num_axes: int) -> tuple[Shifts, int]:
    """For each axis, rotary positions less positions of the prompt [A, P], and their difference behind it.

    As in Qwen2-VL (arXiv 2409.12191): text counts on all axes. Of an image that begins at rotary position p, row r and
    column c are at (p, p + r, p + c), those of a frame t later in its video at (p + t, p + r, p + c), and what follows
    begins behind the largest of these. Audio counts as text does.
    """
    shifts_AP = np.zeros((num_axes, num_tokens), np.int64)
    shift = first = next_position = 0
    for image in images if num_axes else []:
        if image.grid is None:
            continue
        rows, columns = image.grid
        start, end = image.start, image.start + image.num_tokens
        if image.elapsed is None:
            first = next_position = start + shift
        time, index = first + (image.elapsed or 0), np.arange(image.num_tokens)
        shifts_AP[0, start:end] = time - start - index
        shifts_AP[1, start:end] = first + index // columns - start - index
        shifts_AP[2, start:end] = first + index % columns - start - index
        next_position = max(next_position, time + 1, first + max(rows, columns))
        shift = next_position - end
        shifts_AP[:, end:] = shift
    return shifts_AP, shift


class Images:
    """The images of all sequences of an engine."""

    def __init__(self, settings: ImageSettings, most_rows: int) -> None:
        """``most_rows``: embeddings computed between two steps, unless a single image has more."""
        self.settings = settings
        self.cache = EmbeddingCache(settings.num_slots)
        self._most_rows = most_rows
        self._num_rows = 0
        """Embeddings to compute before the step that is being planned."""

    def add(self, seq: Sequence) -> None:
        """Give a new sequence its images. Raises ``InvalidParameter`` if they can never be computed."""
        request = seq.request
        if not request.images:
            return
        seq.images = images = SequenceImages(request.images, request.prompt_tokens, self.settings.num_axes)
        needed = {image.digest: rows for image, rows in images.spans}
        if sum(needed.values()) > self.settings.num_slots:
            raise InvalidParameter(
                "messages",
                f"The images of a request may have {self.settings.num_slots} tokens in all; these have "
                f"{sum(needed.values())}.",
            )
        longest = max(image.num_tokens for image in request.images)
        if self.settings.is_bidirectional and longest > self.settings.longest:
            raise InvalidParameter(
                "messages",
                f"An image, with the words that attend to it, may have {self.settings.longest} tokens; one of these "
                f"has {longest}.",
            )

    def begin_step(self) -> None:
        """Begin to plan a step."""
        self._num_rows = 0

    def admits(self, seq: Sequence, start: int) -> bool:
        """Whether there are slots for the images of a sequence that is cached up to ``start``."""
        return seq.images is None or self.cache.admits(seq, seq.images.missing(start))

    def hold(self, seq: Sequence) -> None:
        """Reserve the slots of a sequence that is admitted."""
        if seq.images is not None:
            held = self.cache.hold(seq, seq.images.missing(seq.num_computed_tokens))
            seq.images.held = {entry.image.digest: entry for entry in held}

    def release(self, seq: Sequence) -> None:
        """Give the slots back: the prompt is computed, or the sequence was preempted or ended."""
        if seq.images is not None and seq.images.held:
            self.cache.release(seq, seq.images.held.values())
            seq.images.held = {}

    def end_of_chunk(self, seq: Sequence, num_tokens: int) -> int:
        """How many of the next ``num_tokens`` tokens of a sequence can be computed now.

        A chunk ends before an image whose embeddings have to wait for a later step. It may be longer than asked for,
        as it does not end within an image whose rows attend to each other.
        """
        images: SequenceImages = seq.images
        start = seq.num_computed_tokens
        end = start + num_tokens
        for image in images.within(start, end):
            entry = images.entry(image)
            if not (entry.is_ready or entry.by is seq):
                is_free = not self._num_rows or self._num_rows + len(entry.slots) <= self._most_rows
                if entry.by is not None or not is_free:
                    return max(0, image.start - start)
                self._num_rows += len(entry.slots)
            if self.settings.is_bidirectional:
                end = max(end, image.start + image.num_tokens)
        return end - start

    def to_encode(self, seq: Sequence, start: int, end: int) -> tuple[Embedded, ...]:
        """The images whose embeddings have to be computed before positions ``start`` to ``end``, from now on by the
        step of ``seq``."""
        images: SequenceImages = seq.images
        entries = {id(entry): entry for entry in map(images.entry, images.within(start, end))}
        found = tuple(entry for entry in entries.values() if not entry.is_ready and entry.by is None)
        for entry in found:
            entry.by = seq
        return found

    def commit(self, item: Scheduled) -> None:
        """Note that a step succeeded."""
        for entry in item.encodes:
            if entry.by is item.seq:
                entry.is_ready, entry.by = True, None
        if item.samples:
            self.release(item.seq)

    def rewind(self, seq: Sequence) -> None:
        """Note that the steps in flight of a sequence failed."""
        if seq.images is not None:
            for entry in seq.images.held.values():
                if entry.by is seq:
                    entry.by = None


def encode_message(entries: list[Embedded]) -> EncodeImages:
    """The message that computes embeddings."""
    return EncodeImages(
        [
            ImageToEncode(entry.slots.tobytes(), entry.image.shape, entry.image.pixels, entry.image.details)
            for entry in entries
        ]
    )


def span_rows(plan: list[Scheduled], counts: list[int]) -> list[SpanRows]:
    """The rows of a step that attend to later ones of their image."""
    found, first_row = [], 0
    for number, (item, count) in enumerate(zip(plan, counts, strict=True)):
        if item.seq.images is not None:
            start = item.settled_start
            for image in item.seq.images.within(start, start + count):
                first, last = max(start, image.start), min(start + count, image.start + image.num_tokens)
                end = image.start + image.num_tokens
                found.append(SpanRows(first_row + first - start, last - first, number, image.start, end))
        first_row += count
    return found

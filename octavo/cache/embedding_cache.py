"""The pool of image embeddings: which slot holds which row of which image.

The vision tower writes an image's embeddings to slots, and steps read them from there in place of a token's row of the
table. Only this object decides about slots, so two processes can never disagree about them. Images are found by digest:
one that is asked for again while its slots are still there is not computed again.

A sequence *holds* its images from its admission until its prompt is computed, so an admitted sequence never waits for
slots. Images that no sequence holds are forgotten, the one that rested longest first, when slots are needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from octavo.types import ImageInput, Sequence


class Embedded:
    """An image in the pool."""

    def __init__(self, image: ImageInput, slots: npt.NDArray[np.int64]) -> None:
        self.image = image
        self.slots = slots
        self.holders: set[Sequence] = set()
        self.is_ready = False
        """Whether a step that follows the computation of its embeddings is committed."""
        self.by: Sequence | None = None
        """The sequence for whose step they are being computed; for others they are not there before that is committed,
        because it may fail."""


def num_rows(image: ImageInput, tokens: list[int]) -> int:
    """Embeddings of an image, one for each of its placeholders in the prompt."""
    return tokens[image.start : image.start + image.num_tokens].count(image.token)


class EmbeddingCache:
    """Slots of the pool, by digest of the image."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.by_digest: OrderedDict[bytes, Embedded] = OrderedDict()
        """The image that was released last comes last."""
        self._free = np.arange(num_slots, dtype=np.int64)
        self._num_free = num_slots

    def admits(self, seq: Sequence, images: Iterable[tuple[ImageInput, int]]) -> bool:
        """Whether there are slots for these images, of so many rows each, besides those of other sequences."""
        needed = {image.digest: count for image, count in images}
        held = sum(len(e.slots) for digest, e in self.by_digest.items() if e.holders and digest not in needed)
        return held + sum(needed.values()) <= self.num_slots

    def hold(self, seq: Sequence, images: Iterable[tuple[ImageInput, int]]) -> list[Embedded]:
        """Let ``seq`` hold these images, for which there must be slots."""
        held, missing = [], []
        for image, count in images:
            entry = self.by_digest.get(image.digest)
            if entry is not None:
                entry.holders.add(seq)  # before anything is forgotten for the others
                held.append(entry)
            else:
                missing.append((image, count))
        for image, count in missing:
            entry = self.by_digest.get(image.digest)  # the same image twice
            if entry is None:
                entry = self.by_digest[image.digest] = Embedded(image, self._take(count))
            entry.holders.add(seq)
            held.append(entry)
        return held

    def release(self, seq: Sequence, entries: Iterable[Embedded]) -> None:
        """Let ``seq`` hold these no longer; what is not ready and held by none is forgotten."""
        for entry in entries:
            entry.holders.discard(seq)
            if entry.by is seq:
                entry.by = None
            if entry.holders:
                continue
            if entry.is_ready:
                self.by_digest.move_to_end(entry.image.digest)
            elif self.by_digest.get(entry.image.digest) is entry:
                self._forget(entry)

    def clear(self) -> None:
        """Forget all images that no sequence holds."""
        for entry in [entry for entry in self.by_digest.values() if not entry.holders]:
            self._forget(entry)

    def _take(self, count: int) -> npt.NDArray[np.int64]:
        resting = [entry for entry in self.by_digest.values() if not entry.holders]
        for entry in resting:
            if self._num_free >= count:
                break
            self._forget(entry)
        assert self._num_free >= count, "an image was admitted for which there are no slots"
        self._num_free -= count
        return self._free[self._num_free : self._num_free + count].copy()

    def _forget(self, entry: Embedded) -> None:
        del self.by_digest[entry.image.digest]
        self._free[self._num_free : self._num_free + len(entry.slots)] = entry.slots
        self._num_free += len(entry.slots)

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that every slot is accounted for, given the sequences that may hold images."""
        taken = [entry.slots for entry in self.by_digest.values()]
        slots = np.concatenate([self._free[: self._num_free], *taken])
        assert sorted(slots.tolist()) == list(range(self.num_slots)), "slots of embeddings are lost, or used twice"
        allowed = set(holders)
        for entry in self.by_digest.values():
            assert entry.holders <= allowed, "a sequence that has ended holds an image"
            assert entry.by is None or entry.by in entry.holders, "an image is computed for a sequence without it"

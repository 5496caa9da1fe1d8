"""Embedding vectors: shortening and cosine similarity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.errors import InvalidParameter

Floats = npt.NDArray[np.float32]


def shortened(vector: Floats, dimensions: int | None) -> Floats:
    """The first ``dimensions`` numbers, normalised to length 1; the vector unchanged for ``None``."""
    if dimensions is None or dimensions == len(vector):
        return vector
    first = vector[:dimensions]
    length = np.linalg.norm(first)
    return first if length == 0 else (first / length).astype("<f4")


def check_dimensions(dimensions: int | None, size: int) -> None:
    """Raise ``InvalidParameter`` unless a vector of ``size`` numbers can be shortened to ``dimensions``."""
    if dimensions is not None and size and not (type(dimensions) is int and 1 <= dimensions <= size):
        raise InvalidParameter("dimensions", f"'dimensions' must be from 1 to {size}, not {dimensions!r}.")


def cosine(a: Floats, b: Floats) -> float:
    """Cosine similarity of two vectors; 0 if one of them is all zeros."""
    lengths = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return 0.0 if lengths == 0 else float(a @ b) / lengths


def pairs_of(text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of one text with each of a list, or of two lists of equal length; else raise ``InvalidParameter``."""
    firsts, seconds = _texts(text_1, "text_1"), _texts(text_2, "text_2")
    if not firsts or not seconds:
        name = "text_2" if firsts else "text_1"
        raise InvalidParameter(name, f"'{name}' must not be empty.")
    if len(firsts) not in (1, len(seconds)):
        message = f"'text_1' must be one text, or as many as 'text_2' has, {len(seconds)}; it has {len(firsts)}."
        raise InvalidParameter("text_1", message)
    return list(zip(firsts * len(seconds) if len(firsts) == 1 else firsts, seconds, strict=True))


def _texts(given: str | Sequence[str], name: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InvalidParameter(name, f"'{name}' must be text or a list of texts.")
    return list(texts)

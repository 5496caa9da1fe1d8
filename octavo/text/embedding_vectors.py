"""Embedding vectors: shortening and cosine similarity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from octavo.errors import InvalidParameter
from octavo.model_info import LabelActivation, PoolingInfo
from octavo.types import Task

Floats = npt.NDArray[np.float32]


def results_of(
    task: Task, values: Sequence[bytes], info: PoolingInfo, *, is_raw: bool = False, dimensions: int | None = None
) -> list[Floats]:
    """``result_of`` for each of several texts."""
    if not values or task in ("token_embed", "token_classify"):
        return [result_of(task, each, info, is_raw=is_raw, dimensions=dimensions) for each in values]
    rows = result_of(task, b"".join(values), info, is_raw=is_raw, dimensions=dimensions, num_texts=len(values))
    return list(rows)


def result_of(
    task: Task,
    values: bytes,
    info: PoolingInfo,
    *,
    is_raw: bool = False,
    normalizes: bool | None = None,
    dimensions: int | None = None,
    num_texts: int | None = None,
) -> Floats:
    """What a request for ``task`` asked for, of the values in the engine's output: numbers, or a row for each token, or
    for each of ``num_texts``, whose values follow one another.

    Scores are made of logits unless ``is_raw``. Embeddings are shortened, and normalised if ``normalizes`` says so;
    ``None``: if the model's own files do.
    """
    numbers = np.frombuffer(values, dtype="<f4")
    if task in ("token_embed", "token_classify"):
        numbers = numbers.reshape(-1, info.token_size if task == "token_embed" else len(info.labels))
    elif num_texts is not None:
        numbers = numbers.reshape(num_texts, -1)
    if task not in ("embed", "token_embed"):
        return numbers if is_raw else activated(numbers, info.activation)
    return shortened(numbers, dimensions, info.normalizes if normalizes is None else normalizes)


def activated(logits: Floats, activation: LabelActivation) -> Floats:
    """Scores of logits, whose last axis is that of the labels."""
    wide = logits.astype(np.float64)
    scores: Floats
    if activation == "softmax":
        powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
        scores = (powers / powers.sum(axis=-1, keepdims=True)).astype("<f4")
    elif activation == "sigmoid":
        scores = (np.exp(np.minimum(wide, 0)) / (1 + np.exp(-np.abs(wide)))).astype("<f4")
    else:
        scores = logits
    return scores


def shortened(vectors: Floats, dimensions: int | None, normalizes: bool = True) -> Floats:
    """The first ``dimensions`` numbers of a vector, or of each row; ``None``: all. Normalised to length 1 if
    ``normalizes``, or if any were left out; a vector of zeros stays as it is."""
    first = vectors[..., :dimensions]
    if not normalizes and first.shape == vectors.shape:
        return vectors
    length = np.linalg.norm(first.astype(np.float64), axis=-1, keepdims=True)
    return (first / np.where(length == 0, 1, length)).astype("<f4")


def check_dimensions(dimensions: int | None, size: int, pooling: PoolingInfo) -> None:
    """Raise ``InvalidParameter`` unless a vector of ``size`` numbers can be shortened to ``dimensions``."""
    if dimensions is not None and pooling.is_sparse:
        raise InvalidParameter(
            "dimensions", "'dimensions' is not for this model, whose vectors have one for each token."
        )
    if dimensions is not None and size and not (type(dimensions) is int and 1 <= dimensions <= size):
        raise InvalidParameter("dimensions", f"'dimensions' must be from 1 to {size}, not {dimensions!r}.")


def cosine(a: Floats, b: Floats) -> float:
    """Cosine similarity of two vectors; 0 if one of them is all zeros."""
    lengths = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return 0.0 if lengths == 0 else float(a @ b) / lengths


def late_interaction(query: Floats, document: Floats) -> float:
    """The sum over the query's token vectors of the largest product with one of the document's (arXiv 2004.12832)."""
    return float((query.astype(np.float64) @ document.astype(np.float64).T).max(axis=1).sum())


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

"""Logits processors for one row, in torch: what ``ops.adjust_logits`` and truncation in ``ops.sample`` must do.

Each takes float32 [V] and returns a new tensor; a banned token is at minus infinity. Token ids beyond the vocabulary
are ignored.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NEVER = -math.inf


def apply_mask(logits_V: Tensor, mask: npt.NDArray[np.uint8]) -> Tensor:
    """Keep only tokens whose bit is set: bit ``id % 8`` of byte ``id // 8``; tokens beyond the mask are banned."""
    allowed = np.zeros(len(logits_V), dtype=np.bool_)
    bits = np.unpackbits(mask, bitorder="little")[: len(allowed)]
    allowed[: len(bits)] = bits
    return logits_V.where(torch.from_numpy(allowed).to(logits_V.device), NEVER)


def ban(logits_V: Tensor, token_ids: Iterable[int]) -> Tensor:
    """Ban these tokens."""
    return logits_V.index_fill(0, _ids(token_ids, logits_V), NEVER)


def keep_only(logits_V: Tensor, token_ids: Iterable[int]) -> Tensor:
    """Ban all but these tokens."""
    ids = _ids(token_ids, logits_V)
    return torch.full_like(logits_V, NEVER).index_copy(0, ids, logits_V[ids])


def add_bias(logits_V: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Add a bias to the logits of these tokens."""
    ids = _ids(bias, logits_V)
    added = torch.tensor([bias[token] for token in ids.tolist()], dtype=logits_V.dtype, device=logits_V.device)
    return logits_V.index_add(0, ids, added)


def penalize_repetition(logits_V: Tensor, tokens: Sequence[int], penalty: float) -> Tensor:
    """Make tokens that occurred less likely: positive logits are divided by ``penalty``, others multiplied.

    Source: CTRL, arXiv 1909.05858.
    """
    ids = torch.unique(_ids(tokens, logits_V))
    seen = logits_V[ids]
    return logits_V.index_copy(0, ids, torch.where(seen > 0, seen / penalty, seen * penalty))


def penalize_output(logits_V: Tensor, tokens: Sequence[int], frequency: float, presence: float) -> Tensor:
    """Subtract ``frequency`` for each occurrence and ``presence`` once, as the OpenAI API defines them."""
    ids, counts = torch.unique(_ids(tokens, logits_V), return_counts=True)
    return logits_V.index_add(0, ids, -(counts * frequency + presence).to(logits_V.dtype))


def _ids(token_ids: Iterable[int], logits_V: Tensor) -> Tensor:
    vocab_size = len(logits_V)
    known = [token for token in token_ids if 0 <= token < vocab_size]
    return torch.tensor(known, dtype=torch.int64, device=logits_V.device)


def keep_min_p(logits_V: Tensor, min_p: float) -> Tensor:
    """Keep tokens at least ``min_p`` times as probable as the most probable one."""
    return _keep_from(logits_V, logits_V.max() + math.log(min_p))


def keep_top_k(logits_V: Tensor, k: int) -> Tensor:
    """Keep the k most probable tokens, and ties of the last of them."""
    return _keep_from(logits_V, logits_V.sort(descending=True).values[min(k, len(logits_V)) - 1])


def keep_top_p(logits_V: Tensor, top_p: float) -> Tensor:
    """Keep the fewest tokens, most probable first, that together reach ``top_p``, and ties of the last of them."""
    sorted_V = logits_V.sort(descending=True).values
    last = int((sorted_V.double().softmax(0).cumsum(0) < top_p).sum())
    return _keep_from(logits_V, sorted_V[min(last, len(sorted_V) - 1)])


def _keep_from(logits_V: Tensor, threshold: Tensor) -> Tensor:
    return logits_V.masked_fill(logits_V < threshold, NEVER)

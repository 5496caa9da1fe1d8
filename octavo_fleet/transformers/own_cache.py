"""A model of the transformers library with a cache of its own for each sequence: any architecture, one sequence at a
time.

A sequence is recognised by the first block of its table, which it shares with no other while it lives; nothing is
stored in the block. So this needs a KV cache without prefix caching. A cache that was given up, or that is not at the
position where a step begins, is computed again from the sequence's tokens.

Shapes: T rows, R rows with logits, D model.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo_fleet.transformers.paged import OutputHead

CACHE_NAMES = ("cache", "cache_params")
"""What some decoders call their cache, in arguments and results; the others call it ``past_key_values``."""


@dataclass
class SequenceCache:
    """The tokens of one sequence, and the library's cache after ``num_cached`` of them."""

    tokens: list[int] = field(default_factory=list)
    cache: Any = None
    num_cached: int = 0


class OwnCacheTransformer(OutputHead):
    """A ``CausalLM`` that ignores the paged cache but for its block tables."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._decoder = model.base_model
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_name = next((name for name in CACHE_NAMES if name in parameters), "past_key_values")
        self.max_tokens = 1 << 20
        """Tokens in the caches of all sequences, after which those used least recently are given up."""
        self.takes_chunks = True
        """Whether several tokens can follow a cache in one call."""
        self.keeps_cache = True
        """Otherwise each call computes all of a sequence again."""
        self._sequences: OrderedDict[int, SequenceCache] = OrderedDict()
        self._width, self._dtype = 0, torch.float32
        """Of the decoder's output, as seen in the trial."""

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        caches: Sequence[LayerCache],
        rows: PagedRows,
        given_TD: Tensor | None = None,
    ) -> Tensor:
        """See ``LlamaForCausalLM.forward``; the result is normalised."""
        ends = rows.cu_seqlens_q.tolist()
        blocks = rows.groups[0].block_tables_SB[:, 0].tolist()
        token_ids, positions = token_ids_T.tolist(), positions_T.tolist()
        parts = []
        for index, block in enumerate(blocks):
            first, end = ends[index], ends[index + 1]
            if end > first:
                parts.append(self._advance(block, positions[first], token_ids[first:end], token_ids_T.device))
        self._give_up_old()
        num_padding = len(token_ids_T) - ends[-1]
        if num_padding or not parts:  # kernels are measured with a step of padding alone
            parts.append(token_ids_T.new_zeros(num_padding, self._width, dtype=self._dtype))
        x_TD = torch.cat(parts) if len(parts) > 1 else parts[0]
        return x_TD if rows.logits_indices_R is None else x_TD[rows.logits_indices_R]

    def _advance(self, block: int, start: int, tokens: list[int], device: torch.device) -> Tensor:
        """The decoder's output for ``tokens`` from position ``start`` of a sequence: [T, D]."""
        if start == 0:
            self._sequences.pop(block, None)
        known = self._sequences.setdefault(block, SequenceCache())
        self._sequences.move_to_end(block)
        assert start <= len(known.tokens), "a sequence continues that was not begun"
        known.tokens[start:] = tokens
        if known.num_cached != start:
            known.cache, known.num_cached = None, 0
        cache, known.cache = known.cache, None  # a call that fails leaves no cache that is half changed
        begin, known.num_cached = known.num_cached, 0
        x_TD, known.cache = self.decode(known.tokens[begin:], cache, device)
        known.num_cached = len(known.tokens) if self.keeps_cache else 0
        return x_TD[-len(tokens) :]

    def decode(self, tokens: list[int], cache: Any, device: torch.device) -> tuple[Tensor, Any]:
        """The decoder's output for ``tokens`` after those in ``cache``, and the cache after them."""
        size = len(tokens) if cache is None or self.takes_chunks else 1
        parts = []
        for first in range(0, len(tokens), size):
            ids = torch.tensor([tokens[first : first + size]], device=device)
            before = {} if cache is None else {self._cache_name: cache}
            output = self._decoder(input_ids=ids, use_cache=self.keeps_cache, **before)
            cache = output[self._cache_name] if self.keeps_cache else None
            parts.append(output.last_hidden_state[0])
            self._width, self._dtype = parts[-1].shape[1], parts[-1].dtype
        return torch.cat(parts) if len(parts) > 1 else parts[0], cache

    def _give_up_old(self) -> None:
        """Give up the caches that were used least recently, until all hold at most ``max_tokens``."""
        total = 0
        for known in reversed(self._sequences.values()):
            total += known.num_cached
            if total > self.max_tokens:
                known.cache, known.num_cached = None, 0

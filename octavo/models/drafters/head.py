"""What draft heads have in common: they continue a model's hidden states, one token at a time.

Shapes: T rows, S sequences, R rows that are needed, D width of the head, E width of the model, V vocabulary, K heads'
number of drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from octavo import ops
from octavo.errors import CheckpointError
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.llama import LlamaForCausalLM
from octavo.models.registry import CausalLM
from octavo.ops.attention import HeadLayout, LayerCache, PagedRows
from octavo.ops.sample import BANNED
from octavo.quant.tensors import Part, Source


class DraftHead(Protocol):
    """A few layers over the hidden states of a model. Row t holds the model's state at position t and token t + 1; its
    output predicts token t + 2."""

    layers: tuple[int, ...]
    """Layers of the model whose inputs it needs; the number of layers stands for the last layer's output."""
    cache: tuple[LayerCacheSpec, ...]
    """What its own layers cache."""
    num_bytes: int
    """Bytes of its own weights."""

    def combine(self, hidden: Mapping[int, Tensor]) -> Tensor:
        """The head's input [T, D] from the model's hidden states [T, E] by layer."""
        ...

    def forward(
        self, tokens_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> Tensor:
        """The output, [T, D], or [R, D] with logits indices; may overwrite ``hidden``."""
        ...

    def remember(
        self, tokens_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> None:
        """Store the keys and values that ``forward`` stores."""
        ...

    def feedback(self, x_SD: Tensor) -> Tensor:
        """The input of the next position, in place of ``combine``, from the output at this one."""
        ...

    def logits(self, x_SD: Tensor) -> Tensor:
        """Logits over the model's vocabulary [S, V] from the output."""
        ...


def store_keys(
    kv_TN: Tensor, heads: HeadLayout, angles: tuple[Tensor, Tensor], cache: LayerCache, rows: PagedRows
) -> None:
    """Store keys and values of a layer, given side by side before their norm and rotation."""
    k_TN, v_TN = kv_TN.chunk(2, dim=1)
    k_TKH = k_TN.reshape(-1, heads.head_dim)
    if heads.k_norm_H is not None:
        k_TKH = ops.rms_norm(k_TKH, heads.k_norm_H, heads.norm_eps)
    k_TKH = k_TKH.view(len(kv_TN), -1, heads.head_dim)
    _, k_TKH = ops.apply_rope(k_TKH[:, :1], k_TKH, *angles)
    ops.store_kv(k_TKH, v_TN.reshape(k_TKH.shape), cache.keys, cache.values, rows.of(cache).slot_mapping_T)


def llama_like(model: CausalLM, method: str) -> LlamaForCausalLM:
    """``model``, whose embedding and head a drafter may share. Raises ``CheckpointError`` for other kinds."""
    if not isinstance(model, LlamaForCausalLM):
        raise CheckpointError(f"speculative_config: {method} is not supported for {type(model).__name__}")
    return model


def spread(logits_SD: Tensor, target_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Logits over the model's vocabulary [S, V] from those over a smaller one; tokens outside it are banned.

    ``target_ids``: the model's token for each of the smaller vocabulary; ``None``: its first tokens.
    """
    if target_ids is None and logits_SD.shape[1] >= vocab_size:
        return logits_SD[:, :vocab_size].contiguous()
    logits_SV = torch.full((len(logits_SD), vocab_size), BANNED, dtype=torch.float32, device=logits_SD.device)
    if target_ids is None:
        logits_SV[:, : logits_SD.shape[1]] = logits_SD
    else:
        logits_SV[:, target_ids] = logits_SD.float()
    return logits_SV


class Renamed:
    """A source whose tensors have other names; those that are not in the mapping are left out."""

    def __init__(self, source: Source, stored: Mapping[str, str]) -> None:
        """``stored``: the name in the checkpoint of each name."""
        self._source = source
        self._stored = stored

    @property
    def is_dummy(self) -> bool:
        return self._source.is_dummy

    def names(self) -> set[str]:
        return set(self._stored)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self._source.describe(self._stored.get(name, name))

    def load(self, name: str, shape: tuple[int, ...]) -> Part:
        return self._source.load(self._stored.get(name, name), shape)

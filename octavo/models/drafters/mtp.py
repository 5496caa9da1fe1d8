"""Multi-token prediction layers (MTP), which checkpoints have behind their decoder layers.

The layer is one more of the model's decoder layers, over the model's last hidden state and the next token's embedding;
in Nemotron 3, whose layers are single parts, it is one more with attention and one more with experts.
Three ways of naming are read: that of DeepSeek-V3 (arXiv 2412.19437) and GLM-4.5, ``model.layers.N`` with N the number
of layers, that of Qwen3-Next, ``mtp.``, and that of Nemotron 3, ``mtp.layers.``. Of several layers for tokens further
ahead, the first is used for all drafts.

Shapes: T rows, S sequences, D model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from octavo import ops
from octavo.models.drafters.head import drafted, part_loader
from octavo.models.model_config import ModelConfig
from octavo.models.mtp_names import NEMOTRON_PREFIX, QWEN_PREFIX, mtp_prefixes
from octavo.models.multimodal_text import TextPart
from octavo.models.parts import DecoderConfig
from octavo.models.registry import CausalLM
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.collective import SINGLE_RANK, Collective
from octavo.quant.checkpoint_tensors import TensorSource
from octavo.quant.stored.stored_weight import WeightFormat

LAYER = re.compile(r"mtp\.layers\.(\d+)\.")


class MTPNames(NamedTuple):
    """Names of the parts of an MTP layer."""

    prefix: str
    """Of all its tensors."""
    layers: tuple[str, ...]
    embedding_norm: str
    hidden_norm: str
    projection: str
    norm: str
    embedding: str
    """Copy of the model's embedding, which a checkpoint may leave out."""
    head: str
    """Copy of the model's head, or a head of its own, which a checkpoint may leave out."""
    masks_first: bool
    """Whether the first position has no embedding."""


def mtp_names(prefix: str, count: int) -> MTPNames:
    """The names under a prefix that ``mtp_prefixes`` found, of so many layers."""
    if prefix not in (QWEN_PREFIX, NEMOTRON_PREFIX):
        return MTPNames(
            prefix,
            layers=(prefix.removesuffix("."),),
            embedding_norm=f"{prefix}enorm",
            hidden_norm=f"{prefix}hnorm",
            projection=f"{prefix}eh_proj",
            norm=f"{prefix}shared_head.norm",
            embedding=f"{prefix}embed_tokens",
            head=f"{prefix}shared_head.head",
            masks_first=True,
        )
    layers, is_qwen = tuple(f"mtp.layers.{i}" for i in range(count)), prefix == QWEN_PREFIX
    return MTPNames(
        prefix,
        layers,
        embedding_norm="mtp.pre_fc_norm_embedding" if is_qwen else f"{layers[0]}.enorm",
        hidden_norm="mtp.pre_fc_norm_hidden" if is_qwen else f"{layers[0]}.hnorm",
        projection="mtp.fc" if is_qwen else f"{layers[0]}.eh_proj",
        norm="mtp.norm" if is_qwen else f"{layers[-1]}.final_layernorm",
        embedding="mtp.embed_tokens",
        head="mtp.lm_head",
        masks_first=False,
    )


class MTPHead:
    """See ``DraftHead``."""

    def __init__(
        self,
        config: ModelConfig,
        source: TensorSource,
        form: WeightFormat,
        model: CausalLM,
        collective: Collective = SINGLE_RANK,
    ) -> None:
        """``source``: the checkpoint of ``model``, which has this ``config`` and MTP layers, and is divided among the
        same ranks. Raises ``CheckpointError``."""
        target = drafted(model, "mtp")
        assert isinstance(config, DecoderConfig)
        source = TextPart(source)
        L, config = config.num_layers, config.with_mtp()
        count = config.num_layers - L
        names = mtp_names(mtp_prefixes(source.names(), L)[0], count)
        own = {name: name for name in source.names() if name.startswith(names.prefix) and not _is_later(name, count)}
        weights = part_loader(source, own, form, config.quantization, collective)
        D, eps, offset = config.hidden_size, config.norm_eps, config.norm.offset
        self.layers: tuple[int, ...] = (L,)
        self.vocab_size = config.vocab_size
        self.target_ids: Tensor | None = None
        self.cache = config.cache[-count:]
        self._target, self._masks_first = target, names.masks_first
        has = weights.tensors.has_module
        self._embedding = target.embedding
        if has(names.embedding):
            self._embedding = weights.embedding(names.embedding, config.vocab_size, D)
        self._embedding_norm = weights.norm(names.embedding_norm, D, eps, offset)
        self._hidden_norm = weights.norm(names.hidden_norm, D, eps, offset)
        self._projection = weights.replicated(names.projection, D, 2 * D)
        self._layers = [target.layer_class(config, weights, name, L + i) for i, name in enumerate(names.layers)]
        self._norm = weights.norm(names.norm, D, eps, offset)
        self._head = target.head
        if has(names.head):
            self._head = weights.head(names.head, (config.vocab_size, D))
        weights.tensors.finish()
        self.num_bytes = weights.bytes_by_format.total()

    def combine(self, hidden: Mapping[int, Tensor]) -> Tensor:
        return self._target.norm(hidden[self.layers[0]])

    def forward(
        self, tokens_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> Tensor:
        embedded_TD = self._embedding(tokens_T)
        if self._masks_first:
            embedded_TD = embedded_TD.masked_fill((positions_T == 0).unsqueeze(1), 0)
        joined_TE = ops.concat(self._embedding_norm(embedded_TD), self._hidden_norm(hidden_TD))
        x_TD = self._projection(joined_TE)
        # Without what images shift, which is not known of the rows of later passes: distances stay right among these.
        unshifted = dataclasses.replace(rows, rope_shifts_AT=None)
        step = self._target.step(tokens_T, positions_T, x_TD, unshifted)
        for layer, cache, own_rows in zip(self._layers, caches, rows.of_layers(len(self._layers)), strict=True):
            x_TD = layer(x_TD, step, cache, own_rows)
        return x_TD

    def remember(
        self, tokens_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> None:
        self.forward(tokens_T, hidden_TD, positions_T, caches, rows)

    def feedback(self, x_SD: Tensor) -> Tensor:
        return self._norm(x_SD)

    def logits(self, x_SD: Tensor) -> Tensor:
        return self._head(x_SD, norm=self._norm)


def _is_later(name: str, count: int) -> bool:
    """Whether a tensor belongs to a layer behind the first ``count``."""
    found = LAYER.match(name)
    return found is not None and int(found[1]) >= count

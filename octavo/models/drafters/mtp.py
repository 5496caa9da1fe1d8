"""Multi-token prediction layers (MTP), which checkpoints have behind their decoder layers.

The layer is one more of the model's decoder layers, over the model's last hidden state and the next token's embedding.
Two ways of naming are read: that of DeepSeek-V3 (arXiv 2412.19437) and GLM-4.5, ``model.layers.N`` with N the number of
layers, and that of Qwen3-Next, ``mtp.``. Of several layers the first is used for all drafts.

Shapes: T rows, S sequences, D model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from octavo import ops
from octavo.models.config import ModelConfig
from octavo.models.drafters.head import llama_like
from octavo.models.llama import LlamaConfig
from octavo.models.loader import WeightLoader
from octavo.models.mtp_names import QWEN_PREFIX, mtp_prefixes
from octavo.models.multimodal_text import TextPart
from octavo.models.registry import CausalLM
from octavo.ops.attention import LayerCache, PagedRows
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.quant.tensors import Renamed, TensorSource

LATER = re.compile(r"mtp\.layers\.[1-9]")
"""Layers behind the first."""


class MTPNames(NamedTuple):
    """Names of the parts of an MTP layer."""

    prefix: str
    """Of all its tensors."""
    layer: str
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


def mtp_names(prefix: str) -> MTPNames:
    """The names under a prefix that ``mtp_prefixes`` found."""
    if prefix == QWEN_PREFIX:
        norms = "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden"
        return MTPNames(prefix, "mtp.layers.0", *norms, "mtp.fc", "mtp.norm", "mtp.embed_tokens", "mtp.lm_head", False)
    norms = f"{prefix}enorm", f"{prefix}hnorm"
    shared = f"{prefix}shared_head.norm", f"{prefix}embed_tokens", f"{prefix}shared_head.head"
    return MTPNames(prefix, prefix.removesuffix("."), *norms, f"{prefix}eh_proj", *shared, True)


class MTPHead:
    """See ``DraftHead``."""

    def __init__(self, config: ModelConfig, source: TensorSource, form: WeightFormat, model: CausalLM) -> None:
        """``source``: the checkpoint of ``model``, which has this ``config`` and MTP layers. Raises
        ``CheckpointError``."""
        target = llama_like(model, "mtp")
        assert isinstance(config, LlamaConfig)
        source = TextPart(source)
        names = mtp_names(mtp_prefixes(source.names(), config.num_layers)[0])
        own = {name: name for name in source.names() if name.startswith(names.prefix) and not LATER.match(name)}
        weights = WeightLoader(Renamed(source, own), form, method=config.quantization)
        D, L, eps, offset = config.hidden_size, config.num_layers, config.norm_eps, config.norm_offset
        config = _with_layer(config)
        self.layers: tuple[int, ...] = (L,)
        self.target_ids: Tensor | None = None
        self.cache = config.cache[-1:]
        self._target, self._masks_first = target, names.masks_first
        has = weights.tensors.has_module
        self._embedding = target.embedding
        if has(names.embedding):
            self._embedding = weights.embedding(names.embedding, config.vocab_size, D)
        self._embedding_norm = weights.norm(names.embedding_norm, D, eps, offset)
        self._hidden_norm = weights.norm(names.hidden_norm, D, eps, offset)
        self._projection = weights.replicated(names.projection, D, 2 * D)
        self._layer = target.layer_class(config, weights, names.layer, L)
        self._norm = weights.norm(names.norm, D, eps, offset)
        self._head = target.head
        if has(names.head):
            self._head = weights.head(names.head, self._embedding, (config.vocab_size, D), False)
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
        return self._layer(self._projection(joined_TE), self._target.rotary(positions_T), caches[0], rows)

    def remember(
        self, tokens_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> None:
        self.forward(tokens_T, hidden_TD, positions_T, caches, rows)

    def feedback(self, x_SD: Tensor) -> Tensor:
        return self._norm(x_SD)

    def logits(self, x_SD: Tensor) -> Tensor:
        return self._head(x_SD, norm=self._norm)


def _with_layer(config: LlamaConfig) -> LlamaConfig:
    """The configuration with one more layer, with full attention and, in a mixture, with experts."""
    moe = config.moe
    if moe is not None:
        moe = dataclasses.replace(moe, is_sparse=(*moe.is_sparse, True))
    windows = (*config.windows, 0) if config.windows else ()
    return dataclasses.replace(config, num_layers=config.num_layers + 1, windows=windows, moe=moe)

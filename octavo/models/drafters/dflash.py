"""DFlash drafters (arXiv 2602.06036): a few layers that fill a block of masked tokens in one pass.

The layers attend, without a causal mask, to the block and to keys and values computed from the model's hidden states.
The embedding and the head are the model's. Checkpoints of z-lab are read, and those of speculators.

Shapes: T rows, M rows of blocks, R rows that are needed, D model, V vocabulary, K kv heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from octavo import ops
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.linear import Linear
from octavo.layers.rotary import Rotary
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder_layer import DecoderLayer
from octavo.models.drafters.head import drafted, part_loader
from octavo.models.linear_parts import MatrixRows
from octavo.models.loader import WeightLoader
from octavo.models.parts import DecoderConfig, HeadNorm
from octavo.models.qwen2 import read_qwen
from octavo.models.registry import CausalLM
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.collective import SINGLE_RANK, Collective
from octavo.quant.checkpoint_tensors import TensorSource
from octavo.quant.methods import read_method
from octavo.quant.stored.shard import Section
from octavo.quant.stored.stored_weight import WeightFormat


class DFlashSettings:
    """What is particular to these drafters. Raises ``CheckpointError`` for what is not supported."""

    def __init__(self, values: Mapping[str, Any], num_layers: int, vocab_size: int) -> None:
        ConfigKeys(values).child("dflash_config")  # refuses what is not an object
        keys = ConfigKeys({**values, **(values.get("dflash_config") or {})})
        self.block_size = keys.size("block_size", 16, low=2)
        self.mask_token_id = keys.size("mask_token_id", low=0)
        if self.mask_token_id >= vocab_size:
            raise wrong("mask_token_id", self.mask_token_id, f"less than the model's vocabulary of {vocab_size}")
        for key in ("causal", "use_swa"):
            if keys.flag(key):
                raise wrong(key, True, "false")
        key, inputs = "target_layer_ids", "aux_hidden_state_layer_ids"
        if keys.get(key) is None and keys.get(inputs) is not None:
            key = inputs
        given, most = keys.get(key), num_layers if key == inputs else num_layers - 1
        is_list = isinstance(given, list | tuple) and len(given) > 0
        if not is_list or not all(type(i) is int and 0 <= i <= most for i in given):
            raise wrong(key, given, f"a list of layers, from 0 to {most}")
        self.layers = tuple(i + num_layers - most for i in given)  # the output of a layer is the input of the next


class DFlashLayer(DecoderLayer):
    """A layer whose keys and values are also computed from the context."""

    def qkv(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Linear:
        """Keys and values alone; ``q_proj`` is separate, as the context has no queries."""
        D, (num_queries, num_keys, _) = config.hidden_size, self.heads.sizes
        has_bias, sections = self.part.has_bias, [Section(num_keys, config.num_kv_heads)]
        queries, *others = (f"{prefix}.{name}" for name in config.names.queries)
        self.q_proj = weights.column(queries, num_queries, D, has_bias, num_heads=config.num_heads)
        return weights.fused([MatrixRows(name, sections) for name in others], D, has_bias)

    def remember(self, context_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> None:
        """Store keys and values of the context."""
        slots_T = rows.of(cache).slot_mapping_T
        ops.store_keys(self.qkv_proj(context_TD), self.heads, *step.angles[0], cache, slots_T)

    def mix(self, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        parts = (project.of_normed(x_TD, self.before_attention) for project in (self.q_proj, self.qkv_proj))
        return ops.attention(ops.concat(*parts), self.heads, *step.angles[0], cache, rows)


class DFlashModel:
    """The layers, with the embedding and the head of the model that they draft for."""

    def __init__(
        self,
        values: Mapping[str, Any],
        source: TensorSource,
        form: WeightFormat,
        model: CausalLM,
        max_len: int,
        collective: Collective = SINGLE_RANK,
    ) -> None:
        """``values``: the drafter's ``config.json``; ``model``: the one that it drafts for, divided among the same
        ranks. Raises ``CheckpointError``."""
        target = drafted(model, "dflash")
        D, vocab_size, num_layers = target.config.hidden_size, target.config.vocab_size, target.config.num_layers
        settings = DFlashSettings(values, num_layers, vocab_size)
        keys = ConfigKeys(values)
        config = read_qwen(keys.child("transformer_layer_config") or keys, max_len).with_attention(head_norm=HeadNorm())
        if config.hidden_size != D:
            raise wrong("hidden_size", config.hidden_size, f"{D}, as the model has")
        if any(config.windows):
            raise wrong("use_sliding_window", True, "false")
        names = {name.removeprefix("model."): name for name in source.names()}
        weights = part_loader(source, names, form, read_method(values.get("quantization_config")), collective)
        self.layers, self.cache = tuple(dict.fromkeys(settings.layers)), config.cache
        self.block_size, self.mask_token_id = settings.block_size, settings.mask_token_id
        self._target, self._inputs = target, settings.layers
        self._fc = weights.replicated("fc", D, len(settings.layers) * D)
        self._hidden_norm = weights.norm("hidden_norm", D, config.norm_eps)
        [(rope, width)] = config.ropes
        self._rotary = Rotary(rope, width, form.device)
        self._layers = [DFlashLayer(config, weights, f"layers.{i}", i) for i in range(config.num_layers)]
        self._norm = weights.norm("norm", D, config.norm_eps)
        for copied in ("embed_tokens.", "lm_head.", "d2t", "t2d"):
            weights.tensors.leave_out(copied)
        weights.tensors.finish()
        self.num_bytes = weights.bytes_by_format.total()

    def remember(
        self, hidden: Mapping[int, Tensor], positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> None:
        """Store keys and values of the context [T, D] in every layer."""
        context_TD = self._hidden_norm(self._fc(ops.concat(*(hidden[layer] for layer in self._inputs))))
        step = StepAngles((self._rotary(positions_T),))
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.remember(context_TD, step, cache, rows)

    def forward(
        self, token_ids_M: Tensor, positions_M: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> Tensor:
        """The last layer's output for the rows that are needed, [R, D].

        ``rows``: each row is a sequence, whose length reaches to the end of the block.
        """
        x_MD = self._target.embedding(token_ids_M)
        step = StepAngles((self._rotary(positions_M),))
        for layer, cache, its_rows in zip(self._layers, caches, rows.of_layers(len(self._layers)), strict=True):
            x_MD = layer(x_MD, step, cache, its_rows)
        return x_MD

    def logits(self, x_RD: Tensor) -> Tensor:
        """Logits [R, V] by the model's head; on several ranks, those of this rank's part of V."""
        return self._target.head(x_RD, norm=self._norm)

"""EAGLE-3 heads (arXiv 2503.01840): one layer over the hidden states of three layers of the model.

Two layouts of checkpoints are read: that of the authors, with ``midlayer.``, and that of speculators and vLLM, with
``layers.0.`` and the decoder's configuration in ``transformer_layer_config``.

Shapes: T rows, S sequences, D width of the head, E width of the model, V vocabulary, W draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.errors import CheckpointError
from octavo.layers.attention_inputs import StepAngles
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.output_mlp import output_mlp
from octavo.layers.rotary import Rotary
from octavo.models.config_keys import ConfigKeys, wrong
from octavo.models.decoder import read_decoder
from octavo.models.decoder_layer import DecoderLayer
from octavo.models.drafters.head import drafted, part_loader
from octavo.models.loader import WeightLoader
from octavo.models.parts import DecoderConfig, HeadNorm
from octavo.models.registry import CausalLM
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.collective import SINGLE_RANK, Collective
from octavo.quant.checkpoint_tensors import TensorSource
from octavo.quant.methods import read_method
from octavo.quant.stored.stored_weight import WeightFormat

LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, kw_only=True)
class Eagle3Settings:
    """What is particular to these heads."""

    layers: tuple[int, ...]
    """Layers of the model whose inputs are combined."""
    target_size: int
    """Width of the model's hidden states."""
    draft_vocab_size: int
    norm_before_residual: bool
    """Whether the residual stream starts with the normalised hidden states."""
    norm_before_fc: bool
    """Whether the concatenated hidden states are normalised."""
    norms_each: bool
    """Whether each hidden state is normalised on its own."""
    norm_output: bool
    """Whether the normalised output is what the next position gets."""


def read_eagle3(
    values: Mapping[str, Any], num_layers: int, target_size: int, max_len: int
) -> tuple[DecoderConfig, Eagle3Settings]:
    """The configuration of a head for a model of ``num_layers``. Raises ``CheckpointError`` naming a wrong key."""
    outer = ConfigKeys(values)
    inner = outer.child("transformer_layer_config")
    keys = inner or outer
    for name in ("use_sliding_window", "sliding_window", "max_window_layers"):
        keys.get(name)  # heads have full attention; configurations that are copied from models have these keys, too
    config = read_decoder(keys, max_len)
    nested = outer.child("eagle_config") or ConfigKeys({})
    default = 2, num_layers // 2, num_layers - 3
    layers = nested.get(LAYERS_KEY) or outer.get(LAYERS_KEY) or [layer for layer in default if layer >= 0]
    if not isinstance(layers, list | tuple) or not all(type(i) is int and 0 <= i <= num_layers for i in layers):
        raise wrong(LAYERS_KEY, layers, f"a list of layers, from 0 to {num_layers}")
    return config, Eagle3Settings(
        layers=tuple(layers),
        target_size=outer.size("target_hidden_size", target_size),
        draft_vocab_size=outer.size("draft_vocab_size", config.vocab_size),
        norm_before_residual=outer.flag("norm_before_residual", inner is not None),
        norm_before_fc=outer.flag("norm_before_fc", nested.flag("norm_before_fc")),
        norms_each=outer.flag("fc_norm"),
        norm_output=outer.flag("norm_output"),
    )


class FirstLayer(DecoderLayer):
    """Attends over token embeddings and hidden states side by side."""

    def __init__(
        self, config: DecoderConfig, weights: WeightLoader, prefix: str, index: int, norm_before_residual: bool
    ) -> None:
        super().__init__(config, weights, prefix, index)
        self.hidden_norm = weights.norm(f"{prefix}.hidden_norm", config.hidden_size, config.norm_eps)
        self._norm_before_residual = norm_before_residual

    def qkv(self, config: DecoderConfig, weights: WeightLoader, prefix: str) -> Linear:
        names = [f"{prefix}.{name}" for name in config.names.queries]
        return weights.qkv(names, self.heads, 2 * config.hidden_size, self.part.has_bias)

    def first(self, embedded_TD: Tensor, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> Tensor:
        """The next residual stream, as ``DecoderLayer.__call__`` gives it."""
        h_TD = self.hidden_norm(x_TD)
        residual_TD = h_TD if self._norm_before_residual else x_TD
        attended_TN = self.attend(self._qkv(embedded_TD, h_TD), step, cache, rows)
        return output_mlp(self.o_proj, self.mlp, *rows.pick(attended_TN, residual_TD))

    def remember(self, embedded_TD: Tensor, x_TD: Tensor, step: StepAngles, cache: LayerCache, rows: PagedRows) -> None:
        """Store the keys and values that ``first`` stores."""
        qkv_TN = self._qkv(embedded_TD, self.hidden_norm(x_TD))
        ops.store_keys(qkv_TN, self.heads, *step.angles[0], cache, rows.of(cache).slot_mapping_T)

    def _qkv(self, embedded_TD: Tensor, h_TD: Tensor) -> Tensor:
        return self.qkv_proj(ops.concat(self.input_norm(embedded_TD), h_TD))


class Eagle3Head:
    """See ``DraftHead``."""

    def __init__(
        self,
        values: Mapping[str, Any],
        source: TensorSource,
        form: WeightFormat,
        model: CausalLM,
        max_len: int,
        collective: Collective = SINGLE_RANK,
    ) -> None:
        """``values``: the head's ``config.json``; ``model``: the one that it drafts for, divided among the same ranks.
        Raises ``CheckpointError``."""
        target = drafted(model, "eagle3")
        own = target.config
        config, settings = read_eagle3(values, own.num_layers, own.hidden_size, max_len)
        if settings.target_size != own.hidden_size:
            raise wrong("target_hidden_size", settings.target_size, f"{own.hidden_size}, as the model has")
        method = read_method(values.get("quantization_config"))
        weights = part_loader(source, _names(source), form, method, collective)
        D, E, W = config.hidden_size, settings.target_size, settings.draft_vocab_size
        eps, count = config.norm_eps, len(settings.layers)
        self.layers = tuple(dict.fromkeys(settings.layers))
        self.cache = config.cache
        self.vocab_size = W
        self._settings = settings
        has = weights.tensors.has
        shares = not has("embed_tokens.weight")
        if shares and own.hidden_size != D:
            raise CheckpointError(f"tensor embed_tokens.weight is missing, and the model's has width {own.hidden_size}")
        if not shares and config.vocab_size < own.vocab_size:
            raise wrong("vocab_size", config.vocab_size, f"at least {own.vocab_size}, as the model has")
        table = target.embedding if shares else weights.embedding("embed_tokens", config.vocab_size, D)
        self._embedding = table
        self._input_norm = weights.norm("input_norm", count * E, eps) if settings.norm_before_fc else None
        self._each_norm: list[RMSNorm] = []
        if settings.norms_each:
            self._each_norm = [weights.norm(f"fc_norm.{i}", E, eps) for i in range(count)]
        self._fc = weights.replicated("fc", D, count * E, has("fc.bias"))
        norms = [HeadNorm() if has(f"layers.{i}.self_attn.q_norm.weight") else None for i in range(config.num_layers)]
        config = config.with_attention(head_norm=norms)
        [(rope, width)] = config.ropes
        self._rotary = Rotary(rope, width, form.device)
        self._first = FirstLayer(config, weights, "layers.0", 0, settings.norm_before_residual)
        self._later = [DecoderLayer(config, weights, f"layers.{i}", i) for i in range(1, config.num_layers)]
        self._norm = weights.norm("norm", D, eps)
        self.target_ids = _target_ids(weights, W, own.vocab_size)
        weights.tensors.leave_out("t2d")
        if has("lm_head.weight") or source.is_dummy:
            self._head = weights.head("lm_head", (W, D))
        elif shares and self.target_ids is None:
            self._head = target.head
        else:
            raise CheckpointError(f"tensor lm_head.weight is missing; expected one of shape [{W}, {D}]")
        weights.tensors.finish()
        self.num_bytes = weights.bytes_by_format.total()

    def combine(self, hidden: Mapping[int, Tensor]) -> Tensor:
        parts = [hidden[layer] for layer in self._settings.layers]
        if self._each_norm:
            parts = [norm(part) for norm, part in zip(self._each_norm, parts, strict=True)]
        return self._fc(ops.concat(*parts), norm=self._input_norm)

    def forward(
        self, tokens_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> Tensor:
        step = StepAngles((self._rotary(positions_T),))
        own_rows = rows.of_layers(1 + len(self._later))
        x_TD = self._first.first(self._embedding(tokens_T), hidden_TD, step, caches[0], own_rows[0])
        for layer, cache, its_rows in zip(self._later, caches[1:], own_rows[1:], strict=True):
            x_TD = layer(x_TD, step, cache, its_rows)
        return x_TD

    def remember(
        self, tokens_T: Tensor, hidden_TD: Tensor, positions_T: Tensor, caches: Sequence[LayerCache], rows: PagedRows
    ) -> None:
        if self._later:
            self.forward(tokens_T, hidden_TD, positions_T, caches, rows)
        else:
            step, its_rows = StepAngles((self._rotary(positions_T),)), rows.of_layers(1)[0]
            self._first.remember(self._embedding(tokens_T), hidden_TD, step, caches[0], its_rows)

    def feedback(self, x_SD: Tensor) -> Tensor:
        return self._norm(x_SD) if self._settings.norm_output else x_SD

    def logits(self, x_SD: Tensor) -> Tensor:
        return self._head(x_SD, norm=self._norm)


def _target_ids(weights: WeightLoader, draft_vocab_size: int, vocab_size: int) -> Tensor | None:
    """See ``DraftHead.target_ids``."""
    W, device = draft_vocab_size, weights.form.device
    if weights.tensors.has("d2t"):
        ids = torch.arange(W) + weights.tensors.typed("d2t", (W,), torch.int64)
        are_known = (ids >= 0) & (ids < vocab_size)
        weights.tensors.check(are_known, f"tensor d2t leads out of the model's vocabulary of {vocab_size}")
        return ids.to(device)
    if weights.tensors.is_dummy:
        return torch.arange(W, device=device)
    if vocab_size != W:
        raise CheckpointError(f"tensor d2t is missing; expected one of shape [{W}]")
    return None


def _names(source: TensorSource) -> dict[str, str]:
    """The name in the checkpoint of each tensor, by its name in the layout of speculators."""
    names = {}
    for stored in source.names():
        name = stored.removeprefix("model.")
        names["layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name] = stored
    return names

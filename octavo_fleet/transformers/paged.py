"""A model of the transformers library whose attention runs over the paged KV cache.

transformers lets a model's attention be replaced by a registered function. Ours stores keys and values in the cache of
the layer and attends through the block tables; everything else is the library's code, run over a ragged batch of one
row. Where this does not give what the model itself gives, it is not used: see ``trial.py``.

Shapes: T rows, N heads, K KV heads, H head dimension, D model, R rows with logits, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from octavo import ops
from octavo.models.layer_cache import LayerCacheSpec
from octavo.ops.attention.attention import HeadLayout, LayerCache, PagedRows

ATTENTION = "octavo_paged"
"""Name of the attention function in transformers."""


class NotPaged(Exception):
    """The model's attention cannot run over the paged cache. The message says why."""


@dataclass
class AttentionState(threading.local):
    """What the attention of each layer needs in one forward pass; every attention module refers to it.

    Each thread has its own: on a GPU one compiles kernels with a pass while others compute.
    """

    specs: list[LayerCacheSpec] = field(default_factory=list)
    """What each attention of a pass caches, in the order of the calls: a layer may have several, or be run again."""
    layers: list[int] = field(default_factory=list)
    """The layer of each."""
    num_calls: int = 0
    """In this pass so far."""
    caches: Sequence[LayerCache] = ()
    rows: PagedRows | None = None
    positions: Tensor | None = None
    """The rows' positions [1, T] during a pass, for modules that would count them from the length of a cache."""
    rotation: tuple[Tensor, Tensor] | None = None
    """Cosines and sines [1, T, 2 R] by which the next attention rotates queries and keys, if that is left to it."""
    _known_angles: dict[int, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)

    def give_positions(self, module: Any, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """The arguments of a module that looks positions up, with the rows' own; a hook before its forward pass."""
        if self.positions is None:
            return None
        given = options.get("position_ids")
        positions = self.positions if given is None else self.positions.reshape(given.shape)
        return args, {**options, "position_ids": positions + first_position(module)}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Tensor:
        """The heads' outputs [1, T, N, V] for queries [1, N, T, H], keys [1, K, T, H] and values [1, K, T, V]; the
        narrower ones are cached with zeros behind them."""
        v_dim, head_dim = v.shape[-1], max(q.shape[-1], v.shape[-1])
        window = options.get("sliding_window") or 0
        scale = options.get("scaling")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        if self.rows is None:
            if len(q) != 1:
                raise NotPaged("a layer's attention makes several sequences of one")
            self.specs.append(LayerCacheSpec(k.shape[1], head_dim, window))
            self.layers.append(layer)
            return q.new_empty(1, q.shape[2], q.shape[1], v_dim).normal_()
        cache = self.caches[self.num_calls]
        self.num_calls += 1
        wide = [x if x.shape[-1] == head_dim else nn.functional.pad(x, (0, head_dim - x.shape[-1])) for x in (q, k, v)]
        sinks, cap = options.get("s_aux"), options.get("softcap") or 0.0
        heads = HeadLayout(
            q.shape[1],
            k.shape[1],
            head_dim,
            scale,
            window=window,
            softcap=cap,
            sinks_N=None if sinks is None else sinks.float(),
        )
        cos_TR, sin_TR = self._angles()
        out_TW = ops.attention(_side_by_side(wide), heads, cos_TR, sin_TR, cache, self.rows)
        return out_TW.view(1, -1, q.shape[1], head_dim)[..., :v_dim]

    def _angles(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """The cosines and sines [T, R] of a rotation that was left to this attention; those of a pass are few."""
        given, self.rotation = self.rotation, None
        if given is None:
            return None, None
        found = self._known_angles.get(id(given[0]))
        if found is None:
            R = given[0].shape[-1] // 2
            cos_TR, sin_TR = (x.reshape(-1, 2 * R)[:, :R].float().contiguous() for x in given)
            found = self._known_angles[id(given[0])] = given[0], cos_TR, sin_TR
        return found[1:]

    def begin(self, positions: Tensor) -> None:
        """Begin a pass over rows of these positions [1, T]."""
        self.positions, self.num_calls, self.rotation = positions, 0, None
        self._known_angles.clear()

    def end(self) -> None:
        """End a pass."""
        self.positions = None
        self._known_angles.clear()


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """Heads [1, N, T, H] of several as rows [T, W]; a view where they are the columns of one tensor."""
    rows = [x[0].transpose(0, 1) for x in parts]
    first, T = rows[0], rows[0].shape[0]
    W, at = sum(x.shape[1] * x.shape[2] for x in rows), first.storage_offset()
    for x in rows:
        is_next = x.storage_offset() == at and x.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not is_next or x.stride() != (first.stride(0), x.shape[2], 1) or first.stride(0) < W:
            return torch.cat([x.reshape(T, -1) for x in rows], dim=1)
        at += x.shape[1] * x.shape[2]
    return first.as_strided((T, W), (first.stride(0), 1))


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """The interface of attention functions in transformers."""
    return module.octavo_state.attend(module.layer_idx, query, key, value, options), None


def num_layers(config: Any) -> int:
    """The layers of a decoder, perhaps the half of a model with an encoder; 1 where the configuration says none."""
    count: Any = getattr(config, "decoder_layers", None) or getattr(config, "num_hidden_layers", 1)
    return int(count)


def first_position(module: nn.Module) -> int:
    """The index of a text's first position, which is behind the padding token's in RoBERTa and what came of it."""
    counts = hasattr(module, "create_position_ids_from_input_ids")
    return int(module.padding_idx) + 1 if counts else 0  # type: ignore[arg-type]


def _looks_up_positions(module: nn.Module) -> bool:
    is_table = isinstance(module, nn.Embedding) or first_position(module) > 0
    return is_table and "position_ids" in inspect.signature(module.forward).parameters


def register() -> None:
    """Register the attention function. Masks are not registered, so the library makes none."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _attention)


class _Output:
    """The output of a decoder of any class: ``last_hidden_state``, also as its first element, and nothing more."""

    def __init__(self, x: Tensor) -> None:
        self.last_hidden_state = x

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Takes the place of the decoder: gives ``output``, whatever the arguments, as do all its parts.

    Its other attributes are the decoder's, as some heads read a factor of logits there. Each thread has an output of
    its own: on a GPU one compiles kernels with a pass while others compute.
    """

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.__dict__["_decoder"] = decoder  # which is no part of this module
        self.given = threading.local()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.__dict__["_decoder"], name)
        return self if isinstance(value, nn.Module) else value

    def forward(self, *_: Any, **__: Any) -> _Output:
        found: _Output = self.given.output
        return found


class OutputHead:
    """What a model computes from its decoder's output: logits, scaled or capped as its own code does."""

    def __init__(self, model: Any) -> None:
        name = model.base_model_prefix
        if not isinstance(getattr(model, name, None), nn.Module) or model.base_model is model:
            raise NotPaged("it has no decoder apart from its head")
        self._head = copy.copy(model)
        self._given = _Given(model.base_model)
        self._head._modules = {**model._modules, name: self._given}

    def logits(self, x_RD: Tensor) -> Tensor:
        """Logits [R, V] of rows that the decoder gave."""
        self._given.given.output = _Output(x_RD.unsqueeze(0))
        ids = torch.zeros(1, len(x_RD), dtype=torch.int64, device=x_RD.device)
        logits: Tensor = self._head(input_ids=ids, use_cache=False).logits[0]
        return logits

    def norm(self, x_TD: Tensor) -> Tensor:
        """The decoder's output is normalised already."""
        return x_TD


class PagedTransformer(OutputHead):
    """A ``CausalLM`` over the paged cache."""

    def __init__(self, model: Any) -> None:
        """Replaces the attention of ``model``, and finds what its layers cache. Raises ``NotPaged``."""
        super().__init__(model)
        self.state = AttentionState()
        for module in model.modules():
            module.octavo_state = self.state
            if _looks_up_positions(module):
                module.register_forward_pre_hook(self.state.give_positions, with_kwargs=True)
        model.set_attn_implementation(ATTENTION)
        self._decoder = model.base_model
        self.specs = self._specs(model.config.get_text_config())

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        caches: Sequence[LayerCache],
        rows: PagedRows,
        given_TD: Tensor | None = None,
    ) -> Tensor:
        """See ``LlamaForCausalLM.forward``; the result is normalised."""
        self.state.caches, self.state.rows = caches, rows
        x_TD = self._decode(token_ids_T, positions_T)
        return x_TD if rows.logits_indices_R is None else x_TD[rows.logits_indices_R]

    def _decode(self, token_ids_T: Tensor, positions_T: Tensor) -> Tensor:
        positions = positions_T.unsqueeze(0)
        self.state.begin(positions)
        try:
            output = self._decoder(input_ids=token_ids_T.unsqueeze(0), position_ids=positions, use_cache=False)
        finally:
            self.state.end()
        x_TD: Tensor = output.last_hidden_state[0]
        return x_TD

    @property
    def weight(self) -> Tensor:
        """A weight of the model, of its dtype and on its device."""
        found: Tensor = next(self._decoder.parameters())
        return found

    def _specs(self, config: Any) -> list[LayerCacheSpec]:
        device = self.weight.device
        tokens = torch.zeros(2, dtype=torch.int64, device=device)
        self._decode(tokens, torch.arange(2, device=device))
        specs, layers = self.state.specs, self.state.layers
        if len(layers) < num_layers(config):  # which counts those that are run again as often
            raise NotPaged("not every layer's attention can be replaced")
        windows = _windows(config, num_layers(config))
        if [spec.window for spec in specs] != [windows[layer] for layer in layers]:
            raise NotPaged("its sliding windows are in its masks only")
        return specs


def _windows(config: Any, num_layers: int) -> list[int]:
    """The window of each layer by the configuration, 0 for full attention. Raises ``NotPaged`` for other kinds."""
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return [window if getattr(config, "use_sliding_window", True) else 0] * num_layers
    if not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise NotPaged(f"it has layers of the kinds {', '.join(sorted(set(kinds)))}")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]

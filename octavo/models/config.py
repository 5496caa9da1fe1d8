"""A model's shape and arithmetic, from the keys of a Hugging Face ``config.json``.

Every key that would change what is computed is honoured or refused by name. Keys that are known to say
nothing about the arithmetic are left alone, and any other key is named in a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import CheckpointError
from octavo.layers.rotary import DefaultRope, LinearRope, Llama3Rope

logger = logging.getLogger(__name__)

MUST_BE: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "rope_interleaved": (False,),
    "partial_rotary_factor": (1,),
    "quantization_config": (),
    "num_local_experts": (),
    "num_experts": (),
    "no_rope_layers": ([],),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "alibi": (False,),
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
}
"""Keys that stand for other arithmetic, with the values (besides null) that mean there is none."""

HONOURED = {
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "attention_bias",
    "mlp_bias",
    "tie_word_embeddings",
    "sliding_window",
    "layer_types",
    "eos_token_id",
}
WITHOUT_EFFECT = {
    "model_type",
    "bos_token_id",
    "pad_token_id",
    "sep_token_id",
    "unk_token_id",
    "decoder_start_token_id",
    "torch_dtype",
    "dtype",
    "use_cache",
    "initializer_range",
    "attention_dropout",
    "hidden_dropout",
    "pretraining_tp",
    "is_llama_config",
    "max_window_layers",
    "use_sliding_window",
    "original_max_position_embeddings",
    "_name_or_path",
    "_attn_implementation_autoset",
    "name_or_path",
    "auto_map",
    "cross_attention_hidden_size",
    "chunk_size_feed_forward",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "return_dict_in_generate",
    "id2label",
    "label2id",
    "finetuning_task",
    "problem_type",
    "task_specific_params",
    "prefix",
    "tokenizer_class",
    "torchscript",
    "unsloth_version",
    "unsloth_fixed",
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only model of the Llama kind. ``ffn_size`` is the width between the two halves of the MLP."""

    architecture: str
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: DefaultRope
    max_position_embeddings: int
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Read the keys of a ``config.json``; raise ``CheckpointError`` for what is missing, wrong or not supported."""
        architectures = values.get("architectures") or [None]
        _check_supported(values)
        hidden_size, num_heads = _size(values, "hidden_size"), _size(values, "num_attention_heads")
        num_kv_heads = _size(values, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise _wrong("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads, {num_heads}")
        if values.get("head_dim") is None and hidden_size % num_heads:
            raise _wrong("hidden_size", hidden_size, f"a multiple of num_attention_heads, {num_heads}")
        head_dim = _size(values, "head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise _wrong("head_dim", head_dim, "an even number, as rotary embeddings turn pairs")
        return cls(
            architecture=str(architectures[0]),
            vocab_size=_size(values, "vocab_size"),
            hidden_size=hidden_size,
            ffn_size=_size(values, "intermediate_size"),
            num_layers=_size(values, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            norm_eps=_number(values, "rms_norm_eps", 1e-6),
            rope=_rope(values),
            max_position_embeddings=_size(values, "max_position_embeddings"),
            attention_bias=_flag(values, "attention_bias"),
            mlp_bias=_flag(values, "mlp_bias"),
            tie_word_embeddings=_flag(values, "tie_word_embeddings"),
            eos_token_ids=token_ids(values, "eos_token_id"),
        )


def token_ids(values: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One id, a list of ids, or nothing, as a tuple; raise ``CheckpointError`` for anything else."""
    found = values.get(key)
    if found is None:
        return ()
    ids = found if isinstance(found, list | tuple) else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise _wrong(key, found, "a token id or a list of them")
    return tuple(ids)


def _wrong(key: str, found: object, allowed: str) -> CheckpointError:
    return CheckpointError(f"config: {key} is {found!r}; it must be {allowed}")


def _size(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
        raise _wrong(key, value, "a positive whole number")
    return value


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise _wrong(key, value, "a positive number")
    return float(value)


def _flag(values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key)
    if value not in (None, True, False):
        raise _wrong(key, value, "true or false")
    return bool(value)


def _check_supported(values: Mapping[str, Any]) -> None:
    for key, allowed in MUST_BE.items():
        value = values.get(key)
        if value is not None and value not in allowed:
            shown = " or ".join(repr(item) for item in allowed) or "absent"
            raise _wrong(key, value, f"{shown}; other arithmetic is not implemented")
    window, context = values.get("sliding_window"), values.get("max_position_embeddings")
    is_windowed = window is not None and values.get("use_sliding_window") is not False
    if is_windowed and not (isinstance(window, int) and isinstance(context, int) and window >= context):
        raise _wrong("sliding_window", window, "absent or as long as the context; windows are not implemented")
    if any(kind != "full_attention" for kind in values.get("layer_types") or ()):
        raise _wrong("layer_types", values["layer_types"], "full_attention in every layer")
    unknown = sorted(set(values) - HONOURED - WITHOUT_EFFECT - set(MUST_BE) - {"transformers_version"})
    if unknown:
        logger.warning("config: keys without meaning to Octavo are ignored: %s", ", ".join(unknown))


def _rope(values: Mapping[str, Any]) -> DefaultRope:
    """The rotary embedding, from ``rope_parameters`` or the older ``rope_theta`` and ``rope_scaling``."""
    given: dict[str, Any] = {"rope_theta": values.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        part = values.get(key)
        if part is not None and not isinstance(part, Mapping):
            raise _wrong(key, part, "an object")
        given.update(part or {})
    theta = _number(given, "rope_theta", 10_000.0)
    kind = given.get("rope_type") or given.get("type") or "default"
    known = {"rope_theta", "rope_type", "type", "original_max_position_embeddings"}
    if given.get("partial_rotary_factor") == 1:
        known.add("partial_rotary_factor")
    rope: DefaultRope
    if kind == "default":
        rope = DefaultRope(theta)
    elif kind == "linear":
        known |= {"factor"}
        rope = LinearRope(theta, _number(given, "factor"))
    elif kind == "llama3":
        known |= {"factor", "low_freq_factor", "high_freq_factor"}
        low, high = _number(given, "low_freq_factor"), _number(given, "high_freq_factor")
        if high <= low:
            raise _wrong("high_freq_factor", high, f"above low_freq_factor, {low}")
        original = _size(given, "original_max_position_embeddings")
        rope = Llama3Rope(theta, _number(given, "factor"), low, high, original)
    else:
        raise _wrong("rope_type", kind, "default, linear or llama3")
    unknown = sorted(key for key in set(given) - known if given[key] is not None)
    if unknown:
        raise _wrong(f"rope {unknown[0]}", given[unknown[0]], f"absent for rope_type {kind}")
    return rope

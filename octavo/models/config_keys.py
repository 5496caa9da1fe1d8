"""Reads a ``config.json`` key by key, so that none is silently ignored.

A family reads the keys that it supports. Each remaining key is refused if it would change what is computed, ignored if
it is known not to affect the computation, and reported in a warning otherwise.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from octavo.errors import CheckpointError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MUST_BE: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_multiplier": (),
    "attn_logit_softcapping": (),
    "clip_qkv": (),
    "embedding_multiplier": (1,),
    "final_logit_softcapping": (),
    "first_k_dense_replace": (0,),
    "full_attn_mod": (1,),
    "interpolate_factor": (1,),
    "is_causal": (True,),
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "layer_types": (),
    "lm_head_bias": (False,),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "mlp_bias": (False,),
    "mlp_only_layers": ([],),
    "n_routed_experts": (),
    "no_rope_layers": ([],),
    "norm_topk_prob": (),
    "num_experts": (),
    "num_local_experts": (),
    "parallel_residual": (False,),
    "partial_rotary_factor": (1,),
    "q_lora_rank": (),
    "kv_lora_rank": (),
    "qk_layernorm": (False,),
    "query_pre_attn_scalar": (),
    "residual_multiplier": (1,),
    "rope_interleaved": (False,),
    "rope_local_base_freq": (),
    "rope_parameters": (),
    "rope_scaling": (),
    "rope_theta": (),
    "sliding_window": (),
    "use_bias": (False,),
    "use_bidirectional_attention": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
}
"""Keys of unsupported arithmetic, with the values (besides null) that disable it."""

MOST = {
    "head_dim": 1 << 14,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "n_embd": 1 << 20,
    "n_head": 1 << 14,
    "n_inner": 1 << 24,
    "n_layer": 1 << 14,
    "n_routed_experts": 1 << 14,
    "num_attention_heads": 1 << 14,
    "num_experts": 1 << 14,
    "num_hidden_layers": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "num_layers": 1 << 14,
    "num_local_experts": 1 << 14,
    "qk_nope_head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "sliding_window_pattern": 1 << 14,
    "v_head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "zero_expert_num": 1 << 14,
}
"""Upper bounds far above any real model: lists and tables of these sizes are built before any tensor is checked."""

WITHOUT_EFFECT = frozenset(
    [
        *("_attn_implementation_autoset", "_name_or_path", "architectures", "attention_dropout", "attn_pdrop"),
        *("auto_map", "bos_token_id", "cache_implementation", "chunk_size_feed_forward", "cross_attention_hidden_size"),
        *("decoder_start_token_id", "dtype", "embd_pdrop", "finetuning_task", "hidden_dropout", "id2label"),
        *("initializer_range", "is_llama_config", "label2id", "max_window_layers", "model_type", "name_or_path"),
        *("original_max_position_embeddings", "output_attentions", "output_hidden_states", "output_router_logits"),
        *("pad_token_id", "prefix", "pretraining_tp", "problem_type", "resid_pdrop", "return_dict"),
        *("return_dict_in_generate", "router_aux_loss_coef", "router_jitter_noise", "sep_token_id"),
        *("task_specific_params", "tokenizer_class", "torch_dtype", "torchscript", "transformers_version"),
        *("unk_token_id", "unsloth_fixed", "unsloth_version", "use_cache", "use_sliding_window"),
    ]
)


def wrong(key: str, found: object, allowed: str) -> CheckpointError:
    """The error for a key whose value is not one of the ``allowed``."""
    return CheckpointError(f"config: {key} is {found!r}; it must be {allowed}")


ONE_ACTIVATION = {"hidden_act": ("silu", "swish")}
"""For ``must_be``: recurrent layers, too, have the activation of feed-forward layers; here it is always this one."""


class ConfigKeys:
    """The keys of one configuration object. Every method raises ``CheckpointError`` naming the key.

    A null key counts as absent; a key without a default is required.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._read: set[str] = set()

    @property
    def values(self) -> Mapping[str, Any]:
        """All keys and values."""
        return self._values

    def over(self, values: Mapping[str, Any]) -> ConfigKeys:
        """The same object with other values, of which what is read counts as read here."""
        other = ConfigKeys(values)
        other._read = self._read
        return other

    def has(self, key: str) -> bool:
        """Whether the key is present, even if null."""
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """The raw value, for types that the other methods do not cover."""
        self._read.add(key)
        value = self._values.get(key)
        return default if value is None else value

    def pass_over(self, *keys: str) -> None:
        """Count keys as read that change nothing here."""
        self._read.update(keys)

    def size(self, key: str, default: int | None = None, low: int = 1) -> int:
        """An integer from ``low`` to the key's bound in ``MOST``, or 2**31 - 1."""
        value, most = self.get(key, default), MOST.get(key, 2**31 - 1)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
            raise wrong(key, value, f"a whole number from {low} to {most if key in MOST else '2**31 - 1'}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise wrong(key, value, "a positive number")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """``count`` positive numbers."""
        values = self.get(key)
        if not isinstance(values, list | tuple) or len(values) != count:
            shown = f"a list of {len(values)}" if isinstance(values, list | tuple) else values
            raise wrong(key, shown, f"a list of {count} positive numbers")
        return tuple(ConfigKeys({key: value}).number(key) for value in values)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise wrong(key, value, "true or false")
        return value

    def choice(self, key: str, allowed: Mapping[str, T], default: str | None = None) -> T:
        """The value of ``allowed`` for the word found."""
        value = self.get(key, default)
        if not isinstance(value, str) or value not in allowed:
            raise wrong(key, value, f"one of {', '.join(allowed)}")
        return allowed[value]

    def choices(self, key: str, allowed: Sequence[str], count: int) -> tuple[str, ...] | None:
        """A list of ``count`` allowed words, or ``None`` if absent."""
        values = self.get(key)
        if values is None:
            return None
        if not isinstance(values, list | tuple) or len(values) != count or not all(v in allowed for v in values):
            raise wrong(key, values, f"a list of {count}, each one of {', '.join(allowed)}")
        return tuple(values)

    def child(self, key: str) -> ConfigKeys | None:
        """A nested object, or ``None`` if absent. The reader of the child must call its ``finish``."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise wrong(key, value, "an object")
        return ConfigKeys(value)

    def must_be(self, allowed: Mapping[str, tuple[Any, ...]]) -> None:
        """Refuse other values of these keys than those that are allowed."""
        for key, values in allowed.items():
            if (value := self.get(key)) is not None and value not in values:
                shown = " or ".join(repr(item) for item in values) or "absent"
                raise wrong(key, value, f"{shown}; other arithmetic is not implemented for this architecture")

    def unread(self) -> list[str]:
        """Keys that were not read, in order."""
        return sorted(key for key, value in self._values.items() if value is not None and key not in self._read)

    def finish(self) -> None:
        """Refuse unread keys that change the computation; warn about unknown ones."""
        left = set(self.unread())
        self.must_be({key: MUST_BE[key] for key in left & MUST_BE.keys()})
        unknown = sorted(left - WITHOUT_EFFECT - MUST_BE.keys())
        if unknown:
            logger.warning("config: keys without meaning to Octavo are ignored: %s", ", ".join(unknown))

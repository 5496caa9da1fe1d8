"""Reads the rotary embedding of a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from octavo.layers.rotary import (
    DefaultRope,
    DynamicRope,
    FactorsRope,
    LinearRope,
    Llama3Rope,
    ProportionalRope,
    SwitchedRope,
    YarnRope,
)
from octavo.models.config_keys import ConfigKeys, wrong

OLD_NAMES = {"su": "longrope"}


class RopeContext(NamedTuple):
    """Model sizes that scaling rules need besides their own keys."""

    width: int
    """Width of the rotated part of a head."""
    max_len: int
    """The longest context of the engine, in tokens."""
    max_position_embeddings: int


def rope_values(keys: ConfigKeys) -> dict[str, Any]:
    """The rotary keys, from ``rope_parameters`` or the older ``rope_theta`` and ``rope_scaling``."""
    given: dict[str, Any] = {}
    for key in ("rope_theta", "partial_rotary_factor"):
        given[key] = keys.get(key)
    for key in ("rope_scaling", "rope_parameters"):
        part = keys.get(key)
        if part is not None and not isinstance(part, Mapping):
            raise wrong(key, part, "an object")
        given.update({name: value for name, value in (part or {}).items() if value is not None})
    outer = keys.get("original_max_position_embeddings")  # takes precedence over the nested key, as in transformers
    given["original_max_position_embeddings"] = outer or given.get("original_max_position_embeddings")
    return {key: value for key, value in given.items() if value is not None}


def ropes_by_kind(keys: ConfigKeys, kinds: Sequence[str]) -> list[dict[str, Any]] | None:
    """Rotary keys of each kind of layers, if ``rope_parameters`` has an object for one of them, else ``None``.

    Raises ``CheckpointError``.
    """
    given = keys.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise wrong("rope_parameters", given, "an object")
    parts = {kind: given[kind] or {} for kind in kinds if kind in given}
    for kind, part in parts.items():
        if not isinstance(part, Mapping):
            raise wrong(f"rope_parameters.{kind}", part, "an object")
    return [dict(parts.get(kind, {})) for kind in kinds] if parts else None


def rotary_width(given: Mapping[str, Any], head_dim: int, default: float | None) -> int:
    """The width of the rotated part of a head, at most ``head_dim``: even, unless that is odd, which goes without
    rotation alone. Proportional embeddings have the width of the head, and leave a part of it as it is themselves.

    ``default`` is the share of a head that the family rotates, ``None``: always the whole of it."""
    if head_dim % 2 or given.get("rope_type", given.get("type")) == "proportional":
        return head_dim
    factor = ConfigKeys(given).number("partial_rotary_factor", default or 1.0)
    if default is None and factor != 1:
        raise wrong("partial_rotary_factor", factor, "1, as this architecture rotates whole heads")
    width = int(head_dim * factor) if factor <= 1 else 0
    if width < 2 or width % 2:
        raise wrong("partial_rotary_factor", factor, f"such that an even part of a head of {head_dim} is rotated")
    return width


def read_rope(given: Mapping[str, Any], context: RopeContext, default_theta: float = 10_000.0) -> DefaultRope:
    """The embedding for the keys from ``rope_values``. Raises ``CheckpointError`` naming the key or kind."""
    keys = ConfigKeys(given)
    kind = keys.get("rope_type") or keys.get("type") or "default"
    kind = OLD_NAMES.get(str(kind), kind)
    if not isinstance(kind, str) or kind not in KINDS:
        raise wrong("rope_type", kind, f"one of {', '.join(KINDS)}")
    theta = keys.number("rope_theta", default_theta)
    rope = KINDS[kind](theta, keys, context)
    keys.pass_over("type", "partial_rotary_factor", "original_max_position_embeddings", "finetuned")
    unread = keys.unread()
    if unread:
        raise wrong(f"rope {unread[0]}", given[unread[0]], f"absent for rope_type {kind}")
    return rope


MOST_GROWTH = 64.0
"""``factor`` of dynamic scaling; there is a row of frequencies for each length."""


def _dynamic(theta: float, keys: ConfigKeys, context: RopeContext) -> DefaultRope:
    factor, original = _growth(keys.number("factor")), context.max_position_embeddings
    if context.max_len <= original:
        return DefaultRope(theta)
    if context.width <= 2:
        raise wrong("head_dim", context.width, "more than 2 rotated numbers, for dynamic scaling")
    return DynamicRope(theta, factor, original, context.max_len)


def longest_context(given: Mapping[str, Any], most: int) -> int:
    """The longest context of a model with these rotary keys and ``max_position_embeddings``: dynamic scaling is for
    ``factor`` times as many."""
    kind = given.get("rope_type") or given.get("type")
    return int(most * max(1.0, _growth(ConfigKeys(given).number("factor", 1.0)))) if kind == "dynamic" else most


def _growth(factor: float) -> float:
    if not factor <= MOST_GROWTH:
        raise wrong("factor", factor, f"at most {MOST_GROWTH:g}, for dynamic scaling")
    return factor


def _llama3(theta: float, keys: ConfigKeys, context: RopeContext) -> DefaultRope:
    low, high = keys.number("low_freq_factor"), keys.number("high_freq_factor")
    if high <= low:
        raise wrong("high_freq_factor", high, f"above low_freq_factor, {low}")
    original = keys.size("original_max_position_embeddings", context.max_position_embeddings)
    return Llama3Rope(theta, keys.number("factor"), low, high, original)


def _yarn(theta: float, keys: ConfigKeys, context: RopeContext) -> DefaultRope:
    original = keys.size("original_max_position_embeddings", context.max_position_embeddings)
    factor = keys.number("factor", context.max_position_embeddings / original)
    mscale, mscale_all = (keys.get(key, 0) for key in ("mscale", "mscale_all_dim"))
    natural = yarn_scale(factor)
    if mscale and mscale_all:
        natural = yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all)
    return YarnRope(
        theta,
        factor,
        original,
        keys.number("attention_factor", natural),
        keys.number("beta_fast", 32.0),
        keys.number("beta_slow", 1.0),
        keys.flag("truncate", True),
    )


def yarn_scale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's attention scale for a context ``factor`` times longer (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(theta: float, keys: ConfigKeys, context: RopeContext) -> DefaultRope:
    """Short factors, and for texts longer than the original length long ones (arXiv 2402.13753, section 3.3)."""
    original = keys.size("original_max_position_embeddings", context.max_position_embeddings, low=2)
    factor = keys.number("factor", context.max_position_embeddings / original)
    natural = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    lists = {key: keys.numbers(key, context.width // 2) for key in ("short_factor", "long_factor")}
    scale = keys.number("attention_factor", natural)
    short, long = (
        FactorsRope(theta, lists[f"{kind}_factor"], keys.number(f"{kind}_attention_factor", scale))
        for kind in ("short", "long")
    )
    return SwitchedRope(theta, original, short, long) if context.max_len > original else short


def _proportional(theta: float, keys: ConfigKeys, context: RopeContext) -> DefaultRope:
    """The first pairs of a head that is rotated as a whole: the others do not turn."""
    return ProportionalRope(theta, keys.number("partial_rotary_factor", 1.0), keys.number("factor", 1.0))


KINDS: dict[str, Callable[[float, ConfigKeys, RopeContext], DefaultRope]] = {
    "default": lambda theta, keys, context: DefaultRope(theta),
    "linear": lambda theta, keys, context: LinearRope(theta, keys.number("factor")),
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "factors": lambda theta, keys, context: FactorsRope(theta, keys.numbers("factors", context.width // 2)),
}
"""``factors`` is the form of Llama 3 in GGUF files: a precomputed divisor for each frequency."""


def half_split_rows(num_heads: int, head_dim: int, width: int, first: int = 0) -> npt.NDArray[np.int64]:
    """Row permutation of query and key projections from adjacent (interleaved) rotary pairs to half-split pairs.

    In each head, the pair 2 i and 2 i + 1 of the ``width`` numbers from ``first`` moves to i and i + width / 2.
    Applied to both queries and keys, it leaves their dot products unchanged.
    """
    head = np.arange(head_dim)
    head[first : first + width] = first + np.arange(width).reshape(-1, 2).T.ravel()
    return (np.arange(num_heads)[:, None] * head_dim + head).ravel()

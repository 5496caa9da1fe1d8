"""Translates the rotary embedding of a GGUF file to keys of ``config.json``."""

from __future__ import annotations

from typing import Any

from octavo.errors import CheckpointError
from octavo.weights.gguf.gguf_metadata import Metadata

FACTORS = "rope_freqs.weight"
"""Optional float32 [pairs]: the divisor of each frequency, as in files of Llama 3."""
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""The two lists of LongRoPE factors."""
FACTOR_TENSORS = {FACTORS, LONG, SHORT}


def read_rope(data: Metadata, head_dim: int) -> dict[str, Any]:
    """``rope_theta``, ``rope_scaling`` (may be ``None``), and ``partial_rotary_factor`` if only a part is rotated."""
    width = data.count("rope.dimension_count", head_dim)
    if width % 2 or width > head_dim:
        data.fail("rope.dimension_count", f"is {width}, but must be even and at most the width of a head, {head_dim}")
    found = {"rope_theta": data.real("rope.freq_base", 10000.0), "rope_scaling": _scaling(data, width)}
    return found if width == head_dim else {**found, "partial_rotary_factor": width / head_dim}


def _scaling(data: Metadata, width: int) -> dict[str, Any] | None:
    """``{"rope_type": ..., ...}``; {"rope_type": "factors"} has precomputed divisors of the frequencies."""
    tensors, has_factor = data.file.tensors, data.has("rope.scaling.factor")
    kind = data.get("rope.scaling.type", "linear" if has_factor else "none")
    if LONG in tensors and SHORT in tensors:
        return _longrope(data, width)
    if FACTORS in tensors:
        if kind != "none":
            raise CheckpointError(
                f"{data.file.path}: tensor {FACTORS!r}: with rope.scaling.type {kind!r}, expected no other scaling"
            )
        return {"rope_type": "factors", "factors": data.floats(FACTORS, width // 2)}
    if kind == "none":
        for key in ("original_context_length", "factor"):
            data.get(f"rope.scaling.{key}")
        return None
    if kind not in ("linear", "yarn"):
        data.fail("rope.scaling.type", f"is {str(kind)[:100]!r}, supported are none, linear and yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": data.real("rope.scaling.factor")}
    return scaling | _yarn(data) if kind == "yarn" else scaling


def _yarn(data: Metadata) -> dict[str, Any]:
    found: dict[str, Any] = {"original_max_position_embeddings": data.count("rope.scaling.original_context_length")}
    for key, name in (
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
        ("rope.scaling.yarn_attn_factor", "attention_factor"),
    ):
        if data.has(key):
            found[name] = data.real(key)
    if multiplier := data.real(
        "rope.scaling.yarn_log_multiplier", 0.0, low=0.0
    ):  # a tenth of DeepSeek's mscale_all_dim
        found["mscale"] = found["mscale_all_dim"] = 10 * multiplier
    if data.real("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        data.fail("rope.scaling.yarn_ext_factor", "must be 1")
    return found


def _longrope(data: Metadata, width: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": data.floats(SHORT, width // 2),
        "long_factor": data.floats(LONG, width // 2),
        "original_max_position_embeddings": data.count("rope.scaling.original_context_length"),
    }
    if data.has("rope.scaling.attn_factor"):
        found["attention_factor"] = data.real("rope.scaling.attn_factor")
    return found

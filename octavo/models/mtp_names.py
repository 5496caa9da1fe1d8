"""Where checkpoints have their multi-token prediction layers (MTP)."""

from __future__ import annotations

from collections.abc import Collection

QWEN_PREFIX = "mtp."


def mtp_prefixes(names: Collection[str], num_layers: int) -> list[str]:
    """The prefix of each MTP layer's tensors, in order; Qwen3-Next has one prefix for all."""
    if f"{QWEN_PREFIX}fc.weight" in names:
        return [QWEN_PREFIX]
    found, layer = [], num_layers
    while f"model.layers.{layer}.eh_proj.weight" in names:
        found.append(f"model.layers.{layer}.")
        layer += 1
    return found

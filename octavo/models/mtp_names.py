"""Where checkpoints have their multi-token prediction layers (MTP)."""

from __future__ import annotations

from collections.abc import Collection

QWEN_PREFIX = "mtp."


def mtp_prefixes(names: Collection[str], num_layers: int) -> list[str]:
    """The prefix of each MTP layer's tensors, in order; Qwen3-Next has one prefix for all.

    A layer is known by its projection, whose weight has other names where it is packed.
    """
    modules = {name.rpartition(".")[0] for name in names}
    if f"{QWEN_PREFIX}fc" in modules:
        return [QWEN_PREFIX]
    found, layer = [], num_layers
    while f"model.layers.{layer}.eh_proj" in modules:
        found.append(f"model.layers.{layer}.")
        layer += 1
    return found

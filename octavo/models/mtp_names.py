"""Where checkpoints have their multi-token prediction layers (MTP)."""

from __future__ import annotations

from collections.abc import Collection

from octavo.quant.tensors import has_module

QWEN_PREFIX = "mtp."


def mtp_prefixes(names: Collection[str], num_layers: int) -> list[str]:
    """The prefix of each MTP layer's tensors, in order; Qwen3-Next has one prefix for all.

    A layer is known by its projection, whose weight has other names where it is packed.
    """
    if has_module(names, f"{QWEN_PREFIX}fc"):
        return [QWEN_PREFIX]
    found, layer = [], num_layers
    while has_module(names, f"model.layers.{layer}.eh_proj"):
        found.append(f"model.layers.{layer}.")
        layer += 1
    return found

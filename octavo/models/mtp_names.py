"""Where checkpoints have their multi-token prediction layers (MTP)."""

from __future__ import annotations

from collections.abc import Collection

from octavo.quant.checkpoint_tensors import has_module

QWEN_PREFIX, NEMOTRON_PREFIX = "mtp.", "mtp.layers."


def mtp_prefixes(names: Collection[str], num_layers: int) -> list[str]:
    """The prefix of each MTP layer's tensors, in order; Qwen3-Next and Nemotron 3 have one prefix for all.

    A layer is known by its projection, whose weight has other names where it is packed.
    """
    if has_module(names, f"{QWEN_PREFIX}fc"):
        return [QWEN_PREFIX]
    if has_module(names, f"{NEMOTRON_PREFIX}0.eh_proj"):
        return [NEMOTRON_PREFIX]
    found, layer = [], num_layers
    while has_module(names, f"model.layers.{layer}.eh_proj"):
        found.append(f"model.layers.{layer}.")
        layer += 1
    return found

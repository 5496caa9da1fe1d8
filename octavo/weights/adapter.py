"""PEFT adapter folders: ``adapter_config.json`` and ``adapter_model.safetensors``.

https://huggingface.co/docs/peft/developer_guides/checkpoint. Unsupported options that would change what is computed are
refused by name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.errors import CheckpointError
from octavo.weights.folder import read_json
from octavo.weights.safetensors import open_tensors

WEIGHTS_NAME = "adapter_model.safetensors"
CONFIG_NAME = "adapter_config.json"
PREFIX = "base_model.model."
MUST_BE: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": (None, "none"),
    "lora_bias": (None, False),
    "use_dora": (None, False),
    "use_qalora": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, {}, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "layer_replication": (None, []),
    "arrow_config": (None,),
    "megatron_config": (None,),
    "use_bdlora": (None, False),
}
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that do not change the model's own weights."""
MAX_ALPHA = 2**31
"""Of ``lora_alpha``: more is no scale, and infinite in half precision with any weights."""


@dataclass(frozen=True)
class AdapterFile:
    """An adapter as stored: module name to its factors ``lora_A`` and ``lora_B`` and the scale of their product."""

    factors: dict[str, tuple[torch.Tensor, torch.Tensor, float]]


def read_adapter(folder: Path) -> AdapterFile:
    """Read the adapter in ``folder``; factors are [R, K] and [N, R]. Raises ``CheckpointError``."""
    config = read_json(folder, CONFIG_NAME)
    if config is None:
        raise CheckpointError(f"{folder}: there is no {CONFIG_NAME}")
    _check(folder, config)
    names, get = open_tensors(folder, WEIGHTS_NAME)
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name in names:
        found = re.fullmatch(rf"{re.escape(PREFIX)}(.+)\.lora_([AB])\.weight", name)
        if found is None:
            raise CheckpointError(f"{folder / WEIGHTS_NAME}: tensor {name} is not lora_A or lora_B of a linear map")
        modules.setdefault(found[1], {})[found[2]] = get(name)
    factors = {}
    for module, parts in modules.items():
        down, up = parts.get("A"), parts.get("B")
        if down is None or up is None or down.dim() != 2 or up.dim() != 2 or not 0 < len(down) == up.shape[1]:
            raise CheckpointError(f"{folder / WEIGHTS_NAME}: {module} must have lora_A [R, K] and lora_B [N, R], R > 0")
        factors[module] = down, up, _scale(folder, config, module, len(down))
    if not factors:
        raise CheckpointError(f"{folder / WEIGHTS_NAME}: there is no lora_A and no lora_B")
    return AdapterFile(factors)


def _check(folder: Path, config: dict[str, Any]) -> None:
    where = folder / CONFIG_NAME
    for key, allowed in MUST_BE.items():
        if config.get(key) not in allowed:
            raise CheckpointError(f"{where}: {key} is {config.get(key)!r}; it must be {allowed[-1]!r}")
    if config.get("init_lora_weights") not in PLAIN_STARTS:
        start = config["init_lora_weights"]
        raise CheckpointError(f"{where}: init_lora_weights is {start!r}, which changes the model's own weights")


def _scale(folder: Path, config: dict[str, Any], module: str, rank: int) -> float:
    """alpha / rank, or alpha / sqrt(rank) (arXiv 2312.03732); ``alpha_pattern`` overrides alpha for some modules."""
    alpha, patterns = config.get("lora_alpha"), config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f"{folder / CONFIG_NAME}: alpha_pattern must be a dict of modules and numbers")
    for pattern, other in patterns.items():
        if module == pattern or module.endswith(f".{pattern}"):
            alpha = other
        elif not re.fullmatch(r"[\w.]+", pattern):
            raise CheckpointError(f"{folder / CONFIG_NAME}: alpha_pattern {pattern!r} must be a name of modules")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
        raise CheckpointError(f"{folder / CONFIG_NAME}: lora_alpha is {alpha!r}; it must be a number up to {MAX_ALPHA}")
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))

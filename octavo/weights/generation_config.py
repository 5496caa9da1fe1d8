"""Default sampling parameters of a checkpoint, from its ``generation_config.json``.

The keys are those of Hugging Face's ``GenerationConfig``; the same subset as in vLLM is used. ``do_sample`` is not part
of it: for greedy decoding, a request sets temperature 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, ConfigError, InvalidParameter
from octavo.sampling_params import SamplingParams
from octavo.weights.folder import read_json

FILE = "generation_config.json"
OWN, NEUTRAL = "auto", "vllm"
PUBLISHED = {"SmolLM2-135M-Instruct": {"temperature": 0.2, "top_p": 0.9}}
"""Parameters recommended by the authors of a model whose files omit them, by prefix of the file or folder name."""
FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Supported keys, and their names in ``SamplingParams``."""


def chosen_config(setting: str, own: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The generation config that the setting selects: that in a folder, or ``own``, that of the checkpoint at ``path``,
    supplemented by ``PUBLISHED`` if it has no sampling parameters.

    Raises ``ConfigError`` for a folder that has none, ``CheckpointError`` for one that is damaged.
    """
    if setting in (OWN, NEUTRAL):
        if FIELDS.keys() & own.keys():
            return own
        published = (values for name, values in PUBLISHED.items() if path.name.startswith(name))
        return {**own, **next(published, {})}
    folder = Path(setting).expanduser()
    config = read_json(folder, FILE) if folder.is_dir() else None
    if config is None:
        raise ConfigError(f"generation_config: {setting!r} is neither {OWN}, {NEUTRAL} nor a folder with {FILE}")
    return config


def sampling_defaults(setting: str, config: Mapping[str, Any]) -> dict[str, int | float]:
    """Defaults of ``SamplingParams`` for fields that a request omits; empty with the setting ``vllm``.

    Raises ``CheckpointError``, naming the key, for a value that would be invalid in a request.
    """
    if setting == NEUTRAL:
        return {}
    defaults: dict[str, int | float] = {}
    for key, field in FIELDS.items():
        value = config.get(key)
        if value is None:
            continue
        try:
            defaults[field] = getattr(SamplingParams(**{field: value}), field)
        except InvalidParameter as error:
            raise CheckpointError(
                f"generation config: {key}: {error.message} Serve with --generation-config {NEUTRAL} to ignore it."
            ) from None
    return defaults

"""How a checkpoint wants to be sampled: what its ``generation_config.json`` says for requests that leave it open.

The keys are Hugging Face's ``GenerationConfig``, of which the same ones are taken as in vLLM. ``do_sample`` is not
among them: a request that wants no sampling asks for temperature 0.
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
"""What the authors of a model recommend for it, where its files leave that out; by how these files are called."""
FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Keys that are honoured, and what they are called in ``SamplingParams``."""


def chosen_config(setting: str, own: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    """The generation config that the setting names: that in a folder, or the ``own`` one of the checkpoint at ``path``,
    with what is published of the model if it says nothing of sampling.

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
    """Values of ``SamplingParams`` for requests that leave them open; none at all with the setting ``vllm``.

    Raises ``CheckpointError``, naming the key, for a value that no request might have.
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

"""Default sampling parameters and token ids of a checkpoint, from its ``generation_config.json`` and ``config.json``.

The keys are those of Hugging Face's ``GenerationConfig``; the same subset as in vLLM is used. ``do_sample`` is not part
of it: for greedy decoding, a request sets temperature 0.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from octavo.errors import CheckpointError, ConfigError, InvalidParameter
from octavo.sampling_params import OPTIONS, SamplingParams
from octavo.weights.folder import read_json

FILE = "generation_config.json"
OWN, NEUTRAL = "auto", "vllm"
PUBLISHED = {"SmolLM2-135M-Instruct": {"temperature": 0.2, "top_p": 0.9}}
"""Parameters recommended by the authors of a model whose files omit them, by prefix of the file or folder name."""
FIELDS = {
    **{option.model_key: name for name, option in OPTIONS.items() if option.model_key},
    "max_new_tokens": "max_tokens",
}
"""Supported keys, and their names in ``SamplingParams``."""
TOKEN_KEYS = ("eos_token_id", "bos_token_id", "pad_token_id", "suppress_tokens", "begin_suppress_tokens")
"""Keys of token ids. Only the first has an effect here; values of the others that are none show a damaged file."""
MAX_TOKEN_IDS = 1 << 32
"""Ids are below this; files that store them unsigned write the largest for a token that is not there."""

logger = logging.getLogger("octavo.start")


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


def token_ids(values: Mapping[str, Any], key: str, where: str = "config") -> tuple[int, ...]:
    """One id, a list of ids, or null, as a tuple; raises ``CheckpointError`` for anything else.

    -1 as ``pad_token_id`` stands for none, as in the first files of Llama.
    """
    found = values.get(key)
    if found is None or (key == "pad_token_id" and found == -1):
        return ()
    ids = found if isinstance(found, list | tuple) else [found]
    if not all(type(token) is int and 0 <= token < MAX_TOKEN_IDS for token in ids):
        shown = repr(found)
        shown = shown if len(shown) < 100 else f"{shown[:100]}..."
        raise CheckpointError(f"{where}: {key} is {shown}; it must be a token id or a list of them")
    return tuple(ids)


def in_vocabulary(ids: Iterable[int], vocab_size: int, key: str) -> tuple[int, ...]:
    """The ids below ``vocab_size``; a warning names the others, which the model cannot generate."""
    given = tuple(ids)
    left_out = [token for token in given if token >= vocab_size]
    if left_out:
        shown = f"{', '.join(map(str, left_out[:5]))}{', ...' if len(left_out) > 5 else ''}"
        logger.warning("%s: %s is not below the size of the vocabulary, %d: ignored", key, shown, vocab_size)
    return tuple(token for token in given if token < vocab_size)


def check_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int) -> None:
    """Raise ``CheckpointError`` for a value of ``TOKEN_KEYS`` that cannot be a token id; warn of ids beyond the
    vocabulary."""
    parts: dict[str, Any] = {"config": config, "config: text_config": config.get("text_config")}
    for where, values in {**parts, "generation config": generation}.items():
        for key in TOKEN_KEYS if isinstance(values, Mapping) else ():
            in_vocabulary(token_ids(values, key, where), vocab_size, f"{where}: {key}")

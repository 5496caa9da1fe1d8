"""Read the tokenizer of a Hugging Face folder: tokenizer.json and the small files beside it.

What is put around a text is tokenizer.json's to say, as in transformers 5; ``add_bos_token`` and the like in
tokenizer_config.json are about tokenizers that have no such file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from octavo.errors import CheckpointError
from octavo.text.tokenizer_parts import TokenizerParts

MAX_TOKENIZER_BYTES = 256 << 20
MAX_CONFIG_BYTES = 16 << 20
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_OTHER_FORMS = ("tokenizer.model", "vocab.json", "vocab.txt", "tekken.json", "tiktoken.model")


def read_parts(folder: Path) -> TokenizerParts | None:
    """The tokenizer of ``folder``, or ``None`` if it has none; raise ``CheckpointError`` for a bad one."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        for name in _OTHER_FORMS:
            if (folder / name).is_file():
                raise CheckpointError(f"{folder}: has {name} but no tokenizer.json, the only form that is read")
        return None
    backend = _read_backend(file)
    config = _read_object(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(config, _read_object(folder / "special_tokens_map.json"))
    return TokenizerParts(
        origin=folder,
        backend=backend,
        special_tokens=special_tokens,
        eos_token_ids=_eos_token_ids(folder, backend, special_tokens),
        chat_template=_chat_template(folder, config),
    )


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    text = _read_text(file, MAX_TOKENIZER_BYTES)
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises the bare class
        raise CheckpointError(f"{file}: not a tokenizer that can be read: {error}") from None


def _read_text(file: Path, limit: int) -> str:
    try:
        if file.stat().st_size > limit:
            raise CheckpointError(f"{file}: more than {limit} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from None


def _read_object(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``; an empty one when there is no such file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(_read_text(file, MAX_CONFIG_BYTES))
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{file}: not JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """Texts of the named special tokens; each is spelled as text or as an object with ``content``."""
    found: dict[str, str] = {}
    for source in sources:
        for name in _SPECIAL_NAMES:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return found


def _eos_token_ids(folder: Path, backend: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> tuple[int, ...]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_object(folder / name).get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ids.update(v for v in values if isinstance(v, int) and not isinstance(v, bool))
    if "eos_token" in special_tokens and (index := backend.token_to_id(special_tokens["eos_token"])) is not None:
        ids.add(index)
    return tuple(sorted(ids))


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """The model's chat template; of several named ones, the one called ``default``."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read_text(file, MAX_CONFIG_BYTES)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None

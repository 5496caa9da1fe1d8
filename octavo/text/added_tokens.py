"""Added and special tokens from the configuration files next to a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from octavo.errors import CheckpointError

MAX_DIGITS = 10
"""Of a token's id."""
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def declared_tokens(config: Mapping[str, Any], added: Mapping[str, Any], folder: Path) -> dict[int, AddedToken]:
    """Tokens by id: ``added_tokens_decoder`` of tokenizer_config.json, else ``added`` of the older added_tokens.json.

    Raises ``CheckpointError`` naming the file and the token.
    """
    where = f"{folder / 'tokenizer_config.json'}: added_tokens_decoder"
    decoder = config.get("added_tokens_decoder")
    if decoder is None:
        where = f"{folder / 'added_tokens.json'}"
        decoder = {index: text for text, index in added.items()}
    if not isinstance(decoder, dict):
        raise CheckpointError(f"{where}: expected an object of token ids, found {type(decoder).__name__}")
    tokens = {}
    for key, value in decoder.items():
        if not str(key).isdecimal() or len(str(key)) > MAX_DIGITS:
            raise CheckpointError(f"{where}: {str(key)[:100]!r} is not a token id")
        tokens[int(key)] = _token(value, f"{where}: {key}")
    return dict(sorted(tokens.items()))


def _token(value: Any, where: str) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    content = value.get("content") if isinstance(value, dict) else None
    if not isinstance(content, str) or not content:
        raise CheckpointError(f"{where}: a token must have a text as 'content'")
    return AddedToken(content, **_flags(value))


def _flags(value: Mapping[str, Any]) -> dict[str, bool]:
    return {name: value[name] for name in FLAGS if isinstance(value.get(name), bool)}


def further_special_tokens(config: Mapping[str, Any], special_tokens: Mapping[str, str]) -> list[AddedToken]:
    """Tokens that the configuration names as special, in the order in which those without an id get one."""
    named: list[Any] = [config.get(name, text) for name, text in special_tokens.items()]
    for key in ("additional_special_tokens", "extra_special_tokens"):
        value = config.get(key)
        if isinstance(value, dict):
            value = list(value.values())
        named += value if isinstance(value, list) else []
    tokens = []
    for value in named:
        text = value.get("content") if isinstance(value, dict) else value
        if not isinstance(text, str) or not text:
            continue
        flags = _flags(value) if isinstance(value, dict) else {}
        tokens.append(AddedToken(text, **{**flags, "special": True}))
    return tokens


def add_tokens(
    backend: tokenizers.Tokenizer, declared: Mapping[int, AddedToken], further: Sequence[AddedToken], folder: Path
) -> None:
    """Add ``declared`` tokens to ``backend``, by their ids, and ``further`` ones that it lacks.

    A declaration overrides an added token that ``backend`` has. Raises ``CheckpointError`` when a token would get an
    id other than the declared one: the model's embeddings would belong to other tokens.
    """
    known = {repr(token) for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in declared.values() if repr(token) not in known])
    for index, token in declared.items():
        found = backend.token_to_id(token.content)
        if found != index:
            raise CheckpointError(f"{folder}: the added token {token.content!r} should have id {index}, found {found}")
    names = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for token in further if token.content not in names])

"""Which formats and which text ``octavo bench quality`` compares."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from octavo.config import EngineConfig, ModelSettings, to_flat
from octavo.errors import ConfigError
from octavo.text.tokenizer import Tokenizer, load_tokenizer
from octavo.weights.hub import resolve_model

HEAD = "+lm_head"
FORMATS: dict[str, dict[str, Any]] = {
    "auto": {},
    "float32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "fp8": {"quantization": "fp8"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
}
"""Settings of each format. "auto" is what ``octavo serve`` makes of the checkpoint by itself."""
PACKED = ("auto", "fp8", "int8", "int4")
"""Formats whose map to logits can be quantised too."""


class Variant(NamedTuple):
    """A model in one format."""

    name: str
    config: EngineConfig


class ScoredText(NamedTuple):
    """What is scored."""

    name: str
    content: str

    @property
    def digest(self) -> str:
        """The first digits of its SHA-256."""
        return hashlib.sha256(self.content.encode()).hexdigest()[:12]


def variants(config: EngineConfig, formats: Sequence[str], checkpoints: Sequence[Path]) -> list[Variant]:
    """The model in each format, then other checkpoints of it as they are, or with a head in int8: ``PATH+lm_head``.

    Raises ``ConfigError`` for a format that is not known, and a checkpoint that is not there.
    """
    found = [Variant(name, _with(config, _settings(name))) for name in formats]
    for path in checkpoints:
        own = path.with_name(path.name.removesuffix(HEAD))
        if not own.exists():
            raise ConfigError(f"checkpoints: {own} does not exist")
        settings = _settings("auto" + HEAD if own != path else "auto")
        found.append(Variant(path.name, _with(config, {**settings, "model": str(own)})))
    return found


def _settings(name: str) -> dict[str, Any]:
    format, has_head = name.removesuffix(HEAD), name.endswith(HEAD)
    if format not in FORMATS or (has_head and format not in PACKED):
        heads = ", ".join(each + HEAD for each in PACKED)
        raise ConfigError(f"formats: {name!r} is not one of {', '.join(FORMATS)}, {heads}")
    return {"dtype": "auto", "quantization": None, **FORMATS[format], "quantize_lm_head": has_head}


def _with(config: EngineConfig, changes: dict[str, Any]) -> EngineConfig:
    return EngineConfig.from_flat({**to_flat(config), **changes})


def read_text(path: Path | None) -> ScoredText:
    """A file; by default every second help topic of Python, which is text that every installation has."""
    if path is not None:
        try:
            return ScoredText(path.name, path.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"text: {path} cannot be read: {error}") from None
    from pydoc_data.topics import topics  # a large module

    return ScoredText("pydoc_data.topics, every second", "\n".join(topics[name] for name in sorted(topics)[::2]))


def windows_of(settings: ModelSettings, text: ScoredText, num_tokens: int, window: int) -> list[list[int]]:
    """The first ``num_tokens`` tokens of the text in windows, each after the token that begins a text, if there is one.

    Raises ``ConfigError`` for a model without a tokenizer, and for a text that is too short.
    """
    if num_tokens < 2 or window < 2:
        raise ConfigError("tokens and window must be at least 2")
    tokenizer = load_tokenizer(Path(settings.tokenizer or resolve_model(settings)))
    if tokenizer is None:
        raise ConfigError("model: it has no tokenizer; name another folder or file with --tokenizer")
    tokens = tokenizer.encode(text.content, add_special_tokens=False)
    if len(tokens) < num_tokens:
        raise ConfigError(f"text: {text.name} has {len(tokens)} tokens; {num_tokens} were asked for")
    begin, step = _beginning(tokenizer), window - len(_beginning(tokenizer))
    parts = [tokens[first : min(first + step, num_tokens)] for first in range(0, num_tokens, step)]
    return [begin + part for part in parts if len(begin + part) > 1]


def _beginning(tokenizer: Tokenizer) -> list[int]:
    first = tokenizer.encode("a")[:1]
    return first if first == [tokenizer.bos_token_id] else []

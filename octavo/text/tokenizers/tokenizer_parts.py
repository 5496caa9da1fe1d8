"""Parts of a tokenizer, independent of the file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from octavo.errors import CheckpointError


@dataclass(frozen=True)
class TokenizerParts:
    """A ``tokenizers`` backend and the checkpoint's metadata about it."""

    origin: Path
    backend: tokenizers.Tokenizer
    special_tokens: Mapping[str, str]
    """Text of ``bos_token``, ``eos_token``, ``unk_token`` and ``pad_token``, those that exist."""
    eos_token_ids: tuple[int, ...]
    """End-of-text tokens that the checkpoint declares."""
    chat_template: str | None
    tool_template: str | None = None
    """The chat template for conversations with tools, if the checkpoint has a separate one."""


def wrap_with_special_tokens(
    backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], add_bos: bool, add_eos: bool, origin: Path
) -> None:
    """Make ``backend`` add the requested beginning- and end-of-text tokens when it encodes.

    Raises ``CheckpointError`` when a requested token does not exist.
    """
    requested = [name for name, flag in (("bos_token", add_bos), ("eos_token", add_eos)) if flag]
    pieces = list[dict[str, Any]]()
    for name in requested:
        text = special_tokens.get(name)
        index = None if text is None else backend.token_to_id(text)
        if text is None or index is None:
            raise CheckpointError(f"{origin}: add_{name} is set, but there is no {name}")
        pieces.append({"id": name, "ids": [index], "tokens": [text]})  # by name, as a text may have a colon
    before, after = ["bos_token:0"] * add_bos, ["eos_token:0"] * add_eos
    backend.post_processor = processors.TemplateProcessing(
        single=[*before, "$A:0", *after], pair=[*before, "$A:0", "$B:0", *after], special_tokens=pieces
    )

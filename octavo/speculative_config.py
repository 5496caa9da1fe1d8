"""Speculative decoding settings, in the format of vLLM's ``--speculative-config``."""

from __future__ import annotations

from typing import Annotated

import msgspec

from octavo.errors import ConfigError


class Ngram(msgspec.Struct, frozen=True, tag_field="method", tag="ngram", forbid_unknown_fields=True):
    """N-gram proposer: drafts from earlier tokens of the same sequence; the names are vLLM's."""

    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1, le=32)] = 4
    """Maximum drafts per sequence and step."""
    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1, le=16)] = 3
    """Longest n-gram that is matched; lengths are tried from this down to ``prompt_lookup_min``."""
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2


def parse_speculative_config(text: str | None) -> Ngram | None:
    """The proposer settings, from JSON; ``None`` without speculation. Raises ``ConfigError``."""
    if text is None:
        return None
    try:
        found = msgspec.json.decode(text, type=Ngram)
    except msgspec.DecodeError as error:
        example = '{"method": "ngram", "num_speculative_tokens": 4}'
        raise ConfigError(f"speculative_config: {error}; expected, for example, {example}") from None
    if found.prompt_lookup_min > found.prompt_lookup_max:
        raise ConfigError("speculative_config: prompt_lookup_min must be at most prompt_lookup_max")
    return found

"""Speculative decoding settings, in the format of vLLM's ``--speculative-config``."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from octavo.errors import ConfigError

Acceptance = Literal["exact", "distribution", "synthetic"]
NumDrafts = Annotated[int, msgspec.Meta(ge=1, le=32)]


class Drafts(msgspec.Struct, frozen=True, tag_field="method", forbid_unknown_fields=True, kw_only=True):
    """Settings of every method."""

    num_speculative_tokens: NumDrafts = 4
    """Maximum drafts per sequence and step."""
    adaptive: bool = True
    """Verify only the drafts that are expected to save time, by measured step times and acceptance rates."""
    acceptance: Acceptance = "exact"
    """``exact``: a draft is accepted if it is the token that would be sampled anyway. ``distribution``: rejection
    sampling, which keeps the distribution only. ``synthetic``: drafts are accepted by chance, for measurements."""
    synthetic_acceptance_length: Annotated[float, msgspec.Meta(ge=1)] | None = None
    """With ``synthetic``: mean tokens per step and sequence when all drafts are verified."""


class Ngram(Drafts, frozen=True, tag="ngram", kw_only=True):
    """N-gram proposer: drafts from earlier tokens of the same sequence; the names are vLLM's."""

    prompt_lookup_max: Annotated[int, msgspec.Meta(ge=1, le=16)] = 3
    """Longest n-gram that is matched; lengths are tried from this down to ``prompt_lookup_min``."""
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2


class Suffix(Drafts, frozen=True, tag="suffix", kw_only=True):
    """Suffix decoding: drafts from earlier tokens of the sequence and from earlier answers; the names are vLLM's."""

    num_speculative_tokens: NumDrafts = 16
    suffix_decoding_max_tree_depth: Annotated[int, msgspec.Meta(ge=2, le=256)] = 24
    """Longest context that is matched."""
    suffix_decoding_max_cached_requests: Annotated[int, msgspec.Meta(ge=0)] = 10000
    """Earlier answers that are kept; 0: drafts come from the sequence alone."""
    suffix_decoding_max_spec_factor: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    """Most drafts for each token of the matched context."""
    suffix_decoding_min_token_prob: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    """Drafts end where fewer occurrences of the context agree with them than this share."""


class OwnCheckpoint(Drafts, frozen=True, kw_only=True):
    """Settings of drafters with a checkpoint of their own."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    """Path or name of the drafter's checkpoint."""
    quantization: Literal["fp8", "int8", "int4"] | None = None
    """To what the drafter's weights, its head included, are quantised while they are loaded."""


class DraftModel(OwnCheckpoint, frozen=True, tag="draft_model", kw_only=True):
    """A smaller model of the same vocabulary drafts."""


class Eagle3(OwnCheckpoint, frozen=True, tag="eagle3", kw_only=True):
    """An EAGLE-3 head drafts."""

    num_speculative_tokens: NumDrafts = 3


class MTP(Drafts, frozen=True, tag="mtp", kw_only=True):
    """The multi-token prediction layer of the model's own checkpoint drafts."""

    num_speculative_tokens: NumDrafts = 1


class DFlash(OwnCheckpoint, frozen=True, tag="dflash", kw_only=True):
    """A DFlash drafter fills a block of tokens in one pass."""

    num_speculative_tokens: NumDrafts = 15


WithDrafter = DraftModel | Eagle3 | MTP | DFlash
"""Methods whose drafts are computed on the device."""
Method = Ngram | Suffix | WithDrafter
"""Settings of one method."""


def parse_speculative_config(text: str | None) -> Method | None:
    """The proposer settings, from JSON; ``None`` without speculation. Raises ``ConfigError``."""
    if text is None:
        return None
    try:
        found: Method = msgspec.json.decode(text, type=Method)
    except msgspec.DecodeError as error:
        raise ConfigError(f"speculative_config: {error}; {_allowed(text)}") from None
    if (found.acceptance == "synthetic") != (found.synthetic_acceptance_length is not None):
        raise ConfigError('speculative_config: synthetic_acceptance_length is for "acceptance": "synthetic"')
    most = found.num_speculative_tokens + 1
    if found.synthetic_acceptance_length is not None and found.synthetic_acceptance_length > most:
        raise ConfigError(f"speculative_config: synthetic_acceptance_length must be at most {most}")
    if isinstance(found, Ngram) and found.prompt_lookup_min > found.prompt_lookup_max:
        raise ConfigError("speculative_config: prompt_lookup_min must be at most prompt_lookup_max")
    return found


def _allowed(text: str) -> str:
    """What a configuration may say."""
    methods: dict[str, type[Drafts]] = {str(kind.__struct_config__.tag): kind for kind in get_args(Method)}
    try:
        method = msgspec.json.decode(text, type=dict).get("method")
    except msgspec.DecodeError:
        method = None
    if method not in methods:
        return f'"method" must be one of {", ".join(methods)}, for example {{"method": "ngram"}}'
    return f"the keys of {method} are {', '.join(methods[method].__struct_fields__)}"

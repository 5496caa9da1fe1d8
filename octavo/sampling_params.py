"""Sampling and stopping parameters of a request, validated on construction."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from octavo.errors import ConfigError, ContextLengthExceeded, InvalidParameter

MAX_N = 16384
MAX_SPECULATIVE_TOKENS = 32
MAX_LOGPROB_IDS = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_BYTES = 256
MAX_STOP_TOKEN_IDS = 128
MIN_REPETITION_PENALTY = 0.001
"""Logits are divided by it and must stay finite."""
MAX_LOGIT_BIAS = 300
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_ALLOWED_TOKEN_IDS = 4096
MAX_PATTERN_SIZE = 128
MAX_PATTERN_COUNT = 1024
MAX_TOKEN_ID = 2**31 - 1

_MASK_64 = 2**64 - 1


class RepetitionDetectionParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Ends a text that repeats itself: names and meaning are vLLM's. Invalid values raise ``InvalidParameter``."""

    max_pattern_size: int
    """The longest pattern looked for, in tokens; 0: none is."""
    min_pattern_size: int = 1
    """The shortest one."""
    min_count: int = 2
    """How often the pattern must stand at the end of the output, without anything between."""

    def __post_init__(self) -> None:
        _integer(self, "max_pattern_size", 0, MAX_PATTERN_SIZE)
        _integer(self, "min_pattern_size", 1, self.max_pattern_size or 1)
        _integer(self, "min_count", 2, MAX_PATTERN_COUNT)

    @property
    def num_compared(self) -> int:
        """Most tokens at the end of an output that matter."""
        return self.max_pattern_size * self.min_count

    def found_in(self, tokens: Sequence[int]) -> bool:
        """Whether ``tokens`` end with a repeated pattern."""
        for size in range(self.min_pattern_size, min(self.max_pattern_size, len(tokens) // self.min_count) + 1):
            compared = range(1, size * (self.min_count - 1) + 1)
            if all(tokens[-back] == tokens[-back - size] for back in compared):
                return True
        return False


@functools.lru_cache(maxsize=16)
def parse_repetition_detection(text: str | None) -> RepetitionDetectionParams | None:
    """The setting ``repetition_detection``, a JSON object. Raises ``ConfigError``."""
    try:
        return None if text is None else msgspec.json.decode(text, type=RepetitionDetectionParams)
    except (msgspec.DecodeError, InvalidParameter) as error:
        raise ConfigError(f"repetition_detection: {error}") from None


class StructuredOutputsParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an output of ``LLM`` is held to: one of these. Names and meaning are vLLM's."""

    json: dict[str, Any] | str | None = None
    """A JSON schema, or its text."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """In GBNF or Lark."""
    json_object: bool | None = None


@dataclass(frozen=True)
class Option:
    """A number or a switch among the sampling parameters. Checks, flags of commands, fields of HTTP bodies with their
    refusals in other APIs, defaults of a model and documentation follow from it."""

    kind: type[int] | type[float] | type[bool]
    low: float = 0
    high: float = 0
    is_open: bool = False
    """Whether ``low`` itself is not allowed."""
    help: str = ""
    """Of the flag that commands have for it; "": none has one."""
    model_key: str = ""
    """Name in a checkpoint's generation config, which then gives the default."""
    gguf_key: str = ""
    ollama: str = ""
    """Name in Ollama's API."""


OPTIONS: dict[str, Option] = {
    "min_tokens": Option(int, 0, MAX_TOKEN_ID),
    "temperature": Option(
        *(float, 0.0, 100.0),
        help="sampling temperature; 0 is greedy",
        model_key="temperature",
        gguf_key="general.sampling.temp",
        ollama="temperature",
    ),
    "top_p": Option(
        *(float, 0.0, 1.0),
        is_open=True,
        help="sample from the smallest set of most likely tokens with this total probability",
        model_key="top_p",
        gguf_key="general.sampling.top_p",
        ollama="top_p",
    ),
    "top_k": Option(
        *(int, 0, MAX_TOKEN_ID),
        help="sample from the K most likely tokens; 0 or -1: all",
        model_key="top_k",
        gguf_key="general.sampling.top_k",
        ollama="top_k",
    ),
    "min_p": Option(
        *(float, 0.0, 1.0),
        help="drop tokens less likely than this fraction of the most likely token's probability",
        model_key="min_p",
        gguf_key="general.sampling.min_p",
        ollama="min_p",
    ),
    "repetition_penalty": Option(
        *(float, MIN_REPETITION_PENALTY, 100.0),
        help="above 1 makes tokens of the prompt and the output less likely",
        model_key="repetition_penalty",
        gguf_key="general.sampling.penalty_repeat",
        ollama="repeat_penalty",
    ),
    "presence_penalty": Option(
        *(float, -2.0, 2.0), help="above 0 makes tokens of the output less likely", ollama="presence_penalty"
    ),
    "frequency_penalty": Option(
        *(float, -2.0, 2.0),
        help="above 0 makes tokens less likely in proportion to their count in the output",
        ollama="frequency_penalty",
    ),
    "seed": Option(int, -(2**63), 2**64 - 1, ollama="seed"),
    "num_speculative_tokens": Option(int, 0, MAX_SPECULATIVE_TOKENS),
    "thinking_token_budget": Option(int, 0, MAX_TOKEN_ID),
    "ignore_eos": Option(bool),
    "include_stop_str_in_output": Option(bool),
}
"""By the name of the parameter."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling and stopping parameters. Field names follow the OpenAI API, extensions follow vLLM.

    Invalid values raise ``InvalidParameter`` with the field and its allowed values. This includes values decoded
    from a message, so later stages need not check again.
    """

    n: int = 1
    """Number of independent continuations of the prompt."""
    max_tokens: int | None = 16
    """Maximum tokens to generate; ``None`` means up to the context length."""
    min_tokens: int = 0
    """End-of-text tokens and stops have no effect before this many output tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 means all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    """Applies to prompt and output tokens; 1 is off (CTRL, arXiv 1909.05858)."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    bad_words: tuple[str, ...] = ()
    """Strings that the output may not contain, tokenized as at the start of a text and as after a space."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be sampled; ``None``: all."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    """The same seed and prompt give the same tokens, whatever else is in the batch; ``None`` draws a seed."""
    logprobs: int | None = None
    """``None``: no log-probabilities. k: of the sampled token and the k most likely tokens, per position."""
    prompt_logprobs: int | None = None
    """The same for prompt tokens."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens whose log-probabilities are reported at each position, most likely first, in place of the most likely."""
    grammar: str | None = None
    """Grammar of the output, as written by ``octavo.grammar.forms``; ``None``: unconstrained."""
    structured_outputs: StructuredOutputsParams | None = None
    """In place of ``grammar``, for ``LLM`` and ``Engine``."""
    detokenize: bool = True
    """Whether ``LLM`` and ``Engine`` give texts, which stop strings need, or token ids alone."""
    truncate_prompt_tokens: int | None = None
    """``LLM`` and ``Engine`` keep so many tokens at the end of the prompt; ``None``: all."""
    repetition_detection: RepetitionDetectionParams | None = None
    """Ends a text that repeats a pattern of tokens, with the stop reason ``"repetition"``; ``None``: never."""
    thinking_token_budget: int | None = None
    """Most tokens of reasoning before the answer, where a model marks its reasoning; ``None``: no bound."""
    return_routed_experts: bool = False
    """Whether to return which experts of a mixture each token used, if the engine keeps that."""
    routed_experts_prompt_start: int = 0
    """Prompt position from which on they are returned."""
    extra_args: dict[str, Any] | None = None
    """Arguments for installed logits processors (``octavo.engine.logits_processors``)."""
    num_speculative_tokens: int | None = None
    """Most drafts to verify in a step, at most those of ``speculative_config``; 0: no speculative decoding."""

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            force_setattr(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids", "logprob_token_ids"):
            value = getattr(self, name)
            if value is None and name == "allowed_token_ids":
                continue
            if not isinstance(value, (list, tuple)):
                raise InvalidParameter(name, f"'{name}' must be a list.")
            force_setattr(self, name, tuple(value))
        if self.top_k == -1:
            force_setattr(self, "top_k", 0)
        _integer(self, "n", 1, MAX_N)
        if self.max_tokens is not None:
            _integer(self, "max_tokens", 0, MAX_TOKEN_ID)
        for name, option in OPTIONS.items():
            _check_option(self, name, option)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter(
                "min_tokens", f"'min_tokens' ({self.min_tokens}) must not be above 'max_tokens' ({self.max_tokens})."
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(self, name, 0, MAX_TOKEN_ID)
        if len(self.logprob_token_ids) > MAX_LOGPROB_IDS:
            message = f"'logprob_token_ids' must have at most {MAX_LOGPROB_IDS} token ids."
            raise InvalidParameter("logprob_token_ids", message)
        if self.logprob_token_ids and self.logprobs is None:
            force_setattr(self, "logprobs", 0)
        _integer(self, "routed_experts_prompt_start", 0, MAX_TOKEN_ID)
        _check_repetition(self)
        _check_of_llm(self)
        if self.extra_args is not None and not (isinstance(self.extra_args, dict) and self.extra_args):
            raise InvalidParameter("extra_args", "'extra_args' must be a dict that is not empty.")
        _check_stops(self)
        _check_logit_bias(self)
        _check_bad_words(self)
        _check_allowed(self)
        if self.grammar is not None and not isinstance(self.grammar, str):
            raise InvalidParameter("grammar", "'grammar' must be a string made by octavo.grammar.forms.")

    def clone(self) -> SamplingParams:
        """An equal one."""
        return msgspec.structs.replace(self)

    @property
    def is_greedy(self) -> bool:
        """Whether to take the most likely token; dividing by a temperature this low would overflow."""
        return self.temperature < 1e-5


DEFAULTS: dict[str, Any] = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
MAY_BE_ABSENT = frozenset(name for name in OPTIONS if DEFAULTS[name] is None)
"""Options for which ``None`` has a meaning of its own."""


def choice_key(seed: int, index: int) -> int:
    """The random key of choice ``index`` of a request with ``seed``, an unsigned 64-bit integer.

    It is output number ``index`` of the SplitMix64 generator started at ``seed`` (Steele, Lea and Flood, "Fast
    splittable pseudorandom number generators", OOPSLA 2014), so the choices of one request have independent
    keys, and so have the choices of requests with adjacent seeds. ``seed`` is taken modulo 2**64.
    """
    state = (seed + (index + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


def resolve_max_tokens(
    params: SamplingParams,
    num_prompt_tokens: int,
    max_model_len: int,
    *,
    field: str = "prompt",
    default: int | None = None,
) -> int:
    """The maximum output tokens of a request: its ``max_tokens``, else the rest of the context.

    ``default`` bounds the latter. If prompt and ``max_tokens`` exceed the context, ``ContextLengthExceeded`` is raised
    for ``field``; nothing is clamped. Clients recognize this error by its code, older ones by the start of its text.
    """
    limit = f"This model's maximum context length is {max_model_len} tokens. However, "
    room = max_model_len - num_prompt_tokens
    if params.max_tokens is not None:
        if params.max_tokens <= room:
            return params.max_tokens
        parts = f"{num_prompt_tokens} in the {field}, {params.max_tokens} in the completion"
        found = f"you requested {num_prompt_tokens + params.max_tokens} tokens ({parts})."
        raise ContextLengthExceeded(
            f"{limit}{found} Please reduce the length of the {field} or completion.", param=field
        )
    if room < 1:
        found = f"your {field} resulted in {num_prompt_tokens} tokens."
        error = ContextLengthExceeded(f"{limit}{found} Please reduce the length of the {field}.", param=field)
        error.num_tokens, error.limit = num_prompt_tokens, max_model_len
        raise error
    resolved = room if default is None else min(room, default)
    if params.min_tokens > resolved:
        message = f"'min_tokens' ({params.min_tokens}) is above the maximum number of output tokens, {resolved}."
        raise InvalidParameter("min_tokens", message)
    return resolved


def _integer(params: msgspec.Struct, name: str, low: int, high: int) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(name, f"'{name}' must be a whole number from {low} to {high}, not {_shown(value)}.")


def _check_option(params: SamplingParams, name: str, option: Option) -> None:
    value = getattr(params, name)
    if option.kind is bool or (value is None and name in MAY_BE_ABSENT):
        return
    if option.kind is int:
        _integer(params, name, int(option.low), int(option.high))
    else:
        _number(params, name, option)


def _number(params: SamplingParams, name: str, option: Option) -> None:
    value, low, high = getattr(params, name), option.low, option.high
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidParameter(name, f"'{name}' must be a number, not {_shown(value)}.")
    if not math.isfinite(value) or value < low or value > high or (option.is_open and value == low):
        bound = f"above {low:g} and at most {high:g}" if option.is_open else f"from {low:g} to {high:g}"
        raise InvalidParameter(name, f"'{name}' must be {bound}, not {_shown(value)}.")
    force_setattr(params, name, float(value))


def _check_repetition(params: SamplingParams) -> None:
    given = params.repetition_detection
    if given is not None and not isinstance(given, RepetitionDetectionParams):
        message = f"'repetition_detection' must be RepetitionDetectionParams, not {_shown(given)}."
        raise InvalidParameter("repetition_detection", message)
    if given is not None and not given.max_pattern_size:
        force_setattr(params, "repetition_detection", None)


def _check_of_llm(params: SamplingParams) -> None:
    given = params.structured_outputs
    if given is not None and (not isinstance(given, StructuredOutputsParams) or params.grammar is not None):
        message = "'structured_outputs' must be StructuredOutputsParams, and there must be no 'grammar' beside it."
        raise InvalidParameter("structured_outputs", message)
    if given is not None and params.thinking_token_budget is not None:
        message = "'thinking_token_budget' must not be given with 'structured_outputs', which bind all of the output."
        raise InvalidParameter("thinking_token_budget", message)
    if params.truncate_prompt_tokens is not None:
        _integer(params, "truncate_prompt_tokens", 1, MAX_TOKEN_ID)
    if not params.detokenize and params.stop:
        raise InvalidParameter("detokenize", "'detokenize' must be true where there are stop strings.")


def _check_stops(params: SamplingParams) -> None:
    if len(params.stop) > MAX_STOP_STRINGS:
        raise InvalidParameter("stop", f"'stop' takes at most {MAX_STOP_STRINGS} strings.")
    for text in params.stop:
        if not isinstance(text, str) or not 1 <= len(text.encode("utf-8", "replace")) <= MAX_STOP_BYTES:
            raise InvalidParameter("stop", f"Each stop string must have 1 to {MAX_STOP_BYTES} bytes.")
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidParameter("stop_token_ids", f"At most {MAX_STOP_TOKEN_IDS} ids are allowed.")
    for token in params.stop_token_ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
            raise InvalidParameter("stop_token_ids", f"{_shown(token)} is not a token id.")


def _check_logit_bias(params: SamplingParams) -> None:
    if not isinstance(params.logit_bias, Mapping) or len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidParameter("logit_bias", f"'logit_bias' must map at most {MAX_LOGIT_BIAS} token ids to numbers.")
    for token, bias in params.logit_bias.items():
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
            raise InvalidParameter("logit_bias", f"{_shown(token)} is not a token id.")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise InvalidParameter("logit_bias", f"The bias of token {token} must be a number from -100 to 100.")


def _check_bad_words(params: SamplingParams) -> None:
    if len(params.bad_words) > MAX_BAD_WORDS:
        raise InvalidParameter("bad_words", f"'bad_words' takes at most {MAX_BAD_WORDS} strings.")
    for text in params.bad_words:
        if not isinstance(text, str) or not text.strip(" ") or not _is_short(text):
            message = f"Each bad word must be text of 1 to {MAX_BAD_WORD_BYTES} bytes, not all of them spaces."
            raise InvalidParameter("bad_words", message)


def _is_short(text: str) -> bool:
    """Whether ``text`` is valid Unicode of at most ``MAX_BAD_WORD_BYTES`` bytes in UTF-8."""
    try:
        return len(text.encode()) <= MAX_BAD_WORD_BYTES
    except UnicodeEncodeError:
        return False


def _check_allowed(params: SamplingParams) -> None:
    allowed = params.allowed_token_ids
    if allowed is None:
        return
    if not 1 <= len(allowed) <= MAX_ALLOWED_TOKEN_IDS:
        message = f"'allowed_token_ids' must have 1 to {MAX_ALLOWED_TOKEN_IDS} token ids, not {len(allowed)}."
        raise InvalidParameter("allowed_token_ids", message)
    for token in allowed:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
            raise InvalidParameter("allowed_token_ids", f"{_shown(token)} is not a token id.")


def _shown(value: object) -> str:
    """``value`` as shown in an error message, truncated to 60 characters."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a number of over 128 bits"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

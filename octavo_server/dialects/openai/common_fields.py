"""The fields that all generation requests have: supported, rejected by name, or without effect.

Field names and defaults are OpenAI's, or vLLM's where OpenAI has none.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from octavo.config import SchedulerSettings
from octavo.errors import InvalidParameter
from octavo.sampling_params import (
    DEFAULTS,
    MAX_TOKEN_ID,
    OPTIONS,
    RepetitionDetectionParams,
    SamplingParams,
    parse_repetition_detection,
)
from octavo_server.http.error_responses import UnsupportedParameter
from octavo_server.services import ModelServices
from octavo_server.tenants.api_keys import caller_of

MAX_CACHE_SALT = 256
MAX_USER = 256
CACHE_RETENTIONS = {"in_memory": 0.0, "in-memory": 0.0, "5m": 300.0, "1h": 3600.0, "24h": 86400.0}
"""Values of ``prompt_cache_retention`` and the seconds for which cached blocks are then evicted last."""
SESSION_HEADERS = ("x-session-id", "session-id", "x-claude-code-session-id")
"""Headers that name the conversation of a request: ours, Codex's, Claude Code's."""
MAX_TARGET = 86400.0
MIN_TIMEOUT, MAX_TIMEOUT = 0.001, 86400.0

REFUSED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("custom_logit_processor", "logit_processors", "logits_processors", "lora_path"), ()),
    **dict.fromkeys(("guided_whitespace_pattern", "no_stop_trim", "stop_regex"), ()),
    **dict.fromkeys(("prompt_embeds", "truncate_prompt_tokens", "use_beam_search", "vllm_xargs", "watermarking"), ()),
    "truncation_side": ("left", "right"),
}
"""API fields without which an answer would be wrong, with their default values, which are accepted."""

IGNORED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("early_stopping", "ec_transfer_params", "guided_decoding_backend", "kv_transfer_params"), ()),
    **dict.fromkeys(("return_mm_kwargs", "return_prompt_text", "return_token_offsets", "store"), ()),
    "length_penalty": (1.0,),
    "mm_payload": ("tensors", "none"),
    "routed_experts_prompt_start": (0,),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
}
"""Fields without which an answer is no less right: what concerns where and how it is computed, or what comes with it.
Values other than these are reported in a response header."""

ACCEPTED = frozenset({"metadata", "prompt_cache_key", "prompt_cache_retention", "request_id", "safety_identifier"})
"""Labels and hints for the operator of a service; no answer depends on them."""

NO_LIMIT = -1
"""Value of ``max_tokens`` for as many tokens as fit the context."""

STREAM_OPTIONS = ("include_usage", "continuous_usage_stats")
"""What a stream may include besides text."""

SAMPLING = {name: (option.kind, None if option.model_key else DEFAULTS[name]) for name, option in OPTIONS.items()}
"""Fields that are options of ``SamplingParams``, with types and defaults; ``None``: the model's."""


def sampling(**values: float | None) -> dict[str, Any]:
    """The field ``sampling`` of a body, of the options that are given."""
    return {name: value for name, value in values.items() if value is not None}


class RepetitionDetectionFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields of ``RepetitionDetectionParams``, not validated yet."""

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2


class GenerationFields(msgspec.Struct, kw_only=True):
    """Fields common to completions and chat completions. Ranges are those of ``SamplingParams``."""

    model: str = ""
    max_tokens: int | None = None
    n: int = 1
    logit_bias: dict[str, float] = {}
    bad_words: list[str] = []
    allowed_token_ids: list[int] | None = None
    stop: str | list[str] = []
    sampling: dict[str, Any] = {}
    """Options that are given, by their names in ``OPTIONS``; for others, the model's generation config or else OpenAI's
    default counts."""
    stream: bool = False
    stream_options: dict[str, Any] | None = None
    stop_token_ids: list[int] = []
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] = []
    repetition_detection: RepetitionDetectionFields | None = None
    priority: int = 0
    cache_salt: str = ""
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    session_id: str | None = None
    ttft_target: float | None = None
    tpot_target: float | None = None
    timeout: float | None = None
    kv_transfer_params: Any = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None

    @property
    def cache_ttl(self) -> float:
        """Seconds for which the cached prompt is preferably retained."""
        return CACHE_RETENTIONS[self.prompt_cache_retention or "in_memory"]

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with a usage chunk; continuous usage implies one."""
        return any((self.stream_options or {}).get(name) for name in STREAM_OPTIONS)

    @property
    def has_continuous_usage(self) -> bool:
        return bool((self.stream_options or {}).get("continuous_usage_stats"))


def check_labels(services: ModelServices, model: str, priority: int, user: str | None) -> None:
    """Validate the fields that all endpoints share. Raises ``RequestError``."""
    services.check_model(model)
    if abs(priority) > MAX_TOKEN_ID:
        raise InvalidParameter("priority", f"'priority' must be from -{MAX_TOKEN_ID} to {MAX_TOKEN_ID}.")
    if priority and services.config.scheduler.scheduling_policy != "priority":
        raise UnsupportedParameter("priority", "'priority' needs a server with --scheduling-policy priority.")
    if len(user or "") > MAX_USER:
        raise InvalidParameter("user", f"'user' must have at most {MAX_USER} characters.")


def without_effect(body: GenerationFields, services: ModelServices) -> list[str]:
    """Fields that are ignored in this request."""
    options = body.stream_options
    named = ["kv_transfer_params"] if has_idle_transfer(body, services) else []
    if "thinking_token_budget" in body.sampling and not services.message_format.can_reason:
        named.append("thinking_token_budget")
    if options is None or not body.stream:
        return named if options is None else [*named, "stream_options"]
    return named + [f"stream_options.{name}" for name, value in options.items() if value and name not in STREAM_OPTIONS]


def has_idle_transfer(body: GenerationFields, services: ModelServices) -> bool:
    """Whether ``kv_transfer_params`` ask for what this server's role does not do."""
    given, own = body.kv_transfer_params, {"prefill": "do_remote_decode", "decode": "do_remote_prefill"}
    if not given or not isinstance(given, dict):
        return bool(given)
    name = own.get(services.config.cache.role)
    return name is None or any(given.get(other) for other in own.values() if other != name)


def check_generation_fields(body: GenerationFields, services: ModelServices) -> None:
    """Validate what ``SamplingParams`` does not. Raises ``RequestError``."""
    check_labels(services, body.model, body.priority, body.user)
    most = services.config.server.max_n
    if not 1 <= body.n <= most:
        raise InvalidParameter("n", f"'n' must be a whole number from 1 to {most} (max_n).")
    if body.prompt_logprobs is not None and body.stream:
        raise UnsupportedParameter("prompt_logprobs", "'prompt_logprobs' is not supported with 'stream'.")
    for name in STREAM_OPTIONS:
        if not isinstance((body.stream_options or {}).get(name), bool | None):
            raise InvalidParameter("stream_options", f"'stream_options.{name}' must be true or false.")
    if len(body.cache_salt) > MAX_CACHE_SALT:
        raise InvalidParameter("cache_salt", f"'cache_salt' must have at most {MAX_CACHE_SALT} characters.")
    if "\0" in body.cache_salt:  # what the engine itself tells apart has it
        raise InvalidParameter("cache_salt", "'cache_salt' must not have the character U+0000.")
    for name in ("prompt_cache_key", "session_id"):
        if len(getattr(body, name) or "") > MAX_USER:
            raise InvalidParameter(name, f"'{name}' must have at most {MAX_USER} characters.")
    if body.prompt_cache_retention not in (None, *CACHE_RETENTIONS):
        allowed = "'in_memory', '5m', '1h' or '24h'"
        raise InvalidParameter("prompt_cache_retention", f"'prompt_cache_retention' must be {allowed}.")
    for name, target in (("ttft_target", body.ttft_target), ("tpot_target", body.tpot_target)):
        if target is not None:
            _check_target(name, target, services.config.scheduler)
    if body.timeout is not None and not MIN_TIMEOUT <= body.timeout <= MAX_TIMEOUT:
        raise InvalidParameter("timeout", f"'timeout' must be from {MIN_TIMEOUT:g} to {MAX_TIMEOUT:g} seconds.")
    for name in ("stop", "bad_words"):
        if getattr(body, name):
            services.need_tokenizer(name)


def scheduling_fields(body: GenerationFields, services: ModelServices, request: Request) -> dict[str, Any]:
    """The fields of ``ClientRequest`` that every endpoint fills from the same fields of its body."""
    return {
        "caller": caller_of(request),
        "model": body.model,
        "priority": body.priority,
        "cache_salt": services.cache_salt(request, body.cache_salt),
        "tenant": services.tenant(request, body.user, body.model),
        "ttft_target": body.ttft_target or 0.0,
        "tpot_target": body.tpot_target or 0.0,
        "session": _session(body, request),
        "cache_ttl": body.cache_ttl,
        "timeout": body.timeout,
        "message_format": services.message_format,
        "report": lambda names: services.report(request, names),
    }


def _session(body: GenerationFields, request: Request) -> str:
    """Name of the conversation that the request is a turn of, from the body or else a header; "": none."""
    named = (request.headers.get(name) for name in SESSION_HEADERS)
    return body.prompt_cache_key or body.session_id or next(filter(None, named), "")[:MAX_USER]


def _check_target(name: str, seconds: float, scheduler: SchedulerSettings) -> None:
    if scheduler.scheduling_policy != "deadline":
        raise UnsupportedParameter(name, f"'{name}' needs a server with --scheduling-policy deadline.")
    if not 0 < seconds <= MAX_TARGET:
        raise InvalidParameter(name, f"'{name}' must be above 0 and at most {MAX_TARGET:g}.")


def sampling_params(
    body: GenerationFields,
    services: ModelServices,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Sampling parameters from the body and from the endpoint's own fields. Raises ``InvalidParameter``."""
    defaults = {name: value for name, value in services.engine.info.sampling_defaults.items() if name in OPTIONS}
    chosen: dict[str, Any] = defaults | body.sampling
    if "seed" in chosen:
        chosen["seed"] %= 2**64
    return SamplingParams(
        n=body.n,
        max_tokens=None if max_tokens == NO_LIMIT else max_tokens,
        **chosen,
        logit_bias=_logit_bias(body.logit_bias),
        bad_words=tuple(body.bad_words),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        skip_special_tokens=body.skip_special_tokens,
        logprobs=0 if body.logprob_token_ids else logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=tuple(body.logprob_token_ids),
        repetition_detection=_repetition(body.repetition_detection, services),
    )


def _repetition(given: RepetitionDetectionFields | None, services: ModelServices) -> RepetitionDetectionParams | None:
    """The parameters, or the server's. Raises ``InvalidParameter`` about ``repetition_detection``."""
    if given is None:
        return parse_repetition_detection(services.config.server.repetition_detection)
    try:
        return RepetitionDetectionParams(**msgspec.structs.asdict(given))
    except InvalidParameter as error:
        raise InvalidParameter("repetition_detection", f"In 'repetition_detection', {error.message}") from None


def check_max_tokens(name: str, value: int | None) -> None:
    """Validate the token limit of a chat request. Raises ``InvalidParameter`` about the field ``name``."""
    if value is not None and value != NO_LIMIT and not 1 <= value <= MAX_TOKEN_ID:
        message = f"'{name}' must be a whole number from 1 to {MAX_TOKEN_ID}, or {NO_LIMIT} for as many as fit."
        raise InvalidParameter(name, message)


def default_max_tokens(services: ModelServices, requested: int | None) -> int | None:
    """The default token limit of a message: the one in the model's generation config, if any."""
    recommended = services.engine.info.sampling_defaults.get("max_tokens")
    return None if recommended is None or requested == NO_LIMIT else int(recommended)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    """Parse the keys, which are strings in JSON and must be decimal token ids."""
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InvalidParameter("logit_bias", "The keys of 'logit_bias' must be token ids.")
        bias[int(key)] = value
    return bias

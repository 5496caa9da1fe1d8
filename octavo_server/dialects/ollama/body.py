"""The bodies of chat and generate requests, and their conversion to a chat completion body.

https://github.com/ollama/ollama/blob/main/docs/api.md
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.errors import InvalidParameter
from octavo.sampling_params import OPTIONS
from octavo.text.reasoning_effort import EFFORTS, thinking_switch
from octavo_server.dialects.openai.chat_body import ChatBody, effort, passed_over
from octavo_server.dialects.openai.common_fields import NO_LIMIT
from octavo_server.http.error_responses import UnsupportedParameter
from octavo_server.http.request_body import BodyDecoder
from octavo_server.services import ModelServices

LATEST = ":latest"
"""The tag that clients add to a name without one."""
SAMPLING = {option.ollama: name for name, option in OPTIONS.items() if option.ollama}
"""Names of options here, and those of ``SamplingParams``."""
NAMES = {
    **{name: f"options.{here}" for here, name in SAMPLING.items()},
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
    "response_format": "format",
}
"""What fields of completions and chat completions are called here."""
LEAST_SHARE = 1e-6
ABOUT_LOADING = frozenset(
    {
        *("num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv"),
        *("use_mmap", "use_mlock", "vocab_only", "logits_all"),
    }
)
"""Options about how a model is loaded, which the server decides when it starts."""
REFUSED_IN_GENERATE: dict[str, tuple[Any, ...]] = dict.fromkeys(("context", "suffix", "template"), ())
ACCEPTED = frozenset({"keep_alive", "truncate", "shift"})
"""How long the model stays loaded (always), and what happens to prompts that are too long (they are refused)."""


class CommonBody(msgspec.Struct, kw_only=True):
    """The fields that both requests have."""

    model: str
    stream: bool = True
    format: str | dict[str, Any] = ""
    options: dict[str, Any] = {}
    think: bool | str | None = None
    return_token_ids: bool = False
    logprobs: bool = False
    top_logprobs: int = 0


class OllamaChatBody(CommonBody, kw_only=True):
    """The body of a request for the next message of a conversation."""

    messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] = []


class OllamaGenerateBody(CommonBody, kw_only=True):
    """The body of a request for an answer to a text, or with ``raw`` for its continuation."""

    prompt: str = ""
    system: str = ""
    raw: bool = False
    images: list[str] = []


chat_decoder = BodyDecoder(OllamaChatBody, {}, ACCEPTED)
generate_decoder = BodyDecoder(OllamaGenerateBody, REFUSED_IN_GENERATE, ACCEPTED)


def without_effect(body: CommonBody, services: ModelServices) -> list[str]:
    """Options, and parts of the messages, that are ignored in this request. Raises ``InvalidParameter``."""
    known = {*SAMPLING, *ABOUT_LOADING, "stop", "num_predict"}
    named = ["top_logprobs"] if body.top_logprobs and not body.logprobs else []
    named += [f"options.{name}" for name, value in body.options.items() if name not in known and value]
    messages = body.messages if isinstance(body, OllamaChatBody) else []
    return [*named, *passed_over(_messages(messages, services), services)] if messages else named


def served_name(name: str, services: ModelServices) -> str:
    """The name as the server has it: without the tag ``latest``, unless it has that."""
    return name if name in services.served_names else name.removesuffix(LATEST)


def chat_body(body: OllamaChatBody, services: ModelServices) -> ChatBody:
    """The request as a chat completion body; a last message of the assistant is the beginning of the answer. Raises
    ``InvalidParameter``."""
    chat = _chat_body(body, _messages(body.messages, services), body.tools, services)
    is_begun = chat.messages[-1]["role"] == "assistant"
    return msgspec.structs.replace(chat, add_generation_prompt=not is_begun, continue_final_message=is_begun)


def generate_chat_body(body: OllamaGenerateBody, services: ModelServices) -> ChatBody:
    """The request as a conversation of one message. Raises ``InvalidParameter``."""
    system = [{"role": "system", "content": body.system}] if body.system else []
    content = with_images(body.prompt, body.images, "images", services)
    return _chat_body(body, [*system, {"role": "user", "content": content}], [], services)


def _chat_body(
    body: CommonBody, messages: list[dict[str, Any]], tools: list[dict[str, Any]], services: ModelServices
) -> ChatBody:
    fields = generation_fields(body, services)
    if body.logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    return msgspec.convert(
        {**fields, **_thinking(body.think, services), "messages": messages, "tools": tools}, type=ChatBody
    )


def generation_fields(body: CommonBody, services: ModelServices) -> dict[str, Any]:
    """The fields that completions and chat completions share. Raises ``InvalidParameter``."""
    fields: dict[str, Any] = {}
    if (stop := body.options.get("stop")) is not None:
        if not (isinstance(stop, str) or (isinstance(stop, list) and all(isinstance(text, str) for text in stop))):
            raise InvalidParameter("options", "'options.stop' must be a string or a list of strings.")
        fields["stop"] = stop
    values = {name: (here, body.options.get(here)) for here, name in SAMPLING.items()}
    given = {name: _checked(name, *pair) for name, pair in values.items() if pair[1] is not None}
    if given.get("top_p") == 0:  # there the most likely token alone; no share of 0 is known to the engine
        given["top_p"] = LEAST_SHARE
    limit = body.options.get("num_predict")
    if limit is not None:
        fields["max_tokens"] = _limit(limit)
    if isinstance(body.format, dict):
        schema = {"name": "output", "strict": True, "schema": body.format}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        raise InvalidParameter("format", "'format' must be 'json' or a JSON schema, an object.")
    own = {"stream": body.stream, "return_token_ids": body.return_token_ids}
    return {"model": served_name(body.model, services), **own, "sampling": given, **fields}


def _checked(name: str, here: str, value: Any) -> Any:
    """The value of an option if it has the right type. Raises ``InvalidParameter``."""
    is_whole = OPTIONS[name].kind is int
    if is_whole and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int if is_whole else int | float):
        raise InvalidParameter("options", f"'options.{here}' must be {'a whole number' if is_whole else 'a number'}.")
    return value


def _limit(limit: Any) -> int:
    """``num_predict`` as ``max_tokens``: 0 and below are as many as fit. Raises ``InvalidParameter``."""
    if isinstance(limit, float) and limit.is_integer():
        limit = int(limit)
    if isinstance(limit, bool) or not isinstance(limit, int):
        raise InvalidParameter("options", "'options.num_predict' must be a number of tokens, or -1 for as many as fit.")
    return limit if limit > 0 else NO_LIMIT


def _thinking(think: bool | str | None, services: ModelServices) -> dict[str, Any]:
    """Fields of a chat completion body for ``think``. Raises ``InvalidParameter`` if the model cannot reason."""
    if think is None or think == "":
        return {}
    if think is not False and not services.message_format.can_reason:
        raise InvalidParameter("think", "This model does not support thinking.")
    if think is True:
        return {"chat_template_kwargs": thinking_switch(True, services.chat_template.source or "")}
    requested = think or "none"
    if effort(requested, services) is None:
        raise InvalidParameter("think", f"'think' must be true, false or one of {', '.join(EFFORTS)}.")
    return {"reasoning_effort": requested}


def with_images(content: Any, images: Any, where: str, services: ModelServices) -> Any:
    """The content of a message with images, which come first. Raises ``InvalidParameter``."""
    if not images:
        return content
    if not services.takes_images:
        what = "images are not supported: this model reads text only."
        raise UnsupportedParameter(where.partition("[")[0].partition(".")[0], f"'{where}': {what}")
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise InvalidParameter(where.partition("[")[0], f"'{where}' must be a list of images in base64.")
    urls = (image if image.startswith("data:") else f"data:;base64,{image}" for image in images)
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return [*parts, {"type": "text", "text": content}] if isinstance(content, str) and content else parts


def _messages(given: list[dict[str, Any]], services: ModelServices) -> list[dict[str, Any]]:
    """Messages as chat completions have them. Raises ``InvalidParameter``."""
    found = []
    for place, message in enumerate(given):
        where = f"messages[{place}]"
        content = with_images(message.get("content"), message.get("images"), f"{where}.images", services)
        converted = {"role": message.get("role"), "content": content}
        if calls := message.get("tool_calls"):
            converted["tool_calls"] = calls
        if message.get("thinking"):
            converted["reasoning_content"] = message["thinking"]
        if converted["role"] == "tool":
            converted |= {"name": message.get("tool_name"), "tool_call_id": message.get("tool_call_id")}
        found.append(converted)
    return found

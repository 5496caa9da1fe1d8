"""The body of a chat completion request: its own fields, and what they ask the engine for.

https://platform.openai.com/docs/api-reference/chat
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from starlette.requests import Request

from octavo.errors import InvalidParameter
from octavo.sampling_params import DEFAULTS, OPTIONS
from octavo.text.chat_messages import ImageMarks, normalise_messages
from octavo.text.conversation import Conversation
from octavo.text.reasoning_effort import Effort, effort_of
from octavo_server.admission import ClientRequest
from octavo_server.dialects.batches.files import file_reader
from octavo_server.dialects.openai import common_fields, kv_transfer
from octavo_server.dialects.openai.common_fields import (
    ACCEPTED,
    IGNORED,
    REFUSED,
    SAMPLING,
    GenerationFields,
    check_generation_fields,
    check_max_tokens,
    default_max_tokens,
    sampling_params,
    scheduling_fields,
)
from octavo_server.dialects.openai.constraints import (
    ToolUse,
    constraint,
    functions_use,
    message_constraints,
    tool_use,
)
from octavo_server.http.error_responses import UnsupportedParameter
from octavo_server.http.request_body import GATHERED, BodyDecoder
from octavo_server.services import ModelServices
from octavo_server.tenants.api_keys import caller_of

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PLAIN_KEYS = {"role", "content", "name"}
REFUSED_IN_CHAT: dict[str, tuple[Any, ...]] = REFUSED | {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "echo": (),
    "input_ids": (),
    "modalities": (["text"],),
    "suffix": (),
}
IGNORED_IN_CHAT: dict[str, tuple[Any, ...]] = IGNORED | {
    "include_reasoning": (True,),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
    "prediction": (),
    "reasoning": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}


class ChatBody(GenerationFields, kw_only=True):
    """A request for the next message of a conversation."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] = []
    add_special_tokens: bool = False
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    """``None`` = true, but false for a model whose chat template does not support tools: such models repeat calls."""
    reasoning_effort: str | None = None
    functions: list[dict[str, Any]] = []
    function_call: str | dict[str, Any] | None = None


decoder = BodyDecoder(ChatBody, REFUSED_IN_CHAT, ACCEPTED, IGNORED_IN_CHAT, SAMPLING)


class TemplateOptions(Protocol):
    """The fields of a body with options for the chat template."""

    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: dict[str, Any]


def refused_elsewhere(own: type[msgspec.Struct], accepted: frozenset[str]) -> dict[str, tuple[Any, ...]]:
    """Chat completion fields that a body of type ``own`` lacks: they are rejected by name, not ignored."""
    plain = [field for field in msgspec.structs.fields(ChatBody) if not field.required]
    defaults = {field.name: () if field.default is msgspec.NODEFAULT else (field.default,) for field in plain}
    del defaults[GATHERED]
    defaults |= {name: () if option.model_key else (DEFAULTS[name],) for name, option in OPTIONS.items()}
    own_names = {*own.__struct_fields__, *accepted, *IGNORED_IN_CHAT}
    return {name: nothing for name, nothing in (defaults | REFUSED_IN_CHAT).items() if name not in own_names}


def tools_of(body: ChatBody, services: ModelServices) -> ToolUse | None:
    """The tools and tool choice of a body. Raises ``InvalidParameter``."""
    if body.functions or body.function_call:
        if body.tools or body.tool_choice:
            raise InvalidParameter(
                "functions", "Either 'functions' or their successor, 'tools', can be given, not both."
            )
        return functions_use(body.functions, body.function_call)
    is_parallel = body.parallel_tool_calls
    return tool_use(
        body.tools, body.tool_choice, services.message_format.is_parallel if is_parallel is None else is_parallel
    )


def conversation(
    messages: list[dict[str, Any]],
    options: TemplateOptions,
    services: ModelServices,
    tools: ToolUse | None = None,
    **template_kwargs: Any,
) -> Conversation:
    """The conversation of a body. Raises ``InvalidParameter``, also when the model does not support chat."""
    services.need_tokenizer("messages")
    check_roles(messages)
    return Conversation(
        messages,
        services.chat_template,
        None if tools is None else tools.given,
        {**template_kwargs, **options.chat_template_kwargs},
        services.message_format.write_calls,
        options.add_generation_prompt,
        options.continue_final_message,
        services.admission.image_text,
    )


def passed_over(messages: list[dict[str, Any]], services: ModelServices) -> list[str]:
    """What of the messages has no meaning here. Raises ``InvalidParameter``."""
    check_roles(messages)
    named: list[str] = []
    images = ImageMarks("", services.takes) if services.takes else None
    if not all(message.keys() <= PLAIN_KEYS and isinstance(message.get("content"), str) for message in messages):
        normalise_messages(messages, named, images)
    return named


def check_roles(messages: list[dict[str, Any]]) -> None:
    """Raise ``InvalidParameter`` for a role that the API does not have."""
    for place, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise InvalidParameter("messages", f"'messages[{place}].role' must be one of {', '.join(ROLES)}.")


def prompt_of(body: ChatBody, services: ModelServices, tools: ToolUse | None) -> Conversation:
    """The conversation of a body, which renders its prompt. Raises ``InvalidParameter``."""
    asked = effort(body.reasoning_effort, services)
    variables = {**({} if asked is None else asked.variables), **_documents(body, services)}
    return conversation(body.messages, body, services, tools, **variables)


def client_request(body: ChatBody, services: ModelServices, request: Request, tools: ToolUse | None) -> ClientRequest:
    """The body as a request for admission. Raises ``RequestError``."""
    check_generation_fields(body, services)
    field, grammar = _grammar(body, services, tools)
    max_tokens, prompt = _max_tokens(body), prompt_of(body, services, tools)
    asked = effort(body.reasoning_effort, services)
    if asked is not None and asked.budget is not None:
        body.sampling = {"thinking_token_budget": asked.budget, **body.sampling}
    return ClientRequest(
        **scheduling_fields(body, services, request),
        prompts=[prompt],
        prompt_field="messages",
        params=sampling_params(body, services, max_tokens, _logprobs(body, services), body.prompt_logprobs),
        default_max_tokens=default_max_tokens(services, max_tokens),
        add_special_tokens=body.add_special_tokens,
        grammar=grammar,
        grammar_field=field,
        transfer=None if body.kv_transfer_params is None else kv_transfer.kv_transfer(body, services),
        read_file=file_reader(services.server.store, caller_of(request).name) if prompt.images else None,
        shown_ids=services.message_format.shown_ids,
        answer_marks=services.message_format.answer_marks(body.continue_final_message),
    )


def _grammar(body: ChatBody, services: ModelServices, tools: ToolUse | None) -> tuple[str, Callable[[str], str] | None]:
    """The field that constrains the message, and a function from the prompt to the message's grammar, if any."""
    format, asked_for = services.message_format, constraint(body)
    reads_calls = format.tools is not None and services.config.server.enable_auto_tool_choice
    if tools is not None and not tools.must_call and not reads_calls:
        message = (
            "'tools' with 'tool_choice' auto are not supported: this server was started with --tool-call-parser none "
            "or with --no-enable-auto-tool-choice."
        )
        raise UnsupportedParameter("tools", message)
    expected = message_constraints(None if asked_for is None else asked_for.form, tools)
    if expected is None:
        return "", None
    field = "tools" if asked_for is None or expected.form is None else asked_for.field
    return field, lambda prompt: format.grammar(expected, prompt, body.continue_final_message)


def effort(requested: str | None, services: ModelServices) -> Effort | None:
    """What a reasoning effort comes to; ``None`` if it has no meaning for the model."""
    if requested is None:
        return Effort({})
    return effort_of(requested, services.chat_template.source or "", services.message_format.can_reason)


def without_effect(body: ChatBody, services: ModelServices) -> list[str]:
    """Fields that are ignored in this request."""
    named = [*common_fields.without_effect(body, services), *passed_over(body.messages, services)]
    return named if effort(body.reasoning_effort, services) is not None else [*named, "reasoning_effort"]


def _documents(body: ChatBody, services: ModelServices) -> dict[str, Any]:
    """The template variable for ``documents``. Raises ``UnsupportedParameter``."""
    if body.documents and "documents" not in (services.chat_template.source or ""):
        message = "'documents' is not supported: this model's chat template does not know them."
        raise UnsupportedParameter("documents", message)
    return {"documents": body.documents} if body.documents else {}


def _max_tokens(body: ChatBody) -> int | None:
    """``max_completion_tokens`` takes precedence over the older ``max_tokens``."""
    check_max_tokens("max_tokens", body.max_tokens)
    check_max_tokens("max_completion_tokens", body.max_completion_tokens)
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _logprobs(body: ChatBody, services: ModelServices) -> int | None:
    if body.logprob_token_ids:
        body.logprobs, body.top_logprobs = True, len(body.logprob_token_ids)
        return 0
    top, most = body.top_logprobs or 0, services.engine.info.max_logprobs
    if not 0 <= top <= most:
        raise InvalidParameter("top_logprobs", f"'top_logprobs' must be from 0 to {most}.")
    if top and not body.logprobs:
        raise InvalidParameter("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true.")
    return top if body.logprobs else None

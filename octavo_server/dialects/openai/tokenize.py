"""POST /tokenize and /detokenize, GET /tokenizer_info, in vLLM's format."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidParameter
from octavo.text.tokenizer import check_in_vocabulary
from octavo_server.admission import PromptSource
from octavo_server.dialects.batches.files import file_reader
from octavo_server.dialects.openai.chat_body import conversation, passed_over
from octavo_server.dialects.openai.common_fields import ACCEPTED
from octavo_server.dialects.openai.constraints import tool_use
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import MissingParameter
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import json_response
from octavo_server.services import ModelServices, asked_services_of, server_of
from octavo_server.tenants.api_keys import caller_of


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Text to turn into token ids: a prompt, or a conversation."""

    model: str = ""
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for a conversation, whose template writes them."""
    return_token_strs: bool = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: list[dict[str, Any]] = []


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Token ids to turn into text."""

    model: str = ""
    tokens: list[int]


tokenize_decoder = BodyDecoder(TokenizeBody, {"chat_template": ()}, ACCEPTED | {"user"})
detokenize_decoder = BodyDecoder(DetokenizeBody, {}, ACCEPTED | {"user"})


async def tokenize(request: Request) -> Response:
    services, body, headers = await server_of(request).read(request, tokenize_decoder, _without_effect)
    services.check_model(body.model)
    tokenizer = services.need_tokenizer("prompt" if body.messages is None else "messages")
    source, field, adds_special = _source(body, services)
    if body.add_special_tokens is not None:
        adds_special = body.add_special_tokens
    caller = caller_of(request)
    read_file = file_reader(services.server.store, caller.name)
    prompt = await services.admission.encode(source, field, adds_special, caller, read_file)
    result: dict[str, Any] = {
        "count": len(prompt.tokens),
        "max_model_len": services.engine.info.max_model_len,
        "tokens": prompt.tokens,
        "token_strs": None,
    }
    if body.return_token_strs:
        result["token_strs"] = [tokenizer.token_text(token) for token in prompt.tokens]
    return json_response(result, headers)


def _without_effect(body: TokenizeBody, services: ModelServices) -> list[str]:
    return [] if body.messages is None else passed_over(body.messages, services)


def _source(body: TokenizeBody, services: ModelServices) -> tuple[PromptSource, str, bool]:
    """The text, its field's name, and the default of ``add_special_tokens``."""
    if body.messages is not None and body.prompt is not None:
        raise InvalidParameter("messages", "'prompt' and 'messages' cannot both be given.")
    if body.messages is not None:
        tools = tool_use(body.tools, None, services.message_format.is_parallel)
        return conversation(body.messages, body, services, tools), "messages", False
    if body.prompt is None:
        raise MissingParameter("prompt")
    return body.prompt, "prompt", True


async def detokenize(request: Request) -> Response:
    services, body, headers = await server_of(request).read(request, detokenize_decoder)
    services.check_model(body.model)
    tokenizer = services.need_tokenizer("tokens")
    check_in_vocabulary(body.tokens, "tokens", services.engine.info)
    caller = caller_of(request)
    with services.admission.reserved(caller):
        async with services.admission.tokenising.place(caller.name):
            text = await asyncio.to_thread(tokenizer.decode, body.tokens, False)
    return json_response({"prompt": text}, headers)


async def tokenizer_info(request: Request) -> Response:
    """Tokenizer metadata, for evaluation harnesses that use this server's tokenizer."""
    services = asked_services_of(request)
    tokenizer = services.need_tokenizer("tokenizer_info")
    info = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **dict.fromkeys(("bos_token", "eos_token", "pad_token")),
        **tokenizer.special_tokens,
        "model_max_length": services.engine.info.max_model_len,
        "chat_template": services.chat_template.source,
    }
    return json_response(info, {})


ENDPOINTS = [
    Endpoint("GET", "/tokenizer_info", tokenizer_info, "Special tokens and chat template, as in tokenizer_config.json"),
    Endpoint("POST", "/tokenize", tokenize, "Turn text into token ids", TokenizeBody),
    Endpoint("POST", "/detokenize", detokenize, "Turn token ids into text", DetokenizeBody),
]

"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, compatible with vLLM; and by the paths that SGLang and
trainers have for them.

https://docs.vllm.ai/en/latest/features/lora.html
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import ConfigError, InvalidParameter, ModelNotFound
from octavo.weights.adapter_files import digest
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import UnsupportedParameter, printable
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import json_response
from octavo_server.services import ModelServices, server_of

MAX_NAME = 256


class LoadBody(msgspec.Struct, kw_only=True):
    """An adapter to load: its name in the API, and its folder on the server."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadBody(msgspec.Struct, kw_only=True):
    """An adapter to unload."""

    lora_name: str


load_decoder = BodyDecoder(LoadBody, {}, frozenset({"base_model_name"}))
unload_decoder = BodyDecoder(UnloadBody, {}, frozenset({"lora_int_id"}))


async def load(request: Request) -> Response:
    """Trainers load each version of an adapter under one name, by a path of their own, without ``load_inplace``."""
    services, body, headers = await server_of(request).read(request, load_decoder)
    _check_allowed(services)
    name, path = body.lora_name, body.lora_path
    if not 1 <= len(name) <= MAX_NAME or name != name.strip() or set(name) & set(",=") or not name.isprintable():
        message = (
            f"'lora_name' must have 1 to {MAX_NAME} printable characters, no spaces around it, and no comma or '='."
        )
        raise InvalidParameter("lora_name", message)
    replaces = body.load_inplace or request.url.path in TRAINERS_PATHS
    if name in (services.model_names if replaces else services.served_names):
        raise InvalidParameter("lora_name", f"There is a model called '{printable(name)}' already.")
    if not path or "," in path or path != path.strip() or not path.isprintable():
        message = "'lora_path' must be a folder, of printable characters without a comma or spaces around them."
        raise InvalidParameter("lora_path", message)
    try:
        content = await asyncio.to_thread(digest, path)
    except ConfigError as error:
        raise InvalidParameter("lora_path", f"'lora_path' cannot be read: {printable(str(error))}.") from None
    await services.engine.load_adapter(name, path, content, replaces)
    answer = {"object": "model", "id": name, "parent": services.model_name, "root": path}
    return json_response({**answer, "success": True}, headers)


async def unload(request: Request) -> Response:
    services, body, headers = await server_of(request).read(request, unload_decoder)
    _check_allowed(services)
    if body.lora_name not in services.engine.adapters.known:
        raise ModelNotFound(f"There is no adapter '{printable(body.lora_name)}'.", param="lora_name")
    await services.engine.unload_adapter(body.lora_name)
    return json_response({"object": "model", "id": body.lora_name, "deleted": True, "success": True}, headers)


TRAINERS_PATHS = ("/load_lora_adapter", "/skyrl/v1/load_lora_adapter")
_REPLACES = "Load a LoRA adapter, in place of one of its name: for trainers"
ENDPOINTS = [
    Endpoint("POST", "/v1/load_lora_adapter", load, "Load a LoRA adapter", LoadBody),
    *(Endpoint("POST", path, load, _REPLACES, LoadBody, name=path.strip("/")) for path in TRAINERS_PATHS),
    Endpoint("POST", "/v1/unload_lora_adapter", unload, "Forget a LoRA adapter", UnloadBody),
    Endpoint("POST", "/unload_lora_adapter", unload, "As `/v1/unload_lora_adapter`", UnloadBody, name="unload_lora"),
]


def _check_allowed(services: ModelServices) -> None:
    """Reject the request unless clients may name folders of the server."""
    if not (services.config.server.allow_runtime_lora_updating and services.engine.adapters.is_enabled):
        message = "Adapters can be changed on a server with --enable-lora and --allow-runtime-lora-updating."
        raise UnsupportedParameter("lora_name", message)

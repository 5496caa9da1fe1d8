"""GET /api/tags, /api/ps and /api/version, POST /api/show, /api/pull, /api/embed and /api/embeddings: Ollama's API."""

from __future__ import annotations

import datetime
import hashlib
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.text.embedding_vectors import check_dimensions
from octavo_server.dialects.ollama.answer import ERRORS, LineStream
from octavo_server.dialects.ollama.body import ACCEPTED, served_name
from octavo_server.dialects.openai.completions import prompts_of
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import encode, json_response
from octavo_server.pooling_requests import PoolingCall, num_tokens, numbers, read
from octavo_server.services import ModelServices, server_of

API_VERSION = "0.12.6"
"""The release of Ollama whose API this is; clients ask for it to know what they may use."""
FOREVER = "2318-01-01T00:00:00Z"
"""When an idle model is unloaded."""


class ShowBody(msgspec.Struct, kw_only=True):
    """The body of a request for what is known about a model."""

    model: str = ""
    name: str = ""
    """The older name of ``model``."""
    verbose: bool = False


class PullBody(msgspec.Struct, kw_only=True):
    """The body of a request to download a model."""

    model: str = ""
    name: str = ""
    """The older name of ``model``."""
    stream: bool = True
    insecure: bool = False


class EmbedBody(msgspec.Struct, kw_only=True):
    """The body of a request for the vectors of one or several texts."""

    model: str
    input: str | list[str]
    dimensions: int | None = None
    options: dict[str, Any] = {}


class EmbeddingsBody(msgspec.Struct, kw_only=True):
    """The body of a request for the vector of a text."""

    model: str
    prompt: str
    options: dict[str, Any] = {}


show_decoder = BodyDecoder(ShowBody)
pull_decoder = BodyDecoder(PullBody)
embed_decoder = BodyDecoder(EmbedBody, {}, ACCEPTED)
embeddings_decoder = BodyDecoder(EmbeddingsBody, {}, ACCEPTED)


async def version(request: Request) -> Response:
    return json_response({"version": API_VERSION}, {})


async def list_tags(request: Request) -> Response:
    every = server_of(request).models
    return json_response({"models": [_model(each, name) for each in every for name in each.served_names]}, {})


async def list_loaded(request: Request) -> Response:
    awake = [each for each in server_of(request).models if not each.engine.sleep_level]
    return json_response({"models": [_loaded(each, name) for each in awake for name in each.served_names]}, {})


def _loaded(services: ModelServices, name: str) -> dict[str, Any]:
    on_gpu = {} if services.engine.info.device == "cpu" else {"size_vram": _num_bytes(services)}
    loaded = {"expires_at": FOREVER, "size_vram": 0, **on_gpu, "context_length": services.engine.info.max_model_len}
    return {**_model(services, name), **loaded}


async def show(request: Request) -> Response:
    services, body, headers = await server_of(request).read(request, show_decoder)
    services.check_model(served_name(body.model or body.name, services))
    info, template = services.engine.info, services.chat_template.source or ""
    can_generate = "generate" in info.tasks
    known = {
        "completion": can_generate,
        "tools": can_generate and services.message_format.tools is not None,
        "thinking": can_generate and services.message_format.can_reason,
        "embedding": "embed" in info.tasks,
    }
    answer = {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in info.sampling_defaults.items()),
        "template": template,
        "details": _details(services),
        "model_info": {
            "general.architecture": info.architecture,
            "general.parameter_count": info.num_parameters,
            f"{info.architecture}.context_length": info.max_model_len,
            f"{info.architecture}.embedding_length": info.embedding_size,
        },
        "capabilities": [name for name, can in known.items() if can],
        "modified_at": _created(services),
    }
    return json_response(answer, headers)


async def pull(request: Request) -> Response:
    """The served model is there; others cannot be downloaded into a running server."""
    services, body, headers = await server_of(request).read(request, pull_decoder)
    services.check_model(served_name(body.model or body.name, services))
    done = {"status": "success"}
    if not body.stream:
        return json_response(done, headers)
    lines = b"".join(encode(line) + b"\n" for line in ({"status": "pulling manifest"}, done))
    return Response(lines, headers={**LineStream.CONTENT_HEADERS, **headers})


async def embed(request: Request) -> Response:
    started = time.monotonic_ns()
    services, body, headers = await read(request, embed_decoder)
    info = services.engine.info
    check_dimensions(body.dimensions, info.embedding_size, info.pooling)
    model = served_name(body.model, services)
    services.check_model(model)
    texts: str | list[int | str | list[int]] = body.input if isinstance(body.input, str) else [*body.input]
    call = PoolingCall(services, request, model)
    choices = await call.ask("embed", prompts_of(texts, "input") if texts else [], "input")
    answer = {
        "model": body.model,
        "embeddings": [numbers(services, choice, dimensions=body.dimensions).tolist() for choice in choices],
        "total_duration": time.monotonic_ns() - started,
        "load_duration": 0,
        "prompt_eval_count": num_tokens(choices),
    }
    return json_response(answer, headers)


async def embeddings(request: Request) -> Response:
    services, body, headers = await read(request, embeddings_decoder)
    model = served_name(body.model, services)
    services.check_model(model)
    choices = await PoolingCall(services, request, model).ask("embed", prompts_of(body.prompt, "prompt"), "prompt")
    return json_response({"embedding": numbers(services, choices[0]).tolist()}, headers)


ENDPOINTS = [
    Endpoint("GET", "/api/version", version, "The release of Ollama whose API this is", errors=ERRORS),
    Endpoint("GET", "/api/tags", list_tags, "List the models, as Ollama does", errors=ERRORS),
    Endpoint("GET", "/api/ps", list_loaded, "List the loaded models, as Ollama does", errors=ERRORS),
    Endpoint("POST", "/api/show", show, "Describe a model, as Ollama does", ShowBody, errors=ERRORS),
    Endpoint("POST", "/api/pull", pull, "Download a model: the served one is there already", PullBody, errors=ERRORS),
    Endpoint("POST", "/api/embed", embed, "Turn texts into vectors, as Ollama does", EmbedBody, errors=ERRORS),
    Endpoint(
        "POST", "/api/embeddings", embeddings, "Turn a text into a vector, as Ollama did", EmbeddingsBody, errors=ERRORS
    ),
]


def _model(services: ModelServices, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _created(services),
        "size": _num_bytes(services),
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(services),
    }


def _details(services: ModelServices) -> dict[str, Any]:
    info = services.engine.info
    most_bytes = max(info.weight_bytes, key=lambda name: info.weight_bytes[name], default=info.dtype)
    return {
        "parent_model": "",
        "format": "gguf" if services.config.model.model.endswith(".gguf") else "safetensors",
        "family": info.architecture,
        "families": [info.architecture],
        "parameter_size": f"{info.num_parameters / 1e9:.1f}B",
        "quantization_level": most_bytes,
    }


def _num_bytes(services: ModelServices) -> int:
    return services.engine.info.memory.get("weights", 0)


def _created(services: ModelServices) -> str:
    return datetime.datetime.fromtimestamp(services.created, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

"""Weights that change while the server serves, as reinforcement learning does: routes of vLLM and of SGLang.

They load checkpoints below ``--weight-updates-dir`` alone, in safetensors or GGUF. The engine process that has the new
weights replaces the one that had the old ones; running requests go on with them from where they are.
"""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import ConfigError, InvalidParameter
from octavo.server_settings import ServerSettings
from octavo_server.engines.engine_client import SleepMode
from octavo_server.http.body_decoder import BodyDecoder
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.errors import UnsupportedParameter, printable
from octavo_server.http.middleware import LOOPBACK
from octavo_server.http.sse import json_response
from octavo_server.services import ModelServices, asked_services_of
from octavo_server.tenants.api_keys import Keys

MODES: tuple[SleepMode, ...] = typing.get_args(SleepMode)
MAX_VERSION = 128
INFORMATIVE = frozenset(("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"))
"""Fields of ``config.json`` that may differ between a model and its update."""


class UpdateBody(msgspec.Struct, kw_only=True):
    """The body of a request to take the weights of a folder."""

    weight_dir: str
    weight_version: str | None = None
    mode: str = "keep"


class DiskUpdateBody(msgspec.Struct, kw_only=True):
    """The body of SGLang's request to take the weights of a folder."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False


class PauseBody(msgspec.Struct, kw_only=True):
    """The body of SGLang's request to pause: ``abort``, ``retract`` or ``in_place``."""

    mode: str = "abort"


_WITHOUT_EFFECT = ("load_format", "flush_cache", "is_async", "torch_empty_cache", "keep_pause", "recapture_cuda_graph")
update_decoder = BodyDecoder(UpdateBody, {}, frozenset())
disk_decoder = BodyDecoder(DiskUpdateBody, {}, frozenset(_WITHOUT_EFFECT))
pause_decoder = BodyDecoder(PauseBody, {}, frozenset())


def check_settings(settings: ServerSettings, keys: Keys) -> None:
    """Raise ``ConfigError`` if strangers could change the weights."""
    if settings.weight_updates_dir is not None and settings.host not in LOOPBACK and not keys.has_admin:
        raise ConfigError("weight_updates_dir: needs an admin_key, as host is not a loopback address")


async def pause(request: Request) -> Response:
    engine = _services(request).engine
    await engine.pause(_mode(request.query_params.get("mode", "abort")))
    if request.query_params.get("clear_cache", "true").lower() not in ("0", "false"):
        await engine.clear_prefix_cache()
    return json_response({"status": "paused", "is_paused": engine.is_paused}, {})


async def pause_generation(request: Request) -> Response:
    """SGLang's ``retract`` and ``in_place`` both continue later from where the requests are."""
    services, body = _services(request), PauseBody()
    if request.headers.get("content-length", "0") != "0":
        _, body, _ = await services.server.read(request, pause_decoder)
    await services.engine.pause("abort" if body.mode == "abort" else "keep")
    return json_response({"status": "ok", "message": "Generation paused successfully."}, {})


async def resume(request: Request) -> Response:
    engine = _services(request).engine
    engine.resume()
    return json_response({"status": "resumed", "is_paused": engine.is_paused}, {})


async def is_paused(request: Request) -> Response:
    return json_response({"is_paused": _services(request).engine.is_paused}, {})


async def update_weights(request: Request) -> Response:
    services = _services(request)
    _, body, headers = await services.server.read(request, update_decoder)
    mode = _mode(body.mode)
    version = await _update(services, "weight_dir", body.weight_dir, body.weight_version, mode)
    return json_response({"status": "updated", "weight_version": version}, headers)


async def update_weights_from_disk(request: Request) -> Response:
    services = _services(request)
    _, body, headers = await services.server.read(request, disk_decoder)
    mode: SleepMode = "abort" if body.abort_all_requests else "keep"
    version = await _update(services, "model_path", body.model_path, body.weight_version, mode)
    answer = {"success": True, "message": "Succeeded to update model weights.", "weight_version": version}
    return json_response({**answer, "num_paused_requests": services.engine.num_live}, headers)


async def reset_prefix_cache(request: Request) -> Response:
    await _services(request).engine.clear_prefix_cache()
    return json_response({"status": "ok", "success": True}, {})


async def abort_requests(request: Request) -> Response:
    engine = _services(request).engine
    was_paused = engine.is_paused
    await engine.pause("abort")
    if not was_paused:
        engine.resume()
    return json_response({"status": "ok"}, {})


async def weight_info(request: Request) -> Response:
    services = _services(request)
    parallel = services.config.model.tensor_parallel_size * services.config.server.data_parallel_size
    return json_response({"weight_version": services.engine.weight_version, "world_size": parallel}, {})


_NEEDS = "; needs `--weight-updates-dir`"
ENDPOINTS = [
    Endpoint("POST", "/pause", pause, f"Compute nothing until `/resume`{_NEEDS}"),
    Endpoint("POST", "/resume", resume, f"Go on after `/pause`{_NEEDS}"),
    Endpoint("GET", "/is_paused", is_paused, f"Whether the server is paused{_NEEDS}"),
    Endpoint("POST", "/update_weights", update_weights, f"Take the weights of a folder{_NEEDS}", UpdateBody),
    Endpoint("POST", "/reset_prefix_cache", reset_prefix_cache, f"Empty the prefix cache{_NEEDS}"),
    Endpoint("POST", "/abort_requests", abort_requests, f"End all running requests{_NEEDS}"),
    Endpoint("GET", "/get_world_size", weight_info, f"Number of ranks, and the version of the weights{_NEEDS}"),
    Endpoint("GET", "/weight_info", weight_info, f"Number of ranks, and the version of the weights{_NEEDS}"),
    Endpoint("POST", "/pause_generation", pause_generation, f"SGLang's `/pause`{_NEEDS}"),
    Endpoint("POST", "/continue_generation", resume, f"SGLang's `/resume`{_NEEDS}"),
    Endpoint(
        *("POST", "/update_weights_from_disk", update_weights_from_disk),
        *(f"SGLang's `/update_weights`{_NEEDS}", DiskUpdateBody),
    ),
    Endpoint("GET", "/flush_cache", reset_prefix_cache, f"SGLang's `/reset_prefix_cache`{_NEEDS}"),
    Endpoint("POST", "/flush_cache", reset_prefix_cache, f"SGLang's `/reset_prefix_cache`{_NEEDS}"),
    Endpoint("POST", "/abort_request", abort_requests, f"SGLang's `/abort_requests`{_NEEDS}"),
]


def _services(request: Request) -> ModelServices:
    services = asked_services_of(request)
    if services.config.server.weight_updates_dir is None:
        message = f"{request.url.path} is for a server started with --weight-updates-dir."
        raise UnsupportedParameter("weight_updates_dir", message)
    return services


def _mode(value: str) -> SleepMode:
    for mode in MODES:
        if mode == value:
            return mode
    raise InvalidParameter("mode", f"'mode' must be one of {', '.join(MODES)}.")


async def _update(services: ModelServices, field: str, folder: str, version: str | None, mode: SleepMode) -> str:
    """Have the engine take the weights of a folder; return their version. Raises ``InvalidParameter``."""
    path = _allowed(services, field, folder)
    name = path.name if version is None else version
    if not name or len(name) > MAX_VERSION or not name.isprintable():
        raise InvalidParameter("weight_version", f"'weight_version' must have 1 to {MAX_VERSION} printable characters.")
    _check_same_model(Path(services.config.model.model), path, field)
    await services.engine.update_weights(str(path), name, mode)
    return name


def _allowed(services: ModelServices, field: str, folder: str) -> Path:
    base = Path(services.config.server.weight_updates_dir or "").expanduser().resolve()
    try:
        path = (base / folder).resolve()  # an absolute one replaces the base
        is_there = path.is_relative_to(base) and path.is_dir()
    except (OSError, ValueError):
        is_there = False
    if not is_there:
        raise InvalidParameter(field, f"'{field}' must be a folder below that of --weight-updates-dir.")
    return path


def _check_same_model(old: Path, new: Path, field: str) -> None:
    """Raise ``InvalidParameter`` unless two checkpoints have the same configuration."""
    try:
        before, after = (json.loads((folder / "config.json").read_text()) for folder in (old, new))
    except (OSError, ValueError, RecursionError):
        raise InvalidParameter(
            field, f"'{field}' and the model that is served must have a readable config.json."
        ) from None
    if not isinstance(before, dict) or not isinstance(after, dict):
        raise InvalidParameter(field, f"'{field}' has a config.json that is no object.")
    differing = _differing(before, after)
    if differing:
        names = ", ".join(printable(name) for name in differing)
        raise InvalidParameter(field, f"'{field}' has a config.json that differs from that of the model in: {names}.")


def _differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return sorted(name for name in (before.keys() | after.keys()) - INFORMATIVE if before.get(name) != after.get(name))

"""Weights that change while the server serves, as reinforcement learning does: routes of vLLM and of SGLang.

They load checkpoints below ``--weight-updates-dir`` alone, in safetensors or GGUF, or tensors that a trainer sends. The
weights are written over the earlier ones between two steps; where a model does not allow that, an engine process with
the new ones replaces the other. Running requests go on with them from where they are.
"""

from __future__ import annotations

import hashlib
import json
import typing
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import ConfigError, InvalidParameter
from octavo.server_settings import ServerSettings
from octavo.types import DropTensors, JoinGroup, ReceiveTensors
from octavo_server.engines.engine_client import SleepMode
from octavo_server.http.endpoint import Endpoint
from octavo_server.http.error_responses import MissingParameter, UnsupportedParameter, printable
from octavo_server.http.middleware import LOOPBACK
from octavo_server.http.request_body import BodyDecoder
from octavo_server.http.response import json_response
from octavo_server.services import Body, ModelServices, asked_services_of, server_of
from octavo_server.tenants.api_keys import Keys

MODES: tuple[SleepMode, ...] = typing.get_args(SleepMode)
MAX_VERSION = 128
INFORMATIVE = frozenset(("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"))
"""Fields of ``config.json`` that may differ between a model and its update."""


class Announced(msgspec.Struct, kw_only=True):
    """Tensors that a trainer broadcasts next, in this order."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[tuple[int, ...]]
    packed: bool | None = None


class TrainerGroup(msgspec.Struct, kw_only=True):
    """The group in which a trainer broadcasts: its rank 0 listens at this address."""

    master_address: str
    master_port: int
    rank_offset: int = 1
    world_size: int
    packed: bool = False


class UpdateBody(msgspec.Struct, kw_only=True):
    """The body of a request to take the weights of a folder, or to receive some."""

    weight_dir: str | None = None
    update_info: Announced | None = None
    weight_version: str | None = None
    mode: str = "keep"


class InitBody(msgspec.Struct, kw_only=True):
    """The body of a request to join the trainer's group."""

    init_info: TrainerGroup


class FinishBody(msgspec.Struct, kw_only=True):
    """The body of a request to take the weights that were received."""

    weight_version: str | None = None
    mode: str = "keep"


class SglangGroupBody(msgspec.Struct, kw_only=True):
    """The body of SGLang's request to join the trainer's group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str | None = None


class SglangTensorsBody(msgspec.Struct, kw_only=True):
    """The body of SGLang's request to take tensors that are broadcast next."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    weight_version: str | None = None
    abort_all_requests: bool = False


class DiskUpdateBody(msgspec.Struct, kw_only=True):
    """The body of SGLang's request to take the weights of a folder."""

    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False


class WeightTransfer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The setting ``weight_transfer_config``."""

    backend: typing.Literal["nccl", "gloo", "ipc"]


class PauseBody(msgspec.Struct, kw_only=True):
    """The body of SGLang's request to pause: ``abort``, ``retract`` or ``in_place``."""

    mode: str = "abort"


class SglangAbortBody(msgspec.Struct, kw_only=True):
    """The body of a request to end others: all, unless it names some; ``rid`` is SGLang's name of one."""

    request_ids: list[str] | None = None
    rid: str = ""


class CheckBody(msgspec.Struct, kw_only=True):
    """The body of a request for checksums, or to compare them with earlier ones."""

    action: str
    baseline: dict[str, str] | None = None
    checksums: list[dict[str, str]] = []


_WITHOUT_EFFECT = ("load_format", "flush_cache", "is_async", "torch_empty_cache", "keep_pause", "recapture_cuda_graph")
update_decoder = BodyDecoder(UpdateBody)
init_decoder = BodyDecoder(InitBody)
finish_decoder = BodyDecoder(FinishBody)
sglang_group_decoder = BodyDecoder(SglangGroupBody)
sglang_tensors_decoder = BodyDecoder(SglangTensorsBody, {}, frozenset(("group_name", "flush_cache", "load_format")))
disk_decoder = BodyDecoder(DiskUpdateBody, {}, frozenset(_WITHOUT_EFFECT))
pause_decoder = BodyDecoder(PauseBody)
check_decoder = BodyDecoder(CheckBody)
abort_decoder = BodyDecoder(SglangAbortBody, {}, frozenset(("abort_all",)))


def check_settings(settings: ServerSettings, keys: Keys) -> None:
    """Raise ``ConfigError`` if strangers could change the weights."""
    for name in ("weight_updates_dir", "weight_transfer_config"):
        if getattr(settings, name) is not None and settings.host not in LOOPBACK and not keys.has_admin:
            raise ConfigError(f"{name}: needs an admin_key, as host is not a loopback address")
    _backend(settings)


async def pause(request: Request) -> Response:
    engine = _services(request).engine
    await engine.pause(_mode(request.query_params.get("mode", "abort")))
    if request.query_params.get("clear_cache", "true").lower() not in ("0", "false"):
        await engine.clear_prefix_cache()
    return json_response({"status": "paused", "is_paused": engine.is_paused}, {})


async def _read_if_any(request: Request, decoder: BodyDecoder[Body], otherwise: Body) -> Body:
    """The body; ``otherwise`` of a request without one. Raises ``RequestError``."""
    if request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers:
        return otherwise
    return (await server_of(request).read(request, decoder))[1]


async def pause_generation(request: Request) -> Response:
    """SGLang's ``retract`` and ``in_place`` both continue later from where the requests are."""
    services = _services(request)
    body = await _read_if_any(request, pause_decoder, PauseBody())
    await services.engine.pause("abort" if body.mode == "abort" else "keep")
    return json_response({"status": "ok", "message": "Generation paused successfully."}, {})


async def resume(request: Request) -> Response:
    """What was received in parts meanwhile, as from SGLang's trainers, is taken first."""
    engine = _services(request).engine
    if engine.is_paused and engine.has_received:
        await engine.take_weights(None)
    engine.resume()
    return json_response({"status": "resumed", "is_paused": engine.is_paused}, {})


async def is_paused(request: Request) -> Response:
    return json_response({"is_paused": _services(request).engine.is_paused}, {})


async def update_weights(request: Request) -> Response:
    services = _services(request)
    _, body, headers = await services.server.read(request, update_decoder)
    mode = _mode(body.mode)
    if (info := body.update_info) is not None:
        await services.engine.order_weights(_tensors(info.names, info.dtype_names, info.shapes, info.packed))
        return json_response({"status": "received"}, headers)
    if body.weight_dir is None:
        raise MissingParameter("weight_dir")
    version = await _update(services, "weight_dir", body.weight_dir, body.weight_version, mode)
    return json_response({"status": "updated", "weight_version": version}, headers)


async def init_weight_transfer_engine(request: Request) -> Response:
    services = _services(request)
    _, body, headers = await services.server.read(request, init_decoder)
    info = body.init_info
    group = JoinGroup(
        info.master_address,
        info.master_port,
        info.rank_offset,
        info.world_size,
        _asked_backend(services),
        is_packed=info.packed,
    )
    await services.engine.order_weights(group)
    return json_response({"message": "Weight transfer initialized"}, headers)


async def start_weight_update(request: Request) -> Response:
    await _services(request).engine.order_weights(DropTensors())
    return json_response({"message": "Weight update started"}, {})


async def finish_weight_update(request: Request) -> Response:
    services = _services(request)
    body = await _read_if_any(request, finish_decoder, FinishBody())
    version = await services.engine.take_weights(_version(body.weight_version), _mode(body.mode))
    return json_response({"message": "Weight update finished", "weight_version": version}, {})


async def init_weights_update_group(request: Request) -> Response:
    services = _services(request)
    _, body, headers = await services.server.read(request, sglang_group_decoder)
    backend = body.backend or _asked_backend(services)
    group = JoinGroup(
        body.master_address, body.master_port, body.rank_offset, body.world_size, backend, body.group_name
    )
    await services.engine.order_weights(group)
    return json_response({"success": True, "message": "Succeeded to initialize the group."}, headers)


async def update_weights_from_distributed(request: Request) -> Response:
    """What comes while the server is paused is taken when it goes on, as trainers send a model in parts."""
    services = _services(request)
    _, body, headers = await services.server.read(request, sglang_tensors_decoder)
    engine = services.engine
    await engine.order_weights(_tensors(body.names, body.dtypes, body.shapes, None))
    if not engine.is_paused:
        await engine.take_weights(_version(body.weight_version), "abort" if body.abort_all_requests else "keep")
    return json_response({"success": True, "message": "Succeeded to receive the weights."}, headers)


async def destroy_weights_update_group(request: Request) -> Response:
    await _services(request).engine.order_weights(DropTensors(leaves_group=True))
    return json_response({"success": True, "message": "Succeeded to leave the group."}, {})


async def server_info(request: Request) -> Response:
    """In the form of vLLM's, as far as trainers read it, and of SGLang's, as far as they and its router do."""
    services = asked_services_of(request)
    backend, info = _backend(services.config.server), services.engine.info
    config = {
        "weight_transfer_config": None if backend is None else {"backend": backend},
        "model_config": {
            "model": services.engine.metrics.model_name,
            "max_model_len": info.max_model_len,
            "logprobs_mode": services.config.model.logprobs_mode,
            "max_logprobs": info.max_logprobs,
        },
        "parallel_config": {
            "tensor_parallel_size": info.tensor_parallel_size,
            "data_parallel_size": services.config.server.data_parallel_size,
        },
    }
    model = services.config.model
    sglang = {
        "served_model_name": services.model_name,
        "model_path": model.model,
        "tokenizer_path": model.tokenizer or model.model,
        "tp_size": info.tensor_parallel_size,
        "dtype": model.dtype,
        "enable_memory_saver": services.config.server.enable_sleep_mode,
        "enable_return_routed_experts": model.enable_return_routed_experts,
    }
    return json_response({"vllm_config": config, **sglang, "weight_version": services.engine.weight_version}, {})


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
    """All of them, or those of the caller that the body names."""
    services = _services(request)
    body = await _read_if_any(request, abort_decoder, SglangAbortBody())
    if body.request_ids is not None or body.rid:
        named = [*(body.request_ids or ()), *filter(None, [body.rid])]
        return json_response({"status": "ok", "aborted": services.server.abort(request, named)}, {})
    engine = services.engine
    was_paused = engine.is_paused
    await engine.pause("abort")
    if not was_paused:
        engine.resume()
    return json_response({"status": "ok"}, {})


async def weight_info(request: Request) -> Response:
    """``world_size``: how many processes join a trainer's group, one for each engine, whatever its ranks."""
    services = _services(request)
    size = services.config.server.data_parallel_size
    return json_response({"weight_version": services.engine.weight_version, "world_size": size}, {})


async def weight_checker(request: Request) -> Response:
    """``compare`` names the tensors that differ from ``baseline``, or in any of several reports."""
    services = _services(request)
    _, body, headers = await services.server.read(request, check_decoder)
    if body.action not in ("checksum", "compare"):
        message = "'action' must be checksum or compare; no weights are replaced by random ones, and no report is kept."
        raise InvalidParameter("action", message)
    if body.action == "compare" and body.baseline is None:
        raise MissingParameter("baseline")
    found = await services.engine.weight_checksums()
    if body.action == "checksum" or body.baseline is None:
        whole = hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()
        answer = {"checksums": found, "checksum": whole, "weight_version": services.engine.weight_version}
        return json_response(answer, headers)
    reports = [body.baseline, found, *body.checksums]
    names = sorted(set().union(*reports))
    differing = [name for name in names if len({report.get(name) for report in reports}) > 1]
    return json_response({"match": not differing, "mismatches": differing}, headers)


_NEEDS = "; needs `--weight-updates-dir` or `--weight-transfer-config`"
_GROUP = "; needs `--weight-transfer-config`"
ENDPOINTS = [
    Endpoint("POST", "/pause", pause, f"Compute nothing until `/resume`{_NEEDS}"),
    Endpoint("POST", "/resume", resume, f"Go on after `/pause`{_NEEDS}"),
    Endpoint("GET", "/is_paused", is_paused, f"Whether the server is paused{_NEEDS}"),
    Endpoint("POST", "/update_weights", update_weights, f"Take the weights of a folder{_NEEDS}", UpdateBody),
    Endpoint(
        *("POST", "/init_weight_transfer_engine", init_weight_transfer_engine),
        *(f"Join the group in which a trainer broadcasts weights{_GROUP}", InitBody),
    ),
    Endpoint("POST", "/start_weight_update", start_weight_update, f"Forget what was received{_GROUP}"),
    Endpoint(
        *("POST", "/finish_weight_update", finish_weight_update, f"Take the weights that were received{_GROUP}"),
        FinishBody,
    ),
    Endpoint("GET", "/server_info", server_info, "Settings that trainers and routers read"),
    Endpoint("GET", "/get_server_info", server_info, "As `/server_info`, SGLang's older name", name="get_server_info"),
    Endpoint("POST", "/reset_prefix_cache", reset_prefix_cache, f"Empty the prefix cache{_NEEDS}"),
    Endpoint("POST", "/abort_requests", abort_requests, f"End all running requests, or those it names{_NEEDS}"),
    Endpoint("GET", "/get_world_size", weight_info, f"How many processes join a trainer's group{_NEEDS}"),
    *(
        Endpoint("GET", path, weight_info, f"The version of the weights{_NEEDS}", name=path.strip("/"))
        for path in ("/weight_info", "/get_weight_version")
    ),
    Endpoint(
        *("POST", "/weight_checker", weight_checker, f"Checksums of the weights, or what differs in them{_NEEDS}"),
        CheckBody,
    ),
    Endpoint("POST", "/pause_generation", pause_generation, f"SGLang's `/pause`{_NEEDS}"),
    Endpoint("POST", "/continue_generation", resume, f"SGLang's `/resume`{_NEEDS}"),
    Endpoint(
        *("POST", "/update_weights_from_disk", update_weights_from_disk),
        *(f"SGLang's `/update_weights`{_NEEDS}", DiskUpdateBody),
    ),
    Endpoint(
        *("POST", "/init_weights_update_group", init_weights_update_group),
        *(f"SGLang's `/init_weight_transfer_engine`{_GROUP}", SglangGroupBody),
    ),
    Endpoint(
        *("POST", "/update_weights_from_distributed", update_weights_from_distributed),
        *(f"Receive weights, and take them unless the server is paused{_GROUP}", SglangTensorsBody),
    ),
    Endpoint(
        *("POST", "/destroy_weights_update_group", destroy_weights_update_group, f"Leave the trainer's group{_GROUP}")
    ),
    Endpoint("GET", "/flush_cache", reset_prefix_cache, f"SGLang's `/reset_prefix_cache`{_NEEDS}"),
    Endpoint("POST", "/flush_cache", reset_prefix_cache, f"SGLang's `/reset_prefix_cache`{_NEEDS}"),
    Endpoint("POST", "/abort_request", abort_requests, f"SGLang's `/abort_requests`{_NEEDS}"),
]
GROUP_PATHS = (
    *("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update"),
    *("/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group"),
)


def _services(request: Request) -> ModelServices:
    services = asked_services_of(request)
    settings = services.config.server
    is_group = request.url.path in GROUP_PATHS
    if settings.weight_transfer_config is None and (is_group or settings.weight_updates_dir is None):
        other = "" if is_group else " or --weight-updates-dir"
        message = f"{request.url.path} is for a server started with --weight-transfer-config{other}."
        raise UnsupportedParameter("weight_transfer_config", message)
    return services


def _backend(settings: ServerSettings) -> str | None:
    """What weights are broadcast with; ``None``: nothing. Raises ``ConfigError``."""
    if settings.weight_transfer_config is None:
        return None
    try:
        backend = msgspec.json.decode(settings.weight_transfer_config, type=WeightTransfer).backend
        if backend == "ipc":  # its handles are pickles
            raise ConfigError(
                "weight_transfer_config: 'ipc' is for one process, in which LLM.load_weights takes tensors; a server "
                "takes 'nccl', 'gloo', or folders below weight_updates_dir"
            )
        return backend
    except msgspec.ValidationError as error:
        raise ConfigError(f"weight_transfer_config: {error}") from None


def _asked_backend(services: ModelServices) -> str:
    backend = _backend(services.config.server)
    assert backend is not None, "its routes are refused"
    return backend


def _tensors(
    names: list[str], dtypes: list[str], shapes: list[tuple[int, ...]], is_packed: bool | None
) -> ReceiveTensors:
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidParameter("names", "There must be a name, a type and a shape for each tensor.")
    if any(size < 0 for shape in shapes for size in shape):
        raise InvalidParameter("shapes", "'shapes' must have no negative sizes.")
    return ReceiveTensors(names, [dtype.removeprefix("torch.") for dtype in dtypes], shapes, is_packed)


def _version(version: str | None) -> str | None:
    if version is not None and not (version and len(version) <= MAX_VERSION and version.isprintable()):
        raise InvalidParameter("weight_version", f"'weight_version' must have 1 to {MAX_VERSION} printable characters.")
    return version


def _mode(value: str) -> SleepMode:
    for mode in MODES:
        if mode == value:
            return mode
    raise InvalidParameter("mode", f"'mode' must be one of {', '.join(MODES)}.")


async def _update(services: ModelServices, field: str, folder: str, version: str | None, mode: SleepMode) -> str:
    """Have the engine take the weights of a folder; return their version. Raises ``InvalidParameter``."""
    if services.config.server.weight_updates_dir is None:
        raise UnsupportedParameter(field, f"'{field}' is for a server started with --weight-updates-dir.")
    path = _allowed(services, field, folder)
    name = path.name if version is None else version
    _version(name)
    served = services.config.model
    _check_same_model(Path(served.hf_config_path or served.model).expanduser(), path, field)
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
    """Raise ``InvalidParameter`` unless two checkpoints have the same configuration, or the new one has none."""
    if not (new / "config.json").exists():
        return
    try:
        before, after = (json.loads((folder / "config.json").read_text()) for folder in (old, new))
    except (OSError, ValueError, RecursionError):
        raise InvalidParameter(
            field, f"'{field}' and the model that is served must have a readable config.json."
        ) from None
    if not isinstance(before, dict) or not isinstance(after, dict):
        raise InvalidParameter(field, f"'{field}' has a config.json that is no object.")
    names = (before.keys() | after.keys()) - INFORMATIVE
    if differing := sorted(name for name in names if before.get(name) != after.get(name)):
        shown = ", ".join(printable(name) for name in differing)
        raise InvalidParameter(field, f"'{field}' has a config.json that differs from that of the model in: {shown}.")

"""What the endpoints of an application share: the services of the server, and those of each of its models."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import msgspec
from starlette.requests import Request

from octavo.config import ServeConfig
from octavo.errors import ConfigError, InvalidParameter, ModelNotFound
from octavo.text.chat_template import ChatTemplate
from octavo.text.message_format import MessageFormat
from octavo.text.text_stream import Detokenizer
from octavo.text.tokenizer import Tokenizer
from octavo_server.admission import Admission
from octavo_server.durable.background_jobs import BackgroundJobs
from octavo_server.durable.journal import Journal
from octavo_server.durable.store import Store
from octavo_server.engines.engine_client import EngineClient, Monitored
from octavo_server.engines.request_table import had_grammars
from octavo_server.generation import Generation
from octavo_server.http.error_responses import UnknownParameter, printable
from octavo_server.http.request_body import BodyDecoder, BodyReceiver
from octavo_server.tenants.api_keys import Keys, caller_of

MAX_SHOWN_FIELDS = 16
MAX_SHOWN_MODELS = 16
MAX_TENANT = 256
NO_NAMES = ("tgi", "dummy")
"""Names that stand for the served model, whichever it is: the clients text-generation and huggingface_hub send the
last two when they are given no name but a URL."""

logger = logging.getLogger("octavo.server")

Body = TypeVar("Body", bound=msgspec.Struct)


class CommonServices(Protocol):
    """The services that every application has, with an engine or without."""

    @property
    def config(self) -> ServeConfig: ...
    @property
    def monitored(self) -> Monitored: ...
    @property
    def keys(self) -> Keys: ...


@dataclass(frozen=True, kw_only=True)
class ServerServices:
    """What the models of a server share."""

    config: ServeConfig
    body_receiver: BodyReceiver
    store: Store
    jobs: BackgroundJobs
    keys: Keys
    group: Monitored | None = None
    """All models of a server of several."""
    models: list[ModelServices] = field(default_factory=list)
    """The services of each model; the first one's answer requests that name none."""
    abortable: WeakValueDictionary[tuple[str, str], Generation] = field(default_factory=WeakValueDictionary)
    """Running requests that may be ended by name: by API key and request id."""

    @property
    def first(self) -> ModelServices:
        return self.models[0]

    @property
    def monitored(self) -> Monitored:
        """What the monitoring endpoints read."""
        return self.group or self.first.engine

    @property
    def journals(self) -> list[Journal]:
        """The journals of all models."""
        return [each.journal for each in self.models if each.journal is not None]

    def warm_up(self) -> None:
        """Do one-time work of all models before the first request.

        Raises ``ConfigError`` for an invalid configured chat template; an invalid one of a model only disables chat.
        """
        for each in self.models:
            each.warm_up()

    def close(self) -> None:
        """Stop the child processes, and close the database."""
        for each in self.models:
            each.chat_template.close()
            each.admission.grammars.close()
            each.admission.images.close()
        for journal in self.journals:
            journal.close()
        self.store.close()

    def of_model(self, name: str) -> ModelServices:
        """The services of the model or adapter of this name; the first model's if there is none, or no name.

        The tag ``:latest``, which Ollama's clients add, may be missing.
        """
        if len(self.models) == 1:
            return self.first
        names = (name, name.removesuffix(":latest"))
        return next((each for each in self.models if not set(names).isdisjoint(each.served_names)), self.first)

    def abort(self, request: Request, request_ids: Sequence[str]) -> int:
        """End the caller's running requests of these ids with what they have; returns how many there were."""
        names = [(caller_of(request).name, name) for name in request_ids]
        found = [generation for name in names if (generation := self.abortable.get(name)) is not None]
        for generation in found:
            generation.abort()
        return len(found)

    def check_room(self, request: Request) -> None:
        """Raise ``QueueFull`` if no model has room for a request of this caller."""
        caller = caller_of(request)
        if not any(each.admission.has_room(caller) for each in self.models):
            self.first.admission.check_room(caller)

    async def read(
        self,
        request: Request,
        decoder: BodyDecoder[Body],
        without_effect: Callable[[Body, ModelServices], list[str]] = lambda body, services: [],
    ) -> tuple[ModelServices, Body, dict[str, str]]:
        """The services of the body's model, the validated body, and response headers that report ignored fields.

        ``without_effect`` returns the fields of a body that have no effect for this model or request. Raises
        ``RequestError``.
        """
        services, body, ignored_fields = await self.decoded(request, decoder)
        names = [*ignored_fields, *without_effect(body, services)]
        request.state.headers = headers = services.headers_for(names)
        return services, body, headers

    async def decoded(self, request: Request, decoder: BodyDecoder[Body]) -> tuple[ModelServices, Body, list[str]]:
        """The services of the body's model, the body, and the names of ignored fields. Raises ``RequestError``.

        An endpoint that passes a request on to another leaves in ``request.state.decoded`` what it had from here.
        """
        if hasattr(request.state, "decoded"):
            decoded: tuple[ModelServices, Body, list[str]] = request.state.decoded
            return decoded
        longest = max(each.engine.info.max_model_len for each in self.models)
        body, ignored_fields = await self.body_receiver.read_json(request, decoder, longest)
        # Gemini's API has the model in the path; the last is Ollama's older name.
        name = request.path_params.get("model", "") or getattr(body, "model", "") or getattr(body, "name", "")
        return self.of_model(name), body, ignored_fields


@dataclass(frozen=True, kw_only=True)
class ModelServices:
    """What the endpoints need of one model."""

    server: ServerServices
    config: ServeConfig
    engine: EngineClient
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate
    message_format: MessageFormat
    admission: Admission
    journal: Journal | None
    """Of durable requests, if there shall be any."""
    model_names: tuple[str, ...]
    """API names of the model; responses contain the first."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def takes_weights(self) -> bool:
        """Whether its weights may change while it serves."""
        settings = self.config.server
        return settings.weight_updates_dir is not None or settings.weight_transfer_config is not None

    def warm_up(self) -> None:
        """Do one-time work before the first request. Raises ``ConfigError`` for an invalid configured template."""
        if self.tokenizer is not None:
            Detokenizer(self.tokenizer)
            _ = self.tokenizer.packed_tokens
            self.tokenizer.prepare_to_encode()
        try:
            self.chat_template.check()
        except ConfigError as error:
            if self.config.model.chat_template is not None:
                raise
            logger.warning("there will be no chat completions: %s", error)

    def expect_grammars(self) -> None:
        """Start a process for grammars if an earlier server had some; the engine must be ready."""
        if self.tokenizer is not None and had_grammars(self.config.server):
            self.admission.grammars.start_process()

    @property
    def takes(self) -> tuple[str, ...]:
        """What the model reads besides text: of "image", "video" and "audio"."""
        return tuple(self.admission.image_text.placeholders) if self.admission.image_text else ()

    @property
    def takes_images(self) -> bool:
        """Whether the model reads images."""
        return "image" in self.takes

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def served_names(self) -> list[str]:
        """Valid values of ``model`` in requests: the model's names, and the adapters."""
        return [*self.model_names, *self.engine.adapters.paths]

    @property
    def accepts_any_model(self) -> bool:
        """By the setting; the backend toy has no model whose name could matter."""
        return self.config.server.accept_any_model or self.config.model.backend == "toy"

    def check_model(self, name: str, *, must_be_served: bool = False) -> None:
        """Raise ``ModelNotFound`` unless ``name`` is this model, an adapter, or no name, or any is accepted.

        With ``must_be_served``, what clients of one model send for none is a name like others.
        """
        adapters = self.engine.adapters
        is_none = name in NO_NAMES and len(self.server.models) == 1 and not must_be_served
        if name in adapters.known:
            adapters.check(name)
        elif not is_none and name not in ("", *self.model_names) and not self.accepts_any_model:
            names = [each for model in self.server.models for each in model.served_names]
            served = ", ".join(f"`{printable(each)}`" for each in names[:MAX_SHOWN_MODELS])
            message = f"The model `{printable(name)}` does not exist. This server serves {served}."
            if name.lower() in (each.lower() for each in names):
                message += " Names are case-sensitive."
            raise ModelNotFound(message, param="model")

    def answering_name(self, requested: str) -> str:
        """``model`` in the response to a request for ``requested``: the adapter's name, or the model's first name.

        Where any name is accepted, it is the requested one.
        """
        if requested and self.accepts_any_model:
            return requested
        return requested if requested in self.engine.adapters.paths else self.model_name

    def tenant(self, request: Request, user: str | None, model: str) -> str:
        """The tenant of a request with these ``user`` and ``model`` fields, according to the settings."""
        server = self.config.server
        if server.tenant_header is not None:
            return request.headers.get(server.tenant_header, "")[:MAX_TENANT]
        source = server.tenant_by or ("user" if server.api_key_file is None else "key")
        if source == "key":
            return caller_of(request).name
        if source == "adapter":
            return model if model in self.engine.adapters.paths else ""
        return user or ""

    def cache_salt(self, request: Request, own: str) -> str:
        """The prefix-cache salt: the body's ``own``, prefixed with the key's name if keys are isolated, as they are
        by default where there is a key file.

        Key names contain no slash, so no client salt can collide with another key's.
        """
        server = self.config.server
        is_isolated = server.api_key_file is not None if server.isolate_keys is None else server.isolate_keys
        return f"{caller_of(request).name}/{own}" if is_isolated else own

    def need_tokenizer(self, field: str) -> Tokenizer:
        """The tokenizer. Raises ``InvalidParameter`` about ``field`` when the model has none."""
        if self.tokenizer is None:
            raise InvalidParameter(field, f"This model has no tokenizer, so '{field}' cannot be used.")
        return self.tokenizer

    def report(self, request: Request, names: Sequence[str]) -> None:
        """Add parts of the body that have no effect to the headers that ``read`` returned for ``request``.

        Raises ``UnknownParameter`` if the policy rejects them.
        """
        headers: dict[str, str] = getattr(request.state, "headers", {})
        for header, value in self.headers_for(list(names)).items():
            headers[header] = ", ".join(filter(None, [headers.get(header), value]))

    def headers_for(self, ignored_fields: list[str]) -> dict[str, str]:
        """Response headers that report ignored fields. Raises ``UnknownParameter`` if the policy rejects them."""
        policy = self.config.server.unknown_fields
        if not ignored_fields or policy == "ignore":
            return {}
        if policy == "reject":
            raise UnknownParameter(ignored_fields[:MAX_SHOWN_FIELDS])
        return {"x-octavo-unknown-fields": ", ".join(printable(name) for name in ignored_fields[:MAX_SHOWN_FIELDS])}


def server_of(request: Request) -> ServerServices:
    server: ServerServices = request.app.state.services
    return server


def asked_services_of(request: Request) -> ModelServices:
    """The services of the model that the query parameter ``model`` names, or of the first. Raises ``ModelNotFound``."""
    name, server = request.query_params.get("model", ""), server_of(request)
    services = server.of_model(name)
    if len(server.models) > 1:
        services.check_model(name)
    return services


def common_services_of(request: Request) -> CommonServices:
    services: CommonServices = request.app.state.services
    return services

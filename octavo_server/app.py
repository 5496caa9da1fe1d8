"""The Starlette application: routes, middleware and lifespan."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from octavo.config import ServeConfig
from octavo.errors import RequestError
from octavo.server_settings import ServerSettings
from octavo.telemetry.metrics import Metrics
from octavo.text.chat_template import load_chat_template
from octavo.text.message_format import find_format
from octavo.text.tokenizer import Tokenizer
from octavo_server import admin, sleep, weights
from octavo_server.admission import Admission
from octavo_server.console import pages as console
from octavo_server.console import stats_stream as live
from octavo_server.dialects.anthropic import message_batches, messages
from octavo_server.dialects.batches import batches, files
from octavo_server.dialects.gemini import endpoints as gemini
from octavo_server.dialects.native import (
    adapter_endpoints,
    completions,
    generate,
    infer,
    sagemaker,
    sessions,
    sglang,
    tgi,
    token_ids,
    transcriptions,
)
from octavo_server.dialects.ollama import endpoints as ollama
from octavo_server.dialects.ollama import model_endpoints as ollama_models
from octavo_server.dialects.openai import (
    chat,
    classification,
    derender,
    embeddings,
    models,
    render,
    scoring,
    tokenize,
)
from octavo_server.dialects.responses import conversations
from octavo_server.dialects.responses import endpoints as responses
from octavo_server.dialects.responses.background_responses import BackgroundResponses
from octavo_server.dialects.tei import endpoints as tei
from octavo_server.durable import endpoints as durable
from octavo_server.durable.background_jobs import BackgroundJobs
from octavo_server.durable.journal import Journal
from octavo_server.durable.store import Store
from octavo_server.engines.engine_client import EngineClient, Monitored
from octavo_server.front.takeover import Predecessor
from octavo_server.http.endpoint import Endpoint, openapi_document
from octavo_server.http.error_responses import ErrorForm, on_http_exception, on_request_error
from octavo_server.http.middleware import AllowedHosts, AllowedOrigins, RequestMiddleware
from octavo_server.http.request_body import BodyReceiver
from octavo_server.http.response import json_response
from octavo_server.model_name import served_model_names
from octavo_server.observe import probes
from octavo_server.observe import timeline_routes as explanations
from octavo_server.services import ModelServices, ServerServices
from octavo_server.tenants.api_keys import Keys

GROUP = "octavo.endpoints"
"""Entry points of other packages: each is a list of ``Endpoint``."""
PARTS = (
    *(completions, chat, messages, message_batches, responses, conversations, files, batches, durable),
    *(embeddings, scoring, classification, tei, adapter_endpoints, models, tokenize, render, derender, probes),
    *(live, explanations, sleep, weights, token_ids, sessions, admin, generate, sglang, infer, tgi, sagemaker),
    *(ollama, ollama_models, gemini, transcriptions),
)


logger = logging.getLogger("octavo.server")


class Served(NamedTuple):
    """A model as the front process has it."""

    config: ServeConfig
    engine: EngineClient
    tokenizer: Tokenizer | None


def create_app(
    config: ServeConfig,
    engine: EngineClient,
    tokenizer: Tokenizer | None,
    others: Sequence[Served] = (),
    group: Monitored | None = None,
    predecessor: Predecessor | None = None,
) -> Starlette:
    """The application for ``engine``, which may be started later, and for the models of ``others``, if any.

    ``group`` is what the monitoring endpoints of a server of several models report on. What ``predecessor`` leaves
    unfinished is continued once it has ended. Raises ``ConfigError`` for an unreadable chat template.
    """
    endpoints = all_endpoints()
    error_forms = forms_of(endpoints)
    endpoints += console.ENDPOINTS if config.server.console else []
    endpoints.append(Endpoint("GET", "/openapi.json", _document, "This document"))
    keys = Keys(config.server)
    weights.check_settings(config.server, keys)
    app = Starlette(
        routes=endpoints,
        middleware=outer_middleware(
            config.server,
            keys,
            (group or engine).metrics,
            error_forms,
            is_open=console.is_open if config.server.console else None,
        ),
        lifespan=_life,
        exception_handlers={RequestError: on_request_error, HTTPException: on_http_exception},
    )
    # The redirect's target would contain the Host header, which the client controls.
    app.router.redirect_slashes = False
    server = ServerServices(
        config=config,
        body_receiver=BodyReceiver(config.server.max_request_bytes),
        store=_store(config.server),
        jobs=BackgroundJobs(),
        keys=keys,
        group=group,
    )
    for each in (Served(config, engine, tokenizer), *others):
        server.models.append(_model_services(each, server, bool(others), predecessor))
    app.state.services = server
    app.state.error_forms = error_forms
    app.state.predecessor = predecessor
    app.state.live_views = {each.model_name: live.LiveView(each.engine) for each in server.models}
    return app


def all_endpoints() -> list[Endpoint]:
    """The endpoints of every application, with those of installed packages, which come last."""
    found = [endpoint for part in PARTS for endpoint in part.ENDPOINTS]
    for point in entry_points(group=GROUP):
        found += point.load()
    return found


def forms_of(endpoints: Iterable[Endpoint]) -> tuple[ErrorForm, ...]:
    """The forms in which endpoints write errors, besides ``ERROR``."""
    return tuple({endpoint.errors.name: endpoint.errors for endpoint in endpoints if endpoint.errors.paths}.values())


def _model_services(
    served: Served, server: ServerServices, is_one_of_several: bool, predecessor: Predecessor | None
) -> ModelServices:
    config, engine, tokenizer = served
    settings, names = config.server, served_model_names(config)
    chat_template = load_chat_template(config.model, tokenizer)
    special_ids = tokenizer.special_ids_by_text() if tokenizer is not None else {}
    journal = None if settings.journal is None else Path(settings.journal).expanduser()
    if journal is not None and is_one_of_several:
        journal /= names[0].replace("/", "--")
    return ModelServices(
        server=server,
        config=config,
        engine=engine,
        tokenizer=tokenizer,
        chat_template=chat_template,
        message_format=find_format(
            settings.tool_call_parser, settings.reasoning_parser, chat_template.source, special_ids
        ),
        admission=Admission(engine, tokenizer, settings, config.model),
        journal=None
        if journal is None
        else Journal(journal, settings.journal_retention, config, engine, tokenizer, predecessor),
        model_names=names,
    )


@contextlib.asynccontextmanager
async def _life(app: Starlette) -> AsyncIterator[None]:
    """Resume what an earlier process left unfinished; delete what expires."""
    services: ServerServices = app.state.services
    for each in services.models:
        each.expect_grammars()
    services.jobs.start("deletion of what has expired", services.store.keep_tidy())
    app.state.batches = batches.Batches(app, [route for route in app.routes if isinstance(route, Endpoint)])
    for journal in services.journals:
        await journal.resume()
    app.state.background_responses = BackgroundResponses(app)
    if app.state.predecessor is None:
        await _resume_jobs(app)
    else:
        services.jobs.start("takeover", _take_over(app, app.state.predecessor))
    yield
    await services.jobs.close()


async def _resume_jobs(app: Starlette) -> None:
    await app.state.background_responses.resume()
    await app.state.batches.resume()


async def _take_over(app: Starlette, predecessor: Predecessor) -> None:
    """Once the predecessor has ended: continue its durable requests, background responses and batches."""
    await predecessor.ended()
    logger.info("the server before this one has ended")
    for journal in app.state.services.journals:
        await journal.take_over()
    await _resume_jobs(app)


def outer_middleware(
    settings: ServerSettings,
    keys: Keys,
    metrics: Metrics,
    error_forms: tuple[ErrorForm, ...],
    is_open: Callable[[str], bool] | None = None,
) -> list[Middleware]:
    """The middleware of every application: request ids, hosts, origins, API keys and CORS."""
    origins = AllowedOrigins(settings)
    outermost = Middleware(
        RequestMiddleware,
        keys=keys,
        hosts=AllowedHosts(settings),
        origins=origins,
        metrics=metrics,
        is_logged=settings.access_log,
        is_traced=settings.otlp_traces_endpoint is not None,
        error_forms=error_forms,
        is_open=is_open,
    )
    if settings.allowed_origins is None:
        return [outermost]
    # Outside the key check: CORS preflight requests carry no API key.
    shown = ["x-request-id", "retry-after"]
    cors = Middleware(
        CORSMiddleware, allow_origins=origins.names, allow_methods=["*"], allow_headers=["*"], expose_headers=shown
    )
    return [cors, outermost]


def _store(settings: ServerSettings) -> Store:
    folder = None if settings.state_dir is None else Path(settings.state_dir).expanduser()
    return Store(folder, settings.retention_hours * 3600)


async def _document(request: Request) -> Response:
    endpoints = (route for route in request.app.routes if isinstance(route, Endpoint))
    return json_response(openapi_document(endpoints, probes.version()), {})

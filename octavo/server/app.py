"""The HTTP application, and the command that serves it."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException

from octavo.config import ServeConfig
from octavo.errors import RequestError
from octavo.server import probes, serving
from octavo.server.admission import Admission
from octavo.server.engine_client import EngineClient
from octavo.server.errors import on_http_exception, on_request_error
from octavo.server.front import Front
from octavo.server.gate import Gate
from octavo.server.openai import chat, completions, models, tokenize
from octavo.server.openai.schema import openapi_document
from octavo.text.chat_template import load_chat_template
from octavo.text.tokenizer import Tokenizer


def create_app(config: ServeConfig, engine: EngineClient, tokenizer: Tokenizer | None) -> FastAPI:
    """The application around an engine, which need not be started yet. Raises ``ConfigError`` for a chat template
    that cannot be read."""
    app = FastAPI(
        title="Octavo",
        version=probes.version(),
        description="An OpenAI-compatible LLM server.",
        # A redirect would be made from the Host header, which the client chooses.
        redirect_slashes=False,
        redoc_url=None,
    )
    app.state.front = Front(
        config=config,
        engine=engine,
        tokenizer=tokenizer,
        chat_template=load_chat_template(config.model, tokenizer),
        admission=Admission(engine, tokenizer, config.server.max_num_queued_reqs),
        model_name=served_model_name(config),
    )
    for part in (completions, chat, models, tokenize, probes):
        app.include_router(part.router)
    app.add_exception_handler(RequestError, on_request_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_middleware(Gate, api_key=config.server.api_key, metrics=engine.metrics)
    app.openapi = lambda: openapi_document(app)  # type: ignore[method-assign]
    return app


def served_model_name(config: ServeConfig) -> str:
    """The model's name in the API: the setting, the id as given, or the name of the folder or file."""
    if config.server.served_model_name:
        return config.server.served_model_name
    path = Path(config.model.model).expanduser()
    if not path.exists():
        return config.model.model
    path = path.resolve()
    return path.stem if path.is_file() else path.name


def run(config: ServeConfig) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code. Raises ``ConfigError`` and ``CheckpointError``."""
    return serving.run(config, create_app, served_model_name(config))

"""The sequences of ``http_requests`` to a server of two models."""

from __future__ import annotations

from typing import Any

from octavo.config import ServeConfig
from octavo_server.app import Served, create_app
from tests.fuzz.http_requests import HTTPRequests
from tests.fuzz.target import Target
from tests.server.conftest import AppServer
from tests.server.in_process import byte_tokenizer


def make() -> Target:
    return HTTPSeveralModels()


class HTTPSeveralModels(HTTPRequests):
    def start(self, settings: dict[str, Any]) -> AppServer:
        models = [
            Served(ServeConfig.from_flat({"model": name, **settings}), engine, byte_tokenizer())
            for name, engine in zip(("test", "other"), self._engines, strict=True)
        ]
        first, *others = models
        return AppServer(create_app(*first, others), first.config.server)

"""Sequences of valid HTTP requests with any path, query, headers and body; one may use the ids in earlier answers.

An input is a JSON list of requests, each an object with ``path`` and, if it is not GET, ``method``, ``headers`` and
``body``, text or JSON. ``{conv}``, ``{resp}``, ``{file}``, ``{batch}`` and ``{msg}`` stand for the latest ids,
``{event}`` for the latest id of an event, ``{once}`` for what no other input has.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

from tests.fuzz.http_seeds import SEEDS
from tests.fuzz.http_server import ENDLESS, EVENT_ID, IDS, Connection, LogErrors, check
from tests.fuzz.target import Fault, JSONTarget, Target, as_json
from tests.server.conftest import AppServer, Served
from tests.server.in_process import InProcessEngine, byte_tokenizer

MAX_REQUESTS = 12
PRINTABLE = "".join(map(chr, range(0x21, 0x7F)))
TOKEN = re.compile(r"[A-Za-z0-9_-]{1,40}")
VALUE = re.compile(r"[\x20-\x7e\x80-\xff]{0,2000}")
CONNECTION_HEADERS = ("content-length", "transfer-encoding", "connection", "upgrade", "expect", "host")


def make() -> Target:
    return HTTPRequests()


class HTTPRequests(JSONTarget):
    max_seconds = 30.0  # a sequence
    seeds = [as_json(seed) for seed in SEEDS]

    def __init__(self) -> None:
        super().__init__()
        self._errors = LogErrors()
        settings = {
            "enable_sleep_mode": True,
            "enable_kv_events": True,
            "state_dir": str(self.folder / "state"),
            "journal": str(self.folder / "journal"),
            "access_log": False,
            "otlp_traces_endpoint": "http://127.0.0.1:9",
        }
        self._engines = [InProcessEngine(), InProcessEngine()]
        self._server = self.start(settings)
        self._number = 0

    def start(self, settings: dict[str, Any]) -> AppServer:
        return Served(self._engines[0], byte_tokenizer(), settings)

    def read(self, data: bytes) -> None:
        try:
            requests = json.loads(data)
        except (ValueError, RecursionError):
            requests = [{"method": "POST", "path": "/v1/chat/completions", "body": data.decode("latin-1")}]
        self._number += 1
        self._known = {"once": f"{self._number}"}
        connection = Connection(self._server)
        try:
            for request in requests[:MAX_REQUESTS] if isinstance(requests, list) else []:
                self._ask(connection, request if isinstance(request, dict) else {"body": request})
        finally:
            connection.close()
            for engine in self._engines:
                engine.requests.clear()
        self.check_log()

    def check_log(self) -> None:
        """Raise ``Fault`` with the first traceback that the server logged."""
        if self._errors.found:
            found, self._errors.found = self._errors.found, []
            raise Fault(f"the server logged: {found[0]}")

    def _ask(self, connection: Connection, request: dict[str, Any]) -> None:
        method = str(request.get("method", "GET"))
        method = method if TOKEN.fullmatch(method) and method != "CONNECT" else "POST"
        path = quote("/" + self._filled(str(request.get("path", ""))).lstrip("/"), safe=PRINTABLE, errors="replace")
        body = request.get("body")
        text = self._filled(body if isinstance(body, str) else json.dumps(body))
        content = b"" if body is None else text.encode("utf-8", "surrogatepass")
        lines = [f"{method} {path} HTTP/1.1", "host: localhost", f"content-length: {len(content)}"]
        headers = request.get("headers")
        for name, value in headers.items() if isinstance(headers, dict) else ():
            value = self._filled(str(value))
            if TOKEN.fullmatch(name) and VALUE.fullmatch(value) and name.lower() not in CONNECTION_HEADERS:
                lines.append(f"{name}: {value}")
        connection.send("\r\n".join([*lines, "", ""]).encode("latin-1") + content)
        answer = connection.receive(method, is_endless=ENDLESS in path)
        check(answer, f"{method} {path[:200]}")
        for found in IDS.finditer(answer.body):
            self._known[found[2].decode()] = found[1].decode("ascii", "replace")
        for found in EVENT_ID.finditer(answer.body):
            self._known["event"] = found[1].decode("ascii", "replace")

    def _filled(self, text: str) -> str:
        for name, value in self._known.items():
            text = text.replace("{" + name + "}", value)
        return text

    def close(self) -> None:
        self._server.stop()
        self._errors.close()
        super().close()

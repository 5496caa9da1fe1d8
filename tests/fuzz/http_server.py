"""A server without a model in this process, and requests to it by hand, as no client library would send them."""

from __future__ import annotations

import contextlib
import http.client
import logging
import re
import socket
import struct
from typing import NamedTuple

from tests.fuzz.target import Fault
from tests.server.conftest import AppServer

READ_SECONDS = 10.0
QUIET_SECONDS = 0.02
ENDLESS = "live"
"""In the path of streams without an end."""
RESET = struct.pack("ii", 1, 0)
"""Closed connections do not keep their port."""
IDS = re.compile(rb'"id":\s*"((resp|conv|file|batch|msg)[_-][^"]{1,80})"')
EVENT_ID = re.compile(rb"^id: (.+)$", re.MULTILINE)


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Connection:
    """One connection, which is opened again when the server has closed it between two requests."""

    def __init__(self, server: AppServer) -> None:
        self._port = server.port
        self._socket: socket.socket | None = None

    def send(self, data: bytes) -> None:
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), READ_SECONDS)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._socket.sendall(data)

    def receive(self, method: str, is_endless: bool = False) -> Answer:
        """Raises ``Fault`` if there is none, or a part of one."""
        assert self._socket is not None
        response = http.client.HTTPResponse(self._socket, method=method)
        try:
            response.begin()
            body = b"" if is_endless else response.read()
        except TimeoutError:
            raise Fault(f"no answer to {method} within {READ_SECONDS} s") from None
        except (http.client.HTTPException, OSError) as error:
            raise Fault(f"no whole answer to {method}: {error!r}") from None
        finally:
            response.close()
        if is_endless or response.will_close:
            self.close()
        return Answer(response.status, response.headers, body)

    def receive_all(self) -> bytes:
        """What comes until the server closes the connection or is quiet; then no more is sent, and that is awaited."""
        assert self._socket is not None
        pieces, seconds = [], QUIET_SECONDS
        while True:
            self._socket.settimeout(seconds)
            try:
                piece = self._socket.recv(1 << 16)
            except TimeoutError:
                if seconds == READ_SECONDS:
                    raise Fault(f"the connection was open for {seconds} s after its client's side") from None
                seconds = READ_SECONDS
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
            except OSError:
                break
            else:
                pieces.append(piece)
                if not piece:
                    break
        self.close()
        return b"".join(pieces)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def check(answer: Answer, of: str) -> None:
    """Raise ``Fault`` for a 5xx other than those that say that the time is over or when to come again."""
    is_late = answer.status == 504 and b"deadline_exceeded" in answer.body
    if answer.status >= 500 and not is_late and not (answer.status == 503 and "retry-after" in answer.headers):
        raise Fault(f"{answer.status} to {of}: {answer.body[:300]!r}")


class LogErrors(logging.Handler):
    """Collects the tracebacks that the server logs, such as those of streams that end early. Until ``close``, nothing
    else that it logs is shown."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []
        self._logger = logging.getLogger("octavo")
        self._logger.propagate = False
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.found.append(logging.Formatter().format(record))

    def close(self) -> None:
        self._logger.removeHandler(self)
        self._logger.propagate = True
        super().close()

"""The child's side of a ``ChildProcess``: messages over one socket, under limits that the kernel enforces.

The socket is standard input. Each message is a length (4 bytes, big-endian) and its bytes.

    parent -> child   JSON settings, once, and a second message if the module reads one; answered by READY
    parent -> child   JSON of one question
    child -> parent   one byte, the kind of answer, then text
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, TypeVar

from octavo.errors import CANCELLATIONS

LENGTH = struct.Struct(">I")
READY, RENDERED, REFUSED, LATE, FAILED, INVALID = b"R", b"T", b"X", b"L", b"F", b"I"
"""Kinds of answer: started, result, refused, time limit exceeded, execution failed, invalid input."""
OUT_OF_MEMORY = 3
"""Exit status; there is no memory left for an error message."""
MAX_ERROR_BYTES = 500

Answer = tuple[bytes, str]
Question = TypeVar("Question")
Body = TypeVar("Body", bound=str | bytes)


class ChildWorker:
    """Answers questions one by one until the parent closes the socket.

    ``settings`` has ``max_memory`` (bytes), ``max_seconds`` (of CPU time, per question) and
    ``max_output`` (bytes of an answer).
    """

    def __init__(self, connection: socket.socket, settings: dict[str, Any]) -> None:
        self._connection = connection
        self._settings = settings

    def run(self, serve: Callable[[Any], Answer]) -> None:
        """Answer each question, in JSON, as ``answer_of`` does."""
        self.run_bytes(lambda message: serve(json.loads(message)))

    def run_bytes(self, serve: Callable[[bytes], tuple[bytes, str | bytes]]) -> None:
        """Answer each question as ``answer_of`` does."""
        self._answer(READY, b"")
        while (message := receive(self._connection)) is not None:
            limit_processor_time(self._settings["max_seconds"])
            try:
                self._answer(*answer_of(serve, message))
            except MemoryError:
                os._exit(OUT_OF_MEMORY)

    def _answer(self, kind: bytes, content: str | bytes) -> None:
        try:
            body = content.encode() if isinstance(content, str) else content
        except UnicodeEncodeError:
            kind, body = FAILED, b"the text has an unpaired surrogate"
        if kind != RENDERED:
            body = body[:MAX_ERROR_BYTES]
        elif len(body) > self._settings["max_output"]:
            kind, body = FAILED, f"it produced more than {self._settings['max_output']} bytes".encode()
        self._connection.sendall(LENGTH.pack(1 + len(body)) + kind + body)


def start() -> tuple[socket.socket, dict[str, Any]] | None:
    """The connection and the settings, whose limits now apply to this process; ``None`` if the parent is gone."""
    connection = socket.socket(fileno=0)
    first = receive(connection)
    if first is None:
        return None
    settings = json.loads(first)
    limit(resource.RLIMIT_AS, settings["max_memory"])
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NPROC, 0)
    limit(resource.RLIMIT_CORE, 0)
    return connection, settings


def answer_of(serve: Callable[[Question], tuple[bytes, Body]], question: Question) -> tuple[bytes, Body | str]:
    """The result of ``serve``; that it failed, where it raises what its libraries do for unforeseen input."""
    try:
        return serve(question)
    except (MemoryError, *CANCELLATIONS):
        raise
    except BaseException as error:
        return FAILED, described(error)


def described(error: BaseException) -> str:
    """The message of an error, or its type if it has none."""
    return str(error) or type(error).__name__


def receive(connection: socket.socket) -> bytes | None:
    """The next message; ``None`` when the other side has closed the connection."""
    header = receive_exactly(connection, LENGTH.size)
    return None if header is None else receive_exactly(connection, LENGTH.unpack(header)[0])


def receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    """The next ``size`` bytes; ``None`` when the connection ends first."""
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def limit(kind: int, value: int) -> None:
    """Lower a resource limit permanently; kinds that the system does not support are ignored."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, value))


def limit_processor_time(seconds: float) -> None:
    """Let the kernel end this process when the next answer takes more than ``seconds`` of CPU time."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), hard))

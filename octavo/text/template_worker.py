"""The child process that renders chat templates; run as a script, it imports nothing of this package.

A template is a program out of a model's files, and Jinja's sandbox bounds neither its time nor its memory.
So it runs here, under limits that the kernel enforces, in a process that may be killed at any time. It
speaks over one socket, its standard input: each message is a length (4 bytes, big-endian) and its bytes.

    parent -> child   JSON {"source", "max_memory", "max_seconds", "max_output"}, once; answered by READY
    parent -> child   JSON of the variables of one rendering, or null to only compile the template
    child -> parent   one byte of ``Answer``, then text: the rendering, or what went wrong
"""

from __future__ import annotations

import contextlib
import datetime
import json
import math
import os
import resource
import socket
import struct
import time
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct(">I")
READY, RENDERED, REFUSED, FAILED, INVALID = b"R", b"T", b"X", b"F", b"I"
"""Kinds of answer: started, the text, raise_exception's message, an error in running, an error in compiling."""
OUT_OF_MEMORY = 3
"""Exit status; there is no memory left to say it in words."""
MAX_ERROR_BYTES = 500


class TemplateRefusal(Exception):
    """The template called ``raise_exception``."""


class GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's part for training; here its content is simply text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: object) -> NoReturn:
    raise TemplateRefusal(str(message))


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def tojson(
    value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as it is, unlike Jinja's own filter, which escapes it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def compile_template(source: str) -> jinja2.Template:
    """Compile with the names and options that Hugging Face chat templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment.from_string(source)


def render(template: jinja2.Template, variables: dict[str, Any], max_output: int) -> str:
    pieces, length = [], 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > max_output:
            raise ValueError(f"it produced more than {max_output} bytes")
    return "".join(pieces)


class Worker:
    """Answers one message after another until the parent hangs up."""

    def __init__(self, connection: socket.socket, settings: dict[str, Any]) -> None:
        self._connection = connection
        self._settings = settings
        self._template: jinja2.Template | None = None

    def run(self) -> None:
        self._answer(READY, "")
        while (message := receive(self._connection)) is not None:
            limit_processor_time(self._settings["max_seconds"])
            try:
                self._answer(*self._serve(message))
            except MemoryError:
                os._exit(OUT_OF_MEMORY)

    def _serve(self, message: bytes) -> tuple[bytes, str]:
        try:
            if self._template is None:
                self._template = compile_template(self._settings["source"])
        except jinja2.TemplateSyntaxError as error:
            return INVALID, f"line {error.lineno}: {error.message}"
        except (RecursionError, SyntaxError, ValueError, TypeError, ArithmeticError) as error:
            return INVALID, described(error)
        try:
            variables = json.loads(message)
            if variables is None:
                return RENDERED, ""
            return RENDERED, render(self._template, variables, self._settings["max_output"])
        except TemplateRefusal as refusal:
            return REFUSED, str(refusal)
        except MemoryError:
            raise
        except Exception as error:  # whatever a template can raise
            return FAILED, described(error)

    def _answer(self, kind: bytes, text: str) -> None:
        try:
            body = text.encode()
        except UnicodeEncodeError:
            kind, body = FAILED, b"the text has an unpaired surrogate"
        if kind != RENDERED:
            body = body[:MAX_ERROR_BYTES]
        elif len(body) > self._settings["max_output"]:
            kind, body = FAILED, f"it produced more than {self._settings['max_output']} bytes".encode()
        self._connection.sendall(LENGTH.pack(1 + len(body)) + kind + body)


def described(error: Exception) -> str:
    return str(error) or type(error).__name__


def receive(connection: socket.socket) -> bytes | None:
    """The next message; ``None`` when the other side has closed the connection."""
    header = receive_exactly(connection, LENGTH.size)
    return None if header is None else receive_exactly(connection, LENGTH.unpack(header)[0])


def receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        piece = connection.recv(min(size - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def limit(kind: int, value: int) -> None:
    """Lower one limit for good; some systems do not know every kind."""
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(kind, (value, value))


def limit_processor_time(seconds: float) -> None:
    """End this process when the next rendering takes more than ``seconds``, even if no parent is left to do so."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), hard))


def main() -> None:
    connection = socket.socket(fileno=0)
    first = receive(connection)
    if first is None:
        return
    settings = json.loads(first)
    limit(resource.RLIMIT_AS, settings["max_memory"])
    limit(resource.RLIMIT_FSIZE, 0)
    limit(resource.RLIMIT_NPROC, 0)
    limit(resource.RLIMIT_CORE, 0)
    Worker(connection, settings).run()


if __name__ == "__main__":
    main()

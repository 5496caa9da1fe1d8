"""The child process that renders chat templates.

A template is an untrusted program from a model's files, and Jinja's sandbox bounds neither its time nor its memory.
So it runs in this process, which may be killed at any time: see ``octavo.system.child_worker``. The settings hold the
``source`` of the template and ``tool_source``, the one for conversations with tools, or null; a question holds the
variables of one rendering, or null to only compile the templates.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.system.child_worker import INVALID, REFUSED, RENDERED, Answer, ChildWorker, described, start


class RaisedException(Exception):
    """The template called ``raise_exception``."""


class GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's part for training; here its content is rendered as is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def raise_exception(message: object) -> NoReturn:
    raise RaisedException(str(message))


def strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def tojson(
    value: object, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
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


class Renderer:
    """Renders the template or the tool template; each is compiled on first use."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._templates: dict[str, jinja2.Template] = {}

    def serve(self, variables: dict[str, Any] | None) -> Answer:
        """The rendering with ``variables``, or the error; with ``None``, all templates are compiled."""
        names = [name for name in ("source", "tool_source") if self._settings.get(name) is not None]
        if variables is not None:
            names = names[-1:] if variables["tools"] is not None else names[:1]
        for name in names:
            try:
                if name not in self._templates:
                    self._templates[name] = compile_template(self._settings[name])
            except jinja2.TemplateSyntaxError as error:
                return INVALID, f"line {error.lineno}: {error.message}"
            except (RecursionError, SyntaxError, ValueError, TypeError, ArithmeticError) as error:
                return INVALID, described(error)
        if variables is None:
            return RENDERED, ""
        try:
            return RENDERED, render(self._templates[names[0]], variables, self._settings["max_output"])
        except RaisedException as refusal:
            return REFUSED, str(refusal)


def main() -> None:
    started = start()
    if started is not None:
        connection, settings = started
        ChildWorker(connection, settings).run(Renderer(settings).serve)


if __name__ == "__main__":
    main()

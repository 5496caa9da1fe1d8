"""The page of the Python API, docs/python_reference.md, from signatures and docstrings of what ``octavo`` exports."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import octavo
from octavo_bench.reference.filling import filled, table

FIRST = ("LLM", "SamplingParams", "Engine", "Client", "AsyncClient")
"""What most programs use; the others follow by name."""
ERRORS = "Errors"


def page() -> str:
    """The page with what is there now."""
    return filled("python_reference.md", {"classes": _lines()})


def _lines() -> Iterator[str]:
    found = {name: getattr(octavo, name) for name in octavo.__all__ if not name.startswith("_")}
    errors = {name: kind for name, kind in found.items() if issubclass(kind, Exception)}
    for name in [*FIRST, *sorted(found.keys() - errors.keys() - set(FIRST))]:
        yield from ("", f"## {name}", "", *_class(name, found[name]))
    rows = [(f"`{name}`", f"`{kind.__base__.__name__}`", _first_line(kind)) for name, kind in errors.items()]
    yield from ("", f"## {ERRORS}", "", *table(("error", "extends", "when"), *rows))


def _class(name: str, kind: type[Any]) -> Iterator[str]:
    if not dataclasses.is_dataclass(kind):
        yield from (*_code(f"{name}{_signature(kind)}"), "")
    yield from _doc(kind)
    fields = _fields(kind)
    if fields:
        yield from ("", *table(("field", "type", "default"), *fields))
    for method, value in vars(kind).items():
        if not method.startswith("_") and callable(getattr(kind, method)):
            yield from ("", f"### {name}.{method}", "", *_code(f"{method}{_signature(getattr(kind, method))}"), "")
            yield from _doc(value)


def _fields(kind: type[Any]) -> list[tuple[str, str, str]]:
    """Rows of the fields of a dataclass or of a struct."""
    try:
        parameters = inspect.signature(kind).parameters.values()
    except ValueError:
        return []
    if not (dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__")):
        return []
    return [(f"`{item.name}`", _annotation(item), _default(item)) for item in parameters]


def _annotation(item: inspect.Parameter) -> str:
    kind = item.annotation
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return "`" + re.sub(r"(?:[a-z_]+[.])+([A-Za-z])", r"\1", text) + "`"


def _default(item: inspect.Parameter) -> str:
    if item.default is inspect.Parameter.empty:
        return "required"
    shown = repr(item.default)
    return f"`{shown}`" if "<" not in shown else ""


def _signature(function: object) -> str:
    """The signature, without ``self``, modules and addresses."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    kept = [item for item in signature.parameters.values() if item.name != "self"]
    text = str(signature.replace(parameters=kept)).replace("'", "")
    return re.sub(r"(?:[a-z_]+[.])+([A-Z])", r"\1", re.sub(r" = <[^>]*>", " = ...", text))


def _doc(owner: object) -> Iterator[str]:
    """A docstring in Markdown: literals in single backquotes, indented examples as they are."""
    yield from re.sub(r"``(.+?)``", r"`\1`", inspect.getdoc(owner) or "").splitlines()


def _first_line(owner: object) -> str:
    return " ".join(" ".join(_doc(owner)).partition(". ")[0].split())


def _code(text: str) -> Iterator[str]:
    yield from ("```python", text, "```")

"""The page of all endpoints and the fields of their bodies, docs/endpoints.md, from the OpenAPI document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from octavo_bench.reference.filling import filled, table
from octavo_server.app import PARTS
from octavo_server.http.endpoint import Endpoint, openapi_document

Json = Mapping[str, Any]


def page() -> str:
    """The page with what is there now."""
    return filled("endpoints.md", {"endpoints": _lines()})


def _lines() -> Iterator[str]:
    endpoints = [endpoint for part in PARTS for endpoint in part.ENDPOINTS]
    schemas = openapi_document(endpoints, "")["components"]["schemas"]
    rows, bodies = [("method", "path", "what it does", "body")], dict[str, list[Endpoint]]()
    for endpoint in endpoints:
        body = endpoint.body.__name__ if endpoint.body else ""
        link = f"[`{body}`](#{body.lower()})" if body else ""
        rows.append((endpoint.method, f"`{endpoint.path_format}`", endpoint.summary, link))
        if body:
            bodies.setdefault(body, []).append(endpoint)
    yield from ("", "## All endpoints", "", *table(*rows))
    for name, users in bodies.items():
        paths = ", ".join(f"`{user.path_format}`" for user in users)
        yield from ("", f"## {name}", "", f"The body of {paths}.", "")
        yield from table(("field", "type", "default"), *_fields(schemas[name], schemas))


def _fields(schema: Json, schemas: Json) -> Iterator[tuple[str, str, str]]:
    required = schema.get("required", ())
    for name, field in schema["properties"].items():
        default = "required" if name in required else _default(field.get("default"))
        yield f"`{name}`", _type(field, schemas), default


def _default(value: object) -> str:
    return "" if value in (None, "", [], {}) else f"`{json.dumps(value)}`"


def _type(field: Json, schemas: Json) -> str:
    """A type in words; null, which every optional field may be, is left out."""
    if "$ref" in field:
        return _type(schemas[field["$ref"].rpartition("/")[2]], schemas)
    if "anyOf" in field:
        kinds = [_type(kind, schemas) for kind in field["anyOf"] if kind.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if field.get("type") == "array" and isinstance(field.get("items"), Mapping):
        return f"array of {_type(field['items'], schemas)}"
    if field.get("properties"):
        return "object: " + ", ".join(f"`{name}`" for name in field["properties"])
    return f"{field.get('type', 'any')}{_bounds(field)}"


def _bounds(field: Json) -> str:
    limits = [f"at least {field['minimum']}"] if "minimum" in field else []
    limits += [f"at most {field['maximum']}"] if "maximum" in field else []
    return f" ({', '.join(limits)})" if limits else ""

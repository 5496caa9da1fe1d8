"""The bodies of POST endpoints in the OpenAPI document, from the same types that read them."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_BODIES: dict[str, type[msgspec.Struct]] = {}

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def documented(body: type[msgspec.Struct], summary: str) -> dict[str, Any]:
    """Arguments for a route that reads ``body`` from JSON."""
    _BODIES[body.__name__] = body
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    error = {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    return {
        "summary": summary,
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
        "responses": {
            status: {"description": description, **error}
            for status, description in {
                400: "The request is refused; `param` names the field",
                401: "The API key is missing or wrong",
                404: "No such model",
                413: "The body is too large",
                429: "The queue is full; try again after `Retry-After` seconds",
                503: "The server is starting or shutting down",
            }.items()
        },
    }


def openapi_document(app: FastAPI) -> dict[str, Any]:
    """FastAPI's document with the schemas of the bodies."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, schemas = msgspec.json.schema_components(list(_BODIES.values()), ref_template="#/components/schemas/{name}")
    document.setdefault("components", {}).setdefault("schemas", {}).update(schemas, Error=_ERROR)
    return document

"""Routes with OpenAPI metadata, and the OpenAPI document, generated from the types that decode the bodies.

https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from octavo_server.http.error_responses import ERROR, ErrorForm

JSON = "application/json"
_SCHEMAS = "#/components/schemas/"

_FAILURES = {
    400: "The request is refused; `param` names the field",
    401: "The API key is missing or wrong",
    404: "No such model",
    413: "The body is too large",
    429: "The queue is full; try again after `Retry-After` seconds",
    503: "The server is starting or shutting down",
}


class Endpoint(Route):
    """A route with its OpenAPI metadata; ``body`` is the type of its body."""

    def __init__(
        self,
        method: str,
        path: str,
        answer: Callable[[Request], Awaitable[Response]],
        summary: str,
        body: type[msgspec.Struct] | None = None,
        name: str | None = None,
        errors: ErrorForm = ERROR,
        media_type: str = JSON,
    ) -> None:
        """``name`` is the id of the operation; by default, the name of ``answer``. ``media_type`` is the body's."""
        super().__init__(path, answer, methods=[method], name=name)
        self.method = method
        self.summary = summary
        self.body = body
        self.errors = errors
        self.media_type = media_type

    def operation(self) -> dict[str, Any]:
        """The OpenAPI operation object."""
        failure = _content(self.errors.name)
        responses: dict[str, Any] = {"200": {"description": "Done"}}
        if self.body is not None:
            responses |= {str(status): {"description": text, **failure} for status, text in _FAILURES.items()}
        responses["default"] = {"description": "What went wrong", **failure}
        operation: dict[str, Any] = {"summary": self.summary, "operationId": self.name, "responses": responses}
        if self.param_convertors:
            operation["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in self.param_convertors
            ]
        if self.body is not None:
            operation["requestBody"] = {"required": True, **_content(self.body.__name__, self.media_type)}
        return operation


def openapi_document(endpoints: Iterable[Endpoint], version: str) -> dict[str, Any]:
    """The OpenAPI document of a server with these endpoints."""
    paths: dict[str, dict[str, Any]] = {}
    bodies, errors = [], dict[str, Any]()
    for endpoint in endpoints:
        errors[endpoint.errors.name] = endpoint.errors.schema
        paths.setdefault(endpoint.path_format, {})[endpoint.method.lower()] = endpoint.operation()
        if endpoint.body is not None:
            bodies.append(endpoint.body)
    _, schemas = msgspec.json.schema_components(bodies, ref_template=_SCHEMAS + "{name}")
    for body in dict.fromkeys(bodies):
        _let_be_null(schemas[body.__name__])
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": version, "description": "An OpenAI-compatible LLM server."},
        "paths": paths,
        "components": {"schemas": {**schemas, **errors}},
    }


def _let_be_null(schema: dict[str, Any]) -> None:
    """Allow null in the schema of every optional field, where it counts as absent."""
    for name, field in schema["properties"].items():
        if name not in schema.get("required", ()):
            default = {"default": field.pop("default")} if "default" in field else {}
            schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **default}


def _content(schema: str, media_type: str = JSON) -> dict[str, Any]:
    return {"content": {media_type: {"schema": {"$ref": _SCHEMAS + schema}}}}

"""Structured output fields: ``response_format``, ``structured_outputs`` and the older ``guided_*``.

https://platform.openai.com/docs/guides/structured-outputs and vLLM's extra parameters, with vLLM's semantics.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from octavo.errors import InvalidParameter
from octavo.grammar import forms
from octavo.grammar.forms import Form, FormError
from octavo_server.http.body_decoder import exact_float
from octavo_server.http.errors import UnsupportedParameter

FORMAT_TYPES = ("text", "json_object", "json_schema", "structural_tag")
MAX_NAME_LENGTH = 64


class Constraint(NamedTuple):
    """The form required of the content, and the field that requires it."""

    field: str
    form: Form


class ConstraintFields(Protocol):
    """The fields of a body that constrain the content."""

    response_format: dict[str, Any] | None
    structured_outputs: dict[str, Any] | None
    guided_json: str | dict[str, Any] | None
    guided_json_object: bool | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


def constraint(body: ConstraintFields) -> Constraint | None:
    """The constraint in ``body``, if any. Raises ``InvalidParameter`` about its field, also if there are two."""
    found = list(_given(body))
    if len(found) > 1:
        fields = " and ".join(f"'{each.field}'" for each in found[:2])
        raise InvalidParameter(found[1].field, f"{fields} cannot be given together.")
    return found[0] if found else None


def _given(body: ConstraintFields) -> Iterator[Constraint]:
    if body.response_format is not None:
        form = _response_format(body.response_format)
        if form is not None:
            yield Constraint("response_format", form)
    if body.structured_outputs:
        yield from _structured_outputs(body.structured_outputs)
    for name in KINDS:
        value = getattr(body, f"guided_{name}", None)
        if value is not None and value is not False:
            yield Constraint(f"guided_{name}", _made(f"guided_{name}", KINDS[name], value))


# --- OpenAI ---


def _response_format(given: Mapping[str, Any]) -> Form | None:
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return _object_format(given)
    if kind == "json_schema":
        if given.get("json_schema") is None and isinstance(given.get("schema"), Mapping):
            return _made("response_format", _json, given["schema"])
        return _json_schema(given.get("json_schema"))
    if kind == "structural_tag":
        return _made("response_format", _structural_tag, given)
    raise InvalidParameter("response_format", f"'response_format.type' must be one of {', '.join(FORMAT_TYPES)}.")


def _object_format(given: Mapping[str, Any]) -> Form:
    """A JSON object; huggingface_hub sends the schema of one as ``value``, and clients of llama.cpp as ``schema``."""
    for name in ("schema", "value"):
        if (schema := given.get(name)) is not None:
            return _made("response_format", _json, schema, f"response_format.{name}")
    return forms.just(forms.json_object())


def _json_schema(given: Any) -> Form:
    """``strict`` is ignored: schemas are always enforced."""
    where = "'response_format.json_schema"
    if not isinstance(given, Mapping):
        raise InvalidParameter("response_format", f"{where}' must be an object with 'name' and 'schema'.")
    name = given.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise InvalidParameter("response_format", f"{where}.name' must be text of 1 to {MAX_NAME_LENGTH} characters.")
    if not isinstance(given.get("schema"), Mapping):
        raise InvalidParameter("response_format", f"{where}.schema' must be a JSON schema: an object.")
    return _made("response_format", _json, given["schema"])


# --- vLLM ---


def _structured_outputs(given: Mapping[str, Any]) -> Iterator[Constraint]:
    for name, value in given.items():
        if value is None or value is False:
            continue
        where = f"structured_outputs.{name}"
        if name not in STRUCTURED_KINDS:
            raise UnsupportedParameter("structured_outputs", f"'{where[:80]}' is not supported by this server.")
        yield Constraint("structured_outputs", _made("structured_outputs", STRUCTURED_KINDS[name], value, where))


def _json(value: Any) -> Form:
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_float=exact_float)
        except (ValueError, RecursionError) as error:
            problem = "" if isinstance(error, json.JSONDecodeError | RecursionError) else f"; {error}"
            raise FormError(f"must be a JSON schema: an object, or JSON text of one{problem}") from None
    return forms.just(forms.json_schema(value))


def _json_object(value: Any) -> Form:
    return forms.just(forms.json_object())


def _structural_tag(value: Any) -> Form:
    """Parse ``structures`` (each with ``begin``, ``schema`` and ``end``) and ``triggers``."""
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_float=exact_float)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, Mapping) or "structures" not in value or "triggers" not in value:
        raise FormError("must have 'structures' and 'triggers'; other kinds of structural tags are not supported")
    structures, triggers = value["structures"], value["triggers"]
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise FormError("must have lists as 'structures' and 'triggers'")
    if not all(isinstance(trigger, str) for trigger in triggers):
        raise FormError("must have a list of strings as 'triggers'")
    return forms.structural_tags([_tag(structure) for structure in structures], triggers)


def _tag(given: Any) -> forms.Tag:
    if not isinstance(given, Mapping) or not all(isinstance(given.get(key), str) for key in ("begin", "end")):
        raise FormError("must have structures with 'begin', 'schema' and 'end'")
    return forms.Tag(given["begin"], forms.json_schema(given.get("schema")), given["end"])


KINDS: dict[str, Callable[[Any], Form]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": lambda value: forms.just(forms.regex(value)),
    "choice": lambda value: forms.just(forms.choice(value)),
    "grammar": lambda value: forms.just(forms.grammar(value)),
}
STRUCTURED_KINDS = KINDS | {"structural_tag": _structural_tag}


def _made(field: str, make: Callable[[Any], Form], value: Any, where: str = "") -> Form:
    try:
        return make(value)
    except FormError as error:
        raise InvalidParameter(field, f"'{where or field}' {error}.") from None

"""Schemas that others published: the JSON Schema Test Suite, as jsonschema carries it, and bfcl-eval's functions.

Each is kept to, or refused: whatever a model of random logits writes under it, and comes to an end, is valid.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from octavo.grammar import forms, tester
from octavo.grammar.forms import FormError
from octavo.grammar.matchers import GrammarError, compile_matcher, normalised
from octavo.system.child_worker import RENDERED
from tests.clients.conftest import FOLDER
from tests.grammar.walks import VOCABULARY, tokenizer, write

CASES = sorted(FOLDER.glob("jsonschema-*/json/tests/draft2020-12/*.json"))
NOT_FUNCTIONS = "BFCL_v4_format_sensitivity.json"


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in CASES])
def test_the_suite_of_json_schema(path: Path) -> None:
    for case in json.loads(path.read_text()):
        schema, name = case["schema"], case["description"]
        try:
            part = forms.json_schema(schema)
            matcher = compile_matcher(normalised(forms.grammar_text(part)), tokenizer())
        except (FormError, GrammarError):
            continue
        for instance in case["tests"]:
            tokens = list(json.dumps(instance["data"], ensure_ascii=False, separators=(",", ":")).encode())
            fresh = matcher.deep_copy()
            is_taken = fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting()
            assert instance["valid"] or not is_taken, (name, instance["description"])
        rng = random.Random(name)
        for text in [write(part, rng, 300) for _ in range(5)]:
            if text is not None:
                jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)


def functions(folder: Path) -> Iterator[Any]:
    """The parameters of every function, in the words of the package."""
    for path in [*sorted(folder.glob("BFCL_*.json")), *sorted(folder.glob("multi_turn_func_doc/*.json"))]:
        if path.name != NOT_FUNCTIONS:
            for row in map(json.loads, path.read_text().splitlines()):
                yield from (
                    function["parameters"] for function in row.get("function", [row]) if "parameters" in function
                )


def as_json_schema(value: Any, types: dict[str, str]) -> Any:
    """The same with JSON Schema's words for types."""
    if not isinstance(value, dict):
        return value
    made = {key: as_json_schema(child, types) for key, child in value.items()}
    if isinstance(value.get("type"), str):
        made["type"] = types.get(value["type"], value["type"])
    return made


def test_the_functions_of_bfcl() -> None:
    (package,) = FOLDER.glob("main/lib/python*/site-packages/bfcl_eval")
    types = runpy.run_path(str(package / "constants/type_mappings.py"))["GORILLA_TO_OPENAPI"]
    schemas = {json.dumps(as_json_schema(given, types)) for given in functions(package / "data")}
    refused = {}
    for text in sorted(schemas):
        schema = json.loads(text)
        try:
            written = write(forms.json_schema(schema), random.Random(text))
        except GrammarError as error:
            refused[text] = str(error)
            continue
        assert written is not None, text
        jsonschema.validate(json.loads(written), schema, jsonschema.Draft202012Validator)
    assert len(schemas) > 3000
    # They are none: types that do not exist, and required properties without a value that they may have.
    assert len(refused) < 10
    assert all(re.search("Invalid type|Unsatisfiable|no text satisfies", reason) for reason in refused.values()), (
        refused
    )


def test_a_function_of_bfcl_makes_no_other_unusable() -> None:
    """Keywords that no grammar keeps to, put into published functions, are left out: what was valid can be written."""
    (package,) = FOLDER.glob("main/lib/python*/site-packages/bfcl_eval")
    types = runpy.run_path(str(package / "constants/type_mappings.py"))["GORILLA_TO_OPENAPI"]
    schemas = sorted({json.dumps(as_json_schema(given, types)) for given in functions(package / "data")})
    trial, more = (
        tester.Tester(VOCABULARY),
        {"uniqueItems": True, "not": {"const": 0}, "propertyNames": {"format": "email"}},
    )
    for text in schemas[::20]:
        rng, schema = random.Random(text), json.loads(text)
        with contextlib.suppress(GrammarError):
            written = write(forms.arguments(schema, "", True), rng)
            for given in schema.get("properties", {}).values():
                given.update(dict(rng.sample(sorted(more.items()), 1)))
            kind, grammar = trial.serve(forms.grammar_text(forms.arguments(schema, "tools[0]", False)))
            assert kind == RENDERED, grammar
            assert len(forms.weakened_in(grammar)) == len(schema.get("properties", {})), schema
            matcher = compile_matcher(grammar, tokenizer())
            assert written is None or matcher.try_consume_tokens(list(written)) == len(written), (schema, written)

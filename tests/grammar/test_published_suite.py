"""The JSON Schema Test Suite, where there is a copy: the folder ``json/tests`` of jsonschema's source distribution.

pip download jsonschema --no-binary jsonschema --no-deps && tar xzf jsonschema-*.tar.gz
OCTAVO_JSON_SCHEMA_SUITE=jsonschema-.../json/tests/draft2020-12 pytest tests/grammar/test_published_suite.py
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from octavo.grammar import forms
from octavo.grammar.forms import FormError
from octavo.grammar.matchers import GrammarError, compile_matcher, normalised
from tests.grammar.walks import tokenizer, write

FOLDER = os.environ.get("OCTAVO_JSON_SCHEMA_SUITE")


def cases() -> Iterator[Any]:
    for file in sorted(Path(FOLDER or "").glob("*.json")):
        for case in json.loads(file.read_text()):
            yield pytest.param(case, id=f"{file.stem}: {case['description']}")


@pytest.mark.skipif(FOLDER is None, reason="needs OCTAVO_JSON_SCHEMA_SUITE")
@pytest.mark.parametrize("case", list(cases()) if FOLDER else [])
def test_a_schema_is_kept_to_or_refused(case: dict[str, Any]) -> None:
    schema = case["schema"]
    try:
        part = forms.json_schema(schema)
        matcher = compile_matcher(normalised(forms.whole(part)), tokenizer())
    except (FormError, GrammarError):
        return
    for instance in case["tests"]:
        tokens = list(json.dumps(instance["data"], ensure_ascii=False, separators=(",", ":")).encode())
        fresh = matcher.deep_copy()
        is_taken = fresh.try_consume_tokens(tokens) == len(tokens) and fresh.is_accepting()
        assert instance["valid"] or not is_taken, instance["description"]
    rng = random.Random(case["description"])
    texts = [write(part, rng, 300) for _ in range(5)]
    for text in texts:
        if text is not None:
            jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator)

"""The fields of a request that constrain the answer: JSON schemas, regular expressions, grammars, structural tags.

A form is tested as in the child process of the grammars, here in the process itself, whose coverage is seen.
"""

from __future__ import annotations

import json

import msgspec

from octavo.errors import RequestError
from octavo.grammar.forms import grammar_text
from octavo.grammar.tester import Tester
from octavo_server.dialects.openai.chat_body import ChatBody
from octavo_server.dialects.openai.constraints import constraint
from tests.fuzz.target import JSONTarget, Target, as_json
from tests.grammar.walks import VOCABULARY

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "exclusiveMaximum": 200},
        "kind": {"enum": ["a", "b", 1, None]},
        "when": {"type": "string", "format": "date-time"},
        "next": {"$ref": "#/$defs/node"},
        "tags": {"type": "array", "items": {"anyOf": [{"type": "number"}, {"const": "x"}]}, "minItems": 1},
    },
    "required": ["name", "next"],
    "additionalProperties": False,
    "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
}
ALL_OF = {"allOf": [{"properties": {"a": {"type": "string"}}}, {"required": ["a"], "patternProperties": {"^b": {}}}]}
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": "<f>", "schema": {"type": "object"}, "end": "</f>"}],
    "triggers": ["<f"],
}


def make() -> Target:
    return Grammar()


class Grammar(JSONTarget):
    seeds = [
        as_json({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}}),
        as_json({"response_format": {"type": "json_object", "schema": ALL_OF}}),
        as_json({"response_format": TAGS}),
        as_json({"guided_json": {"type": "array", "prefixItems": [{"type": "boolean"}], "items": False}}),
        as_json({"guided_regex": r"(?P<a>[a-f0-9]{2,4}|\d+\.\w*)[^x-z]?$"}),
        as_json({"guided_choice": ["yes", "no", "perhaps"]}),
        as_json({"guided_grammar": 'root ::= "a" item* [0-9]+\nitem ::= "," root?'}),
        as_json({"structured_outputs": {"grammar": 'start: "a" item*\nitem: "," NUMBER\nNUMBER: /[0-9]+/'}}),
    ]
    max_seconds = 4.0
    """The child process has two, of which starting the walks may take a part."""

    def __init__(self) -> None:
        super().__init__()
        self._tester = Tester(VOCABULARY)

    def read(self, data: bytes) -> None:
        try:
            body = msgspec.convert({"messages": [], **json.loads(data)}, ChatBody)
            found = constraint(body)
        except (ValueError, TypeError, RecursionError, RequestError):  # what decodes bodies refuses all but the last
            return
        if found is not None:
            self._tester.serve(grammar_text(found.form))

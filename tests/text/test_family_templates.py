"""Chat templates of families of models on a table of conversations: byte-equal to transformers, refusals included."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.errors import InvalidParameter
from octavo.text.chat_messages import normalise_messages
from octavo.text.chat_template import ChatTemplate

from .family_templates import FAMILIES

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "</s>"}
SYSTEM = {"role": "system", "content": " Be brief.\n"}
USER = {"role": "user", "content": "Wie heißt du? 你好 <b>&'\" {{ 7 * 7 }}\u2028 "}
ANSWER = {"role": "assistant", "content": "\n😀 e\u0301\\n"}
THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nYes.", "reasoning_content": "hm </b>"}
FUNCTION = {"name": "wetter", "arguments": {"ort": "Zürich", "n": [1]}}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call00001", "type": "function", "function": FUNCTION}],
}
TWO_CALLS = {**CALL, "tool_calls": CALL["tool_calls"] * 2}  # type: ignore[operator]
RESULT = {"role": "tool", "content": '{"grad": 3.5, "x": "é"}', "tool_call_id": "call00001"}
MORE = {"role": "user", "content": "And then?"}
CONVERSATIONS = {
    "one question": [USER],
    "with a system message": [SYSTEM, USER],
    "several turns": [SYSTEM, USER, ANSWER, MORE],
    "the last word is the assistant's": [USER, ANSWER],
    "thinking": [USER, THOUGHT, MORE, THOUGHT],
    "a call": [SYSTEM, USER, CALL, RESULT],
    "calls at once": [USER, TWO_CALLS, RESULT, RESULT, MORE],
    "out of order": [ANSWER, USER, USER],
    "empty": [{"role": "user", "content": ""}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wetter",
            "description": 'Says how <warm> it is in a town, größer "or" not.',
            "parameters": {
                "type": "object",
                "properties": {
                    "ort": {"type": "string", "enum": ["Zürich", "Bern"]},
                    "n": {"type": "array", "items": {"type": ["integer", "null"]}},
                },
                "required": ["ort"],
            },
        },
    },
    {"type": "function", "function": {"name": "nichts", "parameters": {"type": "object", "properties": {}}}},
]
VARIABLES: list[dict[str, Any]] = [
    {},
    {"enable_thinking": False, "thinking": True, "reasoning_effort": "high"},
    {"documents": [{"title": "T", "text": "x & ü"}, {"text": "y"}], "date_string": "1 Jan 2025"},
]


@pytest.fixture(scope="module", params=FAMILIES)
def template(request: pytest.FixtureRequest) -> Iterator[ChatTemplate]:
    template = ChatTemplate(FAMILIES[request.param], SPECIALS)
    yield template
    template.close()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_renderings_equal_the_reference(template: ChatTemplate, name: str) -> None:
    """A template that knows no calls writes "None" for a message that has nothing else; here it has no text."""
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    messages = normalise_messages(CONVERSATIONS[name])
    if "tool_calls" not in (template.source or ""):
        messages = [{**message, "content": message["content"] or ""} for message in messages]
    for tools, generation, given in itertools.product((None, TOOLS), (True, False), VARIABLES):
        expected, refusal = None, ""
        try:
            (expected,), _ = utils.render_jinja_template(
                [messages],
                tools=tools,
                chat_template=template.source,
                add_generation_prompt=generation,
                **{"documents": None, **SPECIALS, **given},
            )
        except Exception as error:  # the reference lets through whatever a template raises
            refusal = str(error)
        if expected is not None:
            assert template.render(messages, generation, tools=tools, template_kwargs=given) == expected
            continue
        with pytest.raises(InvalidParameter) as caught:
            template.render(messages, generation, tools=tools, template_kwargs=given)
        assert refusal in caught.value.message

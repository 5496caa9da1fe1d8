"""A conversation becomes a prompt with every family's template, whatever its history is."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from typing import Any

import pytest

from octavo.errors import InvalidParameter
from octavo.text.chat_template import ChatTemplate
from octavo.text.conversation import Conversation
from octavo.text.tool_calls.hermes import HERMES

from .family_templates import FAMILIES
from .test_family_templates import SPECIALS

USER = {"role": "user", "content": "Hi"}
STRICT = """{%- for m in messages %}
{%- if m.role == 'system' and not loop.first %}{{ raise_exception('System message must be first.') }}{% endif %}
{{- '<|' + m.role + '|>' + m.content + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
"""A template that takes a system message in front only."""
NO_SYSTEM = STRICT.replace(" and not loop.first", "")
SILENT = """{% for m in messages %}
{% if m.role != 'system' or loop.first %}[{{ m.role }}]{{ m.content }}{% endif %}
{% endfor %}"""
"""A template that leaves later system messages out, and says nothing."""
MISTRAL_IDS = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}
{% if c.id | length != 9 %}{{ raise_exception('9!') }}{% endif %}({{ c.id }}){% endfor %}
{% if m.role == 'tool' %}={{ m.tool_call_id }}{% endif %}{% endfor %}"""
ITEMS = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}
{% for k, v in c.function.arguments | items %}{{ k }}={{ v }};{% endfor %}
{% endfor %}{% endfor %}"""
WRITTEN = """{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}
{% set arguments = c.function.arguments %}{{ c.function.name }}
{{- arguments if arguments is string else arguments | tojson }}{% endfor %}{{ '\\n' }}{% endfor %}"""


@functools.cache
def template_of(source: str) -> ChatTemplate:
    """One for each source: starting its process takes longer than a test."""
    return ChatTemplate(source, SPECIALS)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> ChatTemplate:
    return template_of(FAMILIES[request.param])


def rendered(source: str, messages: list[dict[str, Any]], **more: Any) -> str:
    return Conversation(messages, template_of(source), **more).prompt().text


def prompt(template: ChatTemplate, messages: list[dict[str, Any]], **more: Any) -> str:
    knows_tools = "tools" in (template.source or "")
    return Conversation(messages, template, write_calls=None if knows_tools else HERMES.write, **more).prompt().text


def continued(template: ChatTemplate, *messages: dict[str, Any]) -> str:
    return prompt(template, list(messages), add_generation_prompt=False, continue_final_message=True)


def call(arguments: Any, id: str | None = "c1", name: str = "f") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def calls(*made: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(made), **more}


def result(id: str | None, content: Any = "done", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content, **more}


# --- the final message continues ---

PREFILLS = ("", "im", "|", "end", "Hello", " Answer:\n", "\n\n", "<|im_end|>", "assistant", "</think>", "{{ 1 }}", "Hi")


def test_the_prompt_ends_with_the_text_as_it_is(family: ChatTemplate) -> None:
    """What stands before it is the same for every text."""
    starts = set()
    for text in PREFILLS:
        found = continued(family, USER, {"role": "assistant", "content": text})
        assert found.endswith(text)
        # Qwen's template takes reasoning that the text closes out of it.
        if text != "</think>":
            starts.add(found.removesuffix(text))
    assert len(starts) == 1


@pytest.mark.parametrize("text", ["im", " Answer:\n", ""])
@pytest.mark.parametrize(
    "form",
    ["m.content", "m.content | trim", "m.content | upper", "m.content | tojson", "m.content | e", "m.content[:40]"],
)
def test_templates_that_change_the_text(form: str, text: str) -> None:
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ " + form + " }}<|im_end|>{% endfor %}"
    messages = [USER, {"role": "assistant", "content": text}]
    found = rendered(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert found.rpartition("assistant\n")[2].lstrip('"') == text


@pytest.mark.parametrize("source", ["{{ messages | length }}", "{{ messages[1].content * 2 }}"])
def test_a_text_without_a_single_place_cannot_be_continued(source: str) -> None:
    messages = [USER, {"role": "assistant", "content": "im"}]
    with pytest.raises(InvalidParameter, match="cannot be continued") as caught:
        rendered(source, messages, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_reasoning_continues() -> None:
    template = template_of(FAMILIES["qwen 3"])
    thought = {"role": "assistant", "content": "", "reasoning_content": "Hm, \n"}
    made = Conversation([USER, thought], template, add_generation_prompt=False, continue_final_message=True).prompt()
    assert made.text.endswith("assistant\n<think>\nHm, \n")
    assert made.seen.endswith("assistant\n<think>")
    # A template without reasoning leaves it out here, as it does in a history.
    text = rendered(STRICT, [USER, thought], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|assistant|>")
    for text, seen in (("<think>\nLet", "<think>"), ("<think>a</think>b", "<think>a</think>b"), ("b", "b")):
        messages = [USER, {"role": "assistant", "content": text}]
        made = Conversation(messages, template, add_generation_prompt=False, continue_final_message=True).prompt()
        assert made.text.endswith(text)
        assert made.seen.endswith(seen)


def test_a_message_with_calls_is_complete() -> None:
    messages = [USER, calls(call("{}"))]
    found = rendered(FAMILIES["qwen 3"], messages, add_generation_prompt=False, continue_final_message=True)
    assert found == rendered(FAMILIES["qwen 3"], messages)


# --- histories ---


@pytest.mark.parametrize(
    "arguments",
    [
        '{"a": tru',
        "",
        "null",
        None,
        "[1]",
        "text",
        '"',
        "{",
        '{"a": NaN}',
        '{"a": 1e999}',
        5,
        [1],
        '{"a":' * 400 + "1" + "}" * 400,
    ],
    ids=lambda value: str(value)[:20],
)
def test_arguments_of_any_form(family: ChatTemplate, arguments: Any) -> None:
    text = prompt(family, [USER, calls(call(arguments)), result("c1"), USER])
    kept = arguments if isinstance(arguments, str) and arguments not in ("", "null") else "{}"
    if family.source != FAMILIES["glm 4"]:  # it does not write calls
        assert any(form in text for form in (kept, json.dumps(kept)[1:-1])) or arguments in (5, [1])


def test_malformed_arguments_are_text_where_the_template_takes_text() -> None:
    messages = [USER, calls(call('{"a": tru')), result("c1")]
    assert 'f{"a": tru\n' in rendered(WRITTEN, messages)
    assert 'arguments={"a": tru;' in rendered(ITEMS, messages)


def test_results_are_in_the_order_of_their_calls(family: ChatTemplate) -> None:
    made = [call('{"c": "Paris"}', "c1"), call('{"c": "Rome"}', "c2")]
    in_order = prompt(family, [USER, calls(*made), result("c1", "sunny"), result("c2", "rain")])
    assert in_order.index("sunny") < in_order.index("rain")
    assert in_order == prompt(family, [USER, calls(*made), result("c2", "rain"), result("c1", "sunny")])


@pytest.mark.parametrize(
    ("ids", "results"),
    [
        (("a", "a"), [result("a", "1"), result("a", "2")]),
        (("a", "b"), [result("x", "2", name="g"), result(None, "1")]),
        (("a", "b"), [result(None, "1"), result(None, "2")]),
        (("a", "b"), [result("b", "2"), result("zz", "1"), result("a2", "3")]),
        ((None, None), [result(None, "1"), result(None, "2")]),
    ],
)
def test_ids_that_are_missing_or_the_same(ids: Any, results: Any) -> None:
    made = calls(call("{}", ids[0], "f"), call("{}", ids[1], "g"))
    lines = rendered(WRITTEN, [USER, made, *results]).splitlines()
    assert lines[1:4] == ["[assistant]f{}g{}", "[tool]1", "[tool]2"]


def test_results_in_text_name_their_call() -> None:
    made = calls(call('{"c": "Paris"}', "c1", "w"), call('{"c": "Rome"}', "c2", "w"))
    text = rendered(STRICT, [USER, made, result("c2", "rain")], write_calls=HERMES.write)
    assert '<tool_response>\nw({"c": "Rome"}):\nrain\n</tool_response>' in text


def test_a_template_of_one_call_gets_one_at_a_time() -> None:
    made = calls(call('{"n": 1}', "c1"), call('{"n": 2}', "c2"), content="I look.")
    text = rendered(FAMILIES["gpt-oss"], [USER, made, result("c2", "two"), result("c1", "one"), USER])
    parts = ['"n": 1', '"one"', '"n": 2', '"two"']
    assert sorted(parts, key=text.index) == parts


def test_foreign_ids_where_a_template_takes_its_own_only() -> None:
    messages = [calls(call("{}", "toolu_1"), call("{}", "abcdefgh1")), result("toolu_1", "x")]
    assert rendered(MISTRAL_IDS, messages) == "None(c00000000)(abcdefgh1)x=c00000000"


@pytest.mark.parametrize("source", [STRICT, NO_SYSTEM, SILENT, FAMILIES["gemma"], FAMILIES["mistral"]])
def test_system_messages_anywhere(source: str) -> None:
    leading = [{"role": "system", "content": "One."}, {"role": "developer", "content": "Two."}]
    later = [{"role": "system", "content": "Three."}, USER, {"role": "assistant", "content": "a"}]
    for messages in (
        [*leading, USER],
        [USER, {"role": "assistant", "content": "a"}, *later, USER],
        [*leading, USER, {"role": "assistant", "content": "a"}, *later, {"role": "system", "content": "Four."}],
    ):
        text = rendered(source, messages)
        words = [word for word in ("One.", "Two.", "Three.", "Four.") if word in str(messages)]
        assert all(text.count(word) == 1 for word in words), text


def test_a_template_that_answers_late_has_its_conversation_rewritten() -> None:
    """As when its process, or this machine, stood still for a while."""
    template = ChatTemplate(STRICT, max_seconds=60.0)
    template.check()
    assert template.process_id is not None
    os.kill(template.process_id, signal.SIGSTOP)
    threading.Timer(1.2, os.kill, (template.process_id, signal.SIGCONT)).start()
    text = Conversation([USER, {"role": "system", "content": "One."}, USER], template).prompt().text
    assert "One." in text


@pytest.mark.parametrize(("num_messages", "length"), [(8192, 1), (2, 9 << 20)])
def test_a_huge_conversation_that_is_refused_is_rendered_once(
    num_messages: int, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendered_lengths, render = list[int](), ChatTemplate.render

    def note(template: ChatTemplate, messages: Any, *given: Any, **more: Any) -> str:
        rendered_lengths.append(len(messages))
        return render(template, messages, *given, **more)

    monkeypatch.setattr(ChatTemplate, "render", note)
    refused = [USER, {"role": "system", "content": "One."}]
    with pytest.raises(InvalidParameter, match="must be first"):
        rendered(STRICT, refused + [{"role": "user", "content": "x" * length}] * num_messages)
    assert rendered_lengths == [num_messages + 2]


def test_a_growing_conversation_keeps_its_prefix() -> None:
    start = [{"role": "system", "content": "One."}, {"role": "system", "content": "Two."}, USER]
    first = rendered(STRICT, start, add_generation_prompt=False)
    later = [{"role": "assistant", "content": "a"}, {"role": "system", "content": "Three."}, USER]
    assert rendered(STRICT, [*start, *later]).startswith(first)
    assert "<|user|>Three.\n\nHi\n" in rendered(STRICT, [*start, *later])


HISTORIES: dict[str, list[dict[str, Any]]] = {
    "content, reasoning and calls": [USER, calls(call("{}"), content="I look.", reasoning_content="Hm."), result("c1")],
    "a refusal": [USER, {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}, USER],
    "a refusal beside null": [USER, {"role": "assistant", "content": None, "refusal": "No."}, USER],
    "null everywhere": [{"role": role, "content": None} for role in ("system", "user", "assistant", "tool")],
    "parts of other APIs": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "text", "text": "b", "x": 1}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "QUJD"},
                {"type": "output_text", "text": "c", "annotations": []},
                {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
            ],
        },
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "d"}]}],
        },
    ],
    "a function call": [
        USER,
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "5"},
    ],
    "a custom call": [
        USER,
        calls({"id": "c1", "type": "custom", "custom": {"name": "p", "input": "*** Begin"}}),
        result("c1"),
    ],
    "a result of no call": [USER, result("c9"), USER],
    "the assistant first": [{"role": "assistant", "content": "Welcome."}, USER, USER],
    "two answers": [USER, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
}


@pytest.mark.parametrize("name", HISTORIES)
def test_every_history_renders(family: ChatTemplate, name: str) -> None:
    text, given = prompt(family, HISTORIES[name]), json.dumps(HISTORIES[name])
    assert all(word in text for word in ("No.", "Welcome.", "abc") if word in given)

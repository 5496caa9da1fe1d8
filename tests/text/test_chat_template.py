"""Chat templates: equal to the reference, bounded, and a fresh start after each disaster."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from octavo.errors import ConfigError, InvalidParameter
from octavo.text.chat_messages import normalise_messages
from octavo.text.chat_template import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from tests.tiers import one_in

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA3 = (
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
CHATML = """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{% for message in messages %}
    {% if message.role == 'skip' %}
        {% continue %}
    {% endif %}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' }}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(turn=0) %}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% set ns.turn = ns.turn + 1 %}{% endif %}{% endfor %}"
    "{% generation %}{{ ns.turn }}{% endgeneration %}{{ messages | tojson(indent=2) }}"
)
CONVERSATION = [
    {"role": "user", "content": "Wie heißt du? 你好 <b>&'\" "},
    {"role": "assistant", "content": " {{ 7 * 7 }}\n"},
    {"role": "user", "content": "😀"},
]
TOOLS = [{"type": "function", "function": {"name": "größe", "parameters": {"a": [1, 2.5, None, True]}}}]


@pytest.fixture
def make() -> Iterator[Any]:
    made: list[ChatTemplate] = []

    def build(source: str | None, **limits: Any) -> ChatTemplate:
        made.append(ChatTemplate(source, SPECIALS, **limits))
        return made[-1]

    yield build
    for template in made:
        template.close()


@one_in(5)
@pytest.mark.parametrize("source", [LLAMA3, CHATML, MISTRAL])
@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renderings_equal_the_reference(make: Any, source: str, generation: bool, tools: Any) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, _ = utils.render_jinja_template(
        [CONVERSATION], tools=tools, chat_template=source, add_generation_prompt=generation, **SPECIALS
    )
    assert make(source).render(CONVERSATION, generation, tools=tools) == expected[0]


@pytest.mark.model
@pytest.mark.parametrize("generation", [True, False])
def test_the_real_template_equals_the_reference(make: Any, smollm_tokenizer: Tokenizer, generation: bool) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    source = smollm_tokenizer.chat_template
    for messages in (CONVERSATION, [{"role": "system", "content": "Be brief."}, *CONVERSATION]):
        expected, _ = utils.render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=generation, **smollm_tokenizer.special_tokens
        )
        template = make(source)
        assert template.render(messages, generation) == expected[0]
        messages = normalise_messages([{"role": "developer", "content": "Be brief."}])
        assert template.render(messages).count("system") == 1


def test_variables_of_the_request_reach_the_template(make: Any) -> None:
    template = make("{{ thinking }} {{ bos_token }} {{ documents is none }} {{ tools is none }}")
    assert template.render(CONVERSATION, template_kwargs={"thinking": True}) == "True <s> True True"


def test_conversations_with_tools_may_have_a_template_of_their_own(make: Any) -> None:
    template = make("usual", tool_source="{{ tools | length }} tools")
    template.check()
    assert template.render(CONVERSATION) == "usual"
    assert template.render(CONVERSATION, tools=TOOLS) == "1 tools"
    assert "usual" in template.source
    assert "tools" in template.source
    assert make("usual").render(CONVERSATION, tools=TOOLS) == "usual"
    with pytest.raises(ConfigError, match="chat template: line 1"):
        make("usual", tool_source="{% if %}").check()


def test_null_content_with_calls_is_text_for_a_template_without_calls(make: Any) -> None:
    """Clients send back a call's message with ``content`` null: no error, and no "None" in the prompt."""
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    assert make("{% for m in messages %}[{{ m.content }}]{% endfor %}").render(messages) == "[]"
    assert make("{% for m in messages %}{{ '>' + m.content }}{% endfor %}").render(messages) == ">"
    aware = "{% for m in messages %}{{ m.content is none }} {{ m.tool_calls | length }}{% endfor %}"
    assert make(aware).render(messages) == "True 1"


def test_strftime_now_says_the_time(make: Any) -> None:
    assert make("{{ strftime_now('%Y') }}").render(CONVERSATION) == time.strftime("%Y")


@pytest.mark.parametrize("name", ["chat_template", "messages", "add_generation_prompt"])
def test_some_variables_are_not_the_clients(make: Any, name: str) -> None:
    with pytest.raises(InvalidParameter, match=name) as caught:
        make("x").render(CONVERSATION, template_kwargs={name: "y"})
    assert caught.value.param == "chat_template_kwargs"


def test_no_template_says_how_to_give_one(make: Any) -> None:
    make(None).check()
    with pytest.raises(InvalidParameter, match="--chat-template") as caught:
        make(None).render(CONVERSATION)
    assert caught.value.param == "messages"


def test_what_is_not_json_is_refused(make: Any) -> None:
    with pytest.raises(InvalidParameter, match="plain JSON"):
        make("x").render([{"role": "user", "content": "x", "extra": object()}])


def test_an_exception_of_the_template_is_the_clients_message(make: Any) -> None:
    template = make(MISTRAL)
    with pytest.raises(InvalidParameter) as caught:
        template.render([{"role": "assistant", "content": "x"}])
    assert caught.value.message == "Conversation roles must alternate user/assistant/user/assistant/..."
    assert caught.value.param == "messages"
    assert template.render([{"role": "user", "content": "x"}]).startswith("<s>[INST] x [/INST]")


def test_a_template_that_is_not_one_is_found_by_check(make: Any) -> None:
    template = make("line\n{% if %}")
    with pytest.raises(ConfigError, match="chat template: line 2"):
        template.check()
    with pytest.raises(InvalidParameter, match="is not valid: line 2"):
        template.render(CONVERSATION)


GUARD = "{% if messages[0].content == 'ok' %}fine{% else %}"
BOMBS = {
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "power": "{{ 10 ** (n * 10 ** 8) }}",
    "format": "{{ '%2000000000d' % n }}",
    "center": "{{ 'x'.center(n * 10 ** 9) }}",
    "doubling": "{% set ns = namespace(a=[n]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "output": "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "one output": "{{ 'x' * (n * 17000000) }}",
    "lipsum": "{{ lipsum(n=n * 1000000) }}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "escape": "{{ messages.__class__.__base__.__subclasses__() }}",
    "escape by format": "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "escape by map": "{{ [messages] | map(attribute='__class__') | list | join | length / 0 }}",
    "globals": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "division": "{{ 1 / (n - 1) }}",
    "mutation": "{{ messages.append(1) }}",
    "type": "{{ n + 'x' }}",
    "surrogate": "{{ messages[1].content }}",
}


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("name", BOMBS)
def test_a_disaster_is_one_requests_error_and_over_soon(make: Any, name: str) -> None:
    template = make(GUARD + BOMBS[name] + "{% endif %}", max_seconds=0.5)
    template.check()
    bad = [{"role": "user", "content": "boom"}, {"role": "user", "content": "\ud800"}]
    start = time.monotonic()
    with pytest.raises(InvalidParameter, match="chat template could not be rendered") as caught:
        template.render(bad, template_kwargs={"n": 1})
    assert time.monotonic() - start < 10
    assert len(caught.value.message) < 700
    assert template.render([{"role": "user", "content": "ok"}]) == "fine"


def test_the_error_says_what_was_too_much(make: Any) -> None:
    for name, words in {
        "loop": "more than 0.5 seconds",
        "center": "256 MiB of memory",
        "output": "than 1000 bytes",
    }.items():
        template = make(BOMBS[name], max_seconds=0.5, max_memory=256 << 20, max_output=1000)
        template_kwargs = {"n": 1}
        with pytest.raises(InvalidParameter, match=words):
            template.render(CONVERSATION, template_kwargs=template_kwargs)


def test_a_template_that_hangs_while_it_is_compiled(make: Any) -> None:
    template = make("{{ 10 ** (10 ** 8) }}", max_seconds=0.5)
    with pytest.raises(InvalidParameter, match="could not be rendered"):
        template.render(CONVERSATION)
    with pytest.raises(ConfigError, match="chat template: it took more"):
        template.check()


def test_a_killed_process_is_replaced(make: Any) -> None:
    template = make("{{ messages[0].content }}")
    template.check()
    first = template.process_id
    assert first is not None
    os.kill(first, signal.SIGKILL)
    time.sleep(0.05)
    assert template.render(CONVERSATION) == CONVERSATION[0]["content"]
    assert template.process_id != first


def test_the_process_ends_with_its_owner() -> None:
    template = ChatTemplate("x")
    template.check()
    process_id = template.process_id
    assert process_id is not None
    del template
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


def test_secrets_stay_out_of_the_process(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    template = make("x")
    template.check()
    with open(f"/proc/{template.process_id}/environ", "rb") as file:
        assert b"secret" not in file.read()


def test_threads_share_one_template(make: Any) -> None:
    template = make("{{ messages[0].content }}")
    wrong = []

    def render(number: int) -> None:
        for turn in range(50):
            text = f"{number}.{turn} " + "x" * 1000 * number
            if template.render([{"role": "user", "content": text}]) != text:
                wrong.append(number)

    threads = [threading.Thread(target=render, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_long_conversation_passes(make: Any) -> None:
    text = "wörd " * 200_000
    assert make("{{ messages[0].content }}").render([{"role": "user", "content": text}]) == text

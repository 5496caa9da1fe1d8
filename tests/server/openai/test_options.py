"""A sampling option is declared once, in ``OPTIONS``; what else there is of it follows."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.cli.sampling_flags import add_sampling, sampling_values
from octavo.errors import InvalidParameter
from octavo.sampling_params import DEFAULTS, OPTIONS, Option, SamplingParams
from octavo.weights.generation_config import sampling_defaults
from octavo_server.dialects.anthropic import body as anthropic
from octavo_server.dialects.openai import chat_body, completions
from octavo_server.http.error_responses import UnsupportedParameter
from octavo_server.http.request_body import BodyDecoder
from tests.server.conftest import Served

PAGE = Path(__file__).parents[3] / "docs/endpoints.md"
NUMBERS = {name: option for name, option in OPTIONS.items() if option.kind is not bool}


def beyond(option: Option) -> float:
    return option.high + 1


@pytest.mark.parametrize("name", NUMBERS)
def test_every_way_in_has_the_bounds(served: Served, name: str) -> None:
    option = NUMBERS[name]
    with pytest.raises(InvalidParameter, match=f"'{name}' must be"):
        SamplingParams(**{name: option.kind(beyond(option))})
    if name == "seed":
        return  # taken modulo 2**64 over HTTP
    for path, body in (("completions", {"prompt": "Hi"}), ("chat/completions", {"messages": [{"role": "user"}]})):
        sent: dict[str, Any] = {**body, name: option.kind(beyond(option))}
        if path == "chat/completions":
            sent["messages"] = [{"role": "user", "content": "Hi"}]
        refused = served.client.post(f"/v1/{path}", json=sent)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_page_of_endpoints_and_other_apis_know_it(name: str) -> None:
    assert PAGE.read_text().count(f"| `{name}` |") >= 2
    if name in anthropic.MessageBody.__struct_fields__:
        return
    value: Any = True if OPTIONS[name].kind is bool else OPTIONS[name].kind(OPTIONS[name].high)
    sent = {"messages": [], "max_tokens": 1, name: value}
    with pytest.raises(UnsupportedParameter, match=name):
        anthropic.message_decoder.read(msgspec.json.encode(sent))


def test_flags_and_defaults_of_models_follow() -> None:
    parser = argparse.ArgumentParser()
    add_sampling(parser)
    for name, option in OPTIONS.items():
        if option.help:
            given = parser.parse_args([f"--{name.replace('_', '-')}", "1"])
            assert sampling_values(given) == {name: 1}
        if option.model_key:
            assert sampling_defaults("auto", {option.model_key: 1}) == {name: 1}


@pytest.mark.parametrize("decoder", [chat_body.decoder, completions.decoder])
def test_a_body_has_its_options_in_an_order_of_its_own(decoder: BodyDecoder[Any]) -> None:
    base: dict[str, Any] = {"prompt": "Hi", "messages": []}
    sent = {name: 1 for name, option in OPTIONS.items() if option.kind is not bool}
    forth, back = ({**base, **dict(items)} for items in (sent.items(), reversed(sent.items())))
    first, second = (decoder.read(msgspec.json.encode(body))[0] for body in (forth, back))
    assert msgspec.json.encode(first) == msgspec.json.encode(second)
    assert first.sampling == sent
    assert decoder.read(msgspec.json.encode({**base, "sampling": {"seed": 1}}))[0].sampling == {}


def test_an_option_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is added to the table is decoded, checked, documented, and refused elsewhere."""
    added = BodyDecoder(completions.CompletionBody, {}, frozenset(), options={"loudness": (float, 0.0)})
    body, unknown = added.read(b'{"prompt": "Hi", "loudness": 0.5}')
    assert (body.sampling, unknown) == ({"loudness": 0.5}, [])
    with pytest.raises(InvalidParameter, match="loudness"):
        added.read(b'{"prompt": "Hi", "loudness": "much"}')
    shown = {field.name for field in msgspec.structs.fields(added.documented)}
    assert "loudness" in shown
    assert "sampling" not in shown
    monkeypatch.setitem(OPTIONS, "loudness", Option(float, 0.0, 1.0))
    monkeypatch.setitem(DEFAULTS, "loudness", 0.0)
    assert "loudness" in chat_body.refused_elsewhere(anthropic.MessageBody, frozenset())

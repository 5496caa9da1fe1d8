"""Whose cached prompts a request may find: those of its salt, and of its key if keys are isolated.

A hit makes the first token come sooner, so who finds a prompt knows that somebody has sent it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config import EngineConfig, ModelSettings, SchedulerSettings, ServeConfig, to_flat
from octavo.engine.policies import FirstCome, PolicyContext, make_policy
from octavo.errors import ConfigError
from octavo.types import Request
from octavo.weights.adapter_files import FILES
from octavo_server.engines.lora_adapters import AdapterTable
from tests.engine.making import make_engine, run_to_end
from tests.server.conftest import Served
from tests.server.in_process import InProcessEngine
from tests.server.test_keys import bearer, key_file, line

PROMPT = "A prompt that is longer than a few blocks of four tokens."


def numbers_cached(requests: list[Request]) -> list[int]:
    """How many tokens of its prompt each request finds, when they come one after the other to a real cache."""
    engine, _ = make_engine()
    found = []
    for request in requests:
        engine.add(request)
        found.append(max(output.num_cached_tokens for output in run_to_end(engine)[request.id]))
    return found


def with_keys(serve_app: Any, folder: Path, **settings: Any) -> Served:
    path = key_file(folder, line("alice", "a"), line("bob", "b"))
    served: Served = serve_app(api_key_file=path, api_key="own", **settings)
    return served


def ask(served: Served, key: str, path: str = "/v1/completions", **body: Any) -> None:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    answer = served.client.post(path, json={limit: 2, **body}, headers=bearer(key))
    assert answer.status_code == 200, answer.text


def test_keys_share_nothing_when_they_are_isolated(serve_app: Any, tmp_path: Path) -> None:
    served = with_keys(serve_app, tmp_path, isolate_keys=True)
    for key in ("a", "b", "own", "a", "b", "own"):
        ask(served, key, prompt=PROMPT)
    cached = numbers_cached(served.engine.requests)
    assert cached[:3] == [0, 0, 0]
    assert min(cached[3:]) >= len(PROMPT) - 4


def test_no_salt_of_the_body_reaches_over_to_another_key(serve_app: Any, tmp_path: Path) -> None:
    served = with_keys(serve_app, tmp_path, isolate_keys=True)
    ask(served, "a", prompt=PROMPT, cache_salt="x")
    for key, salt in (("b", "x"), ("b", "alice/x"), ("own", "alice/x"), ("own", "/alice/x"), ("a", ""), ("a", "/x")):
        ask(served, key, prompt=PROMPT, cache_salt=salt)
    assert numbers_cached(served.engine.requests) == [0] * 7


def test_every_api_is_isolated(serve_app: Any, tmp_path: Path) -> None:
    served = with_keys(serve_app, tmp_path, isolate_keys=True)
    messages = [{"role": "user", "content": PROMPT}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/messages", {"messages": messages}),
        ("/v1/responses", {"input": PROMPT}),
        ("/infer/v1/completions", {"model": "test", "prompt": PROMPT}),
        ("/v1/generate", {"prompt": PROMPT}),
        ("/generate", {"prompt": PROMPT}),
    ):
        ask(served, "a", path, **body)
        assert served.engine.requests[-1].cache_salt == "alice/", path
    ask(served, "a", "/v1/responses", input=PROMPT, cache_salt="x")
    assert served.engine.requests[-1].cache_salt == "alice/x"


def test_events_of_the_cache_would_tell_it_all() -> None:
    with pytest.raises(ConfigError, match="isolate_keys and enable_kv_events"):
        ServeConfig.from_flat({"isolate_keys": True, "enable_kv_events": True})
    with pytest.raises(ConfigError, match="isolate_keys needs api_key_file"):
        ServeConfig.from_flat({"isolate_keys": True})


def test_several_keys_are_isolated_and_served_fairly_unless_it_is_said_otherwise(
    serve_app: Any, tmp_path: Path
) -> None:
    keys = {"api_key_file": key_file(tmp_path, line("alice", "a"), line("bob", "b"))}
    served = serve_app(**keys)
    for key in ("a", "b"):
        ask(served, key, prompt=PROMPT, user="somebody")
    assert numbers_cached(served.engine.requests) == [0, 0]
    assert [request.tenant for request in served.engine.requests] == ["alice", "bob"]
    for settings, policy in (
        (keys, "fair"),
        (keys | {"scheduling_policy": "fcfs"}, "fcfs"),
        ({}, None),
        ({"api_key": "k"}, None),
        (keys | {"tenant_weights": "alice=2"}, "fair"),
        (keys | {"backend": "instant"}, None),
        (keys | {"backend": "toy"}, "fair"),
    ):
        config = ServeConfig.from_flat(settings)
        assert config.scheduler.scheduling_policy == policy, settings
        assert ServeConfig.from_flat(to_flat(config)) == config
        EngineConfig.from_flat(to_flat(config, EngineConfig))
    assert isinstance(make_policy(PolicyContext(None, 1, SchedulerSettings(), float)), FirstCome)  # type: ignore[arg-type]


def test_keys_may_share_and_a_salt_still_separates(serve_app: Any, tmp_path: Path) -> None:
    served = with_keys(serve_app, tmp_path, isolate_keys=False)
    for key, salt in (("a", ""), ("b", ""), ("a", "x"), ("b", "x"), ("b", "y")):
        ask(served, key, prompt=PROMPT, cache_salt=salt)
    first, second, third, fourth, fifth = numbers_cached(served.engine.requests)
    assert first == third == fifth == 0
    assert min(second, fourth) >= len(PROMPT) - 4


def test_the_tenant_by_key_and_by_adapter(serve_app: Any, tmp_path: Path) -> None:
    """Under the fair policy. What the body says of its user would let a key have as many shares as it likes."""
    served = with_keys(serve_app, tmp_path, scheduling_policy="fair", tenant_by="key")
    for key in ("a", "b", "own"):
        ask(served, key, prompt=PROMPT, user="somebody")
    ask(served, "a", "/v1/chat/completions", messages=[{"role": "user", "content": PROMPT}], user="else")
    assert [request.tenant for request in served.engine.requests] == ["alice", "bob", "", "alice"]
    for name in FILES:
        (tmp_path / name).touch()
    modules = f"sql={tmp_path},fr={tmp_path}"
    adapters = AdapterTable(ModelSettings(enable_lora=True, lora_modules=modules))
    served = serve_app(
        InProcessEngine(adapters=adapters), scheduling_policy="fair", tenant_by="adapter", enable_lora=True
    )
    for model in ({"model": "sql"}, {"model": "fr"}, {}):
        assert served.complete(**model, user="somebody").status_code == 200
    assert [request.tenant for request in served.engine.requests] == ["sql", "fr", ""]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tenant_by": "key", "tenant_header": "x-t", "api_key_file": "keys"}, "both identify the tenant"),
        ({"tenant_by": "key", "api_key": "k"}, "tenant_by key needs api_key_file"),
        ({"tenant_by": "adapter"}, "tenant_by adapter needs enable_lora"),
        ({"tenant_by": "address"}, "tenant_by"),
    ],
)
def test_a_tenant_setting_without_its_source_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServeConfig.from_flat(settings)

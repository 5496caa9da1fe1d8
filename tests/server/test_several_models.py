"""Several models behind one server: who is awake, over child processes without a model, and what HTTP clients see."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from octavo.config import ServeConfig
from octavo.errors import ConfigError
from octavo.telemetry.metrics import Metrics
from octavo.text.tokenizer import Tokenizer
from octavo_fleet.several_models import GIB, ModelGroup, check_several, choose_sleeper
from octavo_server.app import Served, create_app
from tests.server.child_engine import assert_right, finish, kill, send, until
from tests.server.conftest import AppServer
from tests.server.forked_engine import forked
from tests.server.in_process import InProcessEngine

NAMES = ("one", "two", "three")


def configs(**knobs: Any) -> list[ServeConfig]:
    """Three models of half a GiB each, with a budget for two of them."""
    model = json.dumps({"memory": GIB // 2, **knobs})
    return [
        ServeConfig.from_flat({"model": model, "served_model_name": name, "models_memory_budget": 1.0})
        for name in NAMES
    ]


@asynccontextmanager
async def running(**knobs: Any) -> AsyncIterator[ModelGroup]:
    group = ModelGroup(configs(**knobs), forked())
    await group.start()
    try:
        yield group
    finally:
        await group.stop(0)
        assert group.num_live == 0


def num_processes(group: ModelGroup) -> int:
    return sum(engine.pid is not None and os.path.exists(f"/proc/{engine.pid}") for engine in group.engines)


@pytest.mark.slow
def test_mixed_requests_are_all_answered_within_the_bound_though_an_engine_dies() -> None:
    async def main() -> None:
        async with running(step_seconds=0.001) as group:
            # The first two fit, and are awake.
            assert [engine.sleep_level for engine in group.engines] == [0, 0, 1]
            draw, most, streams = random.Random(3), 0, []
            for number in range(60):
                if number == 30:
                    kill(next(engine for engine in group.engines if engine.pid is not None))
                streams.append(send(draw.choice(group.engines), max_tokens=draw.randint(1, 30)))
                most = max(most, num_processes(group))
                assert group.num_bytes <= GIB
                await asyncio.sleep(draw.choice([0, 0, 0.01, 0.05]))
            await finish(streams)
            assert_right(streams)
            assert most == 2
            assert group.engines[2].wake_seconds > 0
            assert len({request.id for request, _ in streams}) == 60
            text = group.metrics.render().decode()
            for name in NAMES:
                assert f'vllm:num_requests_running{{engine="0",model_name="{name}"}}' in text

    asyncio.run(main())


@pytest.mark.slow
def test_a_model_that_is_always_busy_makes_room_for_one_that_waits() -> None:
    async def main() -> None:
        async with running(step_seconds=0.001) as group:
            ends, streams = asyncio.Event(), []

            async def keep_busy(number: int) -> None:
                while not ends.is_set():
                    streams.append(send(group.engines[number], max_tokens=50))
                    await asyncio.sleep(0.01)

            busy = [asyncio.create_task(keep_busy(number)) for number in (0, 1)]
            await until(lambda: all(engine.num_live for engine in group.engines[:2]))
            waiting = send(group.engines[2])
            await finish([waiting])
            ends.set()
            await asyncio.gather(*busy)
            await finish(streams)
            assert_right([waiting, *streams])

    asyncio.run(main())


def test_settings_are_checked() -> None:
    async def main() -> None:
        group = ModelGroup(configs(memory=2 * GIB), forked())
        with pytest.raises(ConfigError, match=r"models_memory_budget: three alone takes 2\.00 GiB, the bound is 1\.00"):
            await group.start()
        await group.stop(0)

    asyncio.run(main())
    same = [ServeConfig.from_flat({"model": "toy", "backend": "toy"})] * 2
    with pytest.raises(ConfigError, match="two models would be called toy"):
        check_several(same)
    with pytest.raises(ConfigError, match="enable_lora: is for a server of one model"):
        check_several([ServeConfig.from_flat({"enable_lora": True})])


@dataclass
class Model:
    num_live: int = 0
    sleep_level: int = 0
    is_waking: bool = False
    failure: str | None = None
    last_used: float = 0.0
    since: float = 0.0
    wake_seconds: float = 1.0


def test_idle_models_sleep_first_and_busy_ones_after_a_while() -> None:
    idle, older, busy, waking = Model(last_used=5), Model(last_used=3), Model(1, since=6), Model(2, 1, is_waking=True)
    assert choose_sleeper([busy, idle, older, waking, Model(sleep_level=1)], 7) is older
    assert choose_sleeper([busy, waking], 7) is None
    assert choose_sleeper([busy, waking], 11) is busy
    waking.failure = "It cannot be started."
    assert choose_sleeper([busy, idle, waking], 7) is waking


@pytest.fixture
def served(tokenizer: Tokenizer) -> Iterator[AppServer]:
    """Two models with different answers."""
    models = []
    for name in ("first", "second"):
        config = ServeConfig.from_flat({"model": name, "enable_sleep_mode": True})
        engine = InProcessEngine(lambda request, name=name: list(name.encode()), metrics=Metrics(name))  # type: ignore[misc]
        models.append(Served(config, engine, tokenizer))
    server = AppServer(create_app(*models[0], models[1:]), models[0].config.server)
    yield server
    server.stop()


def body_of(response: httpx.Response) -> Any:
    assert response.status_code == 200, response.text
    return response.json()


def test_requests_go_to_the_model_they_name(served: AppServer) -> None:
    for name in ("first", "second"):
        assert body_of(served.complete(model=name, max_tokens=len(name)))["choices"][0]["text"] == name
        answer = body_of(served.chat(model=name, max_tokens=len(name)))
        assert (answer["model"], answer["choices"][0]["message"]["content"]) == (name, name)
        messages = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": len(name)}
        answer = body_of(served.client.post("/v1/messages", json={"model": name, **messages}))
        assert (answer["model"], answer["content"][0]["text"]) == (name, name)
        ollama = {"model": f"{name}:latest", "prompt": "Hi", "stream": False, "options": {"num_predict": len(name)}}
        assert body_of(served.client.post("/api/generate", json=ollama))["response"] == name
        gemini = {"contents": [{"parts": [{"text": "Hi"}]}], "generationConfig": {"maxOutputTokens": len(name)}}
        answer = body_of(served.client.post(f"/v1beta/models/{name}:generateContent", json=gemini))
        assert (answer["modelVersion"], answer["candidates"][0]["content"]["parts"]) == (name, [{"text": name}])
        stored = body_of(served.client.post("/v1/responses", json={"model": name, "input": "Hi", "background": True}))
        while stored["status"] in ("queued", "in_progress"):
            stored = body_of(served.client.get(f"/v1/responses/{stored['id']}"))
        assert stored["model"] == name
        assert stored["output"][0]["content"][0]["text"].startswith(name)
    assert body_of(served.complete())["model"] == "first"
    missing = served.complete(model="third")
    assert missing.status_code == 404
    assert "serves `first`, `second`" in missing.json()["error"]["message"]


def test_a_batch_may_name_several_models(served: AppServer) -> None:
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": name, "prompt": "Hi"}}
        for name in ("first", "second", "third")
    ]
    content = "\n".join(map(json.dumps, lines))
    file = served.client.post("/v1/files", files={"file": ("x.jsonl", content)}, data={"purpose": "batch"}).json()
    asked = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = body_of(served.client.post("/v1/batches", json=asked))
    while batch["status"] != "completed":
        batch = body_of(served.client.get(f"/v1/batches/{batch['id']}"))
    assert batch["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    results = served.client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    models = {result["custom_id"]: result["response"]["body"]["model"] for result in map(json.loads, results)}
    assert models == {"first": "first", "second": "second"}


def test_lists_and_reports_know_every_model(served: AppServer) -> None:
    client = served.client
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["first", "second"]
    assert client.get("/v1/models/second").json()["id"] == "second"
    assert client.get("/v1/models/third").status_code == 404
    for path in ("/api/tags", "/api/ps"):
        assert [each["name"] for each in client.get(path).json()["models"]] == ["first", "second"]
    assert client.get("/stats?model=second").json()["model"] == "second"
    assert client.get("/stats").json()["model"] == "first"
    assert client.get("/stats?model=third").status_code == 404
    assert client.post("/sleep").json()["error"]["param"] == "model"
    client.post("/sleep?model=second")
    assert [each["name"] for each in client.get("/api/ps").json()["models"]] == ["first"]
    assert client.get("/is_sleeping?model=second").json() == {"is_sleeping": True}
    assert client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert client.post("/api/generate", json={"model": "second"}).json()["done_reason"] == "load"
    assert client.get("/is_sleeping?model=second").json() == {"is_sleeping": False}
    assert client.get("/health").status_code == client.get("/ready").status_code == 200


def test_a_full_queue_of_one_model_leaves_room_for_the_others(served: AppServer) -> None:
    served.app.state.services.first.admission._reserved[""] = 1000
    assert served.complete(model="first").status_code == 429
    assert served.complete(model="second").status_code == 200

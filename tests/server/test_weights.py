"""Weights that change while requests run, pauses, and the routes by which trainers ask for both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.config import ServeConfig
from octavo.errors import ConfigError, InvalidParameter, Unavailable
from octavo_server.app import create_app
from tests.server.child_engine import SLOW, assert_right, finish, kill, running, send, until
from tests.server.conftest import Served
from tests.server.fake_engine import VOCAB, expected
from tests.server.in_process import ANSWER, InProcessEngine, byte_tokenizer


def test_running_requests_go_on_with_new_weights() -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            streams = [send(engine, max_tokens=60) for _ in range(8)]
            await until(lambda: len(streams[0][1].tokens) > 3)
            await engine.update_weights(json.dumps({**SLOW, "weights": 7}), "step 1")
            assert engine.weight_version == "step 1"
            late = send(engine, max_tokens=5)
            await finish([*streams, late])
            for request, recorder in streams:
                ((version, start),) = recorder.weights
                assert version == "step 1"
                assert 3 <= start < 60
                tokens = expected(request)
                assert recorder.tokens == tokens[:start] + [(token + 7) % VOCAB for token in tokens[start:]]
            assert late[1].tokens == [(token + 7) % VOCAB for token in expected(late[0])]
            kill(engine)  # the next process has the new weights, too
            after = send(engine, max_tokens=5)
            await finish([after])
            assert after[1].tokens == [(token + 7) % VOCAB for token in expected(after[0])]
            assert not after[1].weights

    asyncio.run(main())


def test_weights_that_cannot_be_loaded_leave_the_earlier_ones() -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            stream = send(engine, max_tokens=60)
            await until(lambda: len(stream[1].tokens) > 3)
            with pytest.raises(InvalidParameter, match="layer 3 is missing"):
                await engine.update_weights(json.dumps({"start_error": "CheckpointError"}), "step 1")
            assert engine.weight_version == "default"
            await finish([stream])
            assert_right([stream])
            assert not stream[1].weights

    asyncio.run(main())


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_nothing_is_computed_while_the_server_is_paused(mode: Any) -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            stream = send(engine, max_tokens=40)
            await until(lambda: len(stream[1].tokens) > 3)
            await engine.pause(mode)
            late = send(engine, max_tokens=5)
            num_tokens = len(stream[1].tokens)
            await asyncio.sleep(0.05)
            assert len(stream[1].tokens) == num_tokens
            assert not late[1].tokens
            kill(engine)
            await until(lambda: engine.num_restarts == 1)
            await asyncio.sleep(0.05)
            assert not late[1].tokens
            engine.resume()
            await finish([stream, late])
            assert_right([late])
            if mode == "abort":
                assert isinstance(stream[1].error, Unavailable)
            else:
                assert_right([stream])

    asyncio.run(main())


def test_a_paused_server_sleeps_until_it_goes_on() -> None:
    async def main() -> None:
        async with running() as engine:
            await engine.pause("keep")
            await engine.sleep(2)
            stream = send(engine)
            await asyncio.sleep(0.05)
            assert engine.sleep_level == 2
            engine.resume()
            await finish([stream])
            assert_right([stream])

    asyncio.run(main())


# --- routes ---


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, config in (("model", {"vocab_size": 9}), ("step-1", {"vocab_size": 9}), ("other", {"vocab_size": 10})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**config, "transformers_version": name}))
    return tmp_path


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    settings = {"weight_updates_dir": str(folder), "model": str(folder / "model")}
    served = Served(InProcessEngine(), byte_tokenizer(), settings)
    yield served
    served.stop()


def test_the_routes_of_trainers(served: Served, folder: Path) -> None:
    client, engine = served.client, served.engine
    assert client.get("/is_paused").json() == {"is_paused": False}
    assert client.post("/pause?mode=keep").json()["is_paused"]
    assert (engine.sleep_modes, engine.num_clears) == (["keep"], 1)
    assert client.post("/resume").json() == {"status": "resumed", "is_paused": False}
    assert client.post("/pause_generation", json={"mode": "retract"}).status_code == 200
    assert client.post("/continue_generation").status_code == 200
    assert client.get("/flush_cache").status_code == client.post("/reset_prefix_cache").status_code == 200
    assert engine.num_clears == 3
    updated = client.post("/update_weights", json={"weight_dir": "step-1"})
    assert updated.json() == {"status": "updated", "weight_version": "step-1"}
    body = {"model_path": str(folder / "step-1"), "load_format": "auto", "weight_version": "7"}
    assert client.post("/update_weights_from_disk", json=body).json()["success"]
    assert engine.weights == [str(folder / "step-1")] * 2
    assert client.get("/weight_info").json() == {"weight_version": "7", "world_size": 1}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"weight_dir": "../model"}, "below that of --weight-updates-dir"),
        ({"weight_dir": "/etc"}, "below that of --weight-updates-dir"),
        ({"weight_dir": "missing"}, "below that of --weight-updates-dir"),
        ({"weight_dir": "a\0b"}, "below that of --weight-updates-dir"),
        ({"weight_dir": "other"}, "differs from that of the model in: vocab_size"),
        ({"weight_dir": "step-1", "mode": "now"}, "'mode' must be one of wait, abort, keep."),
        ({"weight_dir": "step-1", "weight_version": ""}, "'weight_version' must have"),
    ],
)
def test_other_folders_are_refused(served: Served, body: dict[str, str], message: str) -> None:
    response = served.client.post("/update_weights", json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]
    assert not served.engine.weights


def test_a_link_out_of_the_folder_is_refused(served: Served, folder: Path) -> None:
    inner = folder / "inner"
    inner.mkdir()
    served.app.state.services.config.server.__dict__["weight_updates_dir"] = str(inner)
    (inner / "link").symlink_to(folder / "step-1")
    assert served.client.post("/update_weights", json={"weight_dir": "link"}).status_code == 400


def test_a_server_without_the_setting_has_no_updates() -> None:
    served = Served(InProcessEngine(), byte_tokenizer(), {})
    for path in ("/pause", "/resume", "/abort_requests", "/flush_cache"):
        assert "--weight-updates-dir" in served.client.post(path).json()["error"]["message"]
    served.stop()


def test_strangers_need_the_admin_key(folder: Path) -> None:
    settings = {"weight_updates_dir": str(folder), "host": "0.0.0.0", "api_key": "secret"}
    config = ServeConfig.from_flat({"model": "test", **settings})
    with pytest.raises(ConfigError, match="needs an admin_key"):
        create_app(config, InProcessEngine(), byte_tokenizer())


# --- token ids ---


def test_token_ids_are_continued(served: Served) -> None:
    prompt = list(b"What is 2+2?")
    body = {
        "token_ids": prompt,
        "sampling_params": {"max_tokens": 3, "n": 2, "logprobs": 1, "temperature": 1.0, "detokenize": False},
    }
    response = served.client.post("/inference/v1/generate", json=body)
    found = response.json()
    assert response.headers["x-octavo-unknown-fields"] == "sampling_params.detokenize"
    assert [choice["token_ids"] for choice in found["choices"]] == [list(ANSWER.encode()[:3])] * 2
    assert found["choices"][0]["finish_reason"] == "length"
    entries = found["choices"][0]["logprobs"]["content"]
    assert [entry["token_id"] for entry in entries] == list(ANSWER.encode()[:3])
    assert all(len(entry["top_logprobs"]) == 1 for entry in entries)
    assert found["choices"][0]["weight_versions"] == [{"version": "default", "start": 0}]
    assert found["weight_version"] == "default"
    wrong = served.client.post("/inference/v1/generate", json={**body, "sampling_params": {"prompt": "x"}})
    assert wrong.json()["error"]["message"] == "'prompt' is no sampling parameter."

"""Weights that change while requests run, pauses, and the routes by which trainers ask for both."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.config import ServeConfig
from octavo.errors import ConfigError, InvalidParameter, Unavailable
from octavo.types import DropTensors, JoinGroup, ReceiveTensors
from octavo_server.app import create_app
from octavo_server.weights import GROUP_PATHS
from tests.server.child_engine import SLOW, advance, assert_right, begin, finish, kill, running, send, until
from tests.server.conftest import Served
from tests.server.fake_engine import VOCAB, expected
from tests.server.in_process import ANSWER, InProcessEngine, byte_tokenizer
from tests.tiers import one_in


@pytest.mark.slow
def test_running_requests_go_on_with_new_weights() -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            streams = await begin(engine, 8, 4, max_tokens=60)
            await engine.update_weights(json.dumps({**SLOW, "weights": 7}), "step 1")
            assert engine.weight_version == "step 1"
            late = send(engine, max_tokens=5)
            await finish([*streams, late])
            for request, recorder in streams:
                ((version, start),) = recorder.weights
                assert (version, start) == ("step 1", 4)
                tokens = expected(request)
                assert recorder.tokens == tokens[:start] + [(token + 7) % VOCAB for token in tokens[start:]]
            assert late[1].tokens == [(token + 7) % VOCAB for token in expected(late[0])]
            kill(engine)  # the next process has the new weights, too
            after = send(engine, max_tokens=5)
            await finish([after])
            assert after[1].tokens == [(token + 7) % VOCAB for token in expected(after[0])]
            assert not after[1].weights

    asyncio.run(main())


IN_PLACE = {**SLOW, "changes_weights": True}


def later(tokens: list[int], by: int) -> list[int]:
    return [(token + by) % VOCAB for token in tokens]


def test_sixty_four_streams_over_twenty_updates_in_place() -> None:
    """Each token is that of the version which its answer names, and it is one process all the while."""

    async def main() -> None:
        async with running(**IN_PLACE) as engine:
            pid, streams = engine.pid, await begin(engine, 64, 3, max_tokens=300)
            for version in range(1, 21):
                await engine.update_weights(json.dumps({**IN_PLACE, "weights": version}), str(version))
                await advance(engine, streams, 3)
            engine.set_pace(None)
            await finish(streams)
            assert engine.pid == pid
            for request, recorder in streams:
                plain, places = expected(request), [*recorder.weights, ("", 300)]
                assert [version for version, _ in recorder.weights] == [str(version) for version in range(1, 21)]
                found = plain[: places[0][1]]
                for (version, start), (_, end) in itertools.pairwise(places):
                    found += later(plain[start:end], int(version))
                assert recorder.tokens == found

    asyncio.run(main())


@pytest.mark.slow
def test_weights_that_cannot_be_taken_in_place_are_those_of_a_new_process() -> None:
    async def main() -> None:
        async with running(**IN_PLACE) as engine:
            pid = engine.pid
            with pytest.raises(InvalidParameter, match="layer 3 is missing"):
                await engine.update_weights(json.dumps({**IN_PLACE, "start_error": "CheckpointError"}), "1")
            assert (engine.pid != pid, engine.weight_version) == (True, "default")
            await finish([stream := send(engine, max_tokens=5)])
            assert_right([stream])

    asyncio.run(main())


def test_weights_that_were_received_are_lost_with_the_process() -> None:
    async def main() -> None:
        async with running(**IN_PLACE) as engine:
            group = JoinGroup("127.0.0.1", 1, 1, 2, "gloo")
            with pytest.raises(InvalidParameter, match="nobody listens"):
                await engine.order_weights(msgspec.structs.replace(group, port=0))
            await engine.order_weights(group)
            (stream,) = await begin(engine, 1, 4, max_tokens=200)
            await engine.order_weights(ReceiveTensors(["a"], ["float32"], [(1,)]))
            assert engine.has_received
            assert not stream[1].weights
            assert await engine.take_weights(None) == "1"
            assert not engine.has_received
            await advance(engine, [stream], 4)
            kill(engine)
            await until(lambda: engine.num_restarts == 1)
            assert engine.weight_version == "default"
            await finish([stream])
            (first, start), (second, end) = stream[1].weights
            plain = expected(stream[0])
            assert (first, second) == ("1", "default")
            assert stream[1].tokens == [*plain[:start], *later(plain[start:end], 1), *plain[end:]]

    asyncio.run(main())


def test_who_waits_for_a_trainer_that_died_is_told_when_another_joins_or_leaves() -> None:
    """Without that, it would be waited for, and everything behind it, until a group gives up."""

    async def main() -> None:
        async with running(**IN_PLACE) as engine:
            for number, next_order in enumerate((JoinGroup("", 1, 1, 2, "gloo"), DropTensors(leaves_group=True))):
                waiting = [asyncio.create_task(engine.order_weights(JoinGroup("", 2, 1, 2, "gloo")))]
                waiting.append(asyncio.create_task(engine.order_weights(ReceiveTensors(["a"], ["float32"], [(1,)]))))
                await asyncio.sleep(0.2)
                assert not any(each.done() for each in waiting)
                await asyncio.wait_for(engine.order_weights(next_order), 10)
                with pytest.raises(InvalidParameter, match="its group was left, or another one joined"):
                    await waiting[0]
                await asyncio.gather(*waiting, return_exceptions=True)
                assert not engine.has_received, number

    asyncio.run(main())


def test_an_engine_goes_on_after_its_trainer_died() -> None:
    async def main() -> None:
        async with running(**IN_PLACE) as engine:
            await engine.order_weights(JoinGroup("127.0.0.1", 1, 1, 2, "gloo"))
            await engine.pause("keep")
            await engine.order_weights(ReceiveTensors(["a"], ["float32"], [(1,)]))
            assert engine.has_received
            with pytest.raises(InvalidParameter, match="the trainer is gone"):
                await engine.order_weights(ReceiveTensors(["missing"], ["float32"], [(1,)]))
            assert not engine.has_received, "a part of the weights is no update"
            engine.resume()
            await finish([stream := send(engine, max_tokens=5)])
            assert_right([stream])

    asyncio.run(main())


def test_weights_whose_folder_was_deleted_are_lost_with_the_process(tmp_path: Path) -> None:
    """As trainers delete them once they are taken."""

    async def main() -> None:
        async with running(**IN_PLACE) as engine:
            (stream,) = await begin(engine, 1, 4, max_tokens=200)
            (tmp_path / "no-start").touch()
            taken = {**IN_PLACE, "weights": 3, "start_crash_after": str(tmp_path / "no-start")}
            await engine.update_weights(json.dumps(taken), "3")
            await advance(engine, [stream], 4)
            kill(engine)
            await finish([stream])
            assert engine.weight_version == "default"
            (first, start), (second, end) = stream[1].weights
            plain = expected(stream[0])
            assert (first, second) == ("3", "default")
            assert stream[1].tokens == [*plain[:start], *later(plain[start:end], 3), *plain[end:]]

    asyncio.run(main())


@pytest.mark.slow
def test_weights_that_cannot_be_loaded_leave_the_earlier_ones() -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            (stream,) = await begin(engine, 1, 4, max_tokens=60)
            with pytest.raises(InvalidParameter, match="layer 3 is missing"):
                await engine.update_weights(json.dumps({"start_error": "CheckpointError"}), "step 1")
            assert engine.weight_version == "default"
            await finish([stream])
            assert_right([stream])
            assert not stream[1].weights

    asyncio.run(main())


@one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
def test_nothing_is_computed_while_the_server_is_paused(mode: Any) -> None:
    async def main() -> None:
        async with running(**SLOW) as engine:
            (stream,) = await begin(engine, 1, 4, max_tokens=40)
            if mode == "wait":
                engine.set_pace(None)
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


def test_an_update_is_compared_with_the_configuration_that_is_served(folder: Path) -> None:
    (folder / "weights").mkdir()
    settings = {"model": str(folder / "weights"), "hf_config_path": str(folder / "model")}
    served = Served(InProcessEngine(), byte_tokenizer(), {**settings, "weight_updates_dir": str(folder)})
    try:
        for name, status in (("step-1", 200), ("other", 400)):
            assert served.client.post("/update_weights", json={"weight_dir": name}).status_code == status
    finally:
        served.stop()


@pytest.fixture
def group() -> Iterator[Served]:
    served = Served(InProcessEngine(), byte_tokenizer(), {"weight_transfer_config": '{"backend": "gloo"}'})
    yield served
    served.stop()


def test_a_trainer_broadcasts_weights(group: Served) -> None:
    client, engine = group.client, group.engine
    assert client.get("/server_info").json()["vllm_config"]["weight_transfer_config"] == {"backend": "gloo"}
    place = {"master_address": "127.0.0.1", "master_port": 51216, "rank_offset": 1, "world_size": 2, "packed": True}
    assert client.post("/init_weight_transfer_engine", json={"init_info": place}).status_code == 200
    assert engine.orders == [JoinGroup("127.0.0.1", 51216, 1, 2, "gloo", is_packed=True)]
    assert client.post("/start_weight_update", json={}).status_code == 200
    info = {"names": ["a", "b"], "dtype_names": ["bfloat16", "torch.float32"], "shapes": [[2, 3], []]}
    assert client.post("/update_weights", json={"update_info": info}).json() == {"status": "received"}
    assert engine.orders[1:] == [DropTensors(), ReceiveTensors(["a", "b"], ["bfloat16", "float32"], [(2, 3), ()])]
    assert client.post("/finish_weight_update", json={"weight_version": "9"}).json()["weight_version"] == "9"
    assert engine.weight_version == "9"
    assert client.post("/finish_weight_update", json={}).json()["weight_version"] == "1"


def test_a_trainer_of_sglang_sends_a_model_in_parts(group: Served) -> None:
    client, engine = group.client, group.engine
    place = {"master_address": "127.0.0.1", "master_port": 9, "rank_offset": 1, "world_size": 3, "group_name": "one"}
    assert client.post("/init_weights_update_group", json=place).json()["success"]
    assert engine.orders == [JoinGroup("127.0.0.1", 9, 1, 3, "gloo", "one")]
    part = {"names": ["a"], "dtypes": ["float16"], "shapes": [[2]], "flush_cache": True}
    client.post("/pause_generation", json={})
    assert client.post("/update_weights_from_distributed", json=part).json()["success"]
    assert engine.weight_version == "default"
    client.post("/continue_generation")
    assert engine.weight_version == "1"
    client.post("/update_weights_from_distributed", json={**part, "weight_version": "4"})
    assert engine.weight_version == "4"
    assert client.post("/destroy_weights_update_group", json={}).json()["success"]
    assert engine.orders == [DropTensors(leaves_group=True)]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "stream": True}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "model": "test", "max_tokens": 2}),
        ("/v1/responses", {"input": "a", "max_output_tokens": 16}),
        ("/api/generate", {"prompt": "a", "model": "test", "stream": False}),
    ],
)
def test_every_answer_names_its_weights(group: Served, path: str, body: dict[str, Any]) -> None:
    group.engine.weight_version = "12"
    response = group.client.post(path, json=body)
    assert response.status_code == 200
    assert response.headers["x-octavo-weight-version"] == "12"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "'weight_dir'"),
        ({"weight_dir": "step-1"}, "is for a server started with --weight-updates-dir"),
        ({"update_info": {"names": ["a"], "dtype_names": [], "shapes": [[1]]}}, "a name, a type and a shape for each"),
        ({"update_info": {"names": ["a"], "dtype_names": ["f"], "shapes": [[-1]]}}, "no negative sizes"),
    ],
)
def test_what_is_no_update_is_refused(group: Served, body: dict[str, Any], message: str) -> None:
    response = group.client.post("/update_weights", json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_checksums_tell_what_differs(served: Served) -> None:
    client, engine = served.client, served.engine
    engine.weight_version = "1"
    found = client.post("/weight_checker", json={"action": "checksum"}).json()
    assert found["checksums"] == {"tp=0:a": "1", "tp=0:b": "same"}
    assert len(found["checksum"]) == 64
    body: dict[str, Any] = {"action": "compare", "baseline": found["checksums"]}
    assert client.post("/weight_checker", json=body).json() == {"match": True, "mismatches": []}
    engine.weight_version = "2"
    assert client.post("/weight_checker", json=body).json() == {"match": False, "mismatches": ["tp=0:a"]}
    body["checksums"] = [{"tp=0:a": "2"}]
    assert client.post("/weight_checker", json=body).json()["mismatches"] == ["tp=0:a", "tp=0:b"]
    for bad, message in (({"action": "reset"}, "'action' must be"), ({"action": "compare"}, "'baseline'")):
        assert message in client.post("/weight_checker", json=bad).json()["error"]["message"]


def test_handles_of_other_processes_are_refused() -> None:
    config = ServeConfig.from_flat({"model": "test", "weight_transfer_config": '{"backend": "ipc"}'})
    with pytest.raises(ConfigError, match="'ipc' is for one process"):
        create_app(config, InProcessEngine(), byte_tokenizer())


def test_checksums_come_from_the_engine_process() -> None:
    async def main() -> None:
        async with running(**IN_PLACE) as engine:
            before = await engine.weight_checksums()
            await engine.order_weights(ReceiveTensors(["a"], ["float32"], [(1,)]))
            await engine.take_weights("2")
            assert await engine.weight_checksums() != before

    asyncio.run(main())


def test_other_backends_are_refused() -> None:
    config = ServeConfig.from_flat({"model": "test", "weight_transfer_config": '{"backend": "mpi"}'})
    with pytest.raises(ConfigError, match="weight_transfer_config: Invalid enum value 'mpi'"):
        create_app(config, InProcessEngine(), byte_tokenizer())


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
    for path in GROUP_PATHS:
        assert "--weight-transfer-config" in served.client.post(path, json={}).json()["error"]["message"]
    info = served.client.get("/server_info").json()
    assert served.client.get("/get_server_info").json() == info
    assert info["vllm_config"]["weight_transfer_config"] is None
    assert (info["served_model_name"], info["tp_size"]) == (served.client.get("/v1/models").json()["data"][0]["id"], 1)
    served.stop()


def test_strangers_need_the_admin_key(folder: Path) -> None:
    for own in ({"weight_updates_dir": str(folder)}, {"weight_transfer_config": '{"backend": "gloo"}'}):
        config = ServeConfig.from_flat({"model": "test", **own, "host": "0.0.0.0", "api_key": "secret"})
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
    assert found["choices"][0]["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    assert found["weight_version"] == "default"
    wrong = served.client.post("/inference/v1/generate", json={**body, "sampling_params": {"prompt": "x"}})
    assert wrong.json()["error"]["message"] == "'prompt' is no sampling parameter."

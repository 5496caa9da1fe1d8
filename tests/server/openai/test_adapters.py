"""Adapters over HTTP, in a real engine process: named at the start, loaded and unloaded while it runs."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.conftest import Server, start_server
from tests.models.adapter_files import make_adapter
from tests.models.families import VOCAB_SIZE, make_checkpoint
from tests.tiers import nightly_after

pytestmark = pytest.mark.slow  # a real engine process

PROMPT = random.Random(0).choices(range(VOCAB_SIZE), k=40)


class Served:
    """A server with one adapter, and two more in folders."""

    def __init__(self, home: Path) -> None:
        self.models: dict[str, PreTrainedModel] = {"tiny": make_checkpoint(home / "base", "llama/gqa")}
        for i, name in enumerate(("first", "second", "third")):
            self.models[name] = make_adapter(home / "base", home / name, i)
        self.home = home
        self.server: Server = start_server(
            *("--model", str(home / "base"), "--served-model-name", "tiny", "--device", "cpu", "--dtype", "float32"),
            *("--enable-lora", "--lora-modules", f"first={home / 'first'}", "--allow-runtime-lora-updating"),
            *("--kv-cache-memory", "0.05", "--block-size", "16"),
        )

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        response = self.server.post(path, body)
        return response.status_code, response.json()

    def check(self, name: str, **body: Any) -> None:
        """What is generated is what the merged model likes best."""
        given = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **body}
        status, answer = self.post("/v1/completions", model=name, **given)
        assert status == 200, answer
        assert answer["model"] == name
        made = answer["choices"][0]["token_ids"]
        with torch.inference_mode():
            logits = self.models[name](torch.tensor([[*PROMPT, *made]]), use_cache=False).logits[0]
        assert made == logits.argmax(dim=-1)[len(PROMPT) - 1 : -1].tolist(), name

    def models_served(self) -> list[str]:
        return [model["id"] for model in self.server.get("/v1/models").json()["data"]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("adapters"))
    yield served
    served.server.stop()


def test_adapters_come_and_go(served: Served) -> None:
    served.check("tiny")
    served.check("first")
    assert served.models_served() == ["tiny", "first"]
    path = str(served.home / "second")
    status, answer = served.post("/v1/load_lora_adapter", lora_name="second", lora_path=path)
    assert (status, answer["root"]) == (200, path)
    assert served.models_served() == ["tiny", "first", "second"]
    for _ in range(2):  # the second time with cached blocks, each with its own
        for name in ("tiny", "first", "second"):
            served.check(name)
    assert served.post("/v1/unload_lora_adapter", lora_name="second")[0] == 200
    assert served.models_served() == ["tiny", "first"]
    assert served.post("/v1/completions", model="second", prompt=PROMPT)[0] == 404
    third = str(served.home / "third")
    assert served.post("/v1/load_lora_adapter", lora_name="second", lora_path=third)[0] == 200
    served.models["second"] = served.models["third"]
    served.check("second")  # another one of the same name finds nothing that the first of it left
    assert served.post("/v1/unload_lora_adapter", lora_name="second")[0] == 200


def test_a_salt_opens_no_other_adapters_blocks(served: Served) -> None:
    for salt in ("", "x", ":", "first:"):
        served.check("first", cache_salt=salt)
        served.check("tiny", cache_salt=salt)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("load", {"lora_name": "first", "lora_path": "/x"}, 400, "lora_name"),
        ("load", {"lora_name": "tiny", "lora_path": "/x"}, 400, "lora_name"),
        ("load", {"lora_name": "a,b=c", "lora_path": "/x"}, 400, "lora_name"),
        ("load", {"lora_name": "other", "lora_path": "/does/not/exist"}, 400, "lora_path"),
        ("load", {"lora_name": "other"}, 400, "lora_path"),
        ("load", {"lora_name": "other", "lora_path": "/tmp/\0"}, 400, "lora_path"),
        ("load", {"lora_name": "other", "lora_path": "/tmp/a\nb"}, 400, "lora_path"),
        ("load", {"lora_name": "other", "lora_path": "/" + "a/" * 4000}, 400, "lora_path"),
        ("load", {"lora_name": "oth\0er", "lora_path": "/x"}, 400, "lora_name"),
        ("load", {"lora_name": "", "lora_path": "/x"}, 400, "lora_name"),
        ("unload", {"lora_name": "other"}, 404, "lora_name"),
    ],
)
def test_bad_fields_are_refused_by_name(
    served: Served, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    found, answer = served.post(f"/v1/{path}_lora_adapter", **body)
    assert (found, answer["error"]["param"]) == (status, param)


def test_a_path_that_is_no_regular_file_is_refused(served: Served, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapter_config.json")
    status, answer = served.post("/v1/load_lora_adapter", lora_name="other", lora_path=str(tmp_path))
    assert (status, answer["error"]["param"]) == (400, "lora_path")


def test_loads_of_one_name_at_once_are_all_answered(served: Served) -> None:
    path = str(served.home / "third")
    with ThreadPoolExecutor(6) as pool:
        loads = [
            pool.submit(served.post, "/v1/load_lora_adapter", lora_name="at-once", lora_path=path) for _ in "123456"
        ]
        answers = [load.result(60) for load in loads]
    assert sorted(status for status, _ in answers) == [200, 400, 400, 400, 400, 400]
    assert {answer["error"]["param"] for status, answer in answers if status == 400} == {"lora_name"}
    assert served.models_served() == ["tiny", "first", "at-once"]
    served.models["at-once"] = served.models["third"]
    served.check("at-once")
    assert served.post("/v1/unload_lora_adapter", lora_name="at-once")[0] == 200


def kill_engine(served: Served) -> None:
    """And wait for the next one."""
    old = served.server.engine_pid()
    os.kill(old, signal.SIGKILL)
    while served.server.engine_pid() == old or served.server.get("/ready").status_code != 200:  # in this order
        time.sleep(0.05)


@pytest.mark.parametrize("change", nightly_after(1, ["changed", "gone", "damaged"]))
def test_adapters_outlive_the_engine_process_but_one_that_cannot_be_loaded_again(
    served: Served, tmp_path: Path, change: str
) -> None:
    folder = tmp_path / "adapter"
    shutil.copytree(served.home / "third", folder)
    for name, path in (("kept", served.home / "third"), ("lost", folder)):
        assert served.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path))[0] == 200
        served.models[name] = served.models["third"]
        served.check(name)
    with ThreadPoolExecutor(1) as pool:
        # The engine is stopped, so that the request is there when it dies.
        os.kill(served.server.engine_pid(), signal.SIGSTOP)
        waiting = pool.submit(served.post, "/v1/completions", model="lost", prompt=PROMPT, max_tokens=4)
        while served.server.get("/load").json()["server_load"] != 1:
            time.sleep(0.01)
        if change == "gone":
            shutil.rmtree(folder)
        elif change == "changed":
            shutil.copy(served.home / "first" / "adapter_model.safetensors", folder)
        else:
            (folder / "adapter_model.safetensors").write_bytes(b"")
        kill_engine(served)
        answers = [waiting.result(60), served.post("/v1/completions", model="lost", prompt=PROMPT, max_tokens=4)]
    for status, answer in answers:
        assert status == 404
        assert "adapter `lost` could not be loaded again" in answer["error"]["message"]
    assert served.models_served() == ["tiny", "first", "kept"]
    for name in ("tiny", "first", "kept"):
        served.check(name)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(served.home / "third", folder)
    kill_engine(served)
    served.check("lost")  # what is there again is taken back
    for name in ("kept", "lost"):
        assert served.post("/v1/unload_lora_adapter", lora_name=name)[0] == 200


def test_a_request_ends_with_the_adapter_with_which_it_began(served: Served) -> None:
    """A trainer loads each version under one name while requests run, and the engine may die meanwhile."""

    def load(name: str) -> int:
        return served.post("/load_lora_adapter", lora_name="step", lora_path=str(served.home / name))[0]

    served.models["step"] = served.models["first"]
    with ThreadPoolExecutor(2) as pool:
        runs = False
        while not runs:  # the request may end before the engine is stopped again
            assert load("first") == 200
            os.kill(pid := served.server.engine_pid(), signal.SIGSTOP)
            early = pool.submit(served.check, "step", max_tokens=80)
            while served.server.get("/load").json()["server_load"] != 1:
                time.sleep(0.01)
            loading = pool.submit(load, "third")
            os.kill(pid, signal.SIGCONT)
            assert loading.result(60) == 200
            os.kill(pid, signal.SIGSTOP)
            if not (runs := served.server.get("/load").json()["server_load"] == 1):
                os.kill(pid, signal.SIGCONT)
                early.result(60)
        kill_engine(served)
        early.result(60)
    served.models["step"] = served.models["third"]
    served.check("step")
    assert served.models_served() == ["tiny", "first", "step"]
    assert "step," not in served.server.get("/metrics").text
    for _ in range(3):
        assert load("first") == 200
    served.models["step"] = served.models["first"]
    served.check("step")
    own = {"lora_name": "step", "lora_path": str(served.home / "third")}
    assert served.post("/v1/load_lora_adapter", **own)[0] == 400
    assert served.post("/v1/load_lora_adapter", **own, load_inplace=True)[0] == 200
    assert served.post("/v1/unload_lora_adapter", lora_name="step")[0] == 200
    assert served.post("/v1/completions", model="step", prompt=PROMPT)[0] == 404


def test_an_adapter_that_does_not_fit_is_refused(served: Served, tmp_path: Path) -> None:
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    status, answer = served.post("/v1/load_lora_adapter", lora_name="bad", lora_path=str(tmp_path))
    assert (status, answer["error"]["param"]) == (400, "lora_path")
    assert "peft_type" in answer["error"]["message"]
    assert "bad" not in served.models_served()

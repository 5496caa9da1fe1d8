"""The requests of trainers, each in the shapes that its own code sends, and the members of the answers that it reads.

A test is one round of a trainer against one server: answers are sampled, weights change, and it goes on. What it sends
was read in SkyRL 0.3.0, prime-rl (August 2026, with renderers 0.1.12), slime (August 2026), AReaL 1.0.4 and verl 0.9.1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.config import ModelSettings
from octavo.telemetry.cache_view import SessionOrder
from octavo.weights.adapter_files import digest
from octavo_server.engines.lora_adapters import AdapterTable
from tests.server.conftest import Served
from tests.server.in_process import ANSWER, InProcessEngine, byte_tokenizer

PROMPT = list(b"What is 2+2?")
Start = Callable[..., Served]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model, and a folder for the trainer's checkpoints and adapters."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    for name in ("lora-1", "lora-2"):
        (tmp_path / "steps" / name).mkdir(parents=True)
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (tmp_path / "steps" / name / file).write_text(name)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    found: list[Served] = []

    def start(**settings: Any) -> Served:
        engine = InProcessEngine(adapters=AdapterTable(ModelSettings(enable_lora=True)))
        own = {"model": str(folder / "model"), "served_model_name": "policy", "enable_sleep_mode": True}
        own |= {"enable_lora": True, "allow_runtime_lora_updating": True}
        own |= {"weight_updates_dir": str(folder / "steps")}
        found.append(Served(engine, byte_tokenizer(), {**own, **settings}))
        return found[-1]

    yield start
    for served in found:
        served.stop()


def checkpoint(folder: Path, name: str) -> Path:
    """What a trainer writes for an update, without weights: the engine of these tests reads none."""
    (folder / "steps" / name).mkdir()
    (folder / "steps" / name / "config.json").write_text("{}")
    return folder / "steps" / name


def read(answer: httpx.Response) -> Any:
    """The answer, in which nothing may have been left unread of what was asked."""
    assert answer.status_code == 200, answer.text
    assert "x-octavo-unknown-fields" not in answer.headers
    return answer.json()


def test_skyrl(start: Start, folder: Path) -> None:
    served = start()
    client = served.client
    assert read(client.request("GET", "/get_world_size", json={}))["world_size"] == 1
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "max_tokens": 5, "logprobs": 1}
    params |= {"skip_special_tokens": True, "include_stop_str_in_output": True, "stop": None}
    body = {"sampling_params": params, "model": "policy", "token_ids": PROMPT, "cache_salt": "1"}
    headers = {"X-Session-ID": "trajectory-1"}
    [choice] = read(client.post("/inference/v1/generate", json=body, headers=headers))["choices"]
    assert (choice["token_ids"], choice["finish_reason"]) == ([*ANSWER[:5].encode()], "length")
    assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])
    assert len(choice["logprobs"]["content"]) == 5
    assert served.engine.requests[-1].session == "trajectory-1"
    assert (
        read(client.post("/detokenize", json={"model": "policy", "tokens": choice["token_ids"]}))["prompt"] == "The a"
    )
    asked = {"model": "policy", "prompt": "Hi", "add_special_tokens": True}
    assert read(client.post("/tokenize", json=asked))["tokens"] == [*b"Hi"]
    own = {"n": 2, "logprobs": 0, "prompt_logprobs": 2, "max_tokens": 1}
    scored = client.post("/inference/v1/generate", json={**body, "sampling_params": {**own, "output_kind": 2}})
    assert scored.headers["x-octavo-unknown-fields"] == "sampling_params.output_kind"
    first, *others = scored.json()["prompt_logprobs"]
    assert first is None
    assert [str(token) in entry for token, entry in zip(PROMPT[1:], others, strict=True)] == [True] * len(others)
    assert client.post("/finish_session", params={"session_id": "trajectory-1"}).status_code == 200
    assert served.engine.session_orders == [SessionOrder("forget", "", "trajectory-1")]
    read(client.post("/pause", params={"mode": "keep", "clear_cache": "false"}))
    for number in (1, 2):
        path = str(folder / "steps" / f"lora-{number}")
        read(client.post("/skyrl/v1/load_lora_adapter", json={"lora_name": "skyrl-lora", "lora_path": path}))
    read(client.post("/reset_prefix_cache", json={"reset_running_requests": False}))
    read(client.post("/resume"))
    read(client.post("/inference/v1/generate", json={**body, "model": "skyrl-lora"}))
    assert served.engine.requests[-1].adapter == f"skyrl-lora,{digest(path)[:16]}", "the second of this name"
    for path, params in (("/sleep", {"level": "1", "tags": ["weights"]}), ("/wake_up", {"tags": ["kv_cache"]})):
        read(client.post(path, params=params))
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "skyrl-lora"}).status_code == 200


def test_prime_rl(start: Start, folder: Path) -> None:
    served = start()
    client = served.client
    assert [client.get(path).status_code for path in ("/health", "/liveness")] == [200, 200]
    [model] = read(client.get("/v1/models"))["data"]
    assert (model["id"], model["max_model_len"]) == ("policy", served.engine.max_model_len)
    params = {"temperature": 1.0, "max_tokens": 4, "stop_token_ids": [258], "logprobs": 1}
    params |= {"skip_special_tokens": False, "routed_experts_prompt_start": 0}
    body = {"model": "policy", "token_ids": PROMPT, "sampling_params": params, "cache_salt": "0", "priority": 0}
    found = read(client.post("/inference/v1/generate", json=body, headers={"X-Session-ID": "rollout"}))
    [choice] = found["choices"]
    names = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert names == [f"token_id:{token}" for token in choice["token_ids"]], "it checks them"
    assert found["request_id"]
    score = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    body = {"model": "policy", "token_ids": PROMPT, "sampling_params": score}
    for token, entry in zip(
        PROMPT, read(client.post("/inference/v1/generate", json=body))["prompt_logprobs"], strict=True
    ):
        assert entry is None or next(iter(entry)) == str(token), "the first one is taken for the prompt's own"
    step = checkpoint(folder, "step_1")
    (step / "config.json").unlink()
    for marker in ("STABLE", "NCCL_READY"):
        (step / marker).touch()
    read(client.post("/pause", params={"mode": "keep", "clear_cache": "false"}))
    read(client.post("/update_weights", json={"weight_dir": step.as_posix()}))
    read(client.post("/resume"))
    assert (served.engine.weights, served.engine.num_clears) == ([str(step)], 0)
    for name in ("lora-1", "lora-2"):  # each step one of the same name
        body = {"lora_name": "rl", "lora_path": (folder / "steps" / name).as_posix()}
        read(client.post("/load_lora_adapter", json=body))
    assert served.engine.adapters.paths == {"rl": str(folder / "steps" / "lora-2")}


def sglang_round(client: httpx.Client, step: Path) -> None:
    """What slime and AReaL do for an update by disk."""
    read(client.post("/pause_generation", json={}))
    read(client.get("/flush_cache"))
    body = {"model_path": str(step), "weight_version": "1"}
    assert read(client.post("/update_weights_from_disk", json=body))["success"]
    assert read(client.get("/get_weight_version"))["weight_version"] == "1"
    read(client.post("/continue_generation", json={}))


def test_slime(start: Start, folder: Path) -> None:
    """Engines that it did not start: ``--rollout-external-engine-addrs``, with updates by disk."""
    served = start(enable_sleep_mode=False)
    client = served.client
    info = read(client.get("/server_info"))
    assert (info["tp_size"], info["enable_memory_saver"], info["enable_return_routed_experts"]) == (1, False, False)
    assert client.get("/health_generate").status_code == 200
    params: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_new_tokens": 6, "stop": None}
    params |= {"stop_token_ids": None, "skip_special_tokens": True, "no_stop_trim": True}
    params |= {"spaces_between_special_tokens": False, "sampling_seed": 3}
    body = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True}
    answer = read(client.post("/generate", json=body, headers={"X-SMG-Routing-Key": "s"}))
    meta = answer["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == [*ANSWER[:6].encode()]
    assert (answer["text"], meta["finish_reason"]["type"], meta["weight_version"]) == (ANSWER[:6], "length", "default")
    assert {"prompt_tokens", "completion_tokens", "cached_tokens"} <= meta.keys()
    sglang_round(client, checkpoint(folder, "weight_v000001"))
    assert read(client.post("/abort_request", json={"abort_all": True}))
    [load] = read(client.get("/v1/loads", params={"include": "core"}))["loads"]
    assert load == {"dp_rank": 0, "num_running_reqs": 0, "num_waiting_reqs": 0, "num_total_reqs": 0}
    assert read(client.post("/generate", json=body))["meta_info"]["weight_version"] == "1"


def test_areal(start: Start, folder: Path) -> None:
    """Its backend for SGLang."""
    served = start()
    client = served.client
    assert client.get("/health").status_code == 200
    params = {"top_p": 1.0, "top_k": 100, "max_new_tokens": 3, "temperature": 1.0, "stop_token_ids": []}
    params |= {"ignore_eos": False, "skip_special_tokens": True, "frequency_penalty": 0.0}
    asked: dict[str, Any] = {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True, "stream": False}
    meta = read(client.post("/generate", json={**asked, "image_data": []}))["meta_info"]
    assert [len(entry) for entry in meta["output_token_logprobs"]] == [3] * 3
    score: dict[str, Any] = {"max_new_tokens": 1, "temperature": 0.0}
    own = {"input_ids": PROMPT, "sampling_params": score, "logprob_start_len": len(PROMPT) - 5, "top_logprobs_num": 0}
    meta = read(client.post("/generate", json={"return_logprob": True, "stream": False, **own}))["meta_info"]
    assert len([float(entry[0]) for entry in meta["input_token_logprobs"]]) == 5
    read(client.post("/release_memory_occupation", json={}))
    assert served.engine.sleep_level == 1
    read(client.post("/resume_memory_occupation", json={"tags": ["weights", "kv_cache"]}))
    assert served.engine.sleep_level == 0
    sglang_round(client, checkpoint(folder, "1"))
    for number in (1, 2):
        body = {"lora_name": f"lora-v{number}", "lora_path": str(folder / "steps" / f"lora-{number}")}
        assert read(client.post("/load_lora_adapter", json=body))["success"]
    read(client.post("/generate", json={**asked, "lora_path": "lora-v2"}))
    assert served.engine.requests[-1].adapter.startswith("lora-v2,")
    missing = client.post("/generate", json={**asked, "lora_path": "lora-v9"})
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "lora_path")
    read(client.post("/unload_lora_adapter", json={"lora_name": "lora-v1"}))


def test_verl(start: Start) -> None:
    """Its client of SGLang's server. It sends weights as pickles, which are refused."""
    served = start()
    client = served.client
    for path in ("/health_generate", "/flush_cache", "/v1/models"):
        assert client.get(path).status_code == 200
    own = {"n": 1, "max_new_tokens": 4, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
    own |= {"temperature": 1.0, "top_k": -1, "top_p": 1, "ignore_eos": False, "min_new_tokens": 0}
    own |= {"skip_special_tokens": True, "spaces_between_special_tokens": True}
    body = {"sampling_params": own, "input_ids": PROMPT, "return_logprob": True}
    meta = read(client.post("/generate", json=body))["meta_info"]
    assert [entry[1] for entry in meta["output_token_logprobs"]] == [*ANSWER[:4].encode()]
    for tags in (["kv_cache"], ["weights"], None):
        read(client.post("/release_memory_occupation", json={"tags": tags}))
    for tags in (["weights"], ["kv_cache"]):
        read(client.post("/resume_memory_occupation", json={"tags": tags}))
    wrong = client.post("/resume_memory_occupation", json={"tags": ["graphs"]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tags")
    read(client.post("/abort_request", json={"rid": "", "abort_all": True}))
    body = {"serialized_named_tensors": ["gASV"], "load_format": None, "flush_cache": False}
    assert client.post("/update_weights_from_tensor", json=body).status_code == 404


@pytest.mark.parametrize("path", ["/release_memory_occupation", "/load_lora_adapter", "/skyrl/v1/load_lora_adapter"])
def test_one_of_several_keys_changes_nothing(start: Start, folder: Path, path: str) -> None:
    keys = folder / "keys"
    keys.write_text("".join(f"{name} {sha256(name.encode()).hexdigest()}\n" for name in ("alice", "bob")))
    served = start(api_key_file=str(keys), admin_key="boss")
    body = {"lora_name": "a", "lora_path": str(folder / "steps" / "lora-1")} if "lora" in path else {}
    for key, status in (("alice", 403), ("boss", 200)):
        assert served.client.post(path, json=body, headers={"Authorization": f"Bearer {key}"}).status_code == status

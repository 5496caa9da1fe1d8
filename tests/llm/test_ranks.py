"""``LLM`` on ranks: the tokens of one process, no process left, and an error when a rank is gone."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, RanksLost
from tests.llm.test_weight_updates import changed
from tests.llm.tiny import SETTINGS, write_checkpoint
from tests.models.families import make_checkpoint
from tests.ops.cpu_cases import needs_float_kernels
from tests.runtime.thread_ranks import ranks_as_threads
from tests.tiers import nightly_after

pytestmark = [pytest.mark.slow, needs_float_kernels]

PROMPTS = ["The quick brown fox", "jumps over", "the lazy dog and says: " * 6]

PROMPT_LOOKUP = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
REPEATING: dict[str, Any] = {"logit_bias": {100: 50.0, 200: 50.0}}
"""Answers of two tokens, one of each rank, so that prompt lookup finds drafts that are often right."""


def make(folder: Path, size: int, **settings: Any) -> LLM:
    return LLM(str(folder), device="cpu", tensor_parallel_size=size, **{**SETTINGS, **settings})


def texts(llm: LLM, prompts: list[str] = PROMPTS, **params: Any) -> list[list[int]]:
    sampling = SamplingParams(temperature=0.8, max_tokens=30, seed=3, **params)
    return [list(result.outputs[0].token_ids) for result in llm.generate(prompts, sampling)]


def ranks(of: psutil.Process | None = None) -> list[int]:
    children = (of or psutil.Process()).children(recursive=True)
    return [child.pid for child in children if "octavo.rank_process" in child.cmdline()]


def test_ranks_give_the_tokens_of_one_process_until_one_is_lost(tmp_path: Path) -> None:
    """Also with other weights, which come as a folder and as tensors."""
    first = write_checkpoint(tmp_path / "first")
    make_checkpoint(first, "llama/biases", vocab_size=264)
    second = changed(first, tmp_path / "second")
    with make(first, 1, load_format="auto") as one:
        expected = texts(one)
        one.load_weights(second)
        assert (updated := texts(one)) != expected
    with make(first, 2, load_format="auto") as two:
        assert texts(two) == expected
        assert two.info.tensor_parallel_size == 2
        two.load_weights(second)
        assert texts(two) == updated
        two.load_weights(load_file(first / "model.safetensors").items())
        assert texts(two) == expected
        [pid] = ranks()
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(RanksLost, match=r"rank 1 of the engine ended \(killed by signal 9\)"):
            texts(two)
        assert time.monotonic() - began < 30


def test_stages_give_the_tokens_of_one_process_hold_a_part_of_the_layers_and_end_with_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with make(tmp_path, 1) as one:
        expected = texts(one)
    with make(tmp_path, 1, pipeline_parallel_size=2) as two:
        assert texts(two) == expected
        assert len(ranks()) == 1
        assert two.info.num_parameters == one.info.num_parameters
        assert 2 * two.info.memory["kv_cache"] == one.info.memory["kv_cache"]
        assert two.info.memory["weights"] < one.info.memory["weights"]
    del two
    gc.collect()
    assert ranks() == []


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size: 3 is more than the model's 2 layers"),
        ({"enable_lora": True}, "pipeline_parallel_size and enable_lora"),
        ({"nnodes": 3}, "nnodes: 3 must divide pipeline_parallel_size, which is 2"),
        ({"nnodes": 2}, "nnodes needs node_key"),
        ({"node_key": "k"}, "node_key needs nnodes"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend: ray needs nnodes, of at least 2"),
        (
            {"nnodes": 2, "distributed_executor_backend": "ray", "node_key": "k"},
            "node_key: distributed_executor_backend ray sets it",
        ),
        ({"nnodes": 2, "node_key": "k", "node_rank": 2}, "node_rank: must be at most 1"),
        ({"nnodes": 2, "node_key": "k", "node_rank": 1}, "node_rank: this host computes for that with node_rank 0"),
        ({"nnodes": 2, "node_key": "k", "master_addr": "10.0.0.7"}, "master_addr: .* needs node_ssl_certfile"),
        ({"kv_offload_memory": 0.01}, "pipeline_parallel_size and kv_offload_memory"),
        ({"speculative_config": '{"method": "mtp"}'}, '"mtp" needs pipeline_parallel_size 1'),
    ],
)
def test_what_does_not_go_with_stages_is_refused_by_name(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=named):
        make(tmp_path, 1, **{"pipeline_parallel_size": 2, **settings})


MIXTURE = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 1,
}


def test_sequences_of_their_own_give_the_tokens_of_one_process_and_room_for_twice_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_as_threads(monkeypatch)
    write_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **MIXTURE}))
    with make(tmp_path, 1, load_format="dummy") as one:
        expected = texts(one)
    settings = {"enable_dp_attention": True, "enable_expert_parallel": True, "load_format": "dummy"}
    with make(tmp_path, 2, **settings) as two:
        assert texts(two) == expected
        assert two.info.num_kv_blocks == 2 * one.info.num_kv_blocks
        assert two.info.memory["kv_cache"] == one.info.memory["kv_cache"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"decode_context_parallel_size": 2}, "enable_dp_attention and decode_context_parallel_size"),
        ({"pipeline_parallel_size": 2}, "enable_dp_attention and pipeline_parallel_size"),
        ({"enable_lora": True}, "enable_dp_attention and enable_lora"),
        ({"enable_return_routed_experts": True}, "enable_dp_attention and enable_return_routed_experts"),
        ({"kv_offload_memory": 0.01}, "enable_dp_attention and kv_offload_memory"),
        ({"speculative_config": '{"method": "mtp"}'}, '"mtp" does not go with enable_dp_attention; "ngram" does'),
    ],
)
def test_what_does_not_go_with_sequences_of_ranks_is_refused_by_name(
    settings: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match=named):
        make(tmp_path, 2, **{"enable_dp_attention": True, **settings})


@pytest.mark.nightly
@pytest.mark.parametrize("num_parts", [2, *nightly_after(0, [1])])
def test_prompt_lookup_gives_the_tokens_of_one_process_without_it(num_parts: int, tmp_path: Path) -> None:
    """Accepted are the tokens that would be sampled anyway, so drafts change nothing; some are right, some wrong.

    ``num_parts``: of contexts.
    """
    write_checkpoint(tmp_path)
    with make(tmp_path, 1) as one:
        expected = texts(one, **REPEATING)
    settings = {"speculative_config": json.dumps(PROMPT_LOOKUP), "decode_context_parallel_size": num_parts}
    with make(tmp_path, 2, **settings) as two:
        assert texts(two, **REPEATING) == expected
        stats = two.engine.stats()
        assert 0 < stats.num_accepted_drafts < stats.num_drafts


@pytest.mark.nightly
@pytest.mark.parametrize(
    "rule",
    nightly_after(1, [{"acceptance": "distribution"}, {"acceptance": "synthetic", "synthetic_acceptance_length": 2.5}]),
)
def test_rules_that_need_all_logits_give_the_tokens_of_one_process(tmp_path: Path, rule: dict[str, Any]) -> None:
    write_checkpoint(tmp_path)
    settings = {"speculative_config": json.dumps({**PROMPT_LOOKUP, **rule})}
    with make(tmp_path, 1, **settings) as one:
        expected = texts(one, **REPEATING)
    with make(tmp_path, 2, **settings) as two:
        assert texts(two, **REPEATING) == expected
        assert two.engine.stats().num_accepted_drafts > 0


@pytest.mark.parametrize("num_parts", [2, *nightly_after(0, [1])])
def test_blocks_go_to_host_memory_and_come_back(
    num_parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool of hardly more than one prompt, so that the second pass finds its blocks in host memory."""
    ranks_as_threads(monkeypatch)
    write_checkpoint(tmp_path)
    settings: dict[str, Any] = {"num_kv_blocks": 17, "kv_offload_memory": 0.01}
    long = [letter * 200 for letter in "abca"]
    with make(tmp_path, 1, **settings) as one:
        expected = [texts(one, [prompt]) for prompt in long]
    settings |= {"decode_context_parallel_size": num_parts, "block_size": 16 // num_parts}
    with make(tmp_path, 2, **settings) as two:
        assert two.info.block_size == 16
        assert [texts(two, [prompt]) for prompt in long] == expected
        assert two.engine.stats().num_offload_restored > 0


def test_stages_of_two_hosts_give_the_tokens_of_one_process(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    with make(tmp_path, 1) as one:
        expected = texts(one)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    hosts = {"pipeline_parallel_size": 2, "nnodes": 2, "node_key": "a key", "master_port": port}
    given = {**hosts, "model": tmp_path, "device": "cpu", "node_rank": 1}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    second = psutil.Popen([sys.executable, "-m", "octavo", "serve", "--headless", *flags])
    try:
        with make(tmp_path, 1, **hosts) as two:
            assert texts(two) == expected
            [rank] = ranks()
            assert ranks(second) == [rank], "it is of the second host"
            assert 2 * two.info.memory["kv_cache"] == one.info.memory["kv_cache"]
        del two
        gc.collect()
        assert psutil.wait_procs([psutil.Process(rank)] if psutil.pid_exists(rank) else [], timeout=60)[1] == []
        assert second.is_running(), "it waits for the next engine"
    finally:
        second.kill()
        second.wait()

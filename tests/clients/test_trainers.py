"""SkyRL's and prime-rl's own clients, with a small model and adapters that are loaded under one name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.clients.conftest import HERE
from tests.conftest import Server
from tests.llm.tiny import write_checkpoint
from tests.models.adapter_files import make_adapter
from tests.models.families import make_checkpoint


def test_a_round_of_training(serve: Callable[..., Server], run: Callable[..., str], tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    make_checkpoint(folder, "llama/gqa", vocab_size=264)
    adapters = [tmp_path / "one", tmp_path / "two"]
    for seed, adapter in enumerate(adapters):
        make_adapter(folder, adapter, seed)
    flags = ("--weight-updates-dir", str(tmp_path), "--enable-lora", "--allow-runtime-lora-updating")
    server = serve(str(folder), "--served-model-name", "policy", "--enable-sleep-mode", *flags)
    told = run("python", HERE / "trainers.py", server.url, folder, *adapters, environment="trainers")
    found = json.loads(told.splitlines()[-1])
    skyrl, prime_rl = found["skyrl"], found["prime_rl"]
    assert skyrl["sizes"] == [1, 1]
    plain, first, second, awake = [each["response_ids"] for each in skyrl["said"]]
    assert all(len(tokens) == 12 for said in (plain, first, second) for tokens in said)
    assert plain[0] == plain[1], "they have one seed"
    assert len({json.dumps(each) for each in (plain, first, second)}) == 3, "each load is another adapter"
    assert awake == second
    assert all(len(row) == 12 for each in skyrl["said"] for row in each["response_logprobs"])
    assert len(skyrl["scored"]["sequences"]) == 2
    assert skyrl["scored"]["prompt_logprobs"][0] is None
    assert all(logprob < 0 for logprob in skyrl["scored"]["prompt_logprobs"][1:])
    assert prime_rl["prompt_ids"] == [*b"user: What is 2+2?\nassistant:"]
    assert len(prime_rl["completion_ids"]) == len(prime_rl["completion_logprobs"]) == 8
    assert prime_rl["finish_reason"] == "length"

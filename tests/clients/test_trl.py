"""TRL's GRPO in server mode: its trainer samples from the server, sends it weights after each step, and learns."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.clients.conftest import HERE
from tests.conftest import Server
from tests.llm.tiny import write_checkpoint

NUM_STEPS = 30


def test_grpo_learns(serve: Callable[..., Server], run: Callable[..., str], tmp_path: Path) -> None:
    """In 30 steps the reward, the share of lower-case letters, goes from a tenth to nearly one. Sampled
    log-probabilities are the trainer's own but for rounding, and those of a scoring pass to the last bit."""
    folder = write_checkpoint(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    flags = ("--weight-transfer-config", '{"backend": "gloo"}', "--logprobs-mode", "processed_logprobs")
    server = serve(str(folder), *flags, "--max-logprobs", "-1")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    told = run("python", HERE / "trl_grpo.py", server.url, folder, NUM_STEPS, port)
    found = json.loads(told.splitlines()[-1])
    rewards = found["rewards"]
    assert len(rewards) == NUM_STEPS
    assert sum(rewards[:3]) / 3 < 0.2
    assert sum(rewards[-3:]) / 3 > 0.9
    assert max(found["trainer_difference"]) < 1e-4
    assert found["num_scored"] > 500
    assert found["largest_difference"] == 0.0
    assert server.get("/weight_info").json()["weight_version"] == str(NUM_STEPS + 1)

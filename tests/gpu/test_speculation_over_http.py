"""Requests of many kinds to servers on a CUDA device, with drafts and without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo_bench.dummy_models import make_tokenizer
from tests.completions import complete_all, mixed_drafting, wait_until_idle
from tests.conftest import Server
from tests.gpu.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

VOCAB, LENGTH = 512, 1024
ROOM = "--max-model-len", str(LENGTH), "--block-size", "16", "--max-num-seqs", "32", "--batch-invariant"


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_hundred_mixed_requests_with_drafts(tmp_path: Path, serve: Callable[..., Server], adaptive: bool) -> None:
    """With ``--batch-invariant`` they are to the letter what they are without, among drafts and preemptions."""
    write_checkpoint(tmp_path, "llama", vocab_size=VOCAB, max_position_embeddings=LENGTH)
    make_tokenizer(VOCAB).save(str(tmp_path / "tokenizer.json"))
    settings = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": adaptive}
    plain = serve(str(tmp_path), *ROOM, "--num-kv-blocks", "2000")
    bodies = mixed_drafting(100, seed=5)
    want = asyncio.run(complete_all(plain, bodies, stream=False))
    plain.stop()
    drafting = serve(str(tmp_path), *ROOM, "--num-kv-blocks", "72", "--speculative-config", json.dumps(settings))
    found = asyncio.run(complete_all(drafting, bodies, stream=True))
    for body, result, expected in zip(bodies, found, want, strict=True):
        assert result == expected, body
    stats = wait_until_idle(drafting)
    assert stats["num_preemptions"] > 0
    if adaptive:  # whether drafts pay with so small a model, and so how many there are, depends on the machine
        assert stats["num_accepted_drafts"] <= stats["num_drafts"]
    else:
        assert 0 < stats["num_accepted_drafts"] < stats["num_drafts"]

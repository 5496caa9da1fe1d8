"""Needles in long contexts: the engine's model is the one that is trained, and contexts are as they are described."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.cli import main
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
from octavo_bench import needle_model, needles
from octavo_bench.needle_model import COMPARED, KNOWN, PHRASE

CPU = torch.device("cpu")


def phrases(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[at : at + PHRASE]) for at in range(0, len(tokens), PHRASE)]


def unlike(first: tuple[int, ...], second: tuple[int, ...]) -> list[int]:
    """The places of known tokens where they differ."""
    return [place for place in range(KNOWN) if first[place] != second[place]]


def test_the_engine_computes_what_was_trained(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = needle_model.circuit()
    needle_model.write(weights, tmp_path)
    (ids_T,) = needle_model.texts(1, 96, CPU)
    with torch.inference_mode():
        expected_TV = needle_model.logits(weights, ids_T[None])[0].log_softmax(-1)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    with LLM(tmp_path, device="cpu", dtype="float32", kv_cache_memory=0.05) as llm:
        (output,) = llm.generate([ids_T.tolist()], params)
    assert output.prompt_logprobs is not None
    found = [entry[token].logprob for token, entry in zip(ids_T.tolist(), output.prompt_logprobs, strict=True) if entry]
    torch.testing.assert_close(
        torch.tensor(found), expected_TV[:-1].gather(1, ids_T[1:, None])[:, 0], rtol=1e-3, atol=1e-3
    )


def test_weights_begin_with_a_circuit_that_training_sharpens() -> None:
    said: list[str] = []
    needle_model.train(needle_model.NeedleTraining(12, 2048, 512), CPU, 0, said.append)
    losses = [float(line.rpartition(" ")[2]) for line in said]
    assert losses[0] < math.log(needle_model.VOCAB_SIZE)
    assert losses[-1] < losses[0] - 0.5
    assert [line.split("of ")[2].split()[0] for line in said] == ["256", "512"]


def test_every_other_phrase_of_a_text_is_a_decoy() -> None:
    (ids_T,) = needle_model.texts(1, 64 * PHRASE, CPU)
    found = {*phrases(ids_T.tolist())}
    near = [pair for pair in ((a, b) for a in found for b in found if a < b) if len(unlike(*pair)) == 1]
    assert len(near) >= len(found) // 4
    assert all(place >= KNOWN - COMPARED for pair in near for place in unlike(*pair))


def test_needles_occur_once_and_evenly_and_have_decoys() -> None:
    context = needles.make_context(4096, 8, 3, random.Random(0))
    assert len(context.tokens) + len(context.needles) * PHRASE == 4096
    found = phrases(context.tokens)
    counts = Counter(found)
    places = [found.index(tuple(needle)) for needle in context.needles]
    assert all(counts[tuple(needle)] == 1 for needle in context.needles)
    assert places == sorted(places)
    steps = [later - earlier for earlier, later in itertools.pairwise(places)]
    assert max(steps) - min(steps) <= 2
    assert all(sum(len(unlike(tuple(needle), other)) == 1 for other in counts) == 3 for needle in context.needles)


def test_a_model_is_trained_once_and_measured_by_cache(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "needles", str(tmp_path / "model"), "--device", "cpu", "--kv-cache-memory", "0.05"]
    command += ["--caches", "auto,int4", "--lengths", "512,1024", "--num-contexts", "1", "--num-needles", "4"]
    command += ["--num-decoys", "1", "--max-steps", "4", "--step-tokens", "1024", "--longest", "256"]
    results: list[dict[str, Any]] = []
    for _ in range(2):
        assert main(command) == 0
        results.append(json.loads(capsys.readouterr().out)["result"])
    assert results[0].pop("training")["max_steps"] == 4
    assert results[0] == results[1]
    rows = results[0]["rows"]
    assert [(row["kv_cache_dtype"], row["context"]) for row in rows] == [
        *(("auto", 512), ("auto", 1024)),
        *(("int4", 512), ("int4", 1024)),
    ]
    assert all(0 <= row["needle_share"] <= 1 and row["needle_nats"] > 0 and row["perplexity"] > 1 for row in rows)
    assert rows[0] != {**rows[2], "kv_cache_dtype": "auto"}


def test_a_length_that_holds_no_needle_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "needles", str(tmp_path / "model"), "--device", "cpu", "--lengths", "100"]) != 0
    assert "lengths: must be at least 320" in capsys.readouterr().err

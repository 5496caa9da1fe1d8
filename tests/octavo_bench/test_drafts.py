"""Measurements of drafts, and the training of a head, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.cli import main
from octavo.config import EngineConfig
from octavo.weights.checkpoint import open_checkpoint
from octavo_bench.drafts.draft_prompts import KINDS, prompts_of
from octavo_bench.drafts.draft_texts import WantedTexts, generate, training_messages
from octavo_bench.drafts.draft_training import Drawn, Teacher, TrainableEagle3, Training, accepted_by_position
from octavo_bench.drafts.speculate import Side, SpeculationWork
from tests.llm.tiny import write_checkpoint
from tests.models.families import make_checkpoint

SETTINGS = ["--device", "cpu", "--block-size", "16", "--max-num-seqs", "8", "--max-model-len", "384"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights that are larger than usual: a model that repeats itself is easy to learn."""
    made = tmp_path_factory.mktemp("model")
    write_checkpoint(made)
    make_checkpoint(made, "llama/gqa", vocab_size=264, num_hidden_layers=5, eos_token_id=256)
    return made


def bench(capsys: pytest.CaptureFixture[str], output: Path, *args: str) -> dict[str, Any]:
    assert main(["bench", *args, "--output", str(output)]) == 0
    capsys.readouterr()
    found: dict[str, Any] = json.loads(output.read_text())["result"]
    return found


@pytest.mark.nightly
def test_speculation_is_measured_by_kind_and_batch(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.dumps({"method": "ngram", "prompt_lookup_min": 1, "adaptive": False})
    asked = ["--speculative-config", config, "--kinds", "chat", "code", "--batches", "1,2", "--max-tokens", "16"]
    record = bench(capsys, tmp_path / "r.json", "speculate", str(folder), *SETTINGS, *asked, "--rounds", "2")
    rows = record["rows"]
    assert [(row["kind"], row["batch"]) for row in rows] == [("chat", 1), ("chat", 2), ("code", 1), ("code", 2)]
    for row in rows:
        assert row["same_tokens"]
        assert len(row["speedups"]) == 2
        assert row["num_accepted_drafts"] <= row["num_drafts"]
        assert len(row["accepted_by_position"]) <= 4
        assert row["plain_tok_s"] > 0 < row["drafts_tok_s"]


@pytest.mark.nightly
def test_a_head_is_trained_and_drafts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = tmp_path / "head"
    sizes = ["--num-answers", "24", "--answer-tokens", "32", "--text-length", "96", "--batch-size", "4"]
    sizes += [
        "--max-steps",
        "30",
        "--rounds",
        "2",
        "--draft-vocab-size",
        "200",
        "--num-drafts",
        "2",
        "--ffn-size",
        "96",
    ]
    asked = ["--folder", str(head), *sizes, "--kinds", "chat", "--max-tokens", "16"]
    record = bench(capsys, tmp_path / "r.json", "train-draft", str(folder), *SETTINGS, *asked)
    curve = record["curve"]
    assert curve[-1]["step"] == record["num_steps"] == 30
    assert curve[-1]["losses"][0] < curve[0]["losses"][0]
    assert len(record["held_agreement"]) == len(record["held_accepted_by_position"]) == 2
    [row] = record["measured"]["rows"]
    assert row["same_tokens"]
    assert row["num_drafts"] > 0
    assert {"config.json", "model.safetensors", "training.json"} == {path.name for path in head.iterdir()}


def test_training_computes_what_decoding_does(folder: Path) -> None:
    """A round of an anchor is what the head gives for a text that ends there, followed by its own outputs."""
    training = Training(3, None, 50, 40, 2, 1e-3, 1, 1.0, 0)
    teacher = Teacher(open_checkpoint(folder), torch.device("cpu"), training)
    head = TrainableEagle3(teacher.config, len(teacher.layers), 50)
    tokens_BL = torch.randint(0, 200, (2, 40))
    batch = teacher.compute(Drawn(tokens_BL, torch.arange(0)), torch.arange(50))
    with torch.no_grad():
        rounds = head.logits(torch.stack(list(head(batch.hidden_BLE, batch.embedded_BLD, 3))))
        for anchor in (0, 7, 35):
            for text in range(2):
                want = decoded(head, batch.hidden_BLE[text, : anchor + 1], batch.embedded_BLD[text], 3)
                torch.testing.assert_close(rounds[:, text, anchor], want, rtol=1e-4, atol=1e-4)


def decoded(head: TrainableEagle3, hidden_TE: Tensor, embedded_LD: Tensor, count: int) -> Tensor:
    """The logits of several drafts, each from a pass over all rows before it, with causal attention."""
    rows_TD, found = head.fc(hidden_TE), []
    for _ in range(count):
        x_TD = head.midlayer(embedded_LD[None, 1 : len(rows_TD) + 1], rows_TD[None], [])[0]
        found.append(head.lm_head(head.norm(x_TD[-1])))
        rows_TD = torch.cat((rows_TD, x_TD[-1:]))
    return torch.stack(found)


def test_held_texts_have_prompts_of_their_own(folder: Path) -> None:
    config = {"model": str(folder), "device": "cpu", "max_num_seqs": 8, "max_model_len": 384, "block_size": 16}
    used, held = generate(EngineConfig.from_flat(config), WantedTexts(40, 2, 0.7, 300.0), 0)
    assert len(used) == 40
    assert held
    prompts = [{tuple(text.tokens[: text.num_prompt_tokens]) for text in texts} for texts in (used, held)]
    assert not prompts[0] & prompts[1]


def test_drafts_are_accepted_up_to_the_first_wrong_one() -> None:
    """Rows 2 to 4 and 6 to 7 are compared, so that two rounds of anchors 2, 3 and 6 are."""
    rows_R = torch.tensor([2, 3, 4, 6, 7])
    first, second = torch.tensor([1, 0, 1, 1, 0]).bool(), torch.tensor([0, 1, 1, 0, 0]).bool()
    accepted = accepted_by_position([first, second], rows_R, 8)
    torch.testing.assert_close(accepted, torch.tensor([2 / 3, 1 / 3]))


def test_answers_are_cut_off_in_time(folder: Path) -> None:
    side = Side(EngineConfig.from_flat({"model": str(folder), "device": "cpu", "max_num_seqs": 2, "block_size": 16}))
    work = SpeculationWork((), (), 4, 0.0, 0)
    assert side.run([[1, 2, 3]] * 5, work, until=0.0).tokens == [[]] * 5
    assert all(side.run([[1, 2, 3]] * 5, work).tokens)


def test_prompts_of_measurements_are_not_those_of_training() -> None:
    measured = {prompt for kind in KINDS for prompt in prompts_of(kind, 0, 200)}
    assert not measured & set(training_messages())
    assert len(set(prompts_of("chat", 0, 72))) == len(set(prompts_of("code", 0, 72))) == 72


@pytest.mark.parametrize("flags", [["--rounds", "0"], ["--max-tokens", "0"], ["--batches", "1,0"], ["--batches", "-3"]])
def test_sizes_are_at_least_one(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "speculate", "smollm2-135m", *flags])
    assert f"{flags[0]}: must be at least 1" in capsys.readouterr().err

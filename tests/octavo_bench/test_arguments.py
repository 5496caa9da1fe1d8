"""What a measurement would not use is refused, as are sizes of which there is nothing to measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.cli import main
from octavo_bench.drafts.draft_texts import WantedTexts
from tests.tiers import one_in

PEER = "bench peer tiny --engine vllm --python /nowhere"


@one_in(3)
@pytest.mark.parametrize(
    ("command", "told"),
    [
        (f"{PEER} --quantization fp8", "--quantization: with --engine vllm, give it to the servers in --octavo-args"),
        (f"{PEER} --config FILE", "FILE: block_size: with --engine vllm"),
        (f"{PEER} --sequences 3", "--sequences: is for --engine llama.cpp"),
        ("bench peer tiny --python /nowhere --visits octavo:9", "--visits: is for --engine vllm"),
        (PEER, "/nowhere cannot be started: No such file"),
        ("bench quality tiny --quantization int4", "--quantization: name each format to compare in --formats"),
        ("bench serve http://127.0.0.1:1 --search --csv rows.csv", "--csv: has no effect on --search"),
        ("bench serve http://127.0.0.1:1 --search --request-rate 3", "--request-rate: has no effect on --search"),
        ("bench serve http://127.0.0.1:1 --request-rate 0", "--request-rate: must be above 0"),
        ("bench serve http://127.0.0.1:1 --extra-body [1]", "--extra-body: must be a JSON object"),
        ("bench serve http://127.0.0.1:1 --metric-percentiles 50,101", "--metric-percentiles: each must be from 0"),
        ("bench serve http://127.0.0.1:1 --clients 3", "--clients: is for --search"),
        ("bench throughput tiny --values 1,2", "vary: needs --values, and these need --vary"),
        ("bench throughput tiny --num-prompts 0", "--num-prompts: must be at least 1"),
        ("bench throughput tiny --vary input_len --values abc", "values: input_len must be integers of at least 1"),
        ("bench shape qwen3-8b FILE", "FILE cannot be made: File exists"),
        ("bench report --fill /nowhere", "--fill takes a page that is there"),
        ("demo --max-num-seqs 0", "--max-num-seqs/--max-batch-size: must be at least 1"),
        ("debug diff tiny --tensor-parallel-size 2", "unknown argument '--tensor-parallel-size'"),
        ("simulate --rate 5 --concurrency 5", "--rate and --concurrency: "),
        ("simulate --rate inf", "--rate: must be at most 1000000000, got inf"),
        ("simulate --replicas 9999999999999", "--replicas: must be at most 1000000000000, got 9999999999999"),
        ("simulate --weight-bits 0", "--weight-bits: must be above 0"),
        ("doctor --kv-cache-memory inf", "--kv-cache-memory: expected a finite number, got 'inf'"),
        ("doctor --seed 4294967296", "--seed: must be at most 4294967295"),
    ],
)
def test_it_is_refused(command: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("block_size: 8\n")
    try:
        code = main([word.replace("FILE", str(file)) for word in command.split()])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    assert told.replace("FILE", str(file)) in capsys.readouterr().err.replace("\n", " ")


def test_a_variable_counts_as_given(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Octavo's server would inherit it, and vLLM's not."""
    monkeypatch.setenv("OCTAVO_QUANTIZATION", "int8")
    assert main(PEER.split()) == 2
    assert "OCTAVO_QUANTIZATION: with --engine vllm" in capsys.readouterr().err


def test_a_draft_head_is_trained_with_the_seed_that_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def generate(config: object, wanted: WantedTexts, seed: int) -> None:
        raise LookupError(wanted.answer_tokens, seed)

    monkeypatch.setattr("octavo_bench.drafts.train_draft.generate", generate)
    args = ["bench", "train-draft", str(tmp_path), "--folder", str(tmp_path), "--seed", "5", "--answer-tokens", "7"]
    with pytest.raises(LookupError, match=r"\(7, 5\)"):
        main(args)

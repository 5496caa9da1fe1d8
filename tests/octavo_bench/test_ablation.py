"""The table of optimisations, over a model of random weights."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.config import EngineConfig
from octavo_bench import ablation
from octavo_bench.ablation import AblationWork, stages
from tests.llm.tiny import write_checkpoint

SMALL = ("--num-prompts", "2", "--shared-len", "20", "--input-len", "6", "--output-len", "4", "--gap", "0.01")


def test_each_stage_changes_one_thing() -> None:
    rows, missing = stages(AblationWork(), "cpu", has_blocks=True)
    for before, after in itertools.pairwise(rows):
        changed = {name for name in after.settings if after.settings[name] != before.settings.get(name)}
        assert len(changed) == 1, after.name
    assert missing == {}
    assert [row.name for row in rows][-3:] == ["recorded steps", "prompt lookup", "quantised weights"]
    on_gpu, missing = stages(AblationWork(), "cuda", has_blocks=False)
    assert "CUDA graphs" in [row.name for row in on_gpu]
    assert list(missing) == ["quantised weights"]


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = (str(write_checkpoint(tmp_path / "model")), "--load-format", "dummy", "--device", "cpu")
    output = tmp_path / "ablation.json"
    assert main(["bench", "ablation", *model, *SMALL, "--rounds", "1", "--output", str(output)]) == 0
    printed = capsys.readouterr().out
    result = json.loads(output.read_text())["result"]
    assert printed.count("\n| ") == 1 + len(result["rows"])
    assert "Not there: quantised weights, for the checkpoint has no block weights." in printed
    for row in result["rows"]:
        assert row["same_tokens"], row["stage"]
        assert row["output_tok_s"]["median"] > 0 < row["ttft_ms"]["median"] <= row["ttft_max_ms"]["median"]
        assert row["settings"]["block_size"] in (32, None)
    by_name = {row["stage"]: row for row in result["rows"]}
    assert by_name["chunked prompts"]["prefix_hits"] == 0


@pytest.mark.parametrize(
    ("flag", "refusal"),
    [
        ("--num-prompts", "--num-prompts: must be at least 1"),
        ("--rounds", "--rounds: must be at least 1"),
        ("--deadline", "--deadline: must be above 0"),
    ],
)
def test_work_that_is_none_is_refused(flag: str, refusal: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["bench", "ablation", flag, "0"])
    assert refusal in capsys.readouterr().err


@pytest.mark.parametrize(("deadline", "num_rounds"), [(1, 1), (30, 1), (40, 2), (59, 2), (60, 3), (1000, 4)])
def test_only_whole_rounds_that_end_in_time(deadline: float, num_rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of two rows takes 10 seconds; the first round is always there."""
    now = [100.0]
    visits: list[str] = []

    class Rows:
        stages = ("first", "second")

        def __init__(self, *given: object) -> None: ...

        def visit(self, stage: str) -> None:
            now[0] += 10
            visits.append(stage)

        def result(self) -> dict[str, object]:
            return {"visits": len(visits)}

    monkeypatch.setattr(ablation, "Table", Rows)
    monkeypatch.setattr("octavo_bench.ablation.time.perf_counter", lambda: now[0])
    kept: list[dict[str, object]] = []
    result = ablation.measure(EngineConfig(), AblationWork(), 4, lambda line: None, deadline, kept.append)
    assert visits == ["first", "second"] * num_rounds
    assert kept == [{"visits": 2 * number} for number in range(1, num_rounds + 1)]
    assert result == kept[-1]

"""The breakages are about lines that are there, and their record about the code of which it speaks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import octavo
from tests.mutation.mutants import MUTANTS
from tests.mutation.run import keep

PACKAGE = Path(octavo.__file__).parent


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_each_breakage_has_its_line_once(file: str) -> None:
    source = (PACKAGE / file).read_text()
    for mutant in MUTANTS:
        if mutant.file == file:
            assert source.count(mutant.old) == 1, f"tests/mutation/mutants.py: {mutant.old!r} is gone, or there twice"


def test_runs_in_parts_make_one_record_of_the_same_code(tmp_path: Path) -> None:
    output = tmp_path / "record.json"

    def row(number: int, verdict: str) -> dict[str, Any]:
        return {"number": number, "verdict": verdict, "seconds": 1.0, **MUTANTS[number]._asdict()}

    def record(code: str, *rows: dict[str, Any]) -> dict[str, Any]:
        keep(list(rows), code, output, [])
        result: dict[str, Any] = json.loads(output.read_text())["result"]
        return {number["number"]: number["verdict"] for number in result["rows"]} | {"caught": result["caught"]}

    record("a", row(3, "caught"), row(1, "SURVIVES"), {**row(2, "caught"), "new": "gone from the list"})
    assert record("a", row(1, "caught"), row(0, "hangs")) == {0: "hangs", 1: "caught", 3: "caught", "caught": 3}
    assert record("a", {**row(4, "caught"), "number": 77}) == {
        0: "hangs",
        1: "caught",
        3: "caught",
        4: "caught",
        "caught": 4,
    }
    assert record("b", row(5, "SURVIVES")) == {5: "SURVIVES", "caught": 0}

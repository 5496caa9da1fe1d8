"""Apply each breakage to a copy of the package, and see whether the tests of the deciding half fail.

``python -m tests.mutation.run [NUMBER ...] [--output FILE]`` prints a line for each, with the processor time it took,
and the share that is caught. It takes seven minutes of processor time, and is not part of the test suite. Runs
of some of them may write to one file: it keeps what others found, as long as they broke the same code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo_bench.records.report import machine, portable_command
from tests.mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
TESTS = [
    *("tests/engine/test_waiting.py", "tests/engine/test_fault_isolation.py", "tests/engine/test_stopping.py"),
    *("tests/engine/test_step_model.py", "tests/engine/test_ngram.py", "tests/engine/test_step_budget.py"),
    "tests/engine/test_scheduler.py",
    *("tests/engine/test_policies.py", "tests/engine/test_max_itl.py", "tests/engine/test_engine.py"),
    *("tests/telemetry/test_explain.py", "tests/cache/test_kv_cache.py", "tests/cache/test_parts.py"),
    *("tests/cache", "tests/engine/test_offload.py", "tests/engine/test_workloads.py", "tests/engine/test_fairness.py"),
]
SURVIVES = "SURVIVES"
CPU_SECONDS = 180
"""Processor time of one, two to six times what the tests need; a breakage that makes them hang is noticed."""


def nearest_first(file: str) -> list[str]:
    """The tests, those of the broken file first, then those of its folder: most breakages are noticed at once."""
    path = Path(file)
    near = (f"/test_{path.stem}", f"/test_{path.parent.name}.py", f"tests/{path.parts[0]}")
    return sorted(TESTS, key=lambda test: next((i for i, part in enumerate(near) if part in test), len(near)))


def verdict(mutant: Mutant, folder: Path) -> str:
    """What the tests say to the breakage. Raises ``ValueError`` when there is no such line."""
    path = folder / "octavo" / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {mutant.old!r} {source.count(mutant.old)} times")
    path.write_text(source.replace(mutant.old, mutant.new))
    limited = ["bash", "-c", f'ulimit -t {CPU_SECONDS}; exec "$@"', "bash"]  # a clock would depend on other work
    pytest = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not timing", "-p", "no:cacheprovider"]
    command = [*limited, *pytest, *nearest_first(mutant.file)]
    environment = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
    try:
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    finally:
        path.write_text(source)
    return {0: SURVIVES, 1: "caught"}.get(ended.returncode, "hangs" if ended.returncode < 0 else "broken")


def processor_seconds() -> float:
    """What the ended child processes took so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def try_all(numbers: Sequence[int]) -> list[dict[str, Any]]:
    """Try the breakages of these numbers on a copy of the package; a row for each."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("octavo", "octavo_bench", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        for number in numbers:
            before = processor_seconds()
            mutant = MUTANTS[number]
            found = verdict(mutant, folder)
            seconds = round(processor_seconds() - before, 1)
            rows.append({"number": number, "verdict": found, "seconds": seconds, **mutant._asdict()})
            print(f"{found:8} {number:3} {seconds:5.0f} s  {mutant.file}: {' '.join(mutant.new.split())}", flush=True)
            if mutant.equal_because and found == SURVIVES:
                print(f"{'':19}as expected: {mutant.equal_because}", flush=True)
    return rows


def state_of(folder: Path) -> str:
    """A name for the code in which breakages are."""
    found = hashlib.sha256()
    for file in sorted({mutant.file for mutant in MUTANTS}):
        found.update((folder / "octavo" / file).read_bytes())
    return found.hexdigest()[:16]


def merged(rows: list[dict[str, Any]], output: Path, code: str) -> list[dict[str, Any]]:
    """``rows`` and what a file has of other breakages of the same code, by number."""
    number_of = {mutant: number for number, mutant in enumerate(MUTANTS)}
    by_number: dict[int, dict[str, Any]] = {}
    result = json.loads(output.read_text())["result"] if output.is_file() else {"code": code, "rows": []}
    for row in [*(result["rows"] if result["code"] == code else ()), *rows]:
        number = number_of.get(Mutant(**{name: row[name] for name in Mutant._fields}))
        if number is not None:
            by_number[number] = {**row, "number": number}
    return [by_number[number] for number in sorted(by_number)]


def keep(rows: list[dict[str, Any]], code: str, output: Path, arguments: Sequence[str]) -> None:
    """Write the record, with what the file already holds of the same code."""
    rows = merged(rows, output, code)
    caught = sum(map(is_caught, rows))
    record = {
        "benchmark": "mutations",
        "date": time.strftime("%Y-%m-%d"),
        "command": portable_command(["python", "-m", "tests.mutation.run", *arguments]),
        "machine": machine(),
        "result": {"breakages": len(MUTANTS), "tried": len(rows), "caught": caught, "code": code, "rows": rows},
    }
    output.write_text(json.dumps(record, indent=2) + "\n")


def is_caught(row: dict[str, Any]) -> bool:
    return row["verdict"] in ("caught", "hangs")


def main(arguments: Sequence[str]) -> int:
    """Try breakages; fails when fewer than nine of ten are caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.run")
    parser.add_argument("numbers", nargs="*", type=int, metavar="NUMBER", help="breakages to try; default: all")
    parser.add_argument("--output", type=Path, help="also write the record as JSON to this file")
    args = parser.parse_args(arguments)
    code = state_of(ROOT)
    rows = try_all(args.numbers or range(len(MUTANTS)))
    caught = sum(map(is_caught, rows))
    print(f"{caught} of {len(rows)} caught: {caught / len(rows):.0%}")
    if args.output is not None:
        keep(rows, code, args.output, arguments)
    return 0 if caught >= 0.9 * len(rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

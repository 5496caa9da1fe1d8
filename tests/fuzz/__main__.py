"""Fuzz every target, each in a process of its own, and print a table: ``make fuzz``.

    python -m tests.fuzz [TARGET ...] [--runs N] [--seconds S] [--minutes M] [--folder DIR] [--record FILE]

With ``--minutes`` all targets together take so long, however many inputs that are. Inputs that were found to reach new
branches stay in DIR for the next time. Exits with status 1 if there are findings.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from octavo_bench.records.report import machine, portable_command
from tests.fuzz import targets

SCHEMA = "http_schema"
EXAMPLES_PER_RUN = 0.01
"""Valid and invalid requests by schemathesis for each operation, and for each input of another target."""
EXAMPLES_PER_SECOND = 0.2
"""The same, for each second that another target has."""
UNLIMITED = 10**9
"""Runs, of which the time ends the target first."""
MAX_STARTS = 5
"""Of the process of a target, which ends at what no Python code can catch."""


@dataclass
class Result:
    """What came of a target."""

    target: str
    inputs: int = 0
    seconds: float = 0.0
    coverage: int = 0
    """Branches of ``octavo`` that were reached, as libFuzzer counts them; 0 without coverage guidance."""
    findings: list[dict[str, Any]] = field(default_factory=list)


def fuzz(target: str, folder: Path, runs: int, seconds: int) -> Result:
    """Let a target read ``runs`` inputs, or as many as ``seconds`` allow."""
    result, started = Result(target), time.monotonic()
    (folder / "findings.jsonl").unlink(missing_ok=True)
    for _ in range(MAX_STARTS):
        left = round(seconds - (time.monotonic() - started))
        if left < 1 or result.inputs >= runs:
            break
        command = [sys.executable, "-m", "tests.fuzz.worker", target, str(folder), str(left), str(runs - result.inputs)]
        ended = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
        numbers = re.findall(r"^#(\d+)\t", ended.stderr, re.MULTILINE)
        result.inputs += int(numbers[-1]) if numbers else 0
        result.coverage = max([result.coverage, *map(int, re.findall(r" cov: (\d+) ", ended.stderr))])
        if not ended.returncode:
            break
        input_file = re.findall(r"Test unit written to (\S+)", ended.stderr)
        place = f"the process ended with status {ended.returncode}"
        result.findings.append(
            {"target": target, "place": place, "input": "".join(input_file), "details": ended.stderr[-3000:]}
        )
    result.seconds = round(time.monotonic() - started, 1)
    result.findings += findings_in(folder)
    return result


def ask_by_schema(folder: Path, examples: int) -> Result:
    """Ask a server what schemathesis makes of its OpenAPI document."""
    result, started = Result(SCHEMA), time.monotonic()
    (folder / "findings.jsonl").unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.http_schema", str(folder), str(examples)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    result.inputs = int(ended.stdout or 0)
    result.seconds = round(time.monotonic() - started, 1)
    result.findings = findings_in(folder)
    if ended.returncode:
        place = f"the process ended with status {ended.returncode}"
        result.findings.append({"target": SCHEMA, "place": place, "input": "", "details": ""})
    return result


def findings_in(folder: Path) -> list[dict[str, Any]]:
    lines = folder / "findings.jsonl"
    return [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []


def keep(results: list[Result], path: Path) -> None:
    """Write the record, with the rows of other targets that the file holds."""
    earlier = json.loads(path.read_text())["result"]["targets"] if path.is_file() else []
    names = [result.target for result in results]
    rows = [row for row in earlier if row["target"] not in names] + [asdict(result) for result in results]
    record = {
        "benchmark": "fuzzing",
        "date": time.strftime("%Y-%m-%d"),
        "command": portable_command(["python", "-m", "tests.fuzz", *sys.argv[1:]]),
        "machine": machine(),
        "result": {
            "inputs": sum(row["inputs"] for row in rows),
            "findings": sum(len(row["findings"]) for row in rows),
            "targets": rows,
        },
    }
    path.write_text(json.dumps(record, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz what reads untrusted input.")
    parser.add_argument("targets", nargs="*", default=[*targets.NAMES, SCHEMA], help="by default, all")
    parser.add_argument("--runs", type=int, default=10_000, help="inputs of each target (%(default)s)")
    parser.add_argument("--seconds", type=int, default=120, help="time limit of each target (%(default)s)")
    parser.add_argument("--minutes", type=float, help="time of all targets together, in place of runs and seconds")
    folder = Path(tempfile.gettempdir()) / "octavo-fuzz"
    parser.add_argument("--folder", type=Path, default=folder, help="for inputs and findings (%(default)s)")
    parser.add_argument("--record", type=Path, help="file of JSON for the table; rows of other targets in it stay")
    arguments = parser.parse_args()
    runs, seconds = arguments.runs, arguments.seconds
    examples = max(1, round(runs * EXAMPLES_PER_RUN))
    started, results = time.monotonic(), list[Result]()
    row = "{:22}{:>10}{:>10}{:>10}{:>10}"
    print(row.format("target", "inputs", "seconds", "coverage", "findings"), flush=True)
    for index, name in enumerate(arguments.targets):
        if arguments.minutes is not None:  # what starts and ends of processes took is taken from the targets to come
            left = 60 * arguments.minutes - (time.monotonic() - started)
            runs, seconds = UNLIMITED, max(1, round(left / (len(arguments.targets) - index)))
            examples = max(1, round(seconds * EXAMPLES_PER_SECOND))
        folder = arguments.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        result = ask_by_schema(folder, examples) if name == SCHEMA else fuzz(name, folder, runs, seconds)
        results.append(result)
        print(row.format(name, result.inputs, result.seconds, result.coverage or "-", len(result.findings)), flush=True)
    print(row.format("all", *(round(sum(getattr(r, k) for r in results)) for k in ("inputs", "seconds")), "", ""))
    for result in results:
        for finding in result.findings:
            print(f"\n{finding['target']}: {finding['place']}\n{finding['input']}\n{finding['details']}")
    if arguments.record:
        keep(results, arguments.record)
    sys.exit(any(result.findings for result in results))


if __name__ == "__main__":
    main()

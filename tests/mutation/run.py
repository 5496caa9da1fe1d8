"""Apply each breakage to a copy of the package, and see whether the tests of the deciding half fail.

``python -m tests.mutation.run [NUMBER ...]`` prints a line for each, and the share that is caught. It takes some
minutes, and is not part of the test suite.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutation.mutants import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
TESTS = [
    *("tests/engine/test_waiting.py", "tests/engine/test_suspects.py", "tests/engine/test_stopping.py"),
    *("tests/engine/test_interval.py", "tests/engine/test_ngram.py", "tests/engine/test_scheduler.py"),
    *("tests/engine/test_policies.py", "tests/engine/test_pace.py", "tests/engine/test_engine.py"),
    *("tests/telemetry/test_explain.py", "tests/cache/test_kv_cache.py", "tests/cache/test_parts.py"),
    *("tests/cache", "tests/engine/test_workloads.py", "tests/engine/test_fairness.py"),
]
SURVIVES = "SURVIVES"
CPU_SECONDS = 90
"""Processor time of one, about three times what the tests need; a breakage that makes them hang is noticed."""


def nearest_first(file: str) -> list[str]:
    """The tests, those of the broken file first, then those of its folder: most breakages are noticed at once."""
    path = Path(file)
    near = (f"/test_{path.stem}.py", f"/test_{path.parent.name}.py", f"tests/{path.parts[0]}")
    return sorted(TESTS, key=lambda test: next((i for i, part in enumerate(near) if part in test), len(near)))


def verdict(mutant: Mutant, folder: Path) -> str:
    """What the tests say to the breakage. Raises ``ValueError`` when there is no such line."""
    path = folder / "octavo" / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {mutant.old!r} {source.count(mutant.old)} times")
    path.write_text(source.replace(mutant.old, mutant.new))
    limited = [
        "bash",
        "-c",
        f'ulimit -t {CPU_SECONDS}; exec "$@"',
        "bash",
    ]  # a clock would depend on the machine's load
    command = [
        *limited,
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *nearest_first(mutant.file),
    ]
    environment = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
    try:
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    finally:
        path.write_text(source)
    return {0: SURVIVES, 1: "caught"}.get(ended.returncode, "hangs" if ended.returncode < 0 else "broken")


def main(numbers: list[int]) -> int:
    """Try the breakages of these numbers, or all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in ("octavo", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        caught = 0
        for number in numbers:
            started = time.monotonic()
            mutant = MUTANTS[number]
            found = verdict(mutant, folder)
            caught += found in ("caught", "hangs")
            line = f"{mutant.file}: {' '.join(mutant.new.split())}"
            print(f"{found:8} {number:3} {time.monotonic() - started:5.0f} s  {line}", flush=True)
            if mutant.equal_because and found == SURVIVES:
                print(f"{'':19}as expected: {mutant.equal_because}", flush=True)
    print(f"{caught} of {len(numbers)} caught: {caught / len(numbers):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]] or list(range(len(MUTANTS)))))

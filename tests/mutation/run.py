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
    *("tests/cache", "tests/engine/test_waiting.py", "tests/engine/test_suspects.py", "tests/engine/test_stopping.py"),
    *("tests/engine/test_scheduler.py", "tests/engine/test_policies.py", "tests/engine/test_pace.py"),
    *("tests/telemetry/test_explain.py", "tests/engine/test_engine.py", "tests/engine/test_fairness.py"),
    "tests/engine/test_workloads.py",
]
LIMIT = 240
"""Seconds for one; a breakage that makes tests hang is caught."""


def is_caught(mutant: Mutant, folder: Path) -> bool:
    """Whether a test fails with the breakage. Raises ``ValueError`` when there is no such line."""
    path = folder / "octavo" / mutant.file
    source = path.read_text()
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {mutant.old!r} {source.count(mutant.old)} times")
    path.write_text(source.replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=60", *TESTS]
    environment = {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PATH": "/usr/bin:/bin"}
    try:
        ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=LIMIT, check=False)
        return ended.returncode == 1
    except subprocess.TimeoutExpired:
        return True
    finally:
        path.write_text(source)


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
            result = is_caught(MUTANTS[number], folder)
            caught += result
            mutant = MUTANTS[number]
            verdict = "caught  " if result else "SURVIVES"
            line = f"{mutant.file}: {' '.join(mutant.new.split())}"
            print(f"{verdict} {number:3} {time.monotonic() - started:5.0f} s  {line}", flush=True)
            if mutant.equal_because and not result:
                print(f"{'':19}as expected: {mutant.equal_because}", flush=True)
    print(f"{caught} of {len(numbers)} caught: {caught / len(numbers):.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]] or list(range(len(MUTANTS)))))

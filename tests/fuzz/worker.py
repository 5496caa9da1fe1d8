"""Fuzz one target with atheris, in a process of its own: ``python -m tests.fuzz.worker TARGET FOLDER SECONDS RUNS``.

libFuzzer keeps inputs that reach new branches of ``octavo`` and makes others from them, with the target's mutations.
The corpus and a reproducer of each finding are in FOLDER; findings are lines of JSON of ``findings.jsonl``. A finding
is an exception that ``read`` lets through, or more than its time; libFuzzer's own limits end the process: 1 GiB of
memory more than at the start, and half a minute.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import re
import sys
import time
import traceback
from pathlib import Path

import atheris

from tests.fuzz import targets
from tests.fuzz.mutate import MAX_BYTES

HANG_SECONDS = 30
MORE_MEGABYTES = 1024


class Watched:
    """A target that keeps what goes wrong, once for each place in the code."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._known: set[str] = set()
        self.target = targets.load(name)
        for index, seed in enumerate(self.target.seeds):
            (folder / "corpus" / f"seed{index}").write_bytes(seed)

    def read(self, data: bytes) -> None:
        # Once more if it was slow: the machine may have been busy.
        if (seconds := self._time(data)) > self.target.max_seconds:
            seconds = min(seconds, self._time(data))
        if seconds > self.target.max_seconds:
            self._add(data, "slow", f"{seconds:.1f} s")

    def _time(self, data: bytes) -> float:
        """Seconds that the target takes to read ``data``."""
        started = time.monotonic()
        try:
            self.target.read(data)
        except BaseException as error:  # a panic of a library in Rust is no Exception
            if isinstance(error, KeyboardInterrupt):
                raise
            frames = traceback.extract_tb(error.__traceback__)
            # Without numbers: the same fault often has others in its message.
            message = re.sub(r"\d+", "#", str(error))[-200:]
            place = f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno} {message}"
            self._add(data, place, "".join(traceback.format_exception(error)))
        return time.monotonic() - started

    def mutate(self, data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.2:
            return atheris.Mutate(data, max_size)
        return self.target.mutate(data, rng)[:max_size]

    def _add(self, data: bytes, place: str, details: str) -> None:
        if place in self._known:
            return
        self._known.add(place)
        file = self._folder / f"finding-{hashlib.sha256(data).hexdigest()[:16]}"
        file.write_bytes(data)
        record = {"target": self._name, "place": place, "input": str(file), "details": details}
        with (self._folder / "findings.jsonl").open("a") as lines:
            lines.write(json.dumps(record) + "\n")


def main() -> None:
    logging.disable(logging.WARNING)
    name, folder, seconds, runs = sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:5])
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    watched = Watched(name, folder)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    options = {
        "max_total_time": seconds,
        "runs": runs,
        "max_len": MAX_BYTES,
        "timeout": HANG_SECONDS,
        "rss_limit_mb": resident + MORE_MEGABYTES,
        "artifact_prefix": f"{folder}/finding-",
        "print_final_stats": 1,
    }
    flags = [f"-{option}={value}" for option, value in options.items()]
    atheris.Setup(["fuzz", *flags, str(folder / "corpus")], watched.read, custom_mutator=watched.mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    with atheris.instrument_imports(include=["octavo"]):  # to the end: many modules are imported when first used
        main()

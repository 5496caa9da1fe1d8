"""Octavo beside another engine: the same work in turns on one machine, compared as ratios."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.bench.offline import OfflineBench
from octavo.errors import ConfigError

SCRIPTS = {"llama.cpp": "run_llama_cpp.py"}


class PeerProcess:
    """The peer, loaded once in its own interpreter, asked for one run at a time."""

    def __init__(self, engine: str, python: Path, model: Path, threads: int) -> None:
        script = Path(__file__).parent / "peers" / SCRIPTS[engine]
        command = [str(python), str(script), str(model), str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.about: dict[str, Any] = self._read()

    def run(self, **work: int) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(work) + "\n")
        self.process.stdin.flush()
        answer: dict[str, float] = self._read()
        return answer

    def _read(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise ConfigError("the peer ended without an answer; run its script by hand to see why")
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=30)


def compare(
    ours: OfflineBench, peer: PeerProcess, sequences: Sequence[int], prompt: int, decode: int, rounds: int
) -> list[dict[str, Any]]:
    """One row for each number of sequences: medians of both engines and of the ratio pair by pair."""
    rows = []
    for count in sequences:
        work = {"sequences": count, "prompt": prompt, "decode": decode}
        pairs = [(ours.run(**work), peer.run(**work)) for _ in range(rounds)]
        row: dict[str, Any] = dict(work)
        for figure in ("prefill_tok_s", "decode_tok_s"):
            row[figure] = {
                "octavo": round(statistics.median(a[figure] for a, _ in pairs), 1),
                "peer": round(statistics.median(b[figure] for _, b in pairs), 1),
                "ratio": round(statistics.median(a[figure] / b[figure] for a, b in pairs), 2),
                "pairs": [[round(a[figure], 1), round(b[figure], 1)] for a, b in pairs],
            }
        rows.append(row)
    return rows

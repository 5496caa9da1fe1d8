"""Octavo beside llama.cpp, each in its own process: the same work in turns on one machine, compared as ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from octavo_bench.offline import OfflineBench
from octavo_bench.peer_process import PeerProcess


def compare(
    ours: OfflineBench, peer: PeerProcess, sequences: Sequence[int], prompt: int, decode: int, rounds: int
) -> list[dict[str, Any]]:
    """One row for each number of sequences: medians of both engines and of the ratio pair by pair."""
    rows = []
    for count in sequences:
        work = {"sequences": count, "prompt": prompt, "decode": decode}
        pairs = [(ours.run(**work), peer.run(work)) for _ in range(rounds)]
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

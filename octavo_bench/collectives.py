"""All-reduces between the GPUs of one host: Octavo's kernel beside NCCL's and torch's, and how fast the links are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from octavo.errors import ConfigError
from octavo.runtime.peer_memory import visible_gpus
from octavo.runtime.rank_memory import make_memory


def measure(rows: Sequence[int], widths: Sequence[int], seconds: float = 180.0) -> dict[str, Any]:
    """Times of rank 0, of ``rows`` by ``widths`` numbers, over all visible GPUs. Raises ``ConfigError``."""
    gpus = visible_gpus()
    if len(gpus) < 2:
        raise ConfigError(f"collectives: needs at least 2 GPUs; {len(gpus)} are visible")
    descriptor, work = make_memory(len(gpus)), json.dumps({"rows": list(rows), "widths": list(widths)})
    ranks = [_start(rank, gpus, descriptor, work) for rank in range(len(gpus))]
    os.close(descriptor)
    try:
        printed = [rank.communicate(timeout=seconds)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        raise ConfigError(f"collectives: the ranks did not end within {seconds:.0f} s") from None
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise ConfigError(f"collectives: the ranks ended with {[rank.returncode for rank in ranks]}")
    return {"ranks": len(gpus), **json.loads(printed[0].splitlines()[-1])}


def _start(rank: int, gpus: Sequence[str], descriptor: int, work: str) -> subprocess.Popen[str]:
    """A rank whose own GPU is the first that it sees."""
    command = [sys.executable, "-m", "octavo_bench.collective_rank", str(rank), str(len(gpus)), str(descriptor), work]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join([*gpus[rank:], *gpus[:rank]])}
    return subprocess.Popen(command, pass_fds=[descriptor], env=environment, stdout=subprocess.PIPE, text=True)

"""All-reduces between the GPUs of a host: Octavo's kernel compared with NCCL's and torch's, and the links' speed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo_kernels.cpu.rank_memory import make_memory


def measure(rows: Sequence[int], widths: Sequence[int], seconds: float = 180.0) -> dict[str, Any]:
    """Times of rank 0, of ``rows`` by ``widths`` numbers, over all visible GPUs. Raises ``ConfigError``."""
    size = torch.cuda.device_count()
    if size < 2:
        raise ConfigError(f"collectives: needs at least 2 GPUs; {size} visible")
    descriptor, work = make_memory(size), json.dumps({"rows": list(rows), "widths": list(widths)})
    ranks = [_start(rank, size, descriptor, work) for rank in range(size)]
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
    return {"ranks": size, **json.loads(printed[0].splitlines()[-1])}


def _start(rank: int, size: int, descriptor: int, work: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "octavo_bench.collective_rank", str(rank), str(size), str(descriptor), work]
    return subprocess.Popen(command, pass_fds=[descriptor], stdout=subprocess.PIPE, text=True)

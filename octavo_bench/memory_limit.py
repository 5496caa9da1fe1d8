"""The limit of memory, found by trying: each try is a process of its own, which may fail in any way."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

from octavo.errors import ConfigError

PARTS = 32
"""The limit is found to this part of the longest context."""
TRY_SECONDS = 600
BLOCK_SIZE = 16
DECODE = 4


def memory_limit(
    model: Sequence[str], gib: float | None, longest: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """The longest context, up to ``longest`` tokens, of one sequence that is served, and all tries.

    ``model``: flags that name the model. A try may have ``gib`` GiB of data in host memory; ``None``: all there is.
    Raises ``ConfigError`` if the shortest does not fit.
    """
    tries: list[dict[str, Any]] = []

    def is_served(parts: int) -> bool:
        length = longest * parts // PARTS
        reason = _try_length(model, gib, length)
        tries.append({"context": length, "reason": reason})
        report(f"{length} tokens: {reason or 'served'}")
        return not reason

    least, most = (PARTS, PARTS) if is_served(PARTS) else (0, PARTS)
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (middle, most) if is_served(middle) else (least, middle)
    if least == 0:
        raise ConfigError(f"limit: {longest // PARTS} tokens do not fit: {tries[-1]['reason']}")
    return {"longest_context": longest * least // PARTS, "tries": tries}


def _try_length(model: Sequence[str], gib: float | None, length: int) -> str:
    """Why a sequence of this length was not served; "" if it was."""

    def restrict() -> None:
        if gib is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (int(gib * 2**30),) * 2)

    work = {"sequences": 1, "prompt": length - 2 * DECODE - 4, "decode": DECODE, "rounds": 1}
    sizes = {"max-model-len": length, "num-kv-blocks": -(-length // BLOCK_SIZE), "block-size": BLOCK_SIZE}
    flags = [text for name, value in {**work, **sizes}.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "octavo", "bench", "offline", *model, *flags]
    try:
        ended = subprocess.run(
            command, preexec_fn=restrict, capture_output=True, text=True, timeout=TRY_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no result after {TRY_SECONDS} s"
    if ended.returncode == 0:
        return ""
    return (ended.stderr.strip().splitlines() or [f"it ended with {ended.returncode}"])[-1][:200]

"""Counting what a call does, to compare costs without a clock."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import octavo

PACKAGE = f"{Path(octavo.__file__).parent}/"


def count_lines(call: Callable[[], object]) -> int:
    """How many lines of the ``octavo`` package run during ``call``; comprehensions count each round."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count

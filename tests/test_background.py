"""Threads next to the steps, when the interpreter ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDING = """
import time
from octavo.background import Pool, start_thread, stop_if_ending

def give():
    with Pool(1) as pool:
        for future in [pool.submit(time.sleep, 0.1) for _ in range(600)]:
            future.result()

def loop():
    while True:
        stop_if_ending()
        time.sleep(0.01)

thread = start_thread("work", {work})
time.sleep(0.3)
assert thread.is_alive()
"""


@pytest.mark.parametrize("work", ["give", "loop"])
def test_the_interpreter_ends_at_once_and_in_order(work: str) -> None:
    """It would wait a minute for all that the pool was given, and 30 seconds for a thread that does not end."""
    script = ENDING.replace("{work}", work)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")

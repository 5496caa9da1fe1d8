"""Threads next to the steps, when the interpreter ends."""

from __future__ import annotations

import subprocess
import sys

import pytest

ENDING = """
import time
from octavo.system.background_threads import BackgroundPool, start_thread, stop_if_ending

def give():
    with BackgroundPool(1) as pool:
        for future in [pool.submit(time.sleep, 0.1) for _ in range(600)]:
            future.result()

def loop():
    while True:
        stop_if_ending()
        time.sleep(0.01)

def wait_for_a_sleeper():
    from types import SimpleNamespace
    from octavo.engine.runner.step_runner import StepRunner
    send = lambda message: SimpleNamespace(wait=lambda: None)
    runner = StepRunner(SimpleNamespace(send=send, runs_ahead=False), None)
    runner.sleep()
    runner.send(None)

thread = start_thread("work", {work})
time.sleep({pause})
assert thread.is_alive()
"""


@pytest.mark.parametrize("work", ["give", "loop", "wait_for_a_sleeper"])
def test_the_interpreter_ends_at_once_and_in_order(work: str) -> None:
    """It would wait a minute for all that the pool was given, and 30 seconds for a thread that does not end."""
    pause = 3.0 if work == "wait_for_a_sleeper" else 0.3  # which imports more
    script = ENDING.replace("{work}", work).replace("{pause}", str(pause))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stderr) == (0, "")

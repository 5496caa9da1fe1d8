"""What Triton does once before it compiles anything, done while a start has other things to do."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from pathlib import Path

NVIDIA_DRIVER = Path("/dev/nvidiactl")


@functools.cache
def preparation() -> threading.Thread:
    """A thread that brings Triton to where it can compile; it starts with the first call. Wait for it before compiling.

    Triton names what it compiles by a digest of all its own files, half a gigabyte, and takes it when that is first
    asked for; whoever asks meanwhile takes another one.
    """

    def prepare() -> None:
        with contextlib.suppress(ImportError, AttributeError):  # there is no promise that it is called so
            importlib.import_module("triton.runtime.cache").triton_key()

    thread = threading.Thread(target=prepare, name="prepare compiler", daemon=True)
    thread.start()
    return thread


def prepare_where_there_may_be_a_gpu(device: str) -> None:
    """Begin with it before torch is imported, which takes seconds and could say for sure; ``device`` is the setting."""
    if device != "cpu" and NVIDIA_DRIVER.exists():
        preparation()

"""Triton's one-time preparation for compiling, run in a thread during startup."""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from pathlib import Path

NVIDIA_DRIVER = Path("/dev/nvidiactl")


@functools.cache
def preparation() -> threading.Thread:
    """The thread that prepares Triton; the first call starts it. Join it before compiling.

    The keys of Triton's compile cache contain a digest of its own files, half a gigabyte, computed on first use. A
    second caller during that time would compute it again.
    """

    def prepare() -> None:
        with contextlib.suppress(ImportError, AttributeError):  # a private name, which may change
            importlib.import_module("triton.runtime.cache").triton_key()

    thread = threading.Thread(target=prepare, name="prepare compiler", daemon=True)
    thread.start()
    return thread


def prepare_if_there_may_be_a_gpu(device: str) -> None:
    """Start the preparation if there is an NVIDIA driver and the setting ``device`` allows a GPU.

    Called before torch, which could tell for certain, is imported: that takes seconds.
    """
    if device != "cpu" and NVIDIA_DRIVER.exists():
        preparation()

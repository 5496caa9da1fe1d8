"""Threads that work next to the steps, compiling kernels and capturing graphs, and end before the interpreter does.

An interpreter that ends stops daemon threads wherever they are. In C++, as in a compiler, that aborts the process. And
it waits for all that a ``ThreadPoolExecutor`` was ever given, which may be a minute of compiling.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakSet

MOST_SECONDS = 30.0
"""To wait for a thread at the end: longer than a kernel is compiled, or a graph captured."""

_threads: WeakSet[threading.Thread] = WeakSet()
_ending = threading.Event()


def start_thread(name: str, work: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a thread whose work calls ``stop_if_ending`` now and then, or waits for a ``BackgroundPool``."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    _threads.add(thread)
    thread.start()
    return thread


def stop_if_ending() -> None:
    """End this thread by raising ``SystemExit``, which no thread reports, if the interpreter is about to end."""
    if _ending.is_set():
        raise SystemExit


class BackgroundPool(ThreadPoolExecutor):
    """When the interpreter ends, its threads finish what they are at, and begin nothing more."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        stop_if_ending()
        return super().submit(_unless_ending, work, *args, **kwargs)


def _unless_ending(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    stop_if_ending()
    return work(*args, **kwargs)


def _end() -> None:
    _ending.set()
    for thread in list(_threads):
        thread.join(MOST_SECONDS)


# Private, but it is what the standard library's executors wait with; the last to register is called first.
getattr(threading, "_register_atexit", atexit.register)(_end)

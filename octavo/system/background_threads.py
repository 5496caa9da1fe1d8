"""Threads that work next to the steps, compiling kernels and capturing graphs, and end before what they work for does:
an engine that is closed, or the interpreter.

An interpreter that ends stops daemon threads wherever they are. In C++, as in a compiler, that aborts the process. And
it waits for all that a ``ThreadPoolExecutor`` was ever given, which may be a minute of compiling.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any
from weakref import WeakSet

MOST_SECONDS = 30.0
"""To wait for a thread at the end: longer than a kernel is compiled, or a graph captured."""


class ThreadGroup:
    """Threads that work for one owner, and those that they start; those of a part of its work end before others."""

    def __init__(self, whole: ThreadGroup | None = None) -> None:
        """``whole`` is the group of all the work, if this one is for a part of it."""
        self._whole = whole
        self._ending = threading.Event()
        self._threads: WeakSet[threading.Thread] = WeakSet()
        self._lock = threading.Lock()
        _groups.add(self)

    @property
    def is_ending(self) -> bool:
        """Whether ``stop`` was called, here or of the whole."""
        return self._ending.is_set() or (self._whole is not None and self._whole.is_ending)

    def start(self, name: str, work: Callable[..., None], *args: Any) -> threading.Thread:
        """Start a thread whose work calls ``stop_if_ending`` now and then, or waits for a ``BackgroundPool``."""
        thread = threading.Thread(target=self._work, args=(work, *args), name=name, daemon=True)
        with self._lock:
            thread.start()
            self._add(thread)
        return thread

    def _add(self, thread: threading.Thread) -> None:
        self._threads.add(thread)
        if self._whole is not None:
            with self._whole._lock:
                self._whole._add(thread)

    def run(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do ``work`` in this thread, as one of the group."""
        with self.starting():
            stop_if_ending()
            return work(*args, **kwargs)

    def _work(self, work: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(SystemExit):  # of ``stop_if_ending``
            self.run(work, *args)

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """In this block the group is ``current_group``."""
        before = _current.set(self)
        try:
            yield
        finally:
            _current.reset(before)

    def stop(self) -> None:
        """Have the threads end soon, and those that are started later at once."""
        self._ending.set()

    def end(self) -> None:
        """Have the threads end, and wait until they have; one that is in the middle of a kernel or a graph ends it."""
        self.stop()
        with self._lock:
            others = {*self._threads} - {threading.current_thread()}
        for thread in others:
            thread.join(MOST_SECONDS)


_groups: WeakSet[ThreadGroup] = WeakSet()
_of_process = ThreadGroup()
_current: ContextVar[ThreadGroup] = ContextVar("group", default=_of_process)

start_thread = _of_process.start
"""Start a thread that ends with the interpreter, whatever has started it."""


def current_group() -> ThreadGroup:
    """That for which this thread works."""
    return _current.get()


def stop_if_ending() -> None:
    """End this thread by raising ``SystemExit``, silently, if what it works for is about to end."""
    if _of_process.is_ending or _current.get().is_ending:
        raise SystemExit


class BackgroundPool(ThreadPoolExecutor):
    """When what the giver of work belongs to ends, its threads finish what they are at, and begin nothing more."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        stop_if_ending()
        return super().submit(current_group().run, work, *args, **kwargs)


def _end() -> None:
    groups = list(_groups)
    for group in groups:
        group.stop()
    for group in groups:
        group.end()


# Private, but it is what the standard library's executors wait with; the last to register is called first.
getattr(threading, "_register_atexit", atexit.register)(_end)

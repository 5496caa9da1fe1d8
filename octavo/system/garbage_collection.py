"""Control of Python's cyclic garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

YOUNG_OBJECTS = 10_000
"""New objects after which ``collect_seldom`` has garbage searched."""


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Disable the collector within a block; restore its previous state afterwards."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """For the imports of a process of ours: hardly anything that they make is garbage, so it is never searched.

    Importing torch takes a quarter less, and each later collection of everything a tenth of a second less.
    """
    with without_collections():
        yield
        gc.freeze()


@contextlib.contextmanager
def collecting_seldom() -> Iterator[None]:
    """``collect_seldom`` within a block."""
    before = gc.get_threshold()
    collect_seldom()
    try:
        yield
    finally:
        gc.set_threshold(*before)


def leave_out_what_exists() -> None:
    """Collect once, then exclude all existing objects from later collections: they live as long as the process."""
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """Search for garbage after more new objects than Python's 700.

    A step of hundreds of streams makes thousands that soon end by themselves. Searched that often, those that are
    alive for a moment count as old, and everything is searched again and again, for 60 ms in which no stream moves.
    """
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])

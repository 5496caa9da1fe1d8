"""Work that Python's collector of cyclic garbage would disturb."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """A block in which nothing is collected; afterwards it is as it was before."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def leave_out_what_exists() -> None:
    """Collections need not look again at what there is: it lives as long as the process."""
    gc.collect()
    gc.freeze()

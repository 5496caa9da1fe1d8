"""transformers, with a GGUF file, read and named once."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import gguf


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """What transformers loads meanwhile opens a file once, not for each part of it, and makes a table of names once.

    It would make the table of an architecture anew for each tensor. The two take most of the time, and give the same.
    """
    with contextlib.ExitStack() as patches:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patches.enter_context(mock.patch.object(gguf, name, functools.cache(getattr(gguf, name))))
        yield

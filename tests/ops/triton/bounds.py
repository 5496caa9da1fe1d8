"""Interpreted kernels that read or write beside the tensors of their launch are found out.

On a GPU such a read mostly finds other memory, whose contents a mask then drops, and ends the process where it finds
none: results do not show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch import Tensor
from triton.runtime import interpreter


def watch_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where an access that is not masked is in no storage of the launch's tensors."""
    bounds: list[npt.NDArray[np.int64]] = []
    launch, builder = interpreter.GridExecutor.__call__, interpreter.InterpreterBuilder

    def launched(self: Any, *args: Any, **kwargs: Any) -> Any:
        storages = [tensor.untyped_storage() for tensor in _tensors((args, tuple(kwargs.values())))]
        ranges = sorted({(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages if each.nbytes()})
        bounds[:] = np.array(ranges, np.int64).reshape(-1, 2).T
        return launch(self, *args, **kwargs)

    def check(pointers: Any, mask: Any) -> None:
        is_used = np.broadcast_to(mask.data.astype(bool), pointers.data.shape)
        at, size = pointers.data[is_used].astype(np.int64), max(8, pointers.get_element_ty().primitive_bitwidth) // 8
        found = np.searchsorted(bounds[0], at, side="right") - 1
        is_beside = (found < 0) | (at + size > bounds[1][found])
        assert not is_beside.any(), f"{is_beside.sum()} of {len(at)} addresses are beside all tensors"

    def checked(name: str, place: int) -> None:
        access = getattr(builder, name)

        def accessed(self: Any, *args: Any, **kwargs: Any) -> Any:
            check(args[place], args[place + 1] if name == "create_masked_load" else args[place + 2])
            return access(self, *args, **kwargs)

        monkeypatch.setattr(builder, name, accessed)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launched)
    for name, place in (("create_masked_load", 0), ("create_masked_store", 0), ("create_atomic_rmw", 1)):
        checked(name, place)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those of arguments, of tuples of them and of descriptors."""
    if isinstance(value, tuple):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value := getattr(value, "base", value), Tensor):
        yield value

"""Kernels for the CPU, compiled by numba; importing this package registers them with their ops.

Every kernel is batch-invariant: its result for a row is bitwise a function of that row alone (and, in attention, of
its sequence's cache), independent of the other rows, of how a prompt was chunked, and of the number of threads. Sums
therefore have one fixed order, and no fast-math flag is ever set.
"""

import importlib
import importlib.util
from typing import Any

from octavo import ops
from octavo.ops.dispatch import Op

_HERE = [name for name in ops.__all__ if importlib.util.find_spec(f"{__name__}.{name}") is not None]
"""The ops that have a kernel in this folder."""


def _decline_all(reason: str) -> None:
    for name in _HERE:
        op: Op[..., Any] = getattr(ops, name)
        op.kernel(device="cpu", name="numba", preference=10, supports=lambda dtype: reason)(op.reference)


try:
    importlib.import_module("numba")
except ImportError as error:  # not installed, or not built for this Python or numpy
    _decline_all(f"numba cannot be imported: {error}")
else:
    for _name in _HERE:
        importlib.import_module(f"{__name__}.{_name}")

"""Kernels for CUDA devices, compiled by Triton; importing this package registers them with their ops."""

import importlib
import importlib.util
from typing import Any

from octavo import ops
from octavo.ops.dispatch import Op


def _decline_all(reason: str) -> None:
    for name in ops.__all__:
        op = getattr(ops, name)
        if isinstance(op, Op):
            _decline(op, reason)


def _decline(op: Op[..., Any], reason: str) -> None:
    op.kernel(device="cuda", name="triton", preference=10, supports=lambda dtype: reason)(op.reference)


try:
    importlib.import_module("triton")
except ImportError as error:  # torch brings it on Linux only
    _decline_all(f"triton cannot be imported: {error}")
else:
    for _name in ops.__all__:
        if importlib.util.find_spec(f"{__name__}.{_name}") is not None:
            importlib.import_module(f"{__name__}.{_name}")

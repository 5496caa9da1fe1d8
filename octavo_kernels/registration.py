"""Which ops have a kernel in a folder, by the names of its files, and kernels that all decline."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import Any

from octavo import ops
from octavo.ops.dispatch import Op


def ops_of(package: str) -> list[str]:
    """The ops with a file of their name in a package."""
    return [name for name in ops.__all__ if importlib.util.find_spec(f"{package}.{name}") is not None]


def decline_all(names: Iterable[str], device: str, kernel: str, reason: str) -> None:
    """Register kernels that say why they cannot run."""
    for name in names:
        op: Op[..., Any] = getattr(ops, name)
        op.kernel(device=device, name=kernel, preference=10, supports=lambda dtype: reason)(op.reference)

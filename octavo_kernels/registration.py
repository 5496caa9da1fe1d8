"""The import of all kernels of a package, and kernels that all decline."""

from __future__ import annotations

import importlib
import pkgutil

from octavo.ops.dispatch import OPS


def import_all(package: str) -> None:
    """Import every module of a package, with those in its folders: their kernels register themselves."""
    path = importlib.import_module(package).__path__
    for module in pkgutil.walk_packages(path, f"{package}."):
        importlib.import_module(module.name)


def decline_all(device: str, kernel: str, reason: str) -> None:
    """For every op, register a kernel that says why it cannot run."""
    for op in OPS.by_name.values():
        op.kernel(device=device, name=kernel, preference=10, supports=lambda dtype: reason)(op.reference)

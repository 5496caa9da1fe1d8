"""A device for the choice of kernels, where there is no GPU."""

from __future__ import annotations

import pytest

from octavo_kernels.hopper import pipelined_configs, streamed_configs
from octavo_kernels.triton.grouped import grouped_configs

SHARED_BYTES = 227 * 1024
MULTIPROCESSORS = 132


def as_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every device were an H100 on which kernels in Gluon run."""
    for module in (streamed_configs, pipelined_configs):
        monkeypatch.setattr(module, "has_gluon", lambda device: True)
    for module in (streamed_configs, pipelined_configs, grouped_configs):
        monkeypatch.setattr(module, "shared_bytes", lambda device: SHARED_BYTES)
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: MULTIPROCESSORS)

"""What tests of Triton kernels share; see ``tests/triton_interpreter.py``."""

from __future__ import annotations

import pytest

from tests.triton_interpreter import DEVICE, HAS_TRITON

if not HAS_TRITON:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    if not HAS_TRITON:
        return "triton: not installed, its kernels are not tested"
    return f"triton kernels: {'compiled' if DEVICE == 'cuda' else 'interpreted'}"


@pytest.fixture
def device() -> str:
    """Where the kernels under test take their tensors from."""
    return DEVICE

"""No kernel reads or writes beside the tensors of its launch, whatever a mask does with what it reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from octavo.ops import dispatch
from octavo_kernels.registration import import_all
from tests.ops.triton.bounds import watch_bounds
from tests.ops.triton.kernel_runs import calls
from tests.triton_interpreter import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="for interpreted kernels; GPUs have compute-sanitizer")


@triton.jit
def _shift_kernel(ptr: tl.tensor, by: tl.constexpr) -> None:
    at = ptr + tl.arange(0, 4)
    tl.store(at, tl.load(at + by))


def test_an_access_beside_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    watch_bounds(monkeypatch)
    _shift_kernel[(1,)](torch.zeros(4), 0)
    for by in (-1, 1):
        with pytest.raises(Exception, match="1 of 4 addresses are beside all tensors"):
            _shift_kernel[(1,)](torch.zeros(4), by)


@pytest.mark.nightly
def test_all_kernels_stay_within_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    import_all("octavo_kernels.triton")
    for op in dispatch.OPS.by_name.values():
        monkeypatch.setattr(op, "kernels", [replace(kernel, device="cpu") for kernel in op.kernels])
    watch_bounds(monkeypatch)
    with dispatch.only("triton"):
        for name, call in calls(torch.device("cpu")):
            try:
                call()
            except Exception as error:
                raise AssertionError(name) from error

"""The exchange of ranks with GPUs, in Triton's interpreter: each rank is a forked process over shared memory."""

from __future__ import annotations

import mmap
import os
import random
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch

from octavo.ops.triton.collective import PeerCollective, buffer_bytes
from tests.triton_interpreter import DEVICE

SLOT_BYTES = 4096

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu runs the kernel itself")


def together(size: int, work: Callable[[PeerCollective], None]) -> None:
    """Run ``work`` on each rank, in a process of its own; memory mapped before has the same address in all."""
    maps = [mmap.mmap(-1, buffer_bytes(size, SLOT_BYTES)) for _ in range(size)]
    addresses = torch.tensor([np.frombuffer(memory, np.uint8).ctypes.data for memory in maps])
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                work(PeerCollective(addresses, rank, SLOT_BYTES))
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_and_gathered_tensors_are_those_of_all_ranks(size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    parts, residual = torch.randn(size, 11, 120).to(dtype), torch.randn(11, 120).to(dtype)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    expected = (total + residual.float()).to(dtype)

    def work(collective: PeerCollective) -> None:
        delays = random.Random(collective.rank)
        for number in range(2):
            own = parts[collective.rank].clone()
            if number % 2:
                assert torch.equal(collective.all_gather(own), parts)
            else:
                assert torch.equal(collective.all_reduce(own.clone()), total.to(dtype))
                assert torch.equal(collective.all_reduce(own, residual.clone()), expected)
            time.sleep(delays.random() * 0.01)

    together(size, work)

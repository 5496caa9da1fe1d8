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


def together(size: int, work: Callable[[PeerCollective], None], small_bytes: int) -> None:
    """Run ``work`` on each rank, in a process of its own; memory mapped before has the same address in all."""
    maps = [mmap.mmap(-1, buffer_bytes(size, SLOT_BYTES)) for _ in range(size)]
    addresses = torch.tensor([np.frombuffer(memory, np.uint8).ctypes.data for memory in maps])
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                collective = PeerCollective(addresses, rank, SLOT_BYTES)
                collective.small_bytes = small_bytes
                work(collective)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * size


@pytest.mark.parametrize(
    ("size", "dtype", "small_bytes"),
    [
        (2, torch.bfloat16, SLOT_BYTES),
        (2, torch.bfloat16, 1000),  # the end of a message is small
        (2, torch.bfloat16, 0),
        (2, torch.float16, SLOT_BYTES),
        (3, torch.float32, 1000),
    ],
)
def test_sums_and_gathered_tensors_are_those_of_all_ranks(size: int, dtype: torch.dtype, small_bytes: int) -> None:
    torch.manual_seed(1)
    parts, residual = torch.randn(size, 11, 120).to(dtype), torch.randn(11, 120).to(dtype)
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    expected = (total + residual.float()).to(dtype)

    def work(collective: PeerCollective) -> None:
        delays = random.Random(collective.rank)
        for number in range(3):
            own = parts[collective.rank].clone()
            if number % 2:
                assert torch.equal(collective.all_gather(own), parts)
            else:
                assert torch.equal(collective.all_reduce(own.clone()), total.to(dtype))
                assert torch.equal(collective.all_reduce(own, residual.clone()), expected)
            time.sleep(delays.random() * 0.01)

    together(size, work, small_bytes)


def test_an_odd_number_of_16_bits_is_summed() -> None:
    parts = torch.arange(6).view(2, 1, 3).half()
    together(2, lambda collective: check_sum(collective, parts), SLOT_BYTES)


def check_sum(collective: PeerCollective, parts: torch.Tensor) -> None:
    assert torch.equal(collective.all_reduce(parts[collective.rank].clone()), parts.sum(0))

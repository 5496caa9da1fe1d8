"""The exchange of ranks with GPUs, in Triton's interpreter: each rank is a forked process over shared memory."""

from __future__ import annotations

import mmap
import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo_kernels.triton.collective import PeerCollective, buffer_bytes
from tests.ops.triton.test_compiles import run_alone
from tests.tiers import nightly_after
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
    nightly_after(
        3,
        [
            (2, torch.bfloat16, 1000),  # the end of a message is small
            (2, torch.bfloat16, 0),
            (3, torch.float32, 1000),
            (2, torch.bfloat16, SLOT_BYTES),
            (2, torch.float16, SLOT_BYTES),
        ],
    ),
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


@pytest.mark.parametrize("small_bytes", [SLOT_BYTES, 0])
def test_bytes_and_long_integers_are_gathered(small_bytes: int) -> None:
    """Among them rows of experts that move."""
    parts = torch.arange(-3, 3).view(2, 3) << 40

    def work(collective: PeerCollective) -> None:
        own = parts[collective.rank].clone()
        assert torch.equal(collective.all_gather(own), parts)
        rows = own.view(torch.uint8).view(3, 8)
        places = torch.arange(3) + 3 * (1 - collective.rank)
        assert torch.equal(collective.all_to_all(rows, places, 6).view(torch.int64)[:, 0], parts[1 - collective.rank])

    together(2, work, small_bytes)


def check_sum(collective: PeerCollective, parts: torch.Tensor) -> None:
    assert torch.equal(collective.all_reduce(parts[collective.rank].clone()), parts.sum(0))


@pytest.mark.parametrize(("size", "num_parts", "width"), [(2, 2, 120), (2, 2, 33), (4, 2, 7), (3, 3, 121)])
@pytest.mark.parametrize("small_bytes", [SLOT_BYTES, 0])
def test_neighbours_exchange_what_each_has_for_the_others(
    size: int, num_parts: int, width: int, small_bytes: int
) -> None:
    """Also parts that are not a multiple of what a thread moves, and longer than a slot."""
    torch.manual_seed(size)
    sent = torch.randn(size, 11, num_parts, width)

    def work(collective: PeerCollective) -> None:
        first, place = collective.rank // num_parts * num_parts, collective.rank % num_parts
        for _ in range(3):
            found = collective.exchange(sent[collective.rank])
            assert torch.equal(found, sent[first : first + num_parts, :, place])
            assert torch.equal(collective.all_gather(sent[collective.rank, :1]), sent[:, :1])

    together(size, work, small_bytes)


COUNTING = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from octavo_kernels.triton import collective

KINDS = {"x": "*bf16", "residual": "*bf16", "out": "*bf16", "addresses": "*i64", "launches": "*i32"}
KINDS |= {"count": "i32", "x_stride": "i32", "stride": "i32"}
SIZES = {"RANK": 0, "SIZE": 2, "PARTS": 1, "GATHERS": False, "LONGEST_WAIT": 9, "PDL": True, "PROGRAMS": 128}
SIZES |= {"BLOCK": 512, "SLOT": 1 << 16, "PAIRS_AT": 1024, "DATA_AT": 1024}
for kernel in (collective._small_exchange_kernel, collective._large_exchange_kernel):
    constants = {name: SIZES[name] for name in kernel.arg_names if name in SIZES}
    source = ASTSource(kernel, {**KINDS, **dict.fromkeys(constants, "constexpr")}, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    print("KERNEL", compiled.asm["ptx"])
"""


def test_every_warp_reads_the_number_of_the_launch_before_it_is_counted_on(tmp_path: Path) -> None:
    """A warp that came late would read the next number, and wait for words that never come."""
    kernels = run_alone(COUNTING, tmp_path).split("KERNEL")[1:]
    assert len(kernels) == 2
    for ptx in kernels:
        counting = re.search(r"ld\.global.*?st\.global", ptx, re.DOTALL)
        assert counting is not None
        assert "bar.sync" in counting.group()

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

from octavo_kernels.triton import collective as module
from octavo_kernels.triton.collective import PeerCollective, buffer_bytes
from tests.ops.triton.test_compiles import run_alone
from tests.tiers import nightly_after
from tests.triton_interpreter import DEVICE

SLOT_BYTES = 4096

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="tests/gpu runs the kernel itself")


def together(
    size: int, work: Callable[[PeerCollective], None], small_bytes: int | None = None, one_shot_bytes: int | None = None
) -> None:
    """Run ``work`` on each rank, in a process of its own; memory mapped before has the same address in all.

    With few programs, whose blocks are short, so that each moves several of a message.
    """
    maps = [mmap.mmap(-1, buffer_bytes(size, SLOT_BYTES)) for _ in range(size)]
    addresses = torch.tensor([np.frombuffer(memory, np.uint8).ctypes.data for memory in maps])
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                module.PROGRAMS, module.LARGE_BLOCK = 3, 128
                collective = PeerCollective(addresses, rank, SLOT_BYTES)
                if small_bytes is not None:
                    collective.small_bytes = small_bytes
                if one_shot_bytes is not None:
                    collective.one_shot_bytes = one_shot_bytes
                work(collective)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * size


@pytest.mark.parametrize(
    ("size", "dtype", "small_bytes", "one_shot_bytes"),
    nightly_after(
        4,
        [
            (2, torch.bfloat16, 1000, None),  # the end of a message is small
            (2, torch.bfloat16, 0, None),
            (3, torch.float32, 500, 0),
            (4, torch.bfloat16, 0, None),  # pieces of two slots
            (2, torch.bfloat16, 0, 0),
            (8, torch.bfloat16, 300, 0),
            (3, torch.float32, 1000, None),
            (4, torch.float16, 0, 2000),
            (8, torch.float32, 0, None),
            (2, torch.bfloat16, SLOT_BYTES, None),
            (2, torch.float16, SLOT_BYTES, None),
        ],
    ),
)
def test_sums_and_gathered_tensors_are_those_of_all_ranks(
    size: int, dtype: torch.dtype, small_bytes: int, one_shot_bytes: int | None
) -> None:
    """To the bit, whichever way they take."""
    torch.manual_seed(1)
    parts, residual = torch.randn(size, 13, 123).to(dtype), torch.randn(13, 123).to(dtype)
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
                rows = slice(0, 13 - 4 * number)  # shorter messages follow longer ones
                assert torch.equal(collective.all_reduce(own[rows].clone()), total.to(dtype)[rows])
                assert torch.equal(collective.all_reduce(own, residual.clone()), expected)
            time.sleep(delays.random() * 0.01)

    together(size, work, small_bytes, one_shot_bytes)


@pytest.mark.parametrize("num_words", [1, 20])
def test_ranks_without_a_part_of_the_sum(num_words: int) -> None:
    """A message of fewer units than ranks, and one whose parts are of different lengths."""
    parts = torch.arange(5 * num_words).view(5, num_words).float()
    together(5, lambda collective: check_sum(collective, parts), 0, 0)


def test_many_messages_of_every_way() -> None:
    """Each waits for what was sent in this launch, not in an earlier one of its phase."""
    lengths = random.Random(3).choices([3, 40, 200, 900, 1500], k=16)

    def work(collective: PeerCollective) -> None:
        for number, length in enumerate(lengths):
            own = torch.full((length,), float(number + collective.rank))
            assert (collective.all_reduce(own) == 3 * number + 3).all()

    together(3, work, 500, 2000)


@pytest.mark.parametrize(
    ("size", "ways"),
    [(2, ["small", "one", "one", "one"]), (4, ["small", "one", "two", "two"]), (8, ["small", "two", "two", "two"])],
)
def test_the_way_that_moves_the_fewest_bytes_and_waits_least_is_taken(size: int, ways: list[str]) -> None:
    collective = PeerCollective(torch.zeros(size, dtype=torch.int64), 0)
    found = [
        "small" if n <= collective.small_bytes else "one" if n <= collective.one_shot_bytes else "two"
        for n in (128 << 10, 512 << 10, 2 << 20, module.SLOT_BYTES)
    ]
    assert found == ways


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


@pytest.mark.parametrize(
    ("size", "num_parts", "width"), nightly_after(4, [(2, 2, 120), (2, 2, 33), (4, 2, 7), (3, 3, 121), (8, 4, 30)])
)
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

KINDS = {"x": "*bf16", "residual": "*bf16", "out": "*bf16", "addresses": "*i64", "launches": "*i64"}
KINDS |= {"count": "i32", "x_stride": "i32", "stride": "i32"}
SIZES = {"RANK": 0, "SIZE": 2, "PARTS": 1, "GATHERS": False, "LONGEST_WAIT": 9, "PDL": True, "PROGRAMS": 128}
SIZES |= {"BLOCK": 512, "SLOT": 1 << 16, "PAIRS_AT": 1024, "DATA_AT": 1024}
KERNELS = collective._small_exchange_kernel, collective._large_exchange_kernel, collective._two_shot_kernel
for kernel in KERNELS:
    constants = {name: SIZES[name] for name in kernel.arg_names if name in SIZES}
    kinds = {name: KINDS[name] for name in kernel.arg_names if name in KINDS}
    source = ASTSource(kernel, {**kinds, **dict.fromkeys(constants, "constexpr")}, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    print("KERNEL", compiled.asm["ptx"])
"""


def test_every_warp_reads_the_number_of_the_launch_before_it_is_counted_on(tmp_path: Path) -> None:
    """A warp that came late would read the next number, and wait for words that never come."""
    kernels = run_alone(COUNTING, tmp_path).split("KERNEL")[1:]
    assert len(kernels) == 3
    for ptx in kernels:
        counting = re.search(r"ld\.global.*?st\.global", ptx, re.DOTALL)
        assert counting is not None
        assert "bar.sync" in counting.group()

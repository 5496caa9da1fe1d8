"""Collectives through torch's process groups: each rank is a forked process, with gloo in place of NCCL."""

from __future__ import annotations

import mmap
import os
import sys
import traceback

import numpy as np
import pytest
import torch

from octavo.runtime.ranks.process_group import DIVIDED_BYTES, ProcessGroupCollective
from octavo_kernels.cpu.collective import SharedCollective, region_bytes
from tests.tiers import nightly_after

WIDTH = 64
ROWS = (1, 5, DIVIDED_BYTES // (2 * WIDTH) + 1, DIVIDED_BYTES // WIDTH)
"""Of which the last are added up in parts, unless they cannot be divided among the ranks."""


def exchange(host: SharedCollective) -> None:
    collective = ProcessGroupCollective(host, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        for rows in ROWS:
            generator = torch.Generator().manual_seed(rows)
            parts = torch.randn(host.size, rows, WIDTH, generator=generator).to(dtype)
            residual = torch.randn(rows, WIDTH, generator=generator).to(dtype)
            expected = parts[0].float()
            for part in parts[1:]:
                expected = expected + part.float()
            own = parts[host.rank]
            assert torch.equal(collective.all_reduce(own.clone()), expected.to(dtype))
            with_residual = collective.all_reduce(own.clone(), residual.clone())
            assert torch.equal(with_residual, (expected + residual.float()).to(dtype))
            assert torch.equal(collective.all_gather(own), parts)


@pytest.mark.parametrize("size", nightly_after(1, (3, 2)))
def test_sums_are_those_of_float32_in_the_order_of_ranks(size: int) -> None:
    memory = mmap.mmap(-1, region_bytes(size))
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            failed = 1
            try:
                exchange(SharedCollective(np.frombuffer(memory, np.uint8), rank, size))
                failed = 0
            except BaseException:
                traceback.print_exc(file=sys.stderr)
            finally:
                os._exit(failed)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * size

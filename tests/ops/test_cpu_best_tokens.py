"""The first largest numbers as numpy finds them, over blocks of any number of threads, and error codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.ops.sampling.sampling import BANNED, NOT_FINITE, NOTHING_LEFT, OUT_OF_RANGE, OVERFLOWN
from octavo_kernels.cpu import threads
from octavo_kernels.cpu.sampling.sample import BLOCK, best_tokens
from tests.ops.cpu_cases import needs_float_kernels

pytestmark = needs_float_kernels


@pytest.mark.parametrize("num_threads", [0, 1, 3])
@pytest.mark.parametrize("width", [1, 5, BLOCK, 3 * BLOCK + 17])
def test_first_largest_numbers(num_threads: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if num_threads == 0:
        monkeypatch.setattr("octavo_kernels.cpu.sampling.sample.missing", lambda features: "none can be compiled")
    threads.set_num_threads(max(1, num_threads))
    rng = np.random.default_rng(width)
    x_RV = rng.standard_normal((9, width), np.float32) - 5
    x_RV[1] = -7.5  # all the same
    x_RV[2, width // 2 :] = 3
    x_RV[3] = 0.0
    x_RV[3, 0] = -0.0  # equal to those behind it
    x_RV[4, -1], x_RV[5, width // 3], x_RV[6, -1] = np.nan, np.inf, -np.inf
    x_RV[7] = BANNED
    x_RV[8, width // 2] = OVERFLOWN
    expected = [*x_RV[:4].argmax(-1).tolist(), NOT_FINITE, NOT_FINITE, NOT_FINITE, NOTHING_LEFT, OUT_OF_RANGE]
    assert best_tokens(torch.from_numpy(x_RV)).tolist() == expected
    threads.set_num_threads(1)

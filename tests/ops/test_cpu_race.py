"""No token that can win is left out, and few others stay."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.cpu import threads
from octavo.ops.cpu.race import possible_winners
from octavo.ops.noise import exponentials, key_of, token_hashes
from tests.ops.cpu_cases import needs_float_kernels

pytestmark = needs_float_kernels
V = 9001
CPU = torch.device("cpu")


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("scale", [0.0, 0.01, 3.0, 300.0])
def test_every_token_that_reaches_a_score_is_found(scale: float, num_threads: int) -> None:
    threads.set_num_threads(num_threads)
    hashes_V = token_hashes(V, CPU)
    num_found = num_winners = 0
    for seed in range(20):
        logits_V = torch.randn(V, generator=torch.Generator().manual_seed(seed)) * scale
        logits_V[seed::7] = float("-inf")
        scores_V = logits_V - exponentials(hashes_V, seed, 5 * seed).log_()
        reached = float(scores_V.sort().values[-(1 + 20 * (seed % 3))])
        found = possible_winners(logits_V, hashes_V.numpy().astype("uint32"), key_of(seed, 5 * seed), reached)
        winners = (scores_V >= reached).nonzero().squeeze(1)
        assert set(winners.tolist()) <= set(found.tolist())
        assert found.tolist() == sorted(found.tolist())
        num_found, num_winners = num_found + len(found), num_winners + len(winners)
    assert num_found < 1.2 * num_winners + 20
    threads.set_num_threads(1)


def test_the_smallest_bits_are_no_exception() -> None:
    """A hash that makes the bits of a variate zero gives the largest noise."""
    logits_V, hashes_V = torch.zeros(3), torch.tensor([0, 5, 1 << 31]).numpy().astype("uint32")
    assert 0 in possible_winners(logits_V, hashes_V, (1, 0), 22.8).tolist()

"""The reference of ``ops.token_logprobs`` against the sampler's function."""

from __future__ import annotations

import pytest
import torch

from octavo import ops
from tests.ops import row_sampler as sampler
from tests.ops.sampling_cases import generator, make_logits


@pytest.mark.parametrize("n", [0, 1, 20])
def test_same_as_the_samplers(n: int) -> None:
    R, V = 30, 600
    logits_RV = make_logits("flat", R, V, torch.float32)
    tokens = torch.randint(V, (R,), generator=generator(1))
    found = ops.token_logprobs(logits_RV, tokens.int(), n)
    for r, expected in enumerate(sampler.token_logprobs(logits_RV, tokens.tolist(), [n] * R)):
        assert float(found.logprob_R[r]) == pytest.approx(expected.logprob, abs=1e-5)
        assert int(found.rank_R[r]) == expected.rank
        assert found.top_ids_Rn[r].tolist() == expected.top_ids
        assert found.top_logprobs_Rn[r].tolist() == pytest.approx(expected.top_logprobs, abs=1e-5)

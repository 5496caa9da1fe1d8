"""Rows for tests of sampling on a device, and what the sampler of the CPU makes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.ops.sampling.sampling import BANNED, NOT_FINITE, NOTHING_LEFT, OUT_OF_RANGE, SampleParams
from octavo.sampling_params import SamplingParams
from tests.ops import row_sampler as sampler
from tests.ops.row_sampler import Row, Sampler

CODES = {sampler.NOT_NUMBERS: NOT_FINITE, sampler.NOTHING_LEFT: NOTHING_LEFT, sampler.OVERFLOW: OUT_OF_RANGE}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_logits(kind: str, R: int, V: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """``flat``: a normal distribution; ``peaked``: with a few tokens far above; ``tied``: few different values."""
    logits_RV = torch.randn(R, V, generator=generator(seed)) * 2.5
    if kind == "peaked":
        favoured = torch.randint(V, (R, 20), generator=generator(seed + 1))
        logits_RV.scatter_add_(1, favoured, 12 + torch.randn(R, 20, generator=generator(seed + 2)) * 3)
    if kind == "tied":
        logits_RV = logits_RV.round()
    return logits_RV.to(dtype)


def part_of(whole_RV: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """``size`` columns of some logits, and their tokens; all others are banned in ``whole``, in place."""
    V = whole_RV.shape[1]
    ids_W = torch.randperm(V, generator=generator(V))[:size].sort().values
    part_RW = whole_RV[:, ids_W]
    whole_RV.copy_(torch.full_like(whole_RV, BANNED).index_copy_(1, ids_W, part_RW))
    return part_RW, ids_W


def uniform_params(R: int, **values: float) -> SampleParams:
    """Rows with the same parameters at different positions."""
    return SampleParams(
        torch.full((R,), values.get("temperature", 1.0)),
        torch.full((R,), values.get("min_p", 0.0)),
        torch.full((R,), int(values.get("top_k", 0)), dtype=torch.int32),
        torch.full((R,), values.get("top_p", 1.0)),
        torch.full((R,), int(values.get("seed", 0)), dtype=torch.int64),
        torch.arange(R, dtype=torch.int32),
    )


def mixed_params(R: int, V: int, seed: int = 0) -> SampleParams:
    """Rows of every mix of parameters."""
    rng = generator(seed)

    def some(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (R,), generator=rng)]

    return SampleParams(
        some(0.0, 0.25, 0.7, 1.0, 1.0, 1.7),
        some(0.0, 0.0, 0.01, 0.2, 1.0),
        some(0, 0, 1, 7, 50, V // 2, V, V + 5).int(),
        some(1.0, 1.0, 0.001, 0.5, 0.9, 0.95, 0.999),
        torch.randint(-(2**63), 2**63 - 1, (R,), generator=rng),
        torch.randint(0, 100_000, (R,), generator=rng, dtype=torch.int32),
    )


def by_sampler(logits_RV: Tensor, params: SampleParams) -> list[int]:
    """Tokens and codes, one row at a time, from the sampler of the CPU."""
    cpu = Sampler(logits_RV.shape[1], torch.device("cpu"))
    rows = [
        Row(SamplingParams(temperature=t, min_p=m, top_k=k, top_p=p), seed % 2**64, position, [], 0, frozenset())
        for t, m, k, p, seed, position in zip(*(column.tolist() for column in params), strict=True)
    ]
    choices = cpu.sample(logits_RV.float().cpu(), rows)
    return [choice.token if choice.error is None else CODES[choice.error] for choice in choices]

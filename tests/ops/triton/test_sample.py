"""Sampling kernels against the sampler of the CPU, row by row.

Kernels and sampler round their logarithms differently, by some 1e-6: where two tokens are nearer than that in the race,
or a mass is that near to ``top_p``, either may be right. In the rows here, which are fixed, none are.
"""

from __future__ import annotations

import math

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo import ops
from octavo.ops.sampling.noise import exponentials, token_hashes
from octavo.ops.sampling.sampling import BANNED, NOT_FINITE, NOTHING_LEFT, OUT_OF_RANGE, OVERFLOWN, SampleParams
from octavo.ops.sampling.sampling import least_kept as least_kept_reference
from octavo_kernels.triton.sampling import sample as kernels
from octavo_kernels.triton.sampling.noise import minus_log_exponentials, row_key
from octavo_kernels.triton.sampling.sample import CHUNK, GROUPS, SAME_BITS, sample_triton
from octavo_kernels.triton.sampling.truncation import GROUP, least_kept
from tests.ops.sampling_cases import by_sampler, make_logits, mixed_params, part_of, uniform_params
from tests.ops.triton.guards import Guarded
from tests.tiers import one_in

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]


def run(logits_RV: Tensor, params: SampleParams, device: str, ids_V: Tensor | None = None) -> list[int]:
    ids_V = None if ids_V is None else ids_V.to(device)
    tokens_R = sample_triton(logits_RV.to(device), SampleParams(*(column.to(device) for column in params)), ids_V)
    assert tokens_R.dtype == torch.int32
    found: list[int] = tokens_R.tolist()
    return found


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Guarded:
    guarded = Guarded(torch.empty)
    monkeypatch.setattr(kernels.torch, "empty", guarded)
    return guarded


@one_in(5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kind", "V"), [("flat", 1), ("flat", 130), ("tied", 2048), ("peaked", 4100), ("flat", 4500)])
def test_same_tokens_as_the_sampler(kind: str, V: int, dtype: torch.dtype, device: str, guarded: Guarded) -> None:
    R = 12 if device == "cpu" else 1000
    logits_RV = make_logits(kind, R, V, dtype, seed=V)
    params = mixed_params(R, V, seed=V)
    found = run(logits_RV, params, device)
    guarded.check()
    assert found == by_sampler(logits_RV, params)


@triton.jit
def _variates_kernel(
    out: tl.tensor, seed: tl.tensor, position: tl.tensor, N: tl.constexpr, IS_CUDA: tl.constexpr
) -> None:
    ids = tl.arange(0, N)
    factor, offset = row_key(tl.load(seed), tl.load(position))
    tl.store(out + ids, minus_log_exponentials(ids, factor, offset, IS_CUDA))


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63), 1234])
@pytest.mark.parametrize("position", [0, 7, 2**31 - 1])
def test_variates_are_those_of_the_host(seed: int, position: int, device: str) -> None:
    N = 16384
    out = torch.full((N,), math.nan, device=device)
    seed_1, position_1 = torch.tensor([seed], device=device), torch.tensor([position], device=device)
    _variates_kernel[(1,)](out, seed_1, position_1, N, device == "cuda")
    expected = -exponentials(token_hashes(N, torch.device("cpu")), seed, position).double().log()
    torch.testing.assert_close(out.cpu().double(), expected, rtol=5e-7, atol=1e-6)


@triton.jit
def _cut_kernel(
    logits: tl.tensor,
    live: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    numbers: tl.tensor,
    top_k: tl.tensor,
    out: tl.tensor,
    V: tl.tensor,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    SHIFT: tl.constexpr,
) -> None:
    scale, min_p, top_p = tl.load(numbers), tl.load(numbers + 1), tl.load(numbers + 2)
    k = tl.load(top_k)
    cut = least_kept(logits, live, peaks, masses, scale, min_p, k, top_p, V, CHUNKS, GROUPS, SHIFT)
    tl.store(out, cut)


def cut_of(logits_V: Tensor, scale: float, min_p: float, top_k: int, top_p: float, device: str) -> float:
    V = len(logits_V)
    num_chunks = triton.cdiv(V, CHUNK)
    padded = torch.full((num_chunks * CHUNK,), BANNED)
    padded[:V] = logits_V.float()
    scores = (padded * scale).view(num_chunks, CHUNK)
    masses = (scores - scores.max(1, keepdim=True).values).exp().sum(1).to(device)
    peaks = padded.view(-1, GROUP).max(1).values.to(device)
    live = torch.full_like(peaks, 2**31 - 1, dtype=torch.int32)
    numbers, k = torch.tensor([scale, min_p, top_p], device=device), torch.tensor([top_k], device=device)
    out = torch.full((1,), math.nan, device=device)
    chunks, shift = triton.next_power_of_2(num_chunks), SAME_BITS[logits_V.dtype]
    _cut_kernel[(1,)](logits_V.to(device), live, peaks, masses, numbers, k, out, V, chunks, GROUPS, shift, num_warps=8)
    return float(out)


@one_in(5)
@pytest.mark.parametrize(("kind", "dtype"), list(zip(["flat", "peaked", "tied"], DTYPES, strict=True)))
@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [
        (0, 0, 0.9),
        (0, 50, 1),
        (0, 1, 1),
        (0, 1500, 1),
        (0.01, 40, 0.8),
        (0.3, 0, 0.5),
        (0, 20, 0.95),
        (0, 0, 1 - 2**-20),
    ],
)
def test_cuts(kind: str, min_p: float, top_k: int, top_p: float, dtype: torch.dtype, device: str) -> None:
    """The same tokens stay, up to those at the very edge of the nucleus."""
    logits_V = make_logits(kind, 1, 2500, dtype, seed=top_k)[0]
    scale = torch.tensor(1 / 0.7)
    cut = cut_of(logits_V, float(scale), min_p, top_k, top_p, device)
    scores_V = logits_V.float() * scale
    expected = float(least_kept_reference(scores_V, min_p, top_k, top_p))
    if cut != expected:
        between = (scores_V >= min(cut, expected)) & (scores_V < max(cut, expected))
        assert top_p < 1
        assert scores_V.double().softmax(0)[between].sum() < 2e-6


def test_banned_and_overflown(device: str) -> None:
    """A row each of: some banned, all banned, an overflow, an overflow by the temperature; greedy and not."""
    V = 2100
    logits_RV = make_logits("flat", 4, V, torch.float32).repeat(2, 1)
    logits_RV[:, 9:] = BANNED
    logits_RV[1::4] = BANNED
    logits_RV[2::4, 3] = OVERFLOWN
    logits_RV[3::4, 4] = 1e38
    params = uniform_params(8, temperature=0.1, top_p=0.9)
    params.temperature[4:] = 0
    found = run(logits_RV, params, device)
    assert found[1:4] == [NOTHING_LEFT, OUT_OF_RANGE, OUT_OF_RANGE]
    assert found[5:] == [NOTHING_LEFT, OUT_OF_RANGE, 4]
    assert max(found) < 9
    assert found[4] == int(logits_RV[4].argmax())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float, device: str) -> None:
    logits_RV = make_logits("flat", 3, 2100, torch.bfloat16)
    params = uniform_params(3, temperature=temperature, top_k=40)
    expected = by_sampler(logits_RV, params)
    logits_RV[1, 2099] = bad
    found = run(logits_RV, params, device)
    assert found[1] == NOT_FINITE
    assert found[::2] == expected[::2]


def test_of_equals_the_first(device: str) -> None:
    logits_RV = torch.zeros(3, 5000, dtype=torch.bfloat16)
    logits_RV[1, [4000, 77]] = 2
    logits_RV[2, :100] = -1
    logits_RV[2, 100] = -0.0
    assert run(logits_RV, uniform_params(3, temperature=0), device) == [0, 77, 100]


def test_a_row_gives_the_same_alone_and_in_any_batch(device: str) -> None:
    logits_RV, params = make_logits("peaked", 5, 2300, torch.bfloat16), mixed_params(5, 2300, seed=4)
    together = run(logits_RV, params, device)
    alone = [run(logits_RV[r : r + 1], SampleParams(*(c[r : r + 1] for c in params)), device)[0] for r in range(5)]
    backwards = run(logits_RV.flip(0), SampleParams(*(column.flip(0) for column in params)), device)[::-1]
    assert together == alone == backwards


def test_rows_that_lie_apart(device: str) -> None:
    wide_RV, params = make_logits("flat", 4, 3000, torch.float16), mixed_params(4, 2500, seed=5)
    expected = run(wide_RV[:, :2500].contiguous(), params, device)
    on_device = SampleParams(*(column.to(device) for column in params))
    assert sample_triton(wide_RV.to(device)[:, :2500], on_device).tolist() == expected
    columns = wide_RV.to(device).T.contiguous().T[:, :2500]
    assert sample_triton(columns, on_device).tolist() == expected


@one_in(2)
@pytest.mark.parametrize("size", [70, 2100])
def test_columns_may_be_a_part_of_the_vocabulary(size: int, device: str) -> None:
    whole_RV = make_logits("flat", 12, 4500, torch.float32)
    part_RW, ids_W = part_of(whole_RV, size)
    params = mixed_params(12, 4500)
    found = run(part_RW, params, device, ids_W)
    assert found == ops.sample(whole_RV, params).tolist()
    part_RW[1, 2] = math.nan
    assert run(part_RW, params, device, ids_W) == [found[0], NOT_FINITE, *found[2:]]


def test_no_rows(device: str) -> None:
    params = SampleParams(*(column.to(device) for column in uniform_params(0)))
    assert sample_triton(torch.empty(0, 100, device=device), params).shape == (0,)


@one_in(2)
@pytest.mark.parametrize("params", [{"temperature": 1.5}, {"min_p": 0.3, "temperature": 2}], ids=str)
def test_draws_follow_the_distribution(params: dict[str, float], device: str) -> None:
    R, V = (250 if device == "cpu" else 20_000), 8
    logits_V = torch.tensor([1.0, 0, 2, -1, 0.5, 1.5, -0.5, 1.25])
    tokens = run(logits_V.expand(R, V), uniform_params(R, seed=3, **params), device)
    scores_V = logits_V.double() / params["temperature"]
    weights_V = (scores_V - scores_V.max()).exp()
    weights_V[weights_V < params.get("min_p", 0)] = 0
    expected = weights_V / weights_V.sum() * R
    observed = torch.bincount(torch.tensor(tokens), minlength=V)
    assert observed[expected == 0].sum() == 0
    drawn = expected > 0
    chi_square = float(((observed - expected)[drawn] ** 2 / expected[drawn]).sum())
    freedom = int(drawn.sum()) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)

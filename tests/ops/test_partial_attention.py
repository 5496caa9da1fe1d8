"""Attention over parts of contexts: merged, that over the whole of them; and what ranks exchange for it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.ops import dispatch, merge_parts, partial_attention
from octavo.ops.attention.attention import LayerCache
from octavo.ops.attention.cached_rows import INT4
from octavo.ops.collective import ContextPart, ContextRanks
from octavo_kernels.cpu.collective import SharedCollective
from tests.ops.cpu_cases import needs_float_kernels, poison_new_tensors
from tests.ops.test_collective import together
from tests.ops.test_cpu_attention import CACHE_DTYPES, Case, exact, make_case

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 0.7},
    "sinks": {"sinks_N": torch.linspace(-2, 4, 6)},
    "norms": {"q_norm_H": torch.linspace(0.5, 2, 24), "k_norm_H": torch.linspace(-1, 1, 24), "norm_eps": 1e-4},
}
KERNELS = [pytest.param("numba", marks=needs_float_kernels), dispatch.REFERENCE]


def run_parts(case: Case, size: int) -> list[Tensor]:
    """What each part gives, over a cache of its positions alone."""
    parts = [ContextPart(rank, size) for rank in range(size)]
    heads = case.heads._replace(sinks_N=None)
    results = []
    for part in parts:
        keys, values = (x[:, :, part.rank :: size].contiguous() for x in case.cache[:2])
        cache = LayerCache(keys, values)
        own = case.rows.owned(part)
        results.append(partial_attention(case.qkv_TW, heads, case.cos_TR, case.sin_TR, cache, own, part))
        for x, whole in zip(cache[:2], case.cache[:2], strict=True):
            whole[:, :, part.rank :: size] = x
    return results


def merged(case: Case, size: int) -> Tensor:
    return merge_parts(torch.stack(run_parts(case, size)), case.heads.sinks_N, torch.float32).flatten(1)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison_new_tensors(monkeypatch)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_give_the_whole(layout: str, size: int, kernel: str) -> None:
    """Of sequences shorter than there are parts, too."""
    lengths, queries = [1, 7, 40, 300, 33, 3, 560, 2], [1, 7, 1, 50, 20, 0, 1, 2]
    case = make_case(lengths, queries, (6, 2, 24, 24), torch.float32, 12, **LAYOUTS[layout])
    with dispatch.only(kernel):
        found = merged(case, size)
    torch.testing.assert_close(found.double(), exact(case), rtol=1e-5, atol=3e-6)


@needs_float_kernels
@pytest.mark.parametrize("dtype", [*CACHE_DTYPES, INT4])
def test_kernel_and_reference_say_the_same_of_each_part(dtype: torch.dtype) -> None:
    case = make_case([300, 2, 700], [50, 2, 1], (8, 1, 64, 32), dtype, 32)
    reference = case.copy()
    found = run_parts(case, 4)
    with dispatch.only(dispatch.REFERENCE):
        expected = run_parts(reference, 4)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (found[3][50:52, :, -1] == float("-inf")).all(), "the last of four parts has none of two positions"
    assert (found[3][50:52, :, :-1] == 0).all()


@needs_float_kernels
@pytest.mark.parametrize("size", [2, 3])
def test_bits_do_not_depend_on_chunks_or_other_sequences(size: int) -> None:
    case = make_case([190, 17, 140], [190, 1, 60], (9, 3, 64, 12), torch.float32, 4)
    pieces = case.copy()
    together = merged(case, size)
    for s, cuts in enumerate([(0, 1, 3, 8, 64, 65, 190), (0, 1), (0, 59, 60)]):
        begin = int(case.rows.cu_seqlens_q[s])
        for first, last in itertools.pairwise(cuts):
            alone = merged(pieces.part(s, first, last), size)
            assert torch.equal(alone, together[begin + first : begin + last])


@needs_float_kernels
def test_a_query_that_is_not_finite_spoils_itself_alone() -> None:
    case = make_case([40, 12], [30, 1], (9, 3, 64, 16), torch.float32)
    expected = merged(case, 2).view(-1, 9, 64)
    case.qkv_TW[3, 64 + 5] = float("nan")
    for kernel in ("numba", dispatch.REFERENCE):
        with dispatch.only(kernel):
            found = merged(case, 2).view(-1, 9, 64)
        assert bool(found[3, 1].isnan().all())
        found[3, 1] = expected[3, 1]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_slots_of_other_parts_are_padding() -> None:
    slots = torch.tensor([0, 1, 2, 3, 4, 11, -1])
    found = [ContextPart(rank, 3).slots(slots).tolist() for rank in range(3)]
    assert found == [[0, -1, -1, 1, -1, -1, -1], [-1, 0, -1, -1, 1, -1, -1], [-1, -1, 0, -1, -1, 3, -1]]
    assert [[ContextPart(rank, 3).count(n) for n in range(5)] for rank in range(3)] == [
        [0, 1, 1, 1, 2],
        [0, 0, 1, 1, 1],
        [0, 0, 0, 1, 1],
    ]


@pytest.mark.parametrize(("num_ranks", "size"), [(2, 2), (4, 2), (3, 3), (4, 4)])
def test_ranks_exchange_with_their_neighbours(num_ranks: int, size: int) -> None:
    own = torch.arange(num_ranks).float()
    sent = torch.arange(float(num_ranks * size * 5 * 7)).view(num_ranks, 5, size, 7)

    def work(collective: SharedCollective) -> tuple[Tensor, Tensor]:
        ranks = ContextRanks(collective, size)
        return ranks.gathered(own[collective.rank].view(1)), collective.exchange(sent[collective.rank])

    for rank, (gathered, received) in enumerate(together(num_ranks, work)):
        first = rank - rank % size
        assert gathered.flatten().tolist() == own[first : first + size].tolist()
        assert torch.equal(received, sent[first : first + size, :, rank % size])


@needs_float_kernels
def test_whole_attention_refuses_a_part() -> None:
    case = make_case([20], [3], (9, 3, 64, 16), torch.float32)
    ranks = ContextRanks(SharedCollective.__new__(SharedCollective), 2)
    for kernel in ("numba", dispatch.REFERENCE):
        with dispatch.only(kernel), pytest.raises(AssertionError, match="a part of each context"):
            replace(case, cache=case.cache._replace(context=ranks)).run()

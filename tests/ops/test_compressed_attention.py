"""Compressed attention on CPUs, kernels and references, against float64 row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from octavo import ops
from octavo.ops import dispatch
from octavo.ops.hyper_connections import StreamMaps
from tests.ops.compressed_cases import Case, turned

RAGGED = [(5, 5), (1, 30), (0, 3), (13, 41), (9, 16), (1, 1)]
KINDS: dict[str, dict[str, Any]] = {
    "overlapping": {},
    "wide": {"rate": 12, "overlaps": False, "parts": (24,)},
    "as blocks": {"rate": 8, "block_size": 8, "overlaps": False, "parts": (24,)},
    "odd": {"rate": 5, "block_size": 7, "window": 3},
}


@pytest.fixture(params=["reference", "kernel"])
def implementation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Those that run otherwise, or references alone."""
    if request.param == "kernel":
        yield
        return
    with dispatch.only(dispatch.REFERENCE):
        yield


def compress(case: Case) -> None:
    cos, sin = (case.rows_of([f(angles) for angles in case.angles]) for f in (torch.cos, torch.sin))
    ops.compress(case.rows_of(case.given), case.how, cos, sin, case.inputs, case.entries, case.rows)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("kind", KINDS)
def test_entries_of_complete_groups_are_stored(kind: str) -> None:
    case, expected = Case(RAGGED, **KINDS[kind]), Case(RAGGED, **KINDS[kind])
    expected.put_entries()
    compress(case)
    tables = case.rows.groups[2].block_tables_SB
    checked = 0
    for _, s, position in case.places():
        if (position + 1) % case.rate == 0:
            at = int(tables[s, position // case.block_size]), 0, position % case.block_size // case.rate
            torch.testing.assert_close(case.entries.keys[at], expected.entries.keys[at], atol=3e-6, rtol=1e-5)
            case.entries.keys[at] = float("nan")
            checked += 1
    assert checked > 0
    assert case.entries.keys.isnan().all(), "an entry was stored in another's place"


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("count", [1, 3, 50])
@pytest.mark.parametrize("kind", ["overlapping", "odd"])
def test_the_entries_with_the_highest_scores_are_chosen(kind: str, count: int) -> None:
    case = Case(RAGGED, **KINDS[kind])
    case.put_entries()
    q, weights = torch.randn(case.T, 11, 16), torch.randn(case.T, 11)
    found = ops.choose_entries(q, weights, case.rate, count, case.block_size, case.entries, case.rows)
    assert found.dtype == torch.int32
    told = [[entry for entry in row.tolist() if entry >= 0] for row in found[:-1]]
    assert told == list(case.chosen(q, weights, count).values())
    assert all(row[: len(own)].tolist() == own for row, own in zip(found[:-1], told, strict=True))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_entries_are_attended_to(kind: str) -> None:
    case = Case(RAGGED, **KINDS[kind])
    case.put_entries()
    q = torch.randn(case.T, case.heads.num_heads, case.heads.head_dim)
    found = ops.compressed_attention(q, case.heads, case.cache, case.rows, case.entries, case.rate)
    torch.testing.assert_close(found[:-1].double(), case.attended(q), atol=2e-6, rtol=1e-5)
    if case.how.overlaps:
        index, weights = torch.randn(case.T, 11, 16), torch.randn(case.T, 11)
        chosen = ops.choose_entries(index, weights, case.rate, 2, case.block_size, case.entries, case.rows)
        found = ops.compressed_attention(q, case.heads, case.cache, case.rows, case.entries, case.rate, chosen)
        expected = case.attended(q, case.chosen(index, weights, 2))
        torch.testing.assert_close(found[:-1].double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.usefixtures("implementation")
def test_turned_tails() -> None:
    x, angles, norm = torch.randn(5, 3, 10), torch.rand(5, 2) * 6, torch.randn(10)
    cos, sin = angles.cos(), angles.sin()
    found = ops.turn_tails(x, cos, sin, eps=1e-5, norm_H=norm)
    for t in range(5):
        for n in range(3):
            row = x[t, n].double()
            row = row * (row.square().mean() + 1e-5) ** -0.5 * norm.double()
            torch.testing.assert_close(found[t, n].double(), turned(row, angles[t].double()), atol=2e-6, rtol=1e-5)
    back = ops.turn_tails(ops.turn_tails(x, cos, sin), cos, sin, turns_back=True)
    torch.testing.assert_close(back, x, atol=1e-6, rtol=1e-5)


@pytest.mark.usefixtures("implementation")
def test_streams_against_float64() -> None:
    """With the formulas of the paper, token by token."""
    S, D, T = 3, 20, 4
    x, y = torch.randn(T, S * D), torch.randn(T, D)
    maps = StreamMaps(
        torch.randn(S * (S + 2), S * D) * 0.3, torch.randn(S * (S + 2)), torch.rand(3) + 0.5, S, 7, 1e-4, 1e-5
    )
    found = ops.enter_streams(x, maps)
    left = ops.leave_streams(y, x, found.post_TS, found.mix_TSS)
    for t in range(T):
        row = x[t].double()
        given = maps.weight_MX.double() @ (row * (row.square().mean() + 1e-5) ** -0.5)
        base, scales, streams = maps.base_M.double(), maps.scales.double(), row.view(S, D)
        pre = (given[:S] * scales[0] + base[:S]).sigmoid() + 1e-4
        post = 2 * (given[S : 2 * S] * scales[1] + base[S : 2 * S]).sigmoid()
        mix = (given[2 * S :] * scales[2] + base[2 * S :]).view(S, S).softmax(dim=1) + 1e-4
        for turn in range(2 * 7 - 1):
            mix = mix / (mix.sum(dim=turn % 2, keepdim=True) + 1e-4)
        torch.testing.assert_close(found.sum_TD[t].double(), pre @ streams, atol=2e-6, rtol=1e-5)
        expected = mix.T @ streams + post.unsqueeze(1) * y[t].double()
        torch.testing.assert_close(left[t].double().view(S, D), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("S", [0, 1, 3])
def test_attention_to_streams_against_float64(S: int) -> None:
    T, D, Q = 4, 20, 3
    x, y, queries = torch.randn(T, S + 2, D)[:, :S], torch.randn(T, D) * 9, torch.randn(Q, D) * 3
    found = ops.attend_streams(x, y, queries, 1e-5)
    for t in range(T):
        streams = torch.cat((x[t], y[t : t + 1])).double()
        streams = streams * (streams.square().mean(dim=1, keepdim=True) + 1e-5) ** -0.5
        expected = (queries.double() @ streams.T / D**0.5).softmax(dim=1) @ streams
        torch.testing.assert_close(found[:, t].double(), expected, atol=2e-6, rtol=1e-5)

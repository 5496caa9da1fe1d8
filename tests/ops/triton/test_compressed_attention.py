"""Compressed attention and streams by kernels for GPUs, against float64 row by row."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.attention.compressed_attention import turn_tails
from octavo.ops.hyper_connections import StreamMaps, attend_streams, enter_streams, leave_streams
from octavo_kernels.triton.attention.compressed_attention import (
    choose_entries_triton,
    compress_triton,
    compressed_attention_triton,
    turn_tails_triton,
)
from octavo_kernels.triton.hyper_connections import (
    attend_streams_triton,
    enter_streams_triton,
    leave_streams_triton,
)
from tests.ops.compressed_cases import Case
from tests.ops.test_compressed_attention import KINDS
from tests.ops.triton.poison import poison_new_tensors
from tests.tiers import nightly_after

SINGLE = [(1, 5), (0, 0), (1, 32), (1, 12), (1, 25)]
RAGGED = [(5, 5), (1, 20), (0, 3), (13, 24)]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 3e-2}
WAYS = nightly_after(
    3,
    (
        ("overlapping", RAGGED, torch.float32),
        ("odd", SINGLE, torch.float32),
        ("wide", RAGGED, torch.bfloat16),
        ("as blocks", SINGLE, torch.bfloat16),
        ("wide", SINGLE, torch.float32),
        ("odd", RAGGED, torch.float32),
        ("overlapping", SINGLE, torch.bfloat16),
    ),
)


def make(kind: str, lengths: list[tuple[int, int]], dtype: torch.dtype, device: str) -> Case:
    case = Case(lengths, device, dtype, **KINDS[kind])
    if lengths is SINGLE:  # row s belongs to sequence s
        case.single()
    return case


@pytest.mark.parametrize(("kind", "lengths", "dtype"), WAYS)
def test_entries_are_stored(kind: str, lengths: list[tuple[int, int]], dtype: torch.dtype, device: str) -> None:
    case, expected = (make(kind, lengths, dtype, device) for _ in range(2))
    expected.put_entries()
    cos, sin = (case.rows_of([f(angles) for angles in case.angles]) for f in (torch.cos, torch.sin))
    compress_triton(case.rows_of(case.given), case.how, cos, sin, case.inputs, case.entries, case.rows)
    tables, checked = case.rows.groups[2].block_tables_SB, 0
    for _, s, position in case.places():
        if (position + 1) % case.rate == 0:
            at = int(tables[s, position // case.block_size]), 0, position % case.block_size // case.rate
            found, own = case.entries.keys[at].float(), expected.entries.keys[at].float()
            torch.testing.assert_close(found, own, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
            case.entries.keys[at] = float("nan")
            checked += 1
    assert checked > 0
    assert case.entries.keys.isnan().all(), "an entry was stored in another's place"


@pytest.mark.parametrize(("kind", "lengths", "dtype"), WAYS)
def test_entries_are_chosen_and_attended_to(
    kind: str, lengths: list[tuple[int, int]], dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make(kind, lengths, dtype, device)
    case.put_entries()
    q = torch.randn(case.T, case.heads.num_heads, case.heads.head_dim).to(device, dtype)
    index, weights = torch.randn(case.T, 11, 16).to(device, dtype), torch.randn(case.T, 11).to(device)
    poison_new_tensors(monkeypatch)
    rows = [t for t, _, _ in case.places()]
    found = compressed_attention_triton(q, case.heads, case.cache, case.rows, case.entries, case.rate)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(found[rows].double().cpu(), case.attended(q), **close)
    if not case.how.overlaps:
        return
    for count in (2, 40):
        given = index, weights, case.rate, count, case.block_size, case.entries, case.rows
        chosen = choose_entries_triton(*given)
        told = [[entry for entry in row if entry >= 0] for row in chosen[rows].tolist()]
        assert told == list(case.chosen(index, weights, count).values())
        found = compressed_attention_triton(q, case.heads, case.cache, case.rows, case.entries, case.rate, chosen)
        torch.testing.assert_close(
            found[rows].double().cpu(), case.attended(q, dict(zip(rows, told, strict=True))), **close
        )


def test_entries_of_another_type_than_queries(device: str) -> None:
    case = make("overlapping", RAGGED, torch.bfloat16, device)
    case.put_entries()
    index, weights = torch.randn(case.T, 11, 16).to(device, torch.bfloat16).float(), torch.randn(case.T, 11).to(device)
    rows = [t for t, _, _ in case.places()]
    chosen = choose_entries_triton(index, weights, case.rate, 2, case.block_size, case.entries, case.rows)
    told = [[entry for entry in row if entry >= 0] for row in chosen[rows].tolist()]
    assert told == list(case.chosen(index, weights, 2).values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_tails(dtype: torch.dtype, device: str) -> None:
    x, angles, norm = torch.randn(3, 2, 20).to(dtype), torch.rand(3, 3) * 6, torch.randn(20).to(dtype)
    for how in ({}, {"eps": 1e-5}, {"eps": 1e-5, "norm_H": norm}, {"turns_back": True}):
        given = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in how.items()}
        found = turn_tails_triton(x.to(device), angles.cos().to(device), angles.sin().to(device), **given)
        expected = turn_tails.reference(x, angles.cos(), angles.sin(), **how)
        torch.testing.assert_close(found.cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("S", "D", "dtype"), [(4, 40, torch.float32), (3, 130, torch.bfloat16)])
def test_streams(S: int, D: int, dtype: torch.dtype, device: str) -> None:
    x, y = torch.randn(3, S * D).to(dtype), torch.randn(3, D).to(dtype)
    vectors = torch.randn(S * (S + 2), S * D) * 0.3, torch.randn(S * (S + 2)), torch.rand(3) + 0.5
    expected = enter_streams.reference(x, StreamMaps(*vectors, S, 5, 1e-4, 1e-5))
    maps = StreamMaps(*(vector.to(device) for vector in vectors), S, 5, 1e-4, 1e-5)
    found = enter_streams_triton(x.to(device), maps)
    close = {"atol": TOLERANCE[dtype], "rtol": 1e-5}
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own.cpu(), other, **close)
    left = leave_streams_triton(y.to(device), x.to(device), found.post_TS, found.mix_TSS)
    torch.testing.assert_close(left.cpu(), leave_streams.reference(y, x, expected.post_TS, expected.mix_TSS), **close)


@pytest.mark.parametrize(("S", "Q", "dtype"), [(0, 1, torch.float32), (2, 3, torch.float32), (3, 1, torch.bfloat16)])
def test_attention_to_streams(S: int, Q: int, dtype: torch.dtype, device: str) -> None:
    x, y, queries = torch.randn(5, S + 2, 40).to(dtype)[:, :S], torch.randn(5, 40) * 9, torch.randn(Q, 40) * 3
    found = attend_streams_triton(x.to(device), y.to(device), queries.to(device), 1e-5)
    torch.testing.assert_close(found.cpu(), attend_streams.reference(x, y, queries, 1e-5), atol=2e-6, rtol=1e-5)

"""The small kernels at the ends of a step do what their references do, and nothing else."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from octavo import ops
from octavo.ops.attention.attention import RopeSet
from octavo.ops.sampling.sampling import SampleParams
from octavo.ops.stepping import LastResults, StagedRows
from octavo_kernels.triton.attention.rotate_store import rotary_angles_triton
from octavo_kernels.triton.drafting import (
    accept_by_chance_triton,
    accept_drafts_triton,
    draft_rows_triton,
    drafts_behind_triton,
    keep_draft_triton,
    newest_tokens_triton,
)
from octavo_kernels.triton.stepping import (
    next_tokens_triton,
    publish_tokens_triton,
    pull_step_triton,
    stage_step_triton,
)
from tests.ops.sampling_cases import mixed_params

BLOCK_SIZE = 4


def staged(where: str, run: Any, num_groups: int, width: int, has_drafts: bool, has_drafter: bool) -> dict[str, Any]:
    """What staging makes of five sequences: the first, second and fifth are pending, the third is padding."""
    rng = torch.Generator().manual_seed(width)
    counts, drafts = [1, 3, 0, 2, 1], [0, 2, 0, 1, 0]
    if not has_drafts:
        counts, drafts = [1, 1, 0, 2, 1], [0] * 5
    cu_seqlens = torch.tensor([0, *counts]).cumsum(0).int()
    cu_samples = torch.tensor([0, 1, 4, 5, 7, 8]).int()
    starts, T, num_samples = [7, 9, 0, 3, 2], sum(counts) + 2, sum(drafts) + 5
    positions = [start + i for start, count in zip(starts, counts, strict=True) for i in range(count)]
    ends = [start + count for start, count in zip(starts, counts, strict=True)]
    sampled = [end - n + i for end, n in zip(ends, drafts, strict=True) for i in range(n + 1)]
    ids = torch.randint(0, 1000, (T,), generator=rng)
    ids[[0, 1, sum(counts) - 1]] = -1
    if has_drafter and has_drafts:
        ids[[2, 5]] = -1
    sent = {
        "ids": ids,
        "positions": torch.tensor([*positions, 0, 0]),
        "slots": torch.randint(0, 100, (num_groups, T), generator=rng),
        "sampled": torch.tensor(sampled).int(),
        "lens": torch.tensor(ends).int(),
        "cu": cu_seqlens,
        "cu_samples": cu_samples,
        "cells": torch.tensor([3, 0, 5, 1, 2]),
        "tables": torch.full((num_groups, 5, 310), -7, dtype=torch.int32),
    }
    assert len(sampled) == num_samples
    last_tokens = torch.tensor([10, 11, -2, 13, 14, 15, 16, 17], dtype=torch.int32)
    last_positions = torch.tensor([5, 2, -1, 7, 3, 9, 9, 9], dtype=torch.int32)
    proposed = torch.randint(0, 1000, (8, 3), generator=rng, dtype=torch.int32) if has_drafter else None
    packed = torch.randint(0, 100, (num_groups * 5 * width + 5,), generator=rng, dtype=torch.int32)
    on = {name: value.clone().to(where) for name, value in sent.items()}
    of_rows = (on[name] for name in ("positions", "slots", "sampled", "lens", "cu"))
    rows = StagedRows(*of_rows, on["cu_samples"] if has_drafts else None, on["cells"])
    last = LastResults(*(None if x is None else x.to(where) for x in (last_tokens, last_positions, proposed)))
    widths = torch.tensor([width], dtype=torch.int32, device=where)
    run(on["ids"], rows, last, packed.to(where), widths, on["tables"], BLOCK_SIZE)
    return {"sent": sent, "packed": packed, "drafts": proposed} | {name: value.cpu() for name, value in on.items()}


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("width", [3, 300])
@pytest.mark.parametrize(("has_drafts", "has_drafter"), [(False, False), (True, False), (True, True), (False, True)])
def test_stage_step(device: str, width: int, num_groups: int, has_drafts: bool, has_drafter: bool) -> None:
    shape = num_groups, width, has_drafts, has_drafter
    want, compiled = staged("cpu", ops.stage_step.reference, *shape), staged("cpu", ops.stage_step, *shape)
    found = staged(device, stage_step_triton, *shape)
    for name in ("ids", "positions", "slots", "sampled", "lens", "tables"):
        assert torch.equal(found[name], want[name]), name
        assert torch.equal(compiled[name], want[name]), name
    ids, sent = want["ids"], want["sent"]
    num_rows = 3 if has_drafts else 1
    moved = torch.arange(5, 5 + num_rows)
    assert ids[:2].tolist() == [13, 10]
    assert ids[-3] == 0, "an error became a token"
    assert torch.equal(want["positions"][1 : 1 + num_rows], moved), "of the second sequence, drafts were rejected"
    assert want["lens"].tolist() == [8, 5 + num_rows, 0, 5, 3]
    assert want["sampled"].tolist() == ([8, 6, 7, 8, 0, 4, 5, 3] if has_drafts else [8, 6, 0, 5, 3])
    if has_drafts and has_drafter:
        assert ids[2] == want["drafts"][0, 0]
        assert ids[5] == want["drafts"][1, 0]
    tables = want["packed"][: num_groups * 5 * width].view(num_groups, 5, width)
    assert torch.equal(want["tables"][:, :, :width], tables)
    assert (want["tables"][:, :, width:] == -7).all()
    in_table = tables[:, 1, moved // BLOCK_SIZE].long() * BLOCK_SIZE + moved % BLOCK_SIZE
    assert torch.equal(want["slots"][:, 1 : 1 + num_rows], in_table)
    others = torch.tensor([0, *range(1 + num_rows, len(ids))])
    assert torch.equal(want["slots"][:, others], sent["slots"][:, others])


def slow_counts(tokens: list[int], ids: list[int], rows: list[int], cu_samples: list[int]) -> list[int]:
    counts = []
    for first, end in itertools.pairwise(cu_samples):
        count = 0
        while first + count + 1 < end and tokens[first + count] == ids[rows[first + count] + 1]:
            count += 1
        counts.append(count)
    return counts


@pytest.mark.parametrize("seed", range(8))
def test_accept_drafts(device: str, seed: int) -> None:
    rng = random.Random(seed)
    ids, rows, cu_samples = list[int](), list[int](), [0]
    for _ in range(rng.randrange(1, 9)):
        num_tokens, num_drafts = rng.randrange(1, 4), rng.randrange(0, 6)
        ids += rng.choices(range(2), k=num_tokens + num_drafts)
        rows += range(len(ids) - num_drafts - 1, len(ids))
        cu_samples.append(len(rows))
    tokens = rng.choices([0, 1, 1, -2], k=len(rows) + 3)  # and padding
    want = slow_counts(tokens, ids, rows, cu_samples)
    cu_samples += [cu_samples[-1]] * 2
    given = (
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor([*ids, 0]),
        torch.tensor([*rows, 0, 0, 0]),
        torch.tensor(cu_samples, dtype=torch.int32),
    )
    runs = ("cpu", ops.accept_drafts.reference), ("cpu", ops.accept_drafts), (device, accept_drafts_triton)
    for where, run in runs:
        assert run(*(x.to(where) for x in given)).tolist() == [*want, 0, 0]


@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_next_tokens(device: str, seed: int, has_drafts: bool) -> None:
    rng, vocab_size = random.Random(seed), 50
    ids, want, last_rows, last_samples = list[int](), list[int](), list[int](), list[int]()
    cu_seqlens, cu_samples, accepted, given, tokens = [0], [0], list[int](), list[int](), list[int]()
    for _ in range(rng.randrange(1, 6)):
        drafts = rng.randrange(4) if has_drafts else 0
        num_tokens = rng.choice([1, 3, 300])
        own = rng.choices(range(vocab_size), k=num_tokens + drafts)
        sampled = rng.choices([-2, *range(vocab_size)], k=1 + drafts)
        given.append(-1 if drafts else rng.choice([-1, 9]))
        accepted.append(rng.randrange(drafts + 1))
        want += [*own[1:num_tokens], *([given[-1]] if given[-1] >= 0 else [max(token, 0) for token in sampled])]
        ids, tokens = ids + own, tokens + sampled
        cu_seqlens.append(len(ids))
        cu_samples.append(len(tokens))
        last_rows.append(len(ids) - 1 - drafts + accepted[-1])
        last_samples.append(len(tokens) - 1 - drafts + accepted[-1])
    arrays = [torch.tensor([*ids, 1, 1]), *(torch.tensor(x, dtype=torch.int32) for x in (cu_seqlens, cu_samples))]
    arrays += [torch.tensor(x, dtype=torch.int32) for x in (accepted, tokens, given)]
    for where, run in (("cpu", ops.next_tokens.reference), ("cpu", ops.next_tokens), (device, next_tokens_triton)):
        on = [array.to(where) for array in arrays]
        found = run(on[0], on[1], *(on[2:4] if has_drafts else (None, None)), *on[4:], vocab_size)
        assert found.tokens_T.tolist() == [*want, 0, 0]
        assert found.last_rows_S.tolist() == last_rows
        assert found.last_samples_S.tolist() == last_samples


@pytest.mark.parametrize("num_pairs", [1, 24, 64])
def test_rotary_angles(device: str, num_pairs: int) -> None:
    positions = torch.tensor([0, 1, 77, 8191, 131071])
    frequencies = 1.0 / 500000.0 ** (torch.arange(num_pairs) / num_pairs)
    cos, sin = rotary_angles_triton(positions.to(device), frequencies.to(device), 1.25)
    angles = (positions[:, None].float() * frequencies).double()
    torch.testing.assert_close(cos.cpu().double(), angles.cos() * 1.25, rtol=0, atol=2e-6)
    torch.testing.assert_close(sin.cpu().double(), angles.sin() * 1.25, rtol=0, atol=2e-6)
    both = torch.cat((frequencies, frequencies / 3))
    chosen = RopeSet(torch.tensor([1, 0, 1, 1, 0]), torch.tensor([1.25, 1.5]))
    expected = ops.rotary_angles.reference(positions, both, 0.0, chosen)
    on_device = RopeSet(*(x.to(device) for x in chosen))
    found = rotary_angles_triton(positions.to(device), both.to(device), 0.0, on_device)
    torch.testing.assert_close([x.cpu() for x in found], list(expected), rtol=0, atol=4e-6)


@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("count", [1, 5, 130])
def test_publish_tokens(device: str, count: int, has_drafts: bool) -> None:
    for where, run in (("cpu", ops.publish_tokens.reference), (device, publish_tokens_triton)):
        counts = torch.arange(count) % 4 if has_drafts else torch.zeros(count, dtype=torch.int64)
        cu_samples = torch.tensor([0, *(counts + 1)]).cumsum(0).int()
        R, accepted = int(cu_samples[-1]), (counts + 1) // 2
        tokens, positions = torch.arange(1000, 1000 + R).int(), torch.arange(2000, 2000 + R).int()
        cells = torch.randperm(count + 3)[:count]
        last_tokens = torch.full((count + 3,), -7, dtype=torch.int32, device=where)
        last_positions = last_tokens.clone()
        results = torch.full((4, 640), -7, dtype=torch.int32, pin_memory=where == "cuda")
        counter = torch.tensor([6], dtype=torch.int32, device=where)
        drafts = (accepted.int().to(where), cu_samples.to(where)) if has_drafts else (None, None)
        given = (x.to(where) for x in (tokens, positions, cells))
        run(*given, last_tokens, last_positions, results, counter, *drafts)
        if where == "cuda":
            torch.cuda.synchronize()
        last = cu_samples[:-1] + accepted
        assert torch.equal(last_tokens.cpu()[cells], tokens[last])
        assert torch.equal(last_positions.cpu()[cells], positions[last])
        assert (last_tokens == -7).sum() == 3
        assert torch.equal(results[2, :R], tokens)
        if has_drafts:
            assert torch.equal(results[2, R : R + count], accepted.int())
        assert (results == -7).sum() == results.numel() - R - (count if has_drafts else 0)
        assert counter.item() == 7


@pytest.mark.parametrize("num_words", [1, 300, 9000])
def test_pull_step(device: str, num_words: int) -> None:
    uploads = torch.randint(0, 256, (4, 8 * 9000), dtype=torch.uint8)
    uploads = uploads.pin_memory() if device == "cuda" else uploads
    uploads[1, :8].view(torch.int64)[0] = num_words
    inputs = torch.full((8 * 9000,), 7, dtype=torch.uint8, device=device)
    pull_step_triton(inputs, uploads, torch.tensor([5], dtype=torch.int32, device=device))
    assert torch.equal(inputs[: 8 * num_words].cpu(), uploads[1, : 8 * num_words])
    assert (inputs[8 * num_words :] == 7).all()


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("num_passes", [1, 4])
def test_draft_rows(device: str, num_passes: int, num_groups: int) -> None:
    """Sequences with room for all drafts, for some and for none, and padding."""
    positions, last_rows = torch.tensor([8, 9, 2, 17, 0]), torch.tensor([1, 2, 3, 0, 0])
    capacities = torch.tensor([12, 4, 18, 0, 0], dtype=torch.int32)
    tables = torch.randint(0, 100, (num_groups, 7, 5), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    given = positions, last_rows, capacities, tables[:, :5]
    want = ops.draft_rows.reference(*given, num_passes, BLOCK_SIZE)
    for where, run in (("cpu", ops.draft_rows), (device, draft_rows_triton)):
        found = run(*(x.to(where) for x in given), num_passes, BLOCK_SIZE)
        for name, one, other in zip(want._fields, found, want, strict=True):
            assert one.dtype == other.dtype
            assert torch.equal(one.cpu(), other), name
    assert want.cu_seqlens_q.tolist() == [0, 1, 2, 3, 3, 3]
    assert want.positions_PS[0].tolist() == [10, 3, 18, 9, 9]
    assert want.seq_lens_PS[0].tolist() == [11, 4, 18, 0, 0]
    blocks = tables[:, [0, 1], [2, 0]].long()
    assert torch.equal(want.slots_GPS[:, 0, :2], blocks * BLOCK_SIZE + torch.tensor([2, 3]))
    assert (want.slots_GPS[:, 0, 2:] == -1).all()


@pytest.mark.parametrize("seed", range(4))
def test_drafts_behind(device: str, seed: int) -> None:
    rng = random.Random(seed)
    ids, rows, cu_samples, want = list[int](), list[int](), [0], list[int]()
    for _ in range(rng.randrange(1, 9)):
        num_tokens, num_drafts = rng.randrange(1, 4), rng.randrange(0, 6)
        ids += rng.choices(range(90), k=num_tokens + num_drafts)
        rows += range(len(ids) - num_drafts - 1, len(ids))
        want += [*ids[len(ids) - num_drafts :], -1]
        cu_samples.append(len(rows))
    cu_samples += [cu_samples[-1]] * 2
    given = torch.tensor([*ids, 5]), torch.tensor([*rows, 0, 0]), torch.tensor(cu_samples, dtype=torch.int32)
    for where, run in (("cpu", ops.drafts_behind), (device, drafts_behind_triton)):
        assert run(*(x.to(where) for x in given)).tolist() == [*want, -1, -1]


def test_accept_by_chance(device: str) -> None:
    R, V = 300, 50
    rng = torch.Generator().manual_seed(2)
    tokens, drafts = (torch.randint(-1, V, (R,), generator=rng) for _ in "ab")
    tokens[::3] = drafts[::3]
    seeds, positions = torch.randint(2**62, (R,), generator=rng), torch.arange(R, dtype=torch.int32) + 2**28
    given = tokens.int(), drafts, seeds, positions
    want = ops.accept_by_chance(*given, 0.6, V)
    assert accept_by_chance_triton(*(x.to(device) for x in given), 0.6, V).tolist() == want.tolist()
    is_verified = (tokens >= 0) & (drafts >= 0)
    assert torch.equal(want[~is_verified], tokens[~is_verified].int())
    assert 0.5 < float((want == drafts)[is_verified].float().mean()) < 0.7


@pytest.mark.parametrize("is_greedy", [False, True])
def test_newest_tokens(device: str, is_greedy: bool) -> None:
    params, rows = mixed_params(9, 50, seed=3), torch.tensor([0, 3, 8, 5])
    tokens = torch.tensor([5, 1, 2, -2, 4, 49, 6, 7, 8], dtype=torch.int32)
    want = ops.newest_tokens(tokens, params, rows, 3, 50, is_greedy)
    on = SampleParams(*(column.to(device) for column in params))
    found = newest_tokens_triton(tokens.to(device), on, rows.to(device), 3, 50, is_greedy)
    assert want.tokens_S.tolist() == found.tokens_S.tolist() == [5, 0, 8, 49]
    for one, other in zip(found.params_S, want.params_S, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)
    assert torch.equal(found.positions_KS.cpu(), want.positions_KS)
    assert torch.equal(want.positions_KS[2], params.position[rows] + 3)
    assert bool(want.params_S.temperature.any()) is not is_greedy


def test_keep_draft(device: str) -> None:
    tokens = torch.tensor([5, -2, 60], dtype=torch.int32)
    for where, run in (("cpu", ops.keep_draft), (device, keep_draft_triton)):
        drafts = torch.full((3, 2), 7, dtype=torch.int32, device=where)
        assert run(tokens.to(where), drafts, 1, 50).tolist() == [5, 0, 49]
        assert drafts.tolist() == [[7, 5], [7, 0], [7, 49]]

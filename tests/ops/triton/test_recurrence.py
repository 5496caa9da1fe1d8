"""Kernels with recurrent state against float64, and the same bits in any chunks and batch."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import pytest
import torch

from octavo import ops
from octavo.models.layer_cache import recurrent_state, state_layer
from octavo.ops.recurrent.gated_norm import Gate
from octavo.runtime.memory_budget import chunk_bytes
from octavo_kernels.triton.launch import invariant
from octavo_kernels.triton.recurrent import causal_conv, recurrence, selective_scan
from octavo_kernels.triton.recurrent.gated_norm import gated_norm_triton
from octavo_kernels.triton.recurrent.recurrence import RECURRENT_ROWS
from tests.ops.recurrent_cases import CASES, Case, delta_case, in_chunks, linear_case, state_space_case, step
from tests.ops.triton.poison import poison_new_tensors
from tests.tiers import one_in
from tests.triton_interpreter import quick_first

NAMES = {
    **dict.fromkeys(("causal_conv", "gated_conv"), causal_conv),
    **dict.fromkeys(("gated_delta", "state_space", "linear_attention"), recurrence),
    "selective_scan": selective_scan,
}
"""The ops, and the modules of their kernels."""


@pytest.fixture(autouse=True)
def kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The ops run these kernels, whichever device the tensors are on: new ones are on the one under test."""
    torch.manual_seed(0)
    poison_new_tensors(monkeypatch)
    for name, module in NAMES.items():
        run = getattr(module, f"{name}_triton")
        monkeypatch.setattr(getattr(ops, name), "_choose", lambda *_, run=run: run)
        getattr(ops, name)._chosen.clear()
    with torch.device(device) if device != "cpu" else contextlib.nullcontext():
        yield
    for name in NAMES:
        getattr(ops, name)._chosen.clear()


def exact(case: Case, x: torch.Tensor, state: torch.Tensor, rows: object) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        for name in NAMES:
            op = getattr(ops, name)
            patch.setattr(op, "_chosen", {(x.device.type, torch.float64): op.reference})
        patch.setattr(ops.gated_norm, "_chosen", {(x.device.type, torch.float64): ops.gated_norm.reference})
        return case.run(x.double(), state, rows)  # type: ignore[arg-type]


@one_in(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", quick_first(1, [torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("lengths", [[(3, 3), (1, 9), (7, 12), (0, 4), (1, 1), (2, 2)], [(1, 1), (1, 9), (1, 4)]])
def test_close_to_float64(device: str, name: str, dtype: torch.dtype, lengths: list[tuple[int, int]]) -> None:
    case, slots = CASES[name](), [4, 0, 3, 6, 2, -1][: len(lengths)]
    num_rows = sum(rows for rows, _ in lengths)
    x = case.inputs(num_rows).to(dtype)
    state = torch.randn(7, *case.state_shape).to(dtype if "conv" in name else torch.float32)
    state[[slot for (rows, length), slot in zip(lengths, slots, strict=True) if rows == length and slot >= 0]] = float(
        "nan"
    )
    before, exact_state = state.clone(), state.double()
    right = exact(case, x, exact_state, step(lengths, slots))
    found = case.run(x, state, step(lengths, slots))
    used = [slot for (rows, _), slot in zip(lengths, slots, strict=True) if rows and slot >= 0]
    tolerance = 2e-5 if dtype == torch.float32 else 3e-2
    known = num_rows - (2 if len(lengths) > 3 else 0)
    for numbers, wanted in ((found[:known], right[:known]), (state[used], exact_state[used])):
        assert (numbers.double() - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=1)
    others = [slot for slot in range(7) if slot not in used]
    assert torch.equal(state[others].nan_to_num(7), before[others].nan_to_num(7))


@one_in(5)
@pytest.mark.parametrize("name", quick_first(6, ["conv", "gated conv", "delta", "state space", "scan", "linear"]))
def test_same_bits_in_any_chunks_and_batch(device: str, name: str) -> None:
    case = CASES[name]()
    x, state = case.inputs(9), torch.randn(5, *case.state_shape)
    states = [state.clone() for _ in range(3)]
    whole = in_chunks(case, x, states[0], 2, [9])
    assert torch.equal(in_chunks(case, x, states[1], 2, [1, 1, 4, 1, 2]), whole)
    other = case.inputs(4)
    both = case.run(torch.cat((other[:3], x, other[3:])), states[2], step([(3, 8), (9, 9), (1, 1)], [4, 2, 0]))
    assert torch.equal(both[3:12], whole)
    assert torch.equal(states[0][2], states[1][2])
    assert torch.equal(states[0][2], states[2][2])


LONG = {
    "delta": lambda: delta_case(1, 2),
    "state space": lambda: state_space_case(2, groups=1),
    "linear": lambda: linear_case(2),
    "delta by channel": lambda: delta_case(2, 2, 20, 16, by_channel=True, gate="sigmoid"),
    "delta of bounded decays": lambda: delta_case(2, 2, 20, 16, by_channel=True, lowest=-0.2),
    "delta with negative eigenvalues": lambda: delta_case(beta_scale=2.0, gate="sigmoid", is_tiled=True),
    "state space in groups": state_space_case,
    "state space with limits": lambda: state_space_case(groups=1, limits=(0.6, 0.9)),
    "linear without activation": lambda: linear_case(2, activation=False),
    **{f"delta of {size}": lambda size=size: delta_case(1, 2, size, size) for size in (64, 128, 256)},
    **{f"state space of {size}": lambda size=size: state_space_case(2, 64, 1, size) for size in (64, 128, 256)},
}
"""Rules that are computed in chunks where a sequence has many rows."""
MIXED, MIXED_SLOTS = [(3, 3), (RECURRENT_ROWS + 1, 90), (0, 5), (130, 130), (1, 9), (40, 75)], [4, 0, 5, 3, 6, -1]
"""Rows and lengths of sequences short and long, new and not, one of them padding."""


@one_in(3)
@pytest.mark.parametrize("name", quick_first(4, LONG))
@pytest.mark.parametrize("dtype", quick_first(1, [torch.bfloat16, torch.float32]))
def test_long_sequences_in_chunks_are_close_to_float64(device: str, name: str, dtype: torch.dtype) -> None:
    case, num_known = LONG[name](), sum(rows for rows, _ in MIXED[:-1])
    x, state = case.inputs(num_known + MIXED[-1][0]).to(dtype), torch.randn(7, *case.state_shape)
    state[[4, 3]] = float("nan")  # a slot is read by those alone that had rows before
    before, exact_state = state.clone(), state.double()
    right = exact(case, x, exact_state, step(MIXED, MIXED_SLOTS))
    found = case.run(x, state, step(MIXED, MIXED_SLOTS))
    limit, used = 2e-6 if dtype == torch.float32 else 1e-2, [4, 0, 3, 6]
    for numbers, wanted in ((found[:num_known], right[:num_known]), (state[used], exact_state[used])):
        assert (numbers.double() - wanted).norm() <= limit * wanted.norm()
    assert torch.equal(state[[1, 2, 5]], before[[1, 2, 5]])
    with invariant():
        row_by_row, states = case.run(x, before, step(MIXED, MIXED_SLOTS)), before
    assert torch.equal(found[:3], row_by_row[:3]), "few rows are computed one after the other"
    assert torch.equal(state[[4, 6]], states[[4, 6]])
    is_chunked = max(case.state_shape[1:]) * dtype.itemsize <= 512
    assert torch.equal(state[[0, 3]], states[[0, 3]]) != is_chunked


@pytest.mark.parametrize("name", quick_first(1, ["delta", "state space", "linear"]))
def test_one_long_sequence_beside_many_of_six_rows(device: str, name: str) -> None:
    """As in a graph, whose shape says nothing of how the rows are divided: places of sequences without rows follow."""
    case, lengths = LONG[name](), [(6, 6)] * 9 + [(70, 100)] + [(6, 40)] * 9 + [(0, 0)] * 4
    slots = [*range(19), *[-1] * 4]
    x, state = case.inputs(178).to(torch.bfloat16), torch.randn(20, *case.state_shape)
    exact_state, alone = state.double(), state.clone()
    right = exact(case, x, exact_state, step(lengths, slots))
    found = case.run(x, state, step(lengths, slots))
    for numbers, wanted in ((found, right), (state, exact_state)):
        assert (numbers.double() - wanted).norm() <= 1e-2 * wanted.norm()
    last = case.run(x[-6:], alone, step(lengths[18:19], slots[18:19]))
    assert torch.equal(last, found[-6:])
    assert torch.equal(alone[18], state[18])


@pytest.mark.parametrize("name", quick_first(1, ["delta", "state space"]))
def test_chunks_have_the_same_bits_where_steps_end_between_them(device: str, name: str) -> None:
    case = LONG[name]()
    x, states = case.inputs(200), [torch.zeros(3, *case.state_shape) for _ in range(2)]
    whole = in_chunks(case, x, states[0], 1, [200])
    assert torch.equal(in_chunks(case, x, states[1], 1, [64, 128, 8])[:192], whole[:192])


@pytest.mark.parametrize("name", ["delta", "delta by channel"])
def test_chunks_take_no_more_memory_than_is_kept_for_them(
    device: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, made = LONG[name](), list[torch.Tensor]()
    x, state, empty = case.inputs(146), torch.zeros(7, *case.state_shape), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: made.append(empty(*args, **kwargs)) or made[-1])
    out = case.run(x, state, step([(70, 70), (34, 34), (1, 9), (34, 90), (7, 7)], [4, 0, 5, 3, 6]))
    layer = state_layer(recurrent_state(*case.state_shape, 1))
    assert sum(tensor.nbytes for tensor in made) - out.nbytes <= chunk_bytes([layer], 146, 5, torch.float32)


@pytest.mark.parametrize("beta_scale", quick_first(1, [2.0, 1.0]))
def test_chunks_of_one_key_and_of_any_decay(device: str, beta_scale: float) -> None:
    """A text that repeats a token has one key over and over: powers of the matrix that is inverted would be huge."""
    case = delta_case(1, 2, 16, 16, beta_scale=beta_scale)
    x = case.inputs(128)
    x[:, :32] = x[0, :32]  # queries and keys
    x[:, 64:66] = torch.tensor([-30.0, 30.0])  # a head that forgets nothing, and one that forgets all
    states = [torch.zeros(1, *case.state_shape).to(dtype) for dtype in (torch.float32, torch.float64)]
    right = exact(case, x, states[1], step([(128, 128)], [0]))
    found = case.run(x, states[0], step([(128, 128)], [0]))
    assert (found.double() - right).norm() <= 2e-5 * right.norm()
    assert (states[0].double() - states[1]).norm() <= 2e-5 * states[1].norm()


@pytest.mark.parametrize("name", quick_first(1, ["linear", "delta", "state space"]))
def test_batch_invariance_has_no_chunks(device: str, name: str) -> None:
    case = LONG[name]()
    x, states = case.inputs(40), [torch.zeros(3, *case.state_shape) for _ in range(2)]
    with invariant():
        assert torch.equal(in_chunks(case, x, states[0], 1, [40]), in_chunks(case, x, states[1], 1, [1, 36, 3]))
    assert torch.equal(*states)


def test_chunks_of_numbers_that_are_forgotten_at_once(device: str) -> None:
    """Decays of a key's numbers that leave nothing in one row and all in the next: no factor may be more than 1."""
    case, num_rows = delta_case(1, 2, 16, 16, by_channel=True), 100
    x = case.inputs(num_rows)
    x[:, 64:96] = torch.where(torch.rand(num_rows, 32) < 0.1, 3e4, -10.0)
    states = [torch.zeros(1, *case.state_shape).to(dtype) for dtype in (torch.float32, torch.float64)]
    right = exact(case, x, states[1], step([(num_rows, num_rows)], [0]))
    found = case.run(x, states[0], step([(num_rows, num_rows)], [0]))
    assert (found.double() - right).norm() <= 3e-5 * right.norm()
    assert (states[0].double() - states[1]).norm() <= 3e-5 * states[1].norm()


@pytest.mark.parametrize("is_gated_first", [False, True])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_gated_norm(device: str, gate: Gate, is_gated_first: bool) -> None:
    wide, weight = torch.randn(3, 100), torch.randn(40)
    x, gates = wide[:, :40], wide[:, 50:90]
    run = functools.partial(ops.gated_norm.reference, is_gated_first=is_gated_first)
    right = run(x.double(), gates.double(), weight.double(), 1e-5, 20, gate)
    found = gated_norm_triton(x, gates, weight, 1e-5, 20, gate, is_gated_first=is_gated_first)
    torch.testing.assert_close(found.double(), right, rtol=2e-6, atol=2e-6)

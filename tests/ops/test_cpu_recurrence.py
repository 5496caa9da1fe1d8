"""CPU kernels with recurrent state: close to float64, and the same bits in any chunks, batch and number of threads."""

from __future__ import annotations

import pytest
import torch

from octavo import ops
from octavo.ops import dispatch
from octavo.ops.recurrent.gated_norm import Gate
from octavo_kernels.cpu.calls import Arena, recording
from octavo_kernels.cpu.threads import num_threads, set_num_threads
from tests.ops.cpu_cases import needs_float_kernels, poison_new_tensors
from tests.ops.recurrent_cases import (
    CASES,
    Case,
    conv_case,
    delta_case,
    gated_conv_case,
    in_chunks,
    linear_case,
    scan_case,
    state_space_case,
    step,
    with_marks,
)
from tests.tiers import one_in

pytestmark = needs_float_kernels

LARGE = {
    "conv of whole blocks": lambda: conv_case(128),
    "conv of many channels": lambda: gated_conv_case(192),
    "delta of 128": lambda: delta_case(2, 4, 128, 128),
    "delta by channel of 64": lambda: delta_case(2, 2, 64, 64, by_channel=True, gate="sigmoid"),
    "state space of 64": lambda: state_space_case(4, 64, 2, 128),
    "scan of many channels": lambda: scan_case(96, 16),
    "linear of odd sizes": lambda: linear_case(3, 20),
    "delta of odd sizes": lambda: delta_case(1, 3, 7, 50),
}
ALL = {**CASES, **LARGE}


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    poison_new_tensors(monkeypatch)


def states(name: str, case: Case, dtype: torch.dtype = torch.float32, num_slots: int = 7) -> torch.Tensor:
    return torch.randn(num_slots, *case.state_shape).to(torch.float32 if "conv" in name else dtype)


@one_in(3)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_close_to_float64(name: str, dtype: torch.dtype) -> None:
    case = ALL[name]()
    lengths, slots = [(3, 3), (1, 9), (40, 47), (0, 4), (1, 1), (2, 2)], [4, 0, 3, 6, 2, -1]
    x, state = case.inputs(47), states(name, case, dtype)
    state[[2, 4]] = float("nan")
    exact_state, before = state.double(), state.clone()
    with dispatch.only("reference"):
        exact = case.run(x.double(), exact_state, step(lengths, slots))
    found = case.run(x, state, step(lengths, slots))
    tolerance = 2e-5 if dtype == torch.float32 or "conv" in name else 4e-2
    used = [4, 0, 3, 2]
    for numbers, right in ((found[:45], exact[:45]), (state[used], exact_state[used])):
        assert (numbers.double() - right).abs().max() <= tolerance * right.abs().max().clamp(min=1)
    assert torch.equal(state[[1, 5, 6]], before[[1, 5, 6]])


@one_in(3)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_in_any_chunks_and_batch(name: str, dtype: torch.dtype) -> None:
    case, before = ALL[name](), num_threads()
    x, state = case.inputs(70), states(name, case, dtype)
    all_states = [state.clone() for _ in range(4)]
    whole = in_chunks(case, x, all_states[0], 2, [70])
    assert torch.equal(in_chunks(case, x, all_states[1], 2, [1, 1, 33, 1, 2, 32]), whole)
    other = case.inputs(4)
    both = case.run(torch.cat((other[:3], x, other[3:])), all_states[2], step([(3, 8), (70, 70), (1, 1)], [4, 2, 0]))
    assert torch.equal(both[3:73], whole)
    try:
        set_num_threads(3)
        assert torch.equal(in_chunks(case, x, all_states[3], 2, [1] * 4 + [66]), whole)
    finally:
        set_num_threads(before)
    for found in all_states[1:]:
        assert torch.equal(found[2], all_states[0][2])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_kept_at_marks(name: str, dtype: torch.dtype) -> None:
    case = ALL[name]()
    for found, right in with_marks(case, case.inputs(50), states(name, case, dtype, 9)):
        assert torch.equal(found, right)


@pytest.mark.parametrize("name", CASES)
def test_recorded_steps_read_the_sequences_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    case = CASES[name]()
    x, state = case.inputs(2), states(name, case)
    rows = step([(1, 5), (1, 3)], [3, 1])
    with recording(Arena()) as made:
        out = case.run(x, state, rows)
    assert not made.foreign
    x.copy_(case.inputs(2))
    rows.slots_S.copy_(torch.tensor([0, 5]))
    rows.seq_lens_S.copy_(torch.tensor([1, 9]))
    expected_state = state.clone()
    made.repeat()
    assert torch.equal(out, case.run(x, expected_state, step([(1, 1), (1, 9)], [0, 5])))
    assert torch.equal(state, expected_state)


@pytest.mark.parametrize("name", CASES)
def test_slots_beyond_the_pool_are_refused(name: str) -> None:
    case = CASES[name]()
    with pytest.raises(IndexError, match="slots"):
        case.run(case.inputs(1), states(name, case), step([(1, 1)], [7]))
    with pytest.raises(IndexError, match="slots"):
        case.run(case.inputs(2), states(name, case), step([(2, 2)], [0], {0: 7}))


@pytest.mark.parametrize("is_gated_first", [False, True])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
@pytest.mark.parametrize(("columns", "width"), [(128, 128), (96, 32), (60, 20)])
def test_gated_norm(gate: Gate, is_gated_first: bool, columns: int, width: int) -> None:
    wide, weight = torch.randn(9, 2 * columns + 8), torch.randn(columns)
    x, gates = wide[:, 4 : 4 + columns], wide[:, 8 + columns :]
    exact = ops.gated_norm.reference(
        x.double(), gates.double(), weight.double(), 1e-5, width, gate, is_gated_first=is_gated_first
    )
    found = ops.gated_norm(x, gates, weight, 1e-5, width, gate, is_gated_first=is_gated_first)
    torch.testing.assert_close(found.double(), exact, rtol=2e-6, atol=2e-6)
    alone = ops.gated_norm(x[4:5], gates[4:5], weight, 1e-5, width, gate, is_gated_first=is_gated_first)
    assert torch.equal(alone, found[4:5])

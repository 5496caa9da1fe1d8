"""Ops with recurrent state: the references against their formulas in float64, one row at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.ops import dispatch
from octavo.ops.recurrent.gated_delta import DeltaHeads
from octavo.ops.recurrent.gated_norm import Gate
from octavo.ops.recurrent.recurrence import StateRows
from octavo.ops.recurrent.selective_scan import ScanChannels
from octavo.ops.recurrent.state_space import StateSpaceHeads
from tests.ops.recurrent_cases import CASES, in_chunks, step, with_marks

LENGTHS = [(3, 3), (1, 9), (0, 4), (5, 7), (1, 1), (2, 2)]
SLOTS = [4, 0, 3, 6, 2, -1]


@pytest.fixture(autouse=True)
def references() -> object:
    with dispatch.only("reference"):
        torch.manual_seed(0)
        yield


def past_of(state: Tensor, slot: int, rows: int, length: int) -> Tensor:
    return torch.zeros_like(state[slot]) if rows == length else state[slot].clone()


def check(found: Tensor, after: Tensor, expected: dict[int, tuple[Tensor, Tensor]], before: Tensor) -> None:
    """Outputs and states of the sequences, by their index in LENGTHS; all other slots are as they were."""
    first = 0
    untouched = before.clone()
    for s, ((rows, _), slot) in enumerate(zip(LENGTHS, SLOTS, strict=True)):
        if s in expected:
            outputs, state = expected[s]
            torch.testing.assert_close(found[first : first + rows], outputs, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(after[slot], state, rtol=1e-10, atol=1e-12)
            untouched[slot] = after[slot]
        first += rows
    assert torch.equal(after.nan_to_num(7.0), untouched.nan_to_num(7.0))


def sequences() -> list[tuple[int, slice, int, int]]:
    """Index, rows, length and slot of those with rows and a slot."""
    found, first = [], 0
    for s, ((rows, length), slot) in enumerate(zip(LENGTHS, SLOTS, strict=True)):
        if rows and slot >= 0:
            found.append((s, slice(first, first + rows), length, slot))
        first += rows
    return found


def used_slots(*shape: int) -> Tensor:
    """Slots of earlier sequences; those of sequences that begin in this step hold NaN."""
    state = torch.randn(8, *shape, dtype=torch.float64)
    for slot, (rows, length) in zip(SLOTS, LENGTHS, strict=True):
        if rows == length and slot >= 0:
            state[slot] = math.nan
    return state


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_causal_conv(width: int, activation: str | None) -> None:
    x, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((12, 5), (width, 5), (5,)))
    before = used_slots(width - 1, 5)
    expected = {}
    for s, rows, length, slot in sequences():
        inputs = torch.cat((past_of(before, slot, rows.stop - rows.start, length), x[rows]))
        sums = [sum((weight[w] * inputs[t + w] for w in range(width)), bias) for t in range(rows.stop - rows.start)]
        outputs = torch.stack([y * y.sigmoid() if activation else y for y in sums])
        expected[s] = outputs, inputs[-(width - 1) :]
    after = before.clone()
    found = ops.causal_conv(x, weight, bias, after, step(LENGTHS, SLOTS), activation)
    check(found, after, expected, before)


def test_gated_conv_multiplies_before_and_after() -> None:
    bcx, weight = torch.randn(12, 15, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    before = used_slots(2, 5)
    after = before.clone()
    b, c, x = bcx.chunk(3, dim=1)
    other = before.clone()
    expected = c * ops.causal_conv(b * x, weight, None, other, step(LENGTHS, SLOTS))
    assert torch.equal(ops.gated_conv(bcx, weight, None, after, step(LENGTHS, SLOTS)), expected)
    assert torch.equal(after.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize(("by_channel", "lowest"), [(False, 0.0), (True, 0.0), (True, -5.0)])
@pytest.mark.parametrize(("gate", "beta_scale"), [("silu", 1.0), ("sigmoid", 2.0)])
def test_gated_delta(by_channel: bool, lowest: float, gate: Gate, beta_scale: float) -> None:
    G, N, K, V = 2, 4, 3, 5
    x = torch.randn(12, 2 * G * K + N * V, dtype=torch.float64)
    dt, beta = torch.randn(12, N * K if by_channel else N), torch.randn(12, N)
    gates, norm = torch.randn(12, N * V, dtype=torch.float64), torch.randn(V, dtype=torch.float64)
    a_log, dt_bias = torch.randn(N).double(), torch.randn(dt.shape[1]).double()
    heads = DeltaHeads(G, N, K, V, a_log, dt_bias, norm, 1e-6, gate, beta_scale, lowest=lowest)
    before = used_slots(N, K, V)
    expected = {}
    for s, rows, length, slot in sequences():
        S = past_of(before, slot, rows.stop - rows.start, length)
        outputs = []
        for t in range(rows.start, rows.stop):
            out = torch.empty(N, V, dtype=torch.float64)
            for n in range(N):
                g = n // (N // G)
                q, k = x[t, g * K : (g + 1) * K], x[t, (G + g) * K : (G + g + 1) * K]
                v = x[t, 2 * G * K + n * V : 2 * G * K + (n + 1) * V]
                q, k = (y / (y @ y + 1e-6).sqrt() for y in (q, k))
                own = slice(n * K, (n + 1) * K) if by_channel else slice(n, n + 1)
                rate, at = a_log[n].exp(), dt[t, own].double() + dt_bias[own]
                decay = torch.exp(lowest / (1 + (-rate * at).exp()) if lowest else -rate * torch.log1p(at.exp()))
                decayed = decay[:, None] * S[n]
                u = beta_scale * torch.sigmoid(beta[t, n].double()) * (v - decayed.T @ k)
                S[n] = decayed + torch.outer(k, u)
                y, z = S[n].T @ q / K**0.5, gates[t, n * V : (n + 1) * V]
                z = z * z.sigmoid() if gate == "silu" else z.sigmoid()
                out[n] = y / (y.square().mean() + 1e-6).sqrt() * norm * z
            outputs.append(out.flatten())
        expected[s] = torch.stack(outputs), S
    after = before.clone()
    found = ops.gated_delta(x, dt.double(), beta.double(), gates, heads, after, step(LENGTHS, SLOTS))
    check(found, after, expected, before)


@pytest.mark.parametrize("limits", [(0.0, math.inf), (0.3, 0.8)])
def test_state_space(limits: tuple[float, float]) -> None:
    N, P, G, K = 4, 3, 2, 5
    x, dt = torch.randn(12, N * P + 2 * G * K, dtype=torch.float64), torch.randn(12, N, dtype=torch.float64)
    a_log, dt_bias, d = (torch.randn(N, dtype=torch.float64) for _ in range(3))
    before = used_slots(N, K, P)
    expected = {}
    for s, rows, length, slot in sequences():
        S = past_of(before, slot, rows.stop - rows.start, length)
        outputs = []
        for t in range(rows.start, rows.stop):
            out = torch.empty(N, P, dtype=torch.float64)
            for n in range(N):
                g, value = n // (N // G), x[t, n * P : (n + 1) * P]
                b, c = (x[t, N * P + part * K : N * P + (part + 1) * K] for part in (g, G + g))
                size = torch.log1p(torch.exp(dt[t, n] + dt_bias[n])).clamp(*limits)
                S[n] = torch.exp(-a_log[n].exp() * size) * S[n] + torch.outer(b, size * value)
                out[n] = S[n].T @ c + d[n] * value
            outputs.append(out.flatten())
        expected[s] = torch.stack(outputs), S
    after = before.clone()
    heads = StateSpaceHeads(N, P, G, K, a_log, dt_bias, d, limits)
    check(ops.state_space(x, dt, heads, after, step(LENGTHS, SLOTS)), after, expected, before)


def test_selective_scan() -> None:
    C, K = 4, 3
    x, dt, b, c = (torch.randn(12, size, dtype=torch.float64) for size in (C, C, K, K))
    a_log, dt_bias, d = (torch.randn(*shape, dtype=torch.float64) for shape in ((K, C), (C,), (C,)))
    before = used_slots(1, K, C)
    expected = {}
    for s, rows, length, slot in sequences():
        S = past_of(before, slot, rows.stop - rows.start, length)
        outputs = []
        for t in range(rows.start, rows.stop):
            out = torch.empty(C, dtype=torch.float64)
            for n in range(C):
                size = torch.log1p(torch.exp(dt[t, n] + dt_bias[n]))
                S[0, :, n] = torch.exp(-a_log[:, n].exp() * size) * S[0, :, n] + b[t] * size * x[t, n]
                out[n] = S[0, :, n] @ c[t] + d[n] * x[t, n]
            outputs.append(out)
        expected[s] = torch.stack(outputs), S
    after = before.clone()
    found = ops.selective_scan(x, dt, b, c, ScanChannels(a_log, dt_bias, d), after, step(LENGTHS, SLOTS))
    check(found, after, expected, before)


def test_linear_attention() -> None:
    N, H = 3, 4
    x, decay = torch.randn(12, 3 * N * H, dtype=torch.float64), torch.rand(N, dtype=torch.float64)
    before = used_slots(N, H, H)
    expected = {}
    for s, rows, length, slot in sequences():
        S = past_of(before, slot, rows.stop - rows.start, length)
        outputs = []
        for t in range(rows.start, rows.stop):
            q, k, v = (x[t] * x[t].sigmoid()).view(3, N, H)
            S = decay[:, None, None] * S + torch.einsum("nk,nv->nkv", k, v)
            outputs.append(torch.einsum("nkv,nk->nv", S, q).flatten())
        expected[s] = torch.stack(outputs), S
    after = before.clone()
    check(ops.linear_attention(x, decay, after, step(LENGTHS, SLOTS), "silu"), after, expected, before)


@pytest.mark.parametrize("is_gated_first", [False, True])
@pytest.mark.parametrize("gate", ["silu", "sigmoid"])
def test_gated_norm(gate: Gate, is_gated_first: bool) -> None:
    x, gates, weight = (torch.randn(*s, dtype=torch.float64) for s in ((4, 12), (4, 12), (12,)))
    factors = gates.sigmoid() * (gates if gate == "silu" else 1)
    y = x * factors if is_gated_first else x
    scale = (y.view(4, 3, 4).square().mean(-1, keepdim=True) + 1e-5).rsqrt().expand(4, 3, 4).reshape(4, 12)
    exact = y * scale * weight * (1 if is_gated_first else factors)
    found = ops.gated_norm(x, gates, weight, 1e-5, 4, gate, is_gated_first=is_gated_first)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_chunks_and_neighbours_change_nothing(name: str) -> None:
    case = CASES[name]()
    x, state = case.inputs(9).double(), torch.randn(5, *case.state_shape).double()
    states = [state.clone() for _ in range(3)]
    whole = in_chunks(case, x, states[0], 2, [9])
    torch.testing.assert_close(in_chunks(case, x, states[1], 2, [1, 1, 4, 1, 2]), whole)
    other = case.inputs(4)
    both = case.run(torch.cat((other[:3], x, other[3:])), states[2], step([(3, 8), (9, 9), (1, 1)], [4, 2, 0]))
    torch.testing.assert_close(both[3:12], whole)
    torch.testing.assert_close(states[1][2], states[0][2])
    torch.testing.assert_close(states[2][2], states[0][2])


def test_rows_of_padding_have_no_state() -> None:
    case = CASES["delta"]()
    state = torch.randn(2, *case.state_shape)
    before = state.clone()
    rows = StateRows(*(torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 0], [0, 0], [-1, -1])), 1)
    case.run(case.inputs(3), state, rows)
    assert torch.equal(state, before)


@pytest.mark.parametrize("name", CASES)
def test_states_are_kept_at_marks(name: str) -> None:
    case = CASES[name]()
    for found, right in with_marks(case, case.inputs(50).double(), torch.randn(9, *case.state_shape).double()):
        torch.testing.assert_close(found, right)

"""The op of expert layers against float64, token by token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from octavo import ops
from octavo.ops.moe import CappedSwish, ClampedSwish, ExpertActivation, Experts, SoftcappedSwish

T, D, F, X, S = 23, 32, 16, 7, 3


def make(activation: ExpertActivation, has_biases: bool, dtype: torch.dtype) -> Experts:
    torch.manual_seed(len(str(activation)) + has_biases)
    biases = [torch.randn(X, 2 * F, dtype=dtype), torch.randn(X, D, dtype=dtype)] if has_biases else [None, None]
    return Experts(torch.randn(X, 2 * F, D, dtype=dtype), torch.randn(X, D, F, dtype=dtype), activation, *biases)


def one_by_one(x_TD: Tensor, ids_TS: Tensor, shares_TS: Tensor, experts: Experts) -> Tensor:
    out = torch.zeros(x_TD.shape, dtype=torch.float64)
    for t, s in torch.cartesian_prod(torch.arange(len(x_TD)), torch.arange(S)).tolist():
        e = int(ids_TS[t, s])
        gate_up = experts.gate_up[e].double() @ x_TD[t].double()
        if experts.gate_up_bias is not None:
            gate_up += experts.gate_up_bias[e].double()
        gate, up = gate_up.chunk(2)
        if isinstance(experts.activation, ClampedSwish):
            gate, up = gate.clamp(max=experts.activation.limit), up.clamp(-2.0, 2.0) + 1
            gate = gate / (1 + torch.exp(-experts.activation.alpha * gate))
        elif isinstance(experts.activation, CappedSwish):
            gate, up = (gate / (1 + torch.exp(-gate))).clamp(max=experts.activation.cap or 0.4), up.clamp(-0.4, 0.4)
        elif isinstance(experts.activation, SoftcappedSwish):
            gate, up = 3 * (gate / 3).tanh() / (1 + torch.exp(-gate)), 2 * (up / 2).tanh()
        elif experts.activation == "silu":
            gate = gate / (1 + torch.exp(-gate))
        else:
            gate = functional.gelu(gate, approximate="tanh")
        y = experts.down[e].double() @ (gate * up)
        if experts.down_bias is not None:
            y += experts.down_bias[e].double()
        out[t] += shares_TS[t, s].double() * y
    return out


@pytest.mark.parametrize(
    "activation",
    ["silu", "gelu_tanh", ClampedSwish(1.7, 2.0), CappedSwish(0.4), CappedSwish(0.4, 0.3), SoftcappedSwish(3.0, 2.0)],
)
@pytest.mark.parametrize("has_biases", [False, True])
def test_experts_are_what_they_say(activation: ExpertActivation, has_biases: bool) -> None:
    experts = make(activation, has_biases, torch.float32)
    x, shares = torch.randn(T, D), torch.rand(T, S)
    ids = torch.stack([torch.randperm(X - 1)[:S] for _ in range(T)])  # one expert has no rows
    found = ops.moe(x, ids, shares, experts)
    torch.testing.assert_close(found.double(), one_by_one(x, ids, shares, experts), rtol=1e-4, atol=1e-3)


def test_a_row_does_not_depend_on_the_others() -> None:
    experts = make("silu", True, torch.float32)
    x, shares = torch.randn(T, D), torch.rand(T, S)
    ids = torch.stack([torch.randperm(X)[:S] for _ in range(T)])
    whole = ops.moe(x, ids, shares, experts)
    for t in range(0, T, 5):
        assert torch.equal(ops.moe(x[t : t + 1], ids[t : t + 1], shares[t : t + 1], experts)[0], whole[t])


def test_sixteen_bits_round_the_result_alone() -> None:
    experts = make("silu", False, torch.bfloat16)
    x, shares = torch.randn(T, D).bfloat16(), torch.rand(T, S)
    ids = torch.stack([torch.randperm(X)[:S] for _ in range(T)])
    expected = one_by_one(x, ids, shares, experts)
    error = (ops.moe(x, ids, shares, experts).double() - expected).abs().max()
    assert error < 0.02 * expected.abs().max()

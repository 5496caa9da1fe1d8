"""The experts of a mixture in one call of the CPU: the same bits as one by one, in a recording too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo import ops
from octavo.layers.experts import PackedMixture
from octavo.layers.linear import Linear
from octavo.ops.linear.block_linear import PackedBlocks
from octavo.ops.moe import ClampedSwish, ExpertActivation, Experts, Routing, SeparateExperts, SquaredReLU, has_gates
from octavo.ops.moe import sum_over_experts as reduce
from octavo.quant.stored.block_weight import BlockWeight
from octavo.quant.stored.scaled import ScaledWeight
from octavo.quant.stored.stored_weight import LinearWeight
from octavo_kernels.cpu import experts as experts_module
from octavo_kernels.cpu import threads
from octavo_kernels.cpu.calls import Arena, recording
from tests.ops.cpu_cases import needs_float_kernels, random_blocks, random_values

pytestmark = needs_float_kernels

X, D, F, S = 5, 256, 256, 3


def dense(activation: ExpertActivation, dtype: torch.dtype, F: int = 32, has_biases: bool = False) -> Experts:
    N = 2 * F if has_gates(activation) else F
    biases = (torch.randn(X, N), torch.randn(X, D)) if has_biases else (None, None)
    weights = torch.randn(X, N, D) / 16, torch.randn(X, D, F) / 6
    return Experts(weights[0].to(dtype), weights[1].to(dtype), activation, *biases)


def packed(*make: Callable[[int, int, int], LinearWeight], activation: ExpertActivation = "silu") -> PackedMixture:
    """Experts whose gates and ups, then what is behind them, are stored so; the first two may be one weight."""
    *first, last = make
    rows = 2 * F // len(first)
    pairs = [(Linear([m(rows, D, i) for m in first]), Linear([last(D, F, X + i)])) for i in range(X)]
    return PackedMixture(pairs, activation)


def blocks(kind: str) -> Callable[[int, int, int], LinearWeight]:
    return lambda rows, columns, seed: BlockWeight(
        PackedBlocks.pack(random_blocks(kind, rows, columns, seed)), torch.float32
    )


def eight_bits(rows: int, columns: int, seed: int) -> LinearWeight:
    return ScaledWeight(random_values(rows, columns, 128), torch.float32)


CASES: dict[str, Callable[[], SeparateExperts]] = {
    "float32": lambda: dense("silu", torch.float32, has_biases=True),
    "bfloat16": lambda: dense("gelu_tanh", torch.bfloat16),
    "not gated": lambda: dense(SquaredReLU(), torch.float32),
    "clamped": lambda: dense(ClampedSwish(1.7, 2.0), torch.float32, has_biases=True),
    "narrow": lambda: dense("silu", torch.float32, F=24),
    "E4M3": lambda: packed(eight_bits, eight_bits),
    "Q4_K, Q6_K": lambda: packed(blocks("Q4_K"), blocks("Q6_K")),
    "Q4_0 and Q5_K, Q8_0": lambda: packed(blocks("Q4_0"), blocks("Q5_K"), blocks("Q8_0")),
}


def chosen(T: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    ids = torch.stack([torch.randperm(X)[:S] for _ in range(T)])
    return torch.randn(T, D), ids, torch.rand(T, S)


@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_one_by_one(name: str) -> None:
    experts = CASES[name]()
    x, ids, shares = chosen(9)
    ids[3, 1] = ids[5] = -1
    expected = reduce.reference(x, ids, shares, experts)
    assert torch.equal(reduce(x, ids, shares, experts), expected)
    for t in (0, 3, 5):
        assert torch.equal(reduce(x[t : t + 1], ids[t : t + 1], shares[t : t + 1], experts)[0], expected[t])
    residual = torch.randn(9, D)
    expected = reduce.reference(x, ids, shares, experts, residual.clone())
    assert torch.equal(reduce(x, ids, shares, experts, residual), expected)


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("T", [1, 9, 600])
def test_experts_of_few_and_many_rows(T: int, num_threads: int) -> None:
    """Each expert computed by one thread, as those of about as many rows are, and all of them by all threads."""
    experts = CASES["bfloat16"]()
    x, even, shares = chosen(T)
    even[:] = torch.arange(3 * T).view(T, 3) % 4
    uneven = torch.full((T, 3), -1)
    uneven[:, 1], uneven[0] = 2, torch.tensor([4, 2, 0])
    try:
        threads.set_num_threads(num_threads)
        for ids in (even, uneven):
            assert torch.equal(reduce(x, ids, shares, experts), reduce.reference(x, ids, shares, experts))
    finally:
        threads.set_num_threads(1)


def test_more_rows_than_one_call_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts_module, "RESULT_ROWS", 4)
    experts, residual = CASES["float32"](), torch.randn(11, D)
    given = chosen(11)
    assert torch.equal(reduce(*given, experts), reduce.reference(*given, experts))
    expected = reduce.reference(*given, experts, residual.clone())
    assert torch.equal(reduce(*given, experts, residual), expected)


def test_experts_of_several_kinds() -> None:
    """Some are wider than others, whose calls take smaller buffers."""
    narrow, make = packed(eight_bits, eight_bits).experts, blocks("Q4_K")
    wide = [(Linear([make(4 * F, D, i)]), Linear([make(D, 2 * F, X + i)])) for i in range(X)]
    experts = PackedMixture([(narrow, wide)[i % 2][i] for i in range(X)], "silu")
    given = chosen(9)
    with torch.inference_mode(), recording(Arena()) as calls:
        found = reduce(*given, experts)
    assert not calls.foreign
    assert torch.equal(found, reduce.reference(*given, experts))


@pytest.mark.parametrize("name", [name for name in CASES if name != "narrow"])
def test_a_recording_has_the_experts_that_are_chosen_then(name: str) -> None:
    experts = CASES[name]()
    x, ids, shares = chosen(4)
    with torch.inference_mode(), recording(Arena()) as made:
        found = reduce(x, ids, shares, experts)
    assert not made.foreign
    assert torch.equal(found, reduce.reference(x, ids, shares, experts))
    for own, other in zip((x, ids, shares), chosen(4, seed=1), strict=True):
        own.copy_(other)
    made.repeat()
    assert torch.equal(found, reduce.reference(x, ids, shares, experts))


@pytest.mark.parametrize("wrong", [X, -2])
def test_ids_of_no_expert_are_errors(wrong: int) -> None:
    x, ids, shares = chosen(4)
    ids[2, 0] = wrong
    with pytest.raises(IndexError, match=f"from 0 to {X - 1}"):
        reduce(x, ids, shares, CASES["float32"]())


WRONG: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, ...]]] = {
    "int64": lambda x, ids, shares, residual: (x, ids.int(), shares, residual),
    "shares": lambda x, ids, shares, residual: (x, ids, shares[:, :2], residual),
    "columns": lambda x, ids, shares, residual: (x[:, :128], ids, shares, residual[:, :128].contiguous()),
    "the residual is torch.float64": lambda x, ids, shares, residual: (x, ids, shares, residual.double()),
}


@pytest.mark.parametrize("message", WRONG)
def test_arguments_of_another_form_are_errors(message: str) -> None:
    experts = CASES["float32"]()
    given = *chosen(4), torch.randn(4, D)
    reduce(*given[:3], experts)
    x, ids, shares, residual = WRONG[message](*given)
    with pytest.raises(AssertionError, match=message):
        reduce(x, ids, shares, experts, residual)


ROUTINGS = {
    "softmax": Routing(3),
    "normalised, bias": Routing(3, normalises=True, scale=1.5, bias_X=torch.linspace(-1, 1, 12)),
    "groups": Routing(3, groups=(4, 2), scale=16.0),
    "sigmoid": Routing(3, True, "sigmoid", 2.5, (3, 2), correction_X=torch.linspace(0.5, -0.5, 12)),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_routes_are_those_of_the_reference(name: str) -> None:
    torch.manual_seed(1)
    x, norm, weight = torch.randn(70, 64), torch.rand(64) + 0.5, torch.randn(12, 64).bfloat16() / 8
    given = torch.stack([torch.randperm(12)[:3] for _ in range(70)])
    given[::2] = -1
    for taken in (None, given):
        expected = ops.route.reference(x, norm, 1e-6, weight, ROUTINGS[name], taken)
        with torch.inference_mode(), recording(Arena()) as made:
            found = ops.route(x, norm, 1e-6, weight, ROUTINGS[name], taken)
        assert not made.foreign
        assert torch.equal(found[1], expected[1])
        torch.testing.assert_close(found[2], expected[2], rtol=1e-5, atol=1e-7)
        one = ops.route(x[9:10], norm, 1e-6, weight, ROUTINGS[name], None if taken is None else taken[9:10])
        assert all(torch.equal(alone[0], batched[9]) for alone, batched in zip(one, found, strict=True))


@pytest.mark.parametrize("wrong", [12, -1])
def test_given_ids_of_no_expert_are_errors(wrong: int) -> None:
    given = torch.tensor([[-1, 99, 99], [4, 0, wrong]])
    with pytest.raises(IndexError, match="route: given experts must be from 0 to 11"):
        ops.route(torch.randn(2, 64), None, 0.0, torch.randn(12, 64), ROUTINGS["softmax"], given)


def test_of_equal_experts_and_groups_the_first_are_selected() -> None:
    equal = torch.ones(12, 16)
    for routing in ROUTINGS.values():
        routing = routing._replace(bias_X=None, correction_X=None)
        assert ops.route(torch.ones(1, 16), None, 0.0, equal, routing)[1].tolist() == [[0, 1, 2]]

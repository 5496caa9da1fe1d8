"""Experts divided among ranks: kernels on one GPU, and engines on several, or on one that two share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.engine.runner import expert_balance
from octavo.layers.expert_parallel import ExpertPlacement, PartialMixture
from octavo.layers.experts import DenseMixture, GroupedMixture
from octavo.ops.collective import SINGLE_RANK
from octavo.ops.moe import Experts, GroupedExperts, Routing, join_experts, route
from tests.gpu.checkpoints import NEEDS_FOUR, NUM_RANKS
from tests.gpu.graph_bits import assert_a_graph_gives_the_same_bits
from tests.gpu.test_families import OF_GPU, check_alike, generate
from tests.gpu.test_grouped_moe import joined
from tests.models.families import make_checkpoint
from tests.models.test_gpt_oss import make_packed
from tests.models.test_quantised import FORMATS, SIZES
from tests.quant.writers import quantise

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

X, S, D, F = 32, 4, 1024, 768
TOKENS = (1, 3, 9, 40, 700)
REPLAYS = 10
LOOKUP = json.dumps({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False})
FORMS = ("dense", "e2m1", "int4", "e4m3")


def halves(form: str) -> tuple[Any, list[PartialMixture]]:
    """A mixture, and its two halves."""
    if form == "dense":
        weights = [torch.randn(X, *shape, device="cuda") * shape[1] ** -0.5 for shape in ((2 * F, D), (D, F))]
        gate_up, down = (weight.bfloat16() for weight in weights)
        whole: Any = DenseMixture(Experts(gate_up, down))
        own: list[Any] = [
            DenseMixture(Experts(gate_up[part], down[part], num_routed=X)) for part in torch.arange(X).chunk(2)
        ]
    else:
        parts = [[joined(form, X // 2, N, K) for N, K in ((2 * F, D), (D, F))] for _ in range(2)]
        both = [join_experts(list(pair)) for pair in zip(*parts, strict=True)]
        whole = GroupedMixture(GroupedExperts(X, *both))  # type: ignore[arg-type]
        own = [GroupedMixture(GroupedExperts(X // 2, *part, num_routed=X)) for part in parts]
    experts_WP = torch.arange(X).view(2, -1)
    placements = [ExpertPlacement(experts_WP, X, rank) for rank in range(2)]
    given = zip(own, placements, strict=True)
    return whole, [PartialMixture(*part, SINGLE_RANK, torch.device("cuda")) for part in given]


@pytest.mark.parametrize("form", FORMS)
def test_halves_add_up_to_the_mixture(form: str) -> None:
    """With experts that all, few and no tokens choose, and a half that none chooses."""
    torch.manual_seed(0)
    whole, (first, second) = halves(form)
    for T in TOKENS:
        x, shares = torch.randn(T, D, device="cuda").bfloat16(), torch.rand(T, S, device="cuda")
        for likeliest in (0.0, 3.0, 1000.0):
            chance = torch.rand(T, X, device="cuda") + likeliest * torch.linspace(1, 0, X, device="cuda")
            given = x, chance.topk(S).indices, shares
            expected, parts = whole(*given).double(), [first(*given).double(), second(*given).double()]
            error = ((sum(parts) - expected).norm() / expected.norm()).item()
            assert error < 2**-7, f"{T} tokens: {error}"
            assert likeliest < 1000.0 or not parts[1].any()


def chain(form: str, T: int) -> tuple[Callable[[], Tensor], Tensor]:
    """Layers of a router and half of the experts that all depend on the one before, and where their results go."""
    torch.manual_seed(T)
    start_TD = torch.randn(T, D, device="cuda").bfloat16()
    x_TD, norm_D = torch.empty_like(start_TD), torch.rand(D, device="cuda").bfloat16() + 0.5
    layers = [((torch.randn(X, D, device="cuda") * D**-0.5).bfloat16(), half) for half in halves(form)[1] * 2]

    def run() -> Tensor:
        x_TD.copy_(start_TD)
        x = x_TD
        for router, half in layers:
            x = half(*route(x, norm_D, 1e-6, router, Routing(S, True)), x)
        return x

    return run, x_TD


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("T", [1, 3, 40, 300])
def test_a_graph_with_dependent_launch_gives_the_bits_of_plain_launches(T: int, form: str) -> None:
    expected = assert_a_graph_gives_the_same_bits(*chain(form, T), REPLAYS)
    assert expected.isfinite().all()


def check_next_to_one_rank(folder: Path, tolerance: float, size: int = 2, **settings: Any) -> None:
    """In every step the ranks compare their results, and would end if they were not equal."""
    one = generate(folder, **OF_GPU, **settings)
    several = generate(folder, **OF_GPU, **settings, tensor_parallel_size=size, enable_expert_parallel=True)
    check_alike(one, several, tolerance)


@pytest.mark.parametrize(
    ("row", "enforce_eager", "size"),
    [
        ("qwen3_moe/normalised", True, 2),
        ("qwen3_moe/normalised", False, 2),
        ("mixtral/two_of_five", False, 2),
        ("qwen2_moe/shared", False, 2),
        ("deepseek_v3/groups", False, 2),
        ("glm4_moe/groups", False, 2),
        ("gpt_oss/sinks", False, 2),
        pytest.param("qwen3_moe/normalised", False, 4, marks=NEEDS_FOUR),
        pytest.param("deepseek_v3/groups", False, 4, marks=NEEDS_FOUR),
        pytest.param("gpt_oss/sinks", False, 4, marks=NEEDS_FOUR),
    ],
)
def test_ranks_give_the_tokens_of_one(row: str, enforce_eager: bool, size: int, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, row)
    check_next_to_one_rank(tmp_path, 1e-3, size, enforce_eager=enforce_eager)


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ("deepseek_v3/groups", {"enforce_eager": True}),
        ("deepseek_v3/groups", {}),
        ("deepseek_v3/groups", {"speculative_config": LOOKUP}),
        ("deepseek_v3/groups", {"batch_invariant": True}),
        ("gpt_oss/sinks", {}),
        ("gpt_oss/sinks", {"speculative_config": LOOKUP}),
        ("qwen3_moe/normalised", {}),
        ("olmo2/one_kv_head", {"enforce_eager": True}),
        ("olmo2/one_kv_head", {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", NUM_RANKS)
def test_sequences_of_their_own_give_the_tokens_of_one(
    row: str, settings: dict[str, Any], size: int, tmp_path: Path
) -> None:
    """Each rank computes attention for some sequences, of which it alone has the cache."""
    make_checkpoint(tmp_path, row)
    one = generate(tmp_path, **OF_GPU, **settings)
    ranks = {"tensor_parallel_size": size, "enable_dp_attention": True, "enable_expert_parallel": True}
    check_alike(one, generate(tmp_path, **OF_GPU, **ranks, **settings), 1e-3)


@pytest.mark.parametrize("name", ["fp8, blocks", "int4, zeros", "mxfp4"])
def test_quantised_experts(name: str, tmp_path: Path) -> None:
    row = "qwen3_moe/normalised"
    make_checkpoint(tmp_path / "source", row, hidden_size=64, initializer_range=0.1, **SIZES[row])
    quantise(tmp_path / "source", tmp_path / "quantised", FORMATS[name])
    check_next_to_one_rank(tmp_path / "quantised", 0.05, dtype="float16")


def test_gpt_oss_as_published(tmp_path: Path) -> None:
    make_packed(tmp_path)
    check_next_to_one_rank(tmp_path, 0.2, dtype="float16")


@pytest.mark.parametrize("number", [None, "int4, zeros"])
def test_experts_move_between_steps(number: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a copy of an expert on each rank, and graphs captured before."""
    moved, find = list[Any](), expert_balance.changes

    def changes(*args: Any) -> list[Any]:
        found = find(*args)
        moved.extend(found)
        return found

    monkeypatch.setattr(expert_balance, "STEPS_BETWEEN_LOOKS", 5)
    monkeypatch.setattr(expert_balance, "changes", changes)
    row = "qwen3_moe/normalised"
    make_checkpoint(tmp_path / "model", row, hidden_size=64, initializer_range=0.1, **SIZES[row])
    home, precise = tmp_path / "model", {"dtype": "float32"}
    if number is not None:
        quantise(home, home := tmp_path / "quantised", FORMATS[number])
        precise = {"dtype": "float16"}
    one = generate(home, **OF_GPU, **precise)
    ranks = {"tensor_parallel_size": 2, "enable_expert_parallel": True}
    two = generate(home, **OF_GPU, **precise, **ranks, enable_eplb=True, num_redundant_experts=2)
    check_alike(one, two, 1e-3 if number is None else 0.05)
    assert moved

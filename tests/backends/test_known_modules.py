"""Modules of transformers that Octavo's operations compute: which are, and that they give what the library's give."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from transformers import RemBertConfig, RemBertForCausalLM

from octavo.ops.attention.attention import GroupRows, PagedRows
from octavo.quant.stored.stored_weight import WeightFormat
from octavo_bench.architectures import tiny_model
from octavo_fleet.transformers import trial
from octavo_fleet.transformers.known_modules import KnownModules, _activation
from octavo_fleet.transformers.model import TransformersConfig, load_transformers
from octavo_fleet.transformers.own_cache import OwnCacheTransformer
from octavo_fleet.transformers.paged import AttentionState, PagedTransformer, _side_by_side
from tests.backends.checkpoints import OWN, save_checkpoint
from tests.models.families import make_checkpoint

FORM = WeightFormat(torch.float32, torch.device("cpu"))


def load(folder: Path, family: str) -> tuple[Any, TransformersConfig]:
    save_checkpoint(family, folder)
    config = load_transformers(folder, FORM, None)
    assert config.loaded is not None
    return config.loaded.model, config


def computed(paged: PagedTransformer) -> set[str]:
    """Classes of the modules of a decoder that operations compute."""
    return {type(module).__name__ for module in paged._decoder.modules() if "forward" in vars(module)}


@pytest.mark.parametrize(
    ("family", "known"),
    [
        ("smollm3", {"Linear", "SmolLM3Attention", "SmolLM3MLP", "SmolLM3RMSNorm"}),
        ("cohere", {"Linear", "CohereMLP"}),  # which rotates neighbours, and normalises with means
        ("bart", {"Linear"}),
    ],
)
def test_what_is_known_of_a_family(family: str, known: set[str], tmp_path: Path) -> None:
    paged, config = load(tmp_path, family)
    assert not config.not_paged
    assert computed(paged) == known


class _Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 16), nn.Linear(8, 4), nn.Linear(8, 4)


def test_maps_of_one_input_are_computed_together_and_by_each_thread_for_itself() -> None:
    parent = _Parent()
    x, other = torch.randn(1, 5, 8), torch.randn(1, 5, 8)
    want = [[linear(given) for linear in parent.children()] for given in (x, other)]
    known = KnownModules(AttentionState())
    known.replace(parent)
    q, k, v = (linear(x) for linear in parent.children())
    assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    with ThreadPoolExecutor(1) as pool:
        q = parent.q_proj(x)
        found = pool.submit(lambda: [linear(other) for linear in parent.children()]).result()
        k = parent.k_proj(other), parent.k_proj(x)
    for one, right in zip((q, *reversed(k), v, *found), (*want[0][:2], want[1][1], want[0][2], *want[1]), strict=True):
        torch.testing.assert_close(one, right)
    assert known.restore()
    torch.testing.assert_close(parent.v_proj(x), want[0][2])
    assert not known.restore()


class _SquareRMSNorm(nn.Module):
    """What its name does not say."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return x * x


def test_a_module_is_not_taken_for_what_its_name_says() -> None:
    parent = nn.Sequential(_SquareRMSNorm())
    KnownModules(AttentionState()).replace(parent)
    assert torch.equal(parent(torch.full((1, 1, 8), 3.0)), torch.full((1, 1, 8), 9.0))


class _ClampedMLP(nn.Module):
    def __init__(self, limit: float, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)
        self.limit, self.act_fn = limit, activation

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x).clamp(max=self.limit), self.up_proj(x).clamp(-self.limit, self.limit)
        return self.down_proj(self.act_fn(gate) * up)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("limit", "is_known"), [(10.0, False), (1e9, True)])
def test_limits_that_only_large_numbers_reach(limit: float, is_known: bool, dtype: torch.dtype) -> None:
    parent = nn.Sequential(_ClampedMLP(limit, nn.functional.silu)).to(dtype)
    KnownModules(AttentionState()).replace(parent)
    assert ("forward" in vars(parent[0])) == is_known


def test_nearly_the_same_activations_are_told_apart() -> None:
    for activation, name in ((nn.GELU(), "gelu"), (nn.GELU(approximate="tanh"), "gelu_tanh"), (nn.Tanh(), None)):
        assert _activation(_ClampedMLP(1e9, activation)) == name


def test_maps_with_weights_of_several_owners_are_not_joined() -> None:
    one, other = _Parent(), _Parent()
    other.k_proj.weight = one.k_proj.weight
    KnownModules(AttentionState()).replace(nn.ModuleList([one, other]))
    assert one.k_proj.weight.data_ptr() == other.k_proj.weight.data_ptr()
    assert "forward" in vars(one.k_proj), "is computed by an operation, alone"


def test_a_rotation_with_other_arguments_is_left_to_the_model(tmp_path: Path) -> None:
    """Gemma 4 and others rotate queries and keys one by one."""
    make_checkpoint(tmp_path, "gemma4/own_embeddings")
    config = load_transformers(tmp_path, FORM, None)
    assert not config.not_paged
    assert config.loaded is not None
    assert not any("Attention" in name for name in computed(cast(PagedTransformer, config.loaded.model)))


def test_code_that_fails_with_a_postponed_rotation_runs_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend = AttentionState.attend

    def refuse(self: AttentionState, *args: Any) -> Tensor:
        if self.rotation is not None:
            raise RuntimeError("rotate first")
        return attend(self, *args)

    monkeypatch.setattr(AttentionState, "attend", refuse)
    paged, config = load(tmp_path, "smollm3")
    assert not config.not_paged
    assert computed(paged) == {"Linear", "SmolLM3MLP", "SmolLM3RMSNorm"}


def test_logits_of_two_threads(tmp_path: Path) -> None:
    """As on a GPU, where a thread compiles kernels with passes of its own."""
    paged, config = load(tmp_path, "smollm3")
    mine, other = torch.randn(2, config.hidden_size), torch.randn(3, config.hidden_size)
    expected = paged.logits(mine)

    def interfere(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            with ThreadPoolExecutor(1) as pool:
                pool.submit(paged.logits, other).result()

    paged._head.register_forward_pre_hook(interfere)
    assert torch.equal(paged.logits(mine), expected)


def test_maps_that_a_quantiser_has_changed_stay_so() -> None:
    changes: list[Callable[[nn.Linear], object]] = [
        lambda linear: setattr(linear, "forward", lambda x: x + 1),
        lambda linear: linear.register_forward_hook(lambda module, args, output: output + 1),
        lambda linear: linear.register_buffer("scale", torch.ones(1)),
    ]
    for change in changes:
        parent, x = _Parent(), torch.randn(1, 5, 8)
        change(parent.k_proj)
        k, own = parent.k_proj(x), vars(parent.k_proj).get("forward")
        KnownModules(AttentionState()).replace(parent)
        assert vars(parent.k_proj).get("forward") is own
        assert "forward" in vars(parent.q_proj), "is computed by an operation, alone"
        assert torch.equal(parent.k_proj(x), k)


def test_heads_side_by_side_are_not_copied() -> None:
    rows_TW = torch.randn(3, 10 * 4)
    q, k, v = (part.view(1, 3, -1, 4).transpose(1, 2) for part in rows_TW.split_with_sizes([24, 8, 8], dim=1))
    found = _side_by_side([q, k, v])
    assert found.data_ptr() == rows_TW.data_ptr()
    assert torch.equal(found, rows_TW)
    for parts in ([q, v, k], [q, k.contiguous(), v], [q[:, ::2], k, v]):
        assert torch.equal(_side_by_side(parts), torch.cat([x[0].transpose(0, 1).reshape(3, -1) for x in parts], 1))


def test_rounding_is_what_two_ways_to_attend_differ_by() -> None:
    """Only of 16 bits, and only where the library has two."""

    class Model:
        def __init__(self, noise: float, ways: set[str]) -> None:
            self.config, self.noise, self.ways = SimpleNamespace(_attn_implementation="sdpa"), noise, ways
            self.base_model = lambda **_: SimpleNamespace(last_hidden_state=self.output())

        def output(self) -> Tensor:
            return torch.tensor([[[1.0, self.noise if self.config._attn_implementation == "eager" else 0.0]]])

        def __call__(self, **_: Any) -> Any:
            return SimpleNamespace(logits=self.output())

        def set_attn_implementation(self, name: str) -> None:
            if name not in self.ways:
                raise ValueError(name)
            self.config._attn_implementation = name

    texts, both = [torch.zeros(1, dtype=torch.int64)], {"sdpa", "eager"}
    for noise, ways, dtype, bound in (
        (0.25, both, torch.bfloat16, trial.MOST_ROUNDING),
        (0.05, both, torch.bfloat16, pytest.approx(0.1, rel=0.01)),
        (0.001, both, torch.bfloat16, trial.TOLERANCE[torch.bfloat16]),
        (0.25, both, torch.float32, trial.TOLERANCE[torch.float32]),
        (0.25, {"sdpa"}, torch.bfloat16, trial.TOLERANCE[torch.bfloat16]),
    ):
        model = Model(noise, ways)
        expected = [torch.tensor([[1.0, 0.0]], dtype=dtype)]
        assert trial.tolerance(model, texts, expected) == bound
        assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("narrow", [False, True])
def test_rows_of_padding(num_tokens: int, narrow: bool, tmp_path: Path) -> None:
    """As steps on a GPU have; kernels are measured with a step of padding alone."""
    if narrow:  # whose embeddings are narrower than its layers
        config_of = RemBertConfig(
            hidden_size=32, input_embedding_size=16, output_embedding_size=24, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=4, vocab_size=260, is_decoder=True,
        )  # fmt: skip
        tiny_model(config_of, RemBertForCausalLM).save_pretrained(tmp_path)
    else:
        save_checkpoint(next(iter(OWN)), tmp_path)
    config = load_transformers(tmp_path, FORM, None)
    own: Any = config.loaded and config.loaded.model
    assert isinstance(own, OwnCacheTransformer)

    def forward(num_rows: int) -> Tensor:
        groups = (GroupRows(torch.full((num_rows,), -1), torch.zeros(1, 1, dtype=torch.int32)),)
        ends = torch.tensor([0, num_tokens], dtype=torch.int32)
        rows = PagedRows(groups, ends, ends[1:], max(1, num_tokens))
        with torch.inference_mode():
            return own.forward(torch.arange(num_rows), torch.arange(num_rows), [], rows)

    found = forward(num_tokens + 2)
    assert found.shape == (num_tokens + 2, own.decode([1], None, torch.device("cpu"))[0].shape[1])
    if num_tokens:
        assert torch.equal(found[:num_tokens], forward(num_tokens))

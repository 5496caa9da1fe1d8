"""Mixtures of which each rank holds whole experts: the bits of one device, and no more weights than a rank needs."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from octavo.build.build_engine import _updates
from octavo.config import EngineConfig, ModelSettings
from octavo.errors import CheckpointError, ConfigError
from octavo.layers.expert_parallel import ExpertPlacement, ParallelMixture, PartialMixture
from octavo.layers.experts import DenseMixture, GroupedMixture, Mixture
from octavo.models.meta_model import outline
from octavo.models.parts import DecoderConfig
from octavo.models.registry import LoadedModel, load_model, read_config
from octavo.ops.collective import Collective
from octavo.ops.moe import Experts, GroupedExperts, join_experts
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.executors.expert_moves import ExpertMoves
from octavo.runtime.ranks.ranks import check_divides
from octavo.steps.messages import ExpertMove, MoveExperts
from octavo.weights.checkpoint import Checkpoint, open_checkpoint
from tests.models.families import FIRST_ROWS, ROWS, make_checkpoint, make_config
from tests.models.test_quantised import FORMATS
from tests.ops.cpu_cases import needs_float_kernels
from tests.ops.test_collective import together
from tests.ops.triton.test_grouped_linear import random_groups
from tests.quant.writers import quantise
from tests.tiers import nightly_after

DENSE = WeightFormat(torch.float32, torch.device("cpu"), keeps_experts_whole=True)
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MIXTURES = [row for row in FIRST_ROWS if any(ROWS[row][1].get(key) for key in COUNTS)]
"""A row of each family with experts."""
EXPERT_WIDTHS = ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
FIRST = ("mixtral/two_of_five", "gpt_oss/sinks", "deepseek_v3/groups", "llama4/scaled_inputs")


def load(checkpoint: Checkpoint, form: WeightFormat, collective: Collective | None = None) -> LoadedModel:
    config = read_config(checkpoint.config)
    return load_model(config, checkpoint, form, **({} if collective is None else {"collective": collective}))


def mixtures(model: object) -> list[Mixture]:
    """Those of all layers, in their order."""
    return [part for layer in model.layers for part in _within(layer)]  # type: ignore[attr-defined]


def _within(part: object) -> Iterator[Mixture]:
    for name, value in vars(part).items():
        if name == "experts":
            yield value
        elif hasattr(value, "bytes_by_format"):  # experts that all tokens use
            continue
        elif hasattr(value, "__dict__") and type(value).__module__.startswith(("octavo.models", "octavo.layers")):
            yield from _within(value)


def width(mixture: Any) -> int:
    """Of its inputs."""
    experts = mixture.experts
    return (
        int(experts[0][0].weights[0].rows(torch.zeros(1, dtype=torch.int64)).shape[1])
        if isinstance(experts, list)
        else int(experts.down.shape[1])
    )


def num_experts(mixture: Any) -> int:
    return len(mixture.experts) if isinstance(mixture.experts, list) else len(mixture.experts.down)


def chosen(mixture: Mixture, num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    S = min(2, num_experts(mixture))
    ids = torch.stack([torch.randperm(num_experts(mixture))[:S] for _ in range(num_tokens)])
    ids[1::5, 0] = -1  # an expert without weights
    return torch.randn(num_tokens, width(mixture)), ids, torch.rand(num_tokens, S)


def compare(home: Path, form: WeightFormat, size: int) -> None:
    """Compare each mixture's results with those of one device, to the bit, for one token and for more than ranks."""
    checkpoint = open_checkpoint(home)
    torch.manual_seed(size)
    whole = load(checkpoint, form)
    inputs = [[chosen(mixture, count) for mixture in mixtures(whole.model)] for count in (1, 2, 17)]

    def work(collective: Collective) -> tuple[list[list[Tensor]], int]:
        part = load(checkpoint, form, collective)
        own = mixtures(part.model)
        assert all(isinstance(mixture, ParallelMixture) for mixture in own)
        sums = [[collective.all_reduce(mixture(*given)) for mixture, given in zip(own, x, strict=True)] for x in inputs]
        return sums, sum(sum(mixture.bytes_by_format.values()) for mixture in own)

    expected = [[mixture(*given) for mixture, given in zip(mixtures(whole.model), x, strict=True)] for x in inputs]
    found = together(size, work)
    for rank in found:
        assert not isinstance(rank, Exception), rank
        for sums, those in zip(rank[0], expected, strict=True):
            assert sums
            assert all(torch.equal(a, b) for a, b in zip(sums, those, strict=True))
    in_all = sum(sum(mixture.bytes_by_format.values()) for mixture in mixtures(whole.model))
    assert sum(rank[1] for rank in found) == in_all, "an expert is on two ranks, or on none"


@needs_float_kernels
@pytest.mark.parametrize("row", [*FIRST, *nightly_after(0, (row for row in MIXTURES if row not in FIRST))])
def test_sums_have_the_bits_of_one_device(row: str, tmp_path: Path) -> None:
    more = {"index_n_heads": 12} if row.startswith("minimax_m3") else {}
    make_checkpoint(tmp_path, row, hidden_size=48, num_attention_heads=12, num_key_value_heads=12, **more)
    for size in (2, 3, 4) if row == FIRST[0] else (2 + 2 * (len(row) % 2),):
        compare(tmp_path, DENSE, size)


@needs_float_kernels
@pytest.mark.parametrize("name", nightly_after(2, ("int4, zeros", "fp8, blocks", "mxfp4", "awq", "int8", "fp8")))
def test_quantised_experts_stay_as_stored(name: str, tmp_path: Path) -> None:
    source, home = tmp_path / "source", tmp_path / "quantised"
    make_checkpoint(source, "mixtral/two_of_five", hidden_size=64, intermediate_size=96, initializer_range=0.1)
    quantise(source, home, FORMATS[name])
    compare(home, dataclasses.replace(DENSE, packs=True), 2)


class Noted:
    """A checkpoint without an expert, whose tensors are noted when they are read."""

    is_dummy = False

    def __init__(self, checkpoint: Checkpoint, hidden: str = "none") -> None:
        self._checkpoint, self._hidden, self.read = checkpoint, hidden, set[str]()
        self.describe = checkpoint.describe

    def names(self) -> set[str]:
        return {name for name in self._checkpoint.names() if self._hidden not in name}

    def load(self, name: str, shape: tuple[int, ...]) -> Any:
        self.read.add(name)
        return self._checkpoint.load(name, shape)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    make_checkpoint(tmp_path, "qwen3_moe/normalised", num_experts=5, num_attention_heads=12, num_key_value_heads=12)
    return open_checkpoint(tmp_path)


def test_a_rank_reads_its_own_experts_alone(checkpoint: Checkpoint) -> None:
    def work(collective: Collective) -> set[int]:
        source = Noted(checkpoint)
        load_model(read_config(checkpoint.config), source, DENSE, collective=collective)
        return {int(name.split(".experts.")[1].partition(".")[0]) for name in source.read if ".experts." in name}

    assert together(2, work) == [{0, 1}, {2, 3, 4}]


def test_a_missing_expert_is_named(checkpoint: Checkpoint) -> None:
    def work(collective: Collective) -> None:
        source = Noted(checkpoint, ".experts.4.")
        load_model(read_config(checkpoint.config), source, DENSE, collective=collective)

    first, second = together(2, work)
    assert first is None
    assert isinstance(second, CheckpointError)
    assert ".experts.4." in str(second)


def shuffled(slots: list[list[int]], rng: random.Random) -> list[ExpertMove]:
    """Two slots that change their experts, then one that takes a copy, if a rank has an expert that others have."""
    first, second = rng.sample(range(len(slots)), 2)
    moves = []
    a, b = (rng.choice([s for s, e in enumerate(slots[rank]) if e >= 0]) for rank in (first, second))
    if slots[first][a] not in slots[second] and slots[second][b] not in slots[first]:
        moves = [ExpertMove(0, first, a, slots[second][b]), ExpertMove(0, second, b, slots[first][a])]
    elif slots[first][a] in slots[second] and (absent := set(slots[second]) - {*slots[first], -1}):
        moves = [ExpertMove(0, first, a, min(absent))]
    for move in moves:
        slots[move.rank][move.slot] = move.expert
    return moves


@needs_float_kernels
@pytest.mark.parametrize("name", [None, *nightly_after(0, ("int4, zeros", "mxfp4", "fp8, blocks"))])
def test_sums_are_the_same_wherever_the_experts_are(name: str | None, tmp_path: Path) -> None:
    home = tmp_path / "model"
    make_checkpoint(home, "mixtral/two_of_five", hidden_size=64, intermediate_size=96, initializer_range=0.1)
    if name is not None:
        quantise(home, home := tmp_path / "quantised", FORMATS[name])
    form = dataclasses.replace(DENSE, packs=name is not None, num_spare_experts=1)
    checkpoint = open_checkpoint(home)
    whole = mixtures(load(checkpoint, form).model)[0]
    given = chosen(whole, 17)
    expected = whole(*given)

    def work(collective: Collective) -> int:
        experts = ExpertMoves(load(open_checkpoint(home), form, collective).mixtures[:1])  # each process maps the files
        experts.check()
        rng, num_moved, [mixture] = random.Random(3), 0, experts.mixtures
        for _ in range(12):
            with torch.inference_mode():
                found = collective.all_reduce(mixture(*given))
            assert torch.equal(found, expected)
            [loads] = experts.loads()
            assert loads.counts == given[1][given[1] >= 0].bincount(minlength=5).tolist()
            moves = shuffled(loads.slots, rng)
            experts.execute(MoveExperts(moves))
            num_moved += len(moves)
            assert mixture.placement.experts_WP.tolist() == loads.slots
        return num_moved

    for moved in together(2, work):
        assert isinstance(moved, int), moved
        assert moved > 4


def test_experts_in_several_forms_are_not_moved(checkpoint: Checkpoint) -> None:
    def work(collective: Collective) -> None:
        mixtures = load(checkpoint, dataclasses.replace(DENSE, packs=True), collective).mixtures
        if collective.rank:
            mixtures[0].own.experts = dataclasses.replace(  # type: ignore
                mixtures[0].own.experts,  # type: ignore
                gate_up_bias=torch.zeros(3, 1),
            )
        ExpertMoves(mixtures).check()

    for error in together(2, work):
        assert isinstance(error, ConfigError)
        assert "enable_eplb" in str(error)


@pytest.mark.parametrize("size", [2, 3])
def test_copies_of_an_expert_take_turns(size: int) -> None:
    experts = torch.tensor([[0, 1, 2]] * size)
    placement = ExpertPlacement(experts, 3, rank=1)
    assert placement.rank_XW.tolist() == [list(range(size))] * 3
    assert placement.own == [0, 1, 2]
    experts[0] = torch.tensor([1, 2, -1])
    placement.fill()
    assert (placement.rank_XW[0] != 0).all()
    assert (placement.rank_XW[1:] == torch.arange(size)).all()
    uneven = ExpertPlacement(torch.tensor([[1, 0], [-1, 1], [1, 2], [0, -1]]), 3, rank=1)
    assert uneven.rank_XW.tolist() == [[0, 3, 0, 3], [0, 1, 2, 0], [2, 2, 2, 2]]


def small_experts(number: str, X: int, D: int, F: int) -> Callable[[list[int], int], Mixture]:
    """Makes a mixture of some experts, dense or packed, that are among ``num_routed``."""
    gate_up, down = torch.randn(X, 2 * F, D), torch.randn(X, D, F)
    if number == "dense":
        return lambda own, num_routed: DenseMixture(Experts(gate_up[own], down[own], num_routed=num_routed))
    packed = [[random_groups("cpu", number, N, K, 16) for _ in range(X)] for N, K in ((2 * F, D), (D, F))]
    biases = torch.randn(X, 2 * F), torch.randn(X, D)

    def make(own: list[int], num_routed: int) -> Mixture:
        joined: Any = [join_experts([part[expert] for expert in own]) for part in packed]
        chosen = [bias[own] for bias in biases]
        return GroupedMixture(GroupedExperts(len(own), joined[0], joined[1], "silu", chosen[0], chosen[1], num_routed))

    return make


@pytest.mark.parametrize("number", ["dense", "int4", "uint4"])
@pytest.mark.parametrize(("size", "num_spare"), [(3, 0), (2, 1)])
def test_parts_of_gpu_ranks_add_up_to_the_mixture_wherever_the_experts_are(
    size: int, num_spare: int, number: str
) -> None:
    torch.manual_seed(0)
    X, D, F, T = 5, 32, 32, 7
    make = small_experts(number, X, D, F)
    given = torch.randn(T, D), torch.stack([torch.randperm(X)[:2] for _ in range(T)]), torch.rand(T, 2)
    expected = make(list(range(X)), 0)(*given)

    def work(collective: Collective) -> int:
        placement = ExpertPlacement.even(X, collective, num_spare)
        own = make(placement.own, X)
        mixture = PartialMixture(own, placement, collective, torch.device("cpu"))
        assert mixture.bytes_by_format == own.bytes_by_format
        torch.testing.assert_close(collective.all_reduce(mixture(*given)), expected, rtol=1e-4, atol=1e-4)
        experts, rng, num_moved = ExpertMoves([mixture]), random.Random(3), 0
        experts.check()
        table = mixture.slots_XW
        for _ in range(8):
            with torch.inference_mode():
                found = collective.all_reduce(mixture(*given))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            [loads] = experts.loads()
            assert loads.counts == given[1].flatten().bincount(minlength=X).tolist()
            moves = shuffled(loads.slots, rng)
            experts.execute(MoveExperts(moves))
            num_moved += len(moves)
        assert mixture.slots_XW is table, "graphs know it by its address"
        return num_moved

    for moved in together(size, work):
        assert isinstance(moved, int), moved
        assert moved > 4


def test_experts_of_every_family_are_seen_where_they_are_divided() -> None:
    """All rows, as the layers of most have their experts from parts and those of some from elsewhere."""
    settings, found = ModelSettings(tensor_parallel_size=2), 0
    for row in ROWS:
        values = make_config(row).to_dict()
        config = read_config(values)
        assert isinstance(config, DecoderConfig)
        counts = [count for key in COUNTS if (count := ROWS[row][1].get(key) or 0) > 1]
        if row == "nemotron_h/dense" or not counts:
            assert not config.mixtures, row
            continue
        assert {moe.num_experts for moe in config.mixtures} == set(counts), row
        check_divides(config, settings, torch.device("cpu"))
        width = next(key for key in EXPERT_WIDTHS if values.get(key))
        with pytest.raises(ConfigError, match="2 does not divide the width of the experts, 25"):
            check_divides(read_config({**values, width: 25}), settings, torch.device("cpu"))
        found += 1
    assert found >= len(MIXTURES)


def test_experts_of_gpus_are_whole(checkpoint: Checkpoint) -> None:
    config = read_config(checkpoint.config)
    settings = ModelSettings(tensor_parallel_size=4, enable_expert_parallel=True, enable_eplb=True)
    check_divides(config, settings, torch.device("cuda"))
    with pytest.raises(ConfigError, match="enable_eplb: does not go with batch_invariant on GPUs"):
        check_divides(config, dataclasses.replace(settings, batch_invariant=True), torch.device("cuda"))
    form = dataclasses.replace(DENSE, device=torch.device("cuda"))
    loaded = outline(config, checkpoint, form, num_ranks=4)
    assert isinstance(loaded, LoadedModel)
    assert all(isinstance(mixture, PartialMixture) for mixture in mixtures(loaded.model))


@pytest.mark.parametrize("moves", [False, True])
def test_experts_that_move_keep_their_weights(moves: bool) -> None:
    """New ones would be written to the places that experts had at the start."""
    loaded, other = MagicMock(kept=MagicMock(has_constants=False)), MagicMock()
    model = read_config(make_config("mixtral/two_of_five").to_dict())
    config = EngineConfig(model=ModelSettings(model="m", enable_eplb=moves))
    assert (_updates(config, model, other, DENSE, loaded, other, None) is None) == moves

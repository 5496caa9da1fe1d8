"""What several devices load of a model is, put together, what one loads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.layers.experts import DenseMixture
from octavo.models.config_keys import ConfigKeys
from octavo.models.features import KEYS, OWN_KEYS
from octavo.models.loader import WeightLoader
from octavo.models.registry import ARCHITECTURES
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.formats.plain import PLAIN, Plain
from octavo.quant.methods import QuantMethod
from octavo.quant.stored.block_weight import GgufStored
from octavo.quant.stored.shard import Shard
from octavo.quant.stored.stored_weight import StoredWeight, WeightFormat
from octavo.weights.dummy import DummyCheckpoint
from tests.ops.cpu_cases import random_blocks
from tests.tiers import one_in

FORM = WeightFormat(torch.float32, torch.device("cpu"))
ODD = {"vocab_size": 99, "num_hidden_layers": 2, "n_layer": 2, "attention_bias": True, "first_k_dense_replace": 1}
ODD |= {"layers_block_type": ["attention", "mamba"]}
ODD |= {"num_kv_shared_layers": 0}
ODD |= {"multi_query": False}  # of Falcon, whose one KV head would be on every device
OTHERS = {
    "DeepseekV4ForCausalLM": {"attention_bias": False},
    "Zamba2ForCausalLM": {"layers_block_type": ["mamba", "hybrid"]},
    "ZayaForCausalLM": {"attention_bias": False},
}


@dataclass(frozen=True)
class AllBlocks(Plain):
    """Every matrix in blocks."""

    kind: str

    def matrix(self, name: str, shape: tuple[int, int], tensors: Tensors, is_transposed: bool) -> StoredWeight:
        return GgufStored((random_blocks(self.kind, *shape, seed=len(name)),))


def load(
    architecture: str, shard: Shard, values: dict[str, Any], method: QuantMethod = PLAIN
) -> tuple[Any, WeightLoader]:
    keys = {"architectures": [architecture], **KEYS, **OWN_KEYS.get(architecture, {}), **values}
    weights = WeightLoader(DummyCheckpoint(keys, {}, seed=0), FORM, method=method, shard=shard)
    config = ARCHITECTURES[architecture].read_config(ConfigKeys(keys), None)
    return ARCHITECTURES[architecture](config, weights), weights


def matrix_of(weights: WeightLoader, name: str) -> tuple[Tensor, Tensor | None]:
    """A map of the checkpoint as a device holds it, and its bias."""
    part = weights.maps[name]
    [weight] = part.linear.weights
    rows, bias = slice(part.start, part.start + part.size), part.linear.bias_N
    assert weight.dense_NK is not None
    return weight.dense_NK[rows], None if bias is None else bias[rows]


@one_in(5)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shards_of_every_map_make_the_map(architecture: str) -> None:
    values = {**ODD, **OTHERS.get(architecture, {})}
    _, whole = load(architecture, Shard(0, 1), values)
    shards = [load(architecture, Shard(rank, 2), values)[1] for rank in range(2)]
    divided: Counter[int | None] = Counter()
    for name in whole.maps:
        matrix, bias = matrix_of(whole, name)
        parts, biases = zip(*(matrix_of(shard, name) for shard in shards), strict=True)
        dim = next((dim for dim in (0, 1) if parts[0].shape[dim] != matrix.shape[dim]), None)
        if dim == 0 and len(whole.maps[name].rows.sections) > 1:
            assert sorted(torch.cat(parts).tolist()) == sorted(matrix.tolist())
        else:
            assert torch.equal(parts[0] if dim is None else torch.cat(parts, dim=dim), matrix), name
        if bias is not None and dim == 1:
            assert torch.equal(biases[0], bias)
            assert biases[1] is None
        divided[dim] += 1
    assert divided[1] >= 2
    assert divided[0] >= 2 or architecture == "ZayaForCausalLM", "all but ZAYA1 divide projections"


def test_heads_of_fewer_than_devices_are_held_by_several() -> None:
    values = {**ODD, "num_key_value_heads": 2}
    _, whole = load("LlamaForCausalLM", Shard(0, 1), values)
    for rank in range(4):
        _, own = load("LlamaForCausalLM", Shard(rank, 4), values)
        for part, first, count in (("q", 16 * rank, 16), ("k", 16 * (rank // 2), 16), ("v", 16 * (rank // 2), 16)):
            name = f"model.layers.1.self_attn.{part}_proj"
            (matrix, bias), (expected, all_biases) = matrix_of(own, name), matrix_of(whole, name)
            assert torch.equal(matrix, expected[first : first + count])
            assert bias is not None
            assert all_biases is not None
            assert torch.equal(bias, all_biases[first : first + count])


def test_a_fused_matrix_is_divided_section_by_section() -> None:
    _, whole = load("Phi3ForCausalLM", Shard(0, 1), ODD)
    names = "model.layers.0.self_attn.qkv_proj", "model.layers.0.mlp.gate_up_proj"
    (qkv, _), (gate_up, _) = (matrix_of(whole, name) for name in names)
    for rank in range(2):
        _, own = load("Phi3ForCausalLM", Shard(rank, 2), ODD)
        sections = zip(qkv.split([64, 32, 32]), (32, 16, 16), strict=True)
        expected = torch.cat([section[rank * size : rank * size + size] for section, size in sections])
        assert torch.equal(matrix_of(own, names[0])[0], expected)
        assert torch.equal(matrix_of(own, names[1])[0], torch.cat([half.chunk(2)[rank] for half in gate_up.chunk(2)]))


@pytest.mark.parametrize("architecture", ["MixtralForCausalLM", "GptOssForCausalLM"])
def test_each_expert_is_divided(architecture: str) -> None:
    model, _ = load(architecture, Shard(0, 1), ODD)
    shards = [load(architecture, Shard(rank, 2), ODD)[0] for rank in range(2)]
    mixtures = [made.layers[0].mlp.experts for made in (model, *shards)]
    assert all(isinstance(mixture, DenseMixture) for mixture in mixtures)
    one, *parts = [mixture.experts for mixture in mixtures]
    gates_ups = [part.gate_up.chunk(2, dim=1) for part in parts]
    assert torch.equal(torch.cat([half for pair in zip(*gates_ups, strict=True) for half in pair], dim=1), one.gate_up)
    assert torch.equal(torch.cat([part.down for part in parts], dim=2), one.down)
    if one.down_bias is not None:
        assert torch.equal(parts[0].down_bias, one.down_bias)
        assert parts[1].down_bias is None
        biases = [part.gate_up_bias.chunk(2, dim=1) for part in parts]
        expected = torch.cat([half for pair in zip(*biases, strict=True) for half in pair], dim=1)
        assert torch.equal(expected, one.gate_up_bias)


def test_a_vocabulary_may_be_divided_unevenly() -> None:
    values = {**ODD, "tie_word_embeddings": True}
    whole, _ = load("LlamaForCausalLM", Shard(0, 1), values)
    shards = [load("LlamaForCausalLM", Shard(rank, 4), values)[0] for rank in range(4)]
    for tables in ([model.embedding.weight.dense_NK for model in shards], [m.head.weights[0].dense_NK for m in shards]):
        assert [len(table) for table in tables] == [32, 32, 32, 3]
        assert torch.equal(torch.cat(tables), whole.embedding.weight.dense_NK)


@pytest.mark.parametrize(
    ("values", "size", "message"),
    [
        ({"num_attention_heads": 4}, 3, r"layers\.0\.self_attn\.q_proj: 4 parts of 16 rows .* among 3 devices"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 60},
            8,
            r"gate_proj: 60 parts of 1 rows",
        ),
    ],
)
def test_what_cannot_be_divided_is_named(values: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load("LlamaForCausalLM", Shard(1, size), values)


def test_a_block_that_would_be_cut_is_named() -> None:
    message = r"model\.layers\.0\.self_attn\.o_proj: 64 columns cannot be divided among 4 devices in whole blocks of 32"
    with pytest.raises(CheckpointError, match=message):
        load("LlamaForCausalLM", Shard(0, 4), {"num_key_value_heads": 4}, AllBlocks("Q8_0"))

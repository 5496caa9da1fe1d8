"""Which group of a compressed-tensors configuration a module belongs to."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from compressed_tensors.utils import match_targets
from torch import nn

from octavo.errors import CheckpointError
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.formats.compressed_tensors import CompressedTensors
from octavo.quant.module_matching import ModuleTargets
from octavo.quant.stored.stored_weight import DenseStored, WeightFormat
from octavo.weights.dummy import DummyCheckpoint
from tests.quant.sources import module
from tests.quant.writers import compressed

FORM = WeightFormat(torch.float32, torch.device("cpu"))
DOWN = "model.layers.0.mlp.down_proj"
INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
INT8 = compressed("pack-quantized", num_bits=8, type="int", strategy="channel")
LINEAR = [
    *(f"model.layers.{i}.self_attn.{part}_proj" for i in range(2) for part in "qkvo"),
    *(f"model.layers.{i}.mlp.{part}_proj" for i in range(2) for part in ("gate", "up", "down")),
    "lm_head",
]
PATTERNS = [".*", ".*mlp.*", ".*down_proj", r"model\.layers\.0\..*", ".*(q|k|v)_proj$", "lm_head", "down_proj", "model"]
TARGETS = [*LINEAR[::3], "down_proj", "Linear", "Embedding", "Conv2d", "LlamaMLP", *(f"re:{name}" for name in PATTERNS)]


def config(*groups: tuple[list[str], int], ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    """Groups with these targets, of these bits."""
    weights = {bits: writer.config["config_groups"]["group_0"]["weights"] for bits, writer in ((4, INT4), (8, INT8))}
    return {
        "format": "pack-quantized",
        "config_groups": {
            f"group_{i}": {"targets": targets, "weights": weights[bits]} for i, (targets, bits) in enumerate(groups)
        },
        "ignore": list(ignore),
    }


def test_the_library_finds_the_same_groups() -> None:
    modules: dict[str, nn.Module] = {name: nn.Linear(1, 1) for name in LINEAR}
    modules["model.embed_tokens"] = nn.Embedding(1, 1)
    draw, found = random.Random(0), 0
    for _ in range(300):
        groups = [(f"group_{i}", draw.sample(TARGETS, draw.randint(1, 4)), i) for i in range(draw.randint(1, 4))]
        ours = ModuleTargets.of(groups)
        theirs = {target: i for _, targets, i in groups for target in targets}
        for name, layer in modules.items():
            matched = match_targets(name, layer, theirs)
            assert ours.find(name) == (theirs[matched[0]] if matched else None), (groups, name)
            found += bool(matched)
    assert found > 1000


@pytest.mark.parametrize(
    ("others", "own"),
    [
        (["re:.*mlp.*"], DOWN),
        (["re:.*"], DOWN),
        (["Linear"], DOWN),
        (["Linear"], "re:.*down_proj"),
        (["re:.*layers.*"], "re:.*down_proj"),
        (["Conv2d", "LlamaMLP", "up_proj"], "Linear"),
        (["Linear"], "Linear"),
    ],
)
def test_a_module_is_read_as_its_group_stores_it(others: list[str], own: str) -> None:
    """The second group is the module's."""
    written, matrix = INT8.write(torch.randn(16, 64))
    tensors = Tensors(module(DOWN, written))
    stored = CompressedTensors.read(config((others, 4), ([own], 8))).matrix(DOWN, (16, 64), tensors, False)
    assert torch.equal(stored.dense(FORM), matrix)


def test_of_two_patterns_the_first_in_the_alphabet_counts() -> None:
    for patterns in (["re:.*mlp.*", "re:.*down_proj"], ["re:.*down_proj", "re:.*mlp.*"]):
        targets = ModuleTargets.of((target, [target], target) for target in patterns)
        assert targets.find(DOWN) == "re:.*down_proj"


def test_the_parts_of_a_fused_layer_are_found_by_their_own_names() -> None:
    attention = "model.layers.0.self_attn"
    targets = ModuleTargets.of(
        [("a", ["re:.*qkv_proj", f"{attention}.k_proj"], 0), ("b", ["re:.*q_proj", "Linear"], 1)]
    )
    assert [targets.find(f"{attention}.{part}_proj") for part in "qkv"] == [1, 0, 1]


@pytest.mark.parametrize(
    ("target", "linear", "head", "embedding"),
    [
        ("Linear", True, True, False),
        ("LinearBase", True, True, False),
        ("ParallelLMHead", False, True, False),
        ("Embedding", False, False, True),
        ("VocabParallelEmbedding", False, False, True),
        *((name, False, False, False) for name in ("Conv2d", "LlamaMLP", "FusedMoE", "down_proj", "linear", "")),
    ],
)
def test_classes_target_modules_of_their_kind(target: str, linear: bool, head: bool, embedding: bool) -> None:
    targets = ModuleTargets.of([("a", [target], True)])
    for names, is_target in (
        ([DOWN, "transformer.h.0.attn.c_attn", "model.layers.0.mlp.experts.3.up_proj"], linear),
        (["lm_head"], head),
        (["model.embed_tokens", "transformer.wte", "transformer.wpe", "embeddings.word_embeddings"], embedding),
    ):
        assert [bool(targets.find(name)) for name in names] == [is_target] * len(names)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [(".*(a|b)+.*", r"has repeated groups or more than 5 repeats"), (".*" * 6, "has repeated"), ("(", "is not a pat")],
)
def test_a_pattern_is_refused_where_it_is_used(pattern: str, problem: str) -> None:
    """Patterns of groups always; those of modules to ignore for random weights alone."""
    with pytest.raises(CheckpointError, match=rf"quantization_config\.config_groups\.group_1\.targets: '.*' {problem}"):
        CompressedTensors.read(config((["Linear"], 4), ([f"re:{pattern}"], 8)))
    method = CompressedTensors.read(config((["Linear"], 8), ignore=(DOWN, f"re:{pattern}")))
    written, matrix = INT8.write(torch.randn(16, 64))
    stored = method.matrix("lm_head", (16, 64), Tensors(module("lm_head", written)), False)
    assert torch.equal(stored.dense(FORM), matrix)
    dummy = Tensors(DummyCheckpoint({}, {}, seed=0))
    assert isinstance(method.matrix(DOWN, (16, 64), dummy, False), DenseStored)
    with pytest.raises(CheckpointError, match=rf"quantization_config\.ignore: '.*' {problem}"):
        method.matrix("model.layers.0.mlp.up_proj", (16, 64), dummy, False)

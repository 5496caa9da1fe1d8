"""The Llama family against transformers, and every way to cut a computation against each other."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.models.config import ModelConfig
from octavo.models.registry import CausalLM, load_model
from octavo.quant.scheme import WeightFormat
from octavo.runtime.forward_batch import BatchBuilder
from octavo.runtime.kv_storage import KVStorage
from octavo.sampling_params import SamplingParams
from octavo.types import Request, Scheduled, Sequence
from tests.models.checkpoints import VARIANTS, FolderSource, make_checkpoint

CPU = torch.device("cpu")


class Computer:
    """A model over a small paged cache that begins full of NaN, with blocks handed out in random order."""

    def __init__(self, folder: Path, block_size: int) -> None:
        source = FolderSource(folder)
        config = ModelConfig.from_dict(source.config)
        self.model: CausalLM = load_model(config, source, WeightFormat(torch.float32, CPU)).model
        self.storage = KVStorage(config, 256 // block_size, block_size, torch.float32, CPU)
        self.storage.pool.fill_(torch.nan)
        self.free = list(range(1, self.storage.num_blocks))
        random.Random(0).shuffle(self.free)
        self.builder = BatchBuilder(block_size, CPU)

    def sequence(self, tokens: list[int]) -> Sequence:
        return Sequence(Request(0, tokens, SamplingParams(), 1))

    def compute(self, *parts: tuple[Sequence, int]) -> list[Tensor]:
        """Logits of the next ``count`` tokens of each sequence, all in one pass."""
        plan = []
        for seq, count in parts:
            start = seq.num_computed_tokens
            seq.num_computed_tokens += count
            while len(seq.block_table) * self.storage.block_size < seq.num_computed_tokens:
                seq.block_table.append(self.free.pop())
            plan.append(Scheduled(seq, start, tuple(seq.tokens[start : start + count]), (), False, 0))
        batch = self.builder.build(plan)
        x_TD = self.model.forward(batch.token_ids_T, batch.positions_T, self.storage.layers, batch.rows)
        return list(self.model.logits(x_TD).split([count for _, count in parts]))


def random_tokens(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(97), k=length)


@pytest.fixture(scope="module", params=list(VARIANTS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_checkpoint(folder, request.param)


@torch.inference_mode()
def test_logits_are_those_of_transformers(checkpoint: tuple[Path, Any]) -> None:
    folder, reference = checkpoint
    tokens = random_tokens(100)
    expected = reference(torch.tensor([tokens])).logits[0]
    computer = Computer(folder, block_size=16)
    found = computer.compute((computer.sequence(tokens), 100))[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@torch.inference_mode()
def test_chunks_steps_and_batches_give_what_a_full_pass_gives(checkpoint: tuple[Path, Any], block_size: int) -> None:
    folder, reference = checkpoint
    computer = Computer(folder, block_size)
    prompts = [random_tokens(length, seed) for seed, length in enumerate((40, 7, 25))]
    expected = [reference(torch.tensor([tokens])).logits[0] for tokens in prompts]
    seqs = [computer.sequence(tokens) for tokens in prompts]
    found: list[list[Tensor]] = [[], [], []]
    rng = random.Random(block_size)
    while any(seq.num_computed_tokens < len(seq.tokens) for seq in seqs):
        left = [i for i in range(3) if seqs[i].num_computed_tokens < len(seqs[i].tokens)]
        chosen = rng.sample(left, rng.randint(1, len(left)))
        counts = [min(rng.choice([1, 1, 2, 9]), len(seqs[i].tokens) - seqs[i].num_computed_tokens) for i in chosen]
        for i, logits in zip(
            chosen, computer.compute(*[(seqs[i], n) for i, n in zip(chosen, counts, strict=True)]), strict=True
        ):
            found[i].append(logits)
    for logits, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.cat(logits), wanted, rtol=0, atol=1e-4)


def test_parts_of_one_kind_are_one_weight(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gqa")
    source = FolderSource(tmp_path)
    loaded = load_model(ModelConfig.from_dict(source.config), source, WeightFormat(torch.bfloat16, CPU))
    layer: Any = loaded.model.layers[0]  # type: ignore[attr-defined]
    assert len(layer.qkv_proj.weights) == len(layer.mlp.gate_up.weights) == 1
    num_parameters = sum(tensor.numel() for tensor in source.tensors.values())
    assert (loaded.num_parameters, loaded.num_bytes) == (num_parameters, 2 * num_parameters)


def test_tied_head_shares_the_memory_of_the_embedding(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "tied")
    source = FolderSource(tmp_path)
    loaded = load_model(ModelConfig.from_dict(source.config), source, WeightFormat(torch.float32, CPU))
    model: Any = loaded.model
    assert model.head.weights[0].weight_NK.data_ptr() == model.embedding.table_VD.data_ptr()
    assert loaded.num_parameters == sum(weight.numel() for weight in reference.parameters())

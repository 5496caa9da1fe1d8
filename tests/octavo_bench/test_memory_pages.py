"""The tables of memory in docs/tasks: what the engine would compute for such a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.models.meta_model import outline
from octavo.models.model_config import ModelConfig
from octavo.models.registry import read_config
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.memory_budget import plan_memory
from octavo.weights.checkpoint import open_checkpoint
from octavo_bench.dummy_models import model_folder
from tests.tiers import nightly_after

TASKS = Path(__file__).parents[2] / "docs/tasks"
QUANTIZATION = {"bfloat16": None, "FP8": "fp8", "INT4": "int4"}
NUMBERS = {"one": 1, "two": 2, "four": 4}
LARGE = "Llama-3.1-70B"


def cells(page: str, title: str) -> Iterator[list[str]]:
    """The rows of the table under a title of a page, without its head."""
    text = (TASKS / page).read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return iter(rows[2:])


def claims() -> Iterator[tuple[str, str, int, int, str]]:
    """Model, format of weights, GPUs, GiB of each, and the tokens that fit, as the pages say them."""
    model = ""
    for name, form, *tokens in cells("memory.md", "What fits on a GPU"):
        model = name or model
        yield from ((model, form, 1, gib, said) for gib, said in zip((24, 48, 80), tokens, strict=True))
    for gpus, *tokens in cells("70b.md", "What fits where"):
        number, gib = re.fullmatch(r"(\w+) with (\d+) GiB", gpus).groups()  # type: ignore[union-attr]
        yield from (
            (LARGE, form, NUMBERS[number], int(gib), said) for form, said in zip(QUANTIZATION, tokens, strict=True)
        )


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shapes")


@cache
def outlined(name: str, form: str, gpus: int, root: Path) -> tuple[ModelConfig, dict[str, int]]:
    """A model's configuration, and the bytes of its weights on each of so many GPUs, by format."""
    checkpoint = open_checkpoint(model_folder(name.lower(), root), "dummy")
    model = read_config(checkpoint.config, None)
    assert isinstance(model, ModelConfig)
    packed = WeightFormat(torch.bfloat16, torch.device("cuda"), True, QUANTIZATION[form])
    return model, dict(outline(model, checkpoint, packed, gpus).bytes_by_format)


@pytest.mark.parametrize(("name", "form", "gpus", "gib", "said"), nightly_after(3, claims()))
def test_so_many_tokens_fit(name: str, form: str, gpus: int, gib: int, said: str, shapes: Path) -> None:
    model, weights = outlined(name, form, gpus, shapes)
    free = int(0.9 * gib * 2**30) - sum(weights.values())
    kinds = torch.bfloat16, torch.bfloat16, "cuda"
    if said == "-":
        with pytest.raises(ConfigError, match="the KV cache needs"):
            plan_memory(EngineConfig(), model, *kinds, weights=weights, free=free, num_ranks=gpus)
        return
    limits, _ = plan_memory(EngineConfig(), model, *kinds, weights=weights, free=free, num_ranks=gpus)
    assert f"{limits.num_kv_blocks * limits.block_size:,}" == said


@pytest.mark.parametrize("row", nightly_after(0, cells("memory.md", "Weights")), ids=lambda row: row[0])
def test_weights_and_keys_take_so_much(row: list[str], shapes: Path) -> None:
    name, *weights, cached = row
    found = [outlined(name, form, 1, shapes) for form in QUANTIZATION]
    assert [f"{sum(sizes.values()) / 2**30:.1f}" for _, sizes in found] == weights
    model = found[0][0]
    per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * 2
    assert f"{1000 * per_token / 2**30:.2f}" == cached

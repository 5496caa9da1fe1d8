"""What is wrong with the files of a checkpoint is said by tensor, with what was expected and what was found."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.errors import CheckpointError
from octavo.models.meta_model import outline
from octavo.models.registry import load_model, read_config
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.checkpoint import open_checkpoint
from tests.models.checkpoints import make_checkpoint
from tests.models.families import make_checkpoint as make_family

NORM, MAP = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_checkpoint(folder, "gqa")
    return folder


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (NORM, None, rf"tensor {NORM} is missing; expected one of shape \[32\]"),
        (MAP, None, rf"tensor {MAP} is missing; expected one of shape \[16, 32\]"),
        (
            "model.extra.weight",
            torch.ones(3, 2).half(),
            r"does not have: model\.extra\.weight: expected none, found F16 of shape \[3, 2\]",
        ),
        (NORM, torch.ones(31), rf"tensor '{NORM}': has shape \(31,\), expected \(32,\)"),
        (MAP, torch.ones(32, 16), rf"tensor '{MAP}': has shape \(32, 16\), expected \(16, 32\)"),
        (MAP, torch.ones(16, 32, dtype=torch.float64), rf"tensor '{MAP}': has dtype F64, supported are F32, F16, BF16"),
        (MAP, torch.ones(16, 32, dtype=torch.int8), rf"tensor {MAP} is int8; expected floating-point numbers"),
        (NORM, torch.ones(32).to(torch.float8_e4m3fn), rf"tensor {NORM} is float8_e4m3fn; expected floating-point"),
        (MAP, torch.ones(16, 32, dtype=torch.uint8), rf"tensor {MAP} is uint8; expected floating-point numbers"),
    ],
)
def test_each_error_names_the_tensor(
    whole: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None, message: str
) -> None:
    tensors = load_file(whole / "model.safetensors")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    shutil.copy(whole / "config.json", tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    config = read_config(checkpoint.config)
    with pytest.raises(CheckpointError, match=message):
        load_model(config, checkpoint, WeightFormat(torch.float32, torch.device("cpu")))
    with pytest.raises(CheckpointError, match=re.escape(name)):  # from headers alone
        outline(config, checkpoint, WeightFormat(torch.float32, torch.device("meta")))


def test_a_wrong_number_of_experts_that_compute_nothing(tmp_path: Path) -> None:
    """It is refused by the shape of the router."""
    make_family(tmp_path, "longcat_flash/zero_experts")
    checkpoint = open_checkpoint(tmp_path)
    config = read_config({**checkpoint.config, "zero_expert_num": 16_384})
    with pytest.raises(CheckpointError, match=r"e_score_correction_bias': has shape \(9,\), expected \(16390,\)"):
        load_model(config, checkpoint, WeightFormat(torch.float32, torch.device("cpu")))


def test_tables_of_hashes_that_do_not_fit_the_configuration(tmp_path: Path) -> None:
    """Qwen4's factors of tokens follow from the configuration, and so do the sizes of its tables."""
    make_family(tmp_path, "qwen4_exp_text/blocks")
    checkpoint, form = open_checkpoint(tmp_path), WeightFormat(torch.float32, torch.device("cpu"))
    with pytest.raises(CheckpointError, match="layer_multipliers has other numbers than follow from the configuration"):
        load_model(read_config({**checkpoint.config, "seed": 7}), checkpoint, form)
    config = read_config({**checkpoint.config, "make_ngram_vocab_size_divisible_by": 1000})
    with pytest.raises(CheckpointError, match=r"ngram_embedding: 240 rows in parts; expected 1000"):
        load_model(config, checkpoint, form)

"""Quantised checkpoints through the engine: what they compute is what their dequantised matrices compute."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.models.meta_model import outline
from octavo.models.registry import load_model, read_config
from octavo.ops.linear.grouped_linear import grouped_linear
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.safetensors import SafetensorsCheckpoint
from tests.models.families import VOCAB_SIZE, make_checkpoint
from tests.models.test_architectures import SETTINGS, random_tokens
from tests.ops.cpu_cases import needs_float_kernels
from tests.quant.writers import (
    Writer,
    auto_round,
    awq,
    bitnet,
    bitsandbytes_int8,
    compressed,
    fp8,
    gptq,
    modelopt_fp8,
    modelopt_nvfp4,
    quantise,
    replace_matrices,
)
from tests.tiers import nightly_after, one_in

GROUP = 16
INT = {"type": "int", "strategy": "group", "group_size": GROUP}
FORMATS: dict[str, Writer] = {
    "gptq": gptq(4, GROUP),
    "gptq v2, 3 bits, zeros": gptq(3, GROUP, "gptq_v2", has_zeros=True),
    "gptq, in activation order": gptq(4, GROUP, has_zeros=True, is_ordered=True),
    "gptq, 8 bits": gptq(8, GROUP),
    "gptq, groups of 8": gptq(4, 8),
    "auto-round": auto_round(4, GROUP),
    "awq": awq(GROUP),
    "bitsandbytes, 8 bits": bitsandbytes_int8(),
    "bitnet": bitnet(linear_class="autobitlinear"),
    "bitnet, divided": bitnet(),
    "bitnet, rounded at load": bitnet(linear_class="autobitlinear", quantization_mode="online"),
    "fp8": fp8(),
    "fp8, blocks": fp8(32, 32),
    "modelopt fp8": modelopt_fp8(),
    "modelopt nvfp4": modelopt_nvfp4(),
    "int4": compressed("pack-quantized", num_bits=4, **INT),
    "int4, zeros": compressed("pack-quantized", num_bits=4, **INT, symmetric=False),
    "int8": compressed("int-quantized", num_bits=8, type="int", strategy="channel"),
    "compressed fp8": compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    "nvfp4": compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    "mxfp4": compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16}
SIZES: dict[str, dict[str, Any]] = {
    "llama/biases": {},
    "qwen3/wide_heads": {},
    "gemma3/two_ropes": {"num_hidden_layers": 3},
    "phi3/fused": {},
    "mixtral/two_of_five": {},
    "qwen3_moe/normalised": {"moe_intermediate_size": 32},
    "deepseek_v3/groups": {"moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 16},
    "qwen3_next/experts": {"moe_intermediate_size": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
    "qwen3_5_moe/experts": {"moe_intermediate_size": 32},
    "axk2/gated_norms": {**LATENT, "moe_intermediate_size": 32, "index_head_dim": 32},
    "dots3_note_text/windows": {**LATENT, "moe_intermediate_size": 32, "shared_experts_intermediate_size": 32}
    | {"index_head_dim": 32, "swa_q_lora_rank": 32, "swa_kv_lora_rank": 32, "swa_v_head_dim": 16},
    "glm_moe_dsa/shared": {**LATENT, "moe_intermediate_size": 32, "index_head_dim": 32},
}
RECURRENT = (
    "qwen3_next/experts",
    "qwen3_5_moe/experts",
    "axk2/gated_norms",
    "dots3_note_text/windows",
    "glm_moe_dsa/shared",
)
"""Published in blocks of FP8, whose rows are blocks of the heads, or not, as those of the second here."""
ALL_FAMILIES = {"gptq", "awq", "fp8, blocks", "int4", "modelopt nvfp4"}
"""Formats that every family is tried in; Llama is tried in each."""
PROMPT = random_tokens(60)
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, prompt_logprobs=5, logprobs=5)


def checkpoint(folder: Path, row: str) -> Path:
    make_checkpoint(folder, row, hidden_size=64, intermediate_size=96, initializer_range=0.1, **SIZES[row])
    return folder


@pytest.fixture(
    scope="module",
    params=[
        (row, name)
        for row in SIZES
        for name in FORMATS
        if row == "llama/biases" or name in (("fp8, blocks",) if row in RECURRENT else ALL_FAMILIES)
    ],
    ids="/".join,
)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint in a format, and one with the same matrices unquantised."""
    row, name = request.param
    torch.manual_seed(0)
    source, folder, plain = (tmp_path_factory.mktemp(kind) for kind in ("source", "quantised", "plain"))
    checkpoint(source, row)
    matrices = quantise(source, folder, FORMATS[name])
    assert len(matrices) >= 2 * 4
    replace_matrices(source, plain, matrices)
    return folder, plain


def logprobs(folder: Path, **settings: Any) -> tuple[Tensor, list[int]]:
    """Log-probabilities of each prompt token's best five as a table [tokens, V], NaN elsewhere; and the answer."""
    with LLM(folder, **SETTINGS, **settings) as llm:
        result = llm.generate([PROMPT], PARAMS)[0]
    output = result.outputs[0]
    rows = [*(result.prompt_logprobs or [])[1:], *(output.logprobs or [])]
    table = torch.full((len(rows), VOCAB_SIZE), float("nan"))
    for row, told in zip(table, rows, strict=True):
        for token, entry in (told or {}).items():
            row[token] = entry.logprob
    return table, list(output.token_ids)


@one_in(7)
def test_dequantised_weights_give_the_logits_of_their_matrices(folders: tuple[Path, Path]) -> None:
    folder, plain = folders
    (found, answer), (expected, same) = (logprobs(path, dtype="float32") for path in (folder, plain))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, equal_nan=True)
    assert answer == same


@needs_float_kernels
@one_in(7)
def test_packed_weights_are_close_to_their_matrices(folders: tuple[Path, Path]) -> None:
    """Activations are rounded to 8 bits for packed integers: log-probabilities move by a few hundredths.

    Those of models with experts move more: near ties of the router may be decided otherwise, too.
    """
    folder, plain = folders
    (found, answer), (expected, same) = (logprobs(path, kv_cache_dtype="auto") for path in (folder, plain))
    assert (found - expected)[: len(PROMPT) - 1].abs().nanmean() < 0.05
    best = expected[len(PROMPT) - 1 :].nan_to_num(-1e9).topk(2).values
    for token, other, (first, second) in zip(answer, same, best.tolist(), strict=True):
        if token != other:
            assert first - second < 0.25, "only near ties may be decided otherwise"
            break


@one_in(3)
@pytest.mark.parametrize("name", ["gptq, in activation order", "fp8, blocks", "modelopt nvfp4", "int8"])
def test_random_weights_need_no_files_of_weights(tmp_path: Path, name: str) -> None:
    checkpoint(tmp_path, "qwen3_moe/normalised")
    (tmp_path / "model.safetensors").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": FORMATS[name].config}))
    found, answer = logprobs(tmp_path, load_format="dummy")
    assert len(answer) == PARAMS.max_tokens
    assert not found[: len(PROMPT)].isnan().all(dim=1).any()


def test_a_quantised_embedding_is_tied_to_the_head(tmp_path: Path) -> None:
    """compressed-tensors may quantise embeddings too (targets: Embedding)."""
    source, folder, plain = (tmp_path / name for name in ("source", "quantised", "plain"))
    make_checkpoint(source, "llama/one_kv_head_tied", hidden_size=64)
    tensors = load_file(source / "model.safetensors")
    name, writer = "model.embed_tokens", compressed("int-quantized", num_bits=8, type="int", strategy="channel")
    written, matrix = writer.write(tensors.pop(f"{name}.weight"))
    replace_matrices(source, plain, {f"{name}.weight": matrix})
    folder.mkdir()
    save_file({**tensors, **{f"{name}.{part}": value for part, value in written.items()}}, folder / "model.safetensors")
    writer.config["config_groups"]["group_0"]["targets"] = ["Embedding"]
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": writer.config}))
    found, expected = (logprobs(path, dtype="float32") for path in (folder, plain))
    assert found[1] == expected[1]
    packed = logprobs(folder)[0]
    assert (packed - expected[0])[: len(PROMPT) - 1].abs().nanmean() < 0.05


@one_in(7)
def test_a_quantised_checkpoint_is_checked_from_its_headers(folders: tuple[Path, Path]) -> None:
    folder, plain = folders
    found, expected = (
        outline(read_config(checkpoint.config), checkpoint, WeightFormat(torch.bfloat16, torch.device("meta")))
        for checkpoint in (SafetensorsCheckpoint(folder), SafetensorsCheckpoint(plain))
    )
    assert found.num_parameters == expected.num_parameters
    assert found.num_bytes == expected.num_bytes


@needs_float_kernels
@one_in(7)
@pytest.mark.parametrize("has_grouped_kernel", [False, True])
@pytest.mark.parametrize("row", nightly_after(1, ["mixtral/two_of_five", "llama/biases"]))
@pytest.mark.parametrize("name", FORMATS)
def test_packed_weights_take_about_the_bytes_that_headers_announce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, row: str, has_grouped_kernel: bool
) -> None:
    """With the kernels of a CPU, and packed as for those of a GPU; those that no kernel takes are dense.

    How many bytes a scale takes depends on its value.
    """
    if has_grouped_kernel:
        monkeypatch.setattr(grouped_linear, "chosen", lambda *_: "triton")
    torch.manual_seed(0)
    source, folder = tmp_path / "source", tmp_path / "quantised"
    quantise(checkpoint(source, row), folder, FORMATS[name])
    file = SafetensorsCheckpoint(folder)
    config, form = read_config(file.config), WeightFormat(torch.float32, torch.device("cpu"), packs=True)
    found, announced = (make(config, file, form).bytes_by_format for make in (load_model, outline))
    assert found.keys() == announced.keys()
    for kind, size in found.items():
        assert announced[kind] == pytest.approx(size, rel=0.2 if kind != "float32" else 0)


@needs_float_kernels
@pytest.mark.parametrize("name", ["fp8", "fp8, blocks", "compressed fp8"])
def test_fp8_weights_take_the_bytes_that_the_headers_announce(tmp_path: Path, name: str) -> None:
    source, folder = tmp_path / "source", tmp_path / "quantised"
    matrices = quantise(checkpoint(source, "llama/biases"), folder, FORMATS[name])
    file = SafetensorsCheckpoint(folder)
    config, form = read_config(file.config), WeightFormat(torch.float32, torch.device("cpu"), packs=True)
    found = load_model(config, file, form).bytes_by_format
    assert found == outline(config, file, form).bytes_by_format
    numbers = sum(matrix.numel() for matrix in matrices.values())
    assert numbers < found["fp8"] <= numbers * (1 + 4 / 32)

"""Scales of an FP8 KV cache in checkpoints: the compressed-tensors library's own model says what they give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.modeling import register_key_hook, register_value_hook
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, apply_quantization_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.models.layer_cache import kv_groups, rank_cache
from octavo.models.meta_model import FirstOf, outline
from octavo.models.registry import LoadedModel, load_model, read_config
from octavo.ops import dispatch
from octavo.ops.attention.attention import GroupRows, PagedRows
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.kv_storage import KVStorage
from octavo.weights.checkpoint import open_checkpoint

CPU = torch.device("cpu")
FORM = WeightFormat(torch.float32, CPU)
TOKENS = torch.arange(40) * 7 % 99
KEYS, VALUES = 300.0, 0.001
"""How many times larger keys and values are than those of a usual model: FP8 numbers end at 448 and at 0.002."""


def attentions(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


@pytest.fixture(scope="module", params=["tensor", "attn_head"])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensor]:
    """A checkpoint with calibrated scales, of layers or of heads, and its logits as the library computes them."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=99, num_hidden_layers=2, initializer_range=0.2, **shape)).eval()
    scheme = QuantizationArgs(num_bits=8, type="float", strategy=request.param, dynamic=False, symmetric=True)
    for attention in attentions(model):
        for part, factor in (("q", 1 / KEYS), ("k", KEYS), ("v", VALUES), ("o", 1 / VALUES)):
            getattr(attention, f"{part}_proj").weight.data *= factor
    apply_quantization_config(model, QuantizationConfig(config_groups={}, kv_cache_scheme=scheme, format="dense"))
    for attention in attentions(model):
        attention.quantization_enabled = False
        register_key_hook(attention, lambda module, keys: calibrate(module.k_scale, keys))
        register_value_hook(attention, lambda module, values: calibrate(module.v_scale, values))
    with torch.no_grad():
        model(TOKENS[None])
        for attention in attentions(model):
            attention.quantization_enabled = True
        logits = model(TOKENS[None]).logits[0]
    folder = tmp_path_factory.mktemp(request.param)
    compressor = ModelCompressor.from_pretrained_model(model)
    assert compressor is not None
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return folder, logits


def calibrate(scale: Tensor, x_1KTH: Tensor) -> None:
    """A scale for the tensor, or for each head, such that the largest number becomes that of FP8."""
    largest = x_1KTH.abs().amax((0, 2, 3)) if scale.numel() > 1 else x_1KTH.abs().max()
    scale.data.copy_((largest / 448).view(scale.shape))


def load(folder: Path) -> tuple[Any, LoadedModel]:
    checkpoint = open_checkpoint(folder)
    config = read_config(checkpoint.config)
    return config, load_model(config, checkpoint, FORM)


def logits_of(config: Any, loaded: LoadedModel, dtype: torch.dtype, scales: Any = None) -> Tensor:
    """A prompt, then its last tokens one by one, over a cache of this type."""
    storage = KVStorage(config.cache, kv_groups(config.cache), [2], 32, dtype, CPU, scales=scales or {})
    found = []
    with dispatch.only(dispatch.REFERENCE), torch.no_grad():
        for begin, end in ((0, 37), (37, 38), (38, 39), (39, 40)):
            slots, lens = torch.arange(begin, end), torch.tensor([0, end - begin], dtype=torch.int32)
            group = GroupRows(slots, torch.tensor([[0, 1]], dtype=torch.int32))
            rows = PagedRows((group,), lens, torch.tensor([end], dtype=torch.int32), end - begin)
            found.append(loaded.model.logits(loaded.model.forward(TOKENS[begin:end], slots, storage.layers, rows)))
    return torch.cat(found)


def test_a_scaled_cache_gives_what_the_library_computes(written: tuple[Path, Tensor]) -> None:
    folder, expected = written
    config, loaded = load(folder)
    found = logits_of(config, loaded, torch.float8_e4m3fn, loaded.kv_scales)
    exact = logits_of(config, loaded, torch.float32)
    unscaled = logits_of(config, loaded, torch.float8_e4m3fn)
    rounding = (exact - expected).norm()
    assert (found - expected).norm() < 0.1 * rounding, "numbers are rounded alike, but for near ties"
    assert (unscaled - exact).norm() > 5 * rounding


def test_a_rank_has_the_scales_of_its_heads(written: tuple[Path, Tensor]) -> None:
    folder, _ = written
    config, whole = load(folder)
    part = load_model(config, open_checkpoint(folder), FORM, collective=FirstOf(2))
    assert outline(config, open_checkpoint(folder), FORM, num_ranks=2).num_bytes == part.num_bytes
    assert rank_cache(config.cache, 2)[0].num_kv_heads == 1
    assert len(part.kv_scales) == 2
    for layer, scales in part.kv_scales.items():
        assert all(torch.equal(own, of_all[:1]) for own, of_all in zip(scales, whole.kv_scales[layer], strict=True))


NAMES = {
    "modelopt": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    "older compressed-tensors": ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
    "vllm": ("self_attn.attn.k_scale", "self_attn.attn.v_scale"),
}


def renamed(folder: Path, to: Path, scales: dict[str, Tensor], **settings: Any) -> Path:
    """The checkpoint with other scales."""
    config = LlamaConfig.from_pretrained(folder)
    config.quantization_config = settings
    config.save_pretrained(to)
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if "_scale" not in name}
    save_file({**tensors, **{f"model.layers.0.{name}": x for name, x in scales.items()}}, to / "model.safetensors")
    return to


@pytest.mark.parametrize("writer", NAMES)
def test_names_of_other_writers(writer: str, written: tuple[Path, Tensor], tmp_path: Path) -> None:
    pair = dict(zip(NAMES[writer], (torch.tensor(0.25), torch.tensor([0.5])), strict=True))
    folder = renamed(written[0], tmp_path, pair, quant_method="modelopt", quant_algo="FP8", kv_cache_quant_algo="FP8")
    _, loaded = load(folder)
    assert list(loaded.kv_scales) == [0]
    assert [part.tolist() for part in loaded.kv_scales[0]] == [[0.25, 0.25], [0.5, 0.5]]
    assert all(part.is_contiguous() for part in loaded.kv_scales[0])


def test_one_scale_for_keys_and_values_or_for_keys_alone(written: tuple[Path, Tensor], tmp_path: Path) -> None:
    for name, expected in (("kv_scale", [[0.25] * 2, [0.25] * 2]), ("k_scale", [[0.25] * 2, [1.0] * 2])):
        pair = {f"self_attn.{name}": torch.tensor(0.25)}
        _, loaded = load(renamed(written[0], tmp_path, pair, quant_method="fp8"))
        assert [part.tolist() for part in loaded.kv_scales[0]] == expected


def test_scales_for_other_numbers_are_not_used(
    written: tuple[Path, Tensor], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pair = {"self_attn.k_proj.k_scale": torch.tensor(0.25), "self_attn.v_proj.v_scale": torch.tensor(0.25)}
    for settings in ({"kv_cache_quant_algo": "NVFP4"}, {"kv_cache_scheme": {"type": "float", "num_bits": 4}}):
        caplog.clear()
        folder = renamed(written[0], tmp_path, pair, quant_method="modelopt", quant_algo="FP8", **settings)
        assert not load(folder)[1].kv_scales
        assert "2 scales of attention are not used, model.layers.0.self_attn.k_proj.k_scale among them" in caplog.text
    of_channels = {"self_attn.k_scale": torch.ones(32), "self_attn.q_scale": torch.tensor(0.1)}
    assert not load(renamed(written[0], tmp_path, of_channels, quant_method="fp8"))[1].kv_scales

"""Loading: every tensor is there, none is left over, and shapes are as expected."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM, SamplingParams
from octavo.build.device_settings import weight_format
from octavo.config import STORED_METHODS, ModelSettings
from octavo.errors import CheckpointError, ConfigError
from octavo.models.registry import LoadedModel, load_model, read_config
from octavo.quant.checkpoint_tensors import Part
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.gguf.block_formats import BlockTensor
from tests.models import families
from tests.models.checkpoints import FolderSource, make_checkpoint
from tests.ops.cpu_cases import needs_float_kernels, random_blocks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for variant in ("gqa", "tied"):
        made[variant] = tmp_path_factory.mktemp(variant)
        make_checkpoint(made[variant], variant)
    return made


def load(source: FolderSource, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_model(read_config(source.config), source, WeightFormat(dtype, torch.device("cpu")))


def test_a_missing_tensor_is_named_with_its_shape(folders: dict[str, Path]) -> None:
    source = FolderSource(folders["gqa"])
    del source.tensors["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.weight is missing.*\[16, 32\]"):
        load(source)


def test_a_tensor_of_another_shape_is_named_with_both(folders: dict[str, Path]) -> None:
    source = FolderSource(folders["gqa"])
    source.tensors["model.norm.weight"] = torch.ones(31)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \[31\]; expected \[32\]"):
        load(source)


def test_tensors_left_over_are_named_unless_they_are_harmless(folders: dict[str, Path]) -> None:
    source = FolderSource(folders["gqa"])
    source.tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    load(source)
    source.tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    with pytest.raises(CheckpointError, match=r"1 tensors .*model\.layers\.0\.self_attn\.q_norm\.weight"):
        load(source)


def test_a_tied_head_may_be_there_twice_but_not_differ(folders: dict[str, Path]) -> None:
    source = FolderSource(folders["tied"])
    num_parameters = load(source).num_parameters
    source.tensors["lm_head.weight"] = source.tensors["model.embed_tokens.weight"].clone()
    assert load(source).num_parameters == num_parameters
    source.tensors["lm_head.weight"][3, 3] += 1
    with pytest.raises(CheckpointError, match="differs from the embedding"):
        load(source)


def test_an_untied_head_must_be_there(folders: dict[str, Path]) -> None:
    source = FolderSource(folders["tied"])
    source.config["tie_word_embeddings"] = False
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing"):
        load(source)


@pytest.mark.parametrize(
    ("name", "closest"), [("LlammaForCausalLM", "; closest are LlamaForCausalLM, "), ("Zzz", ""), (None, "")]
)
def test_an_unknown_architecture_is_refused_with_the_closest(
    name: str | None, closest: str, folders: dict[str, Path]
) -> None:
    source = FolderSource(folders["gqa"])
    source.config["architectures"] = None if name is None else [name]
    with pytest.raises(
        CheckpointError, match=f"{name} is not supported{closest}.*; `octavo models` lists all"
    ) as error:
        load(source)
    assert len(str(error.value)) < 600


class Blocks(FolderSource):
    """Serves every matrix as F16 blocks."""

    def load(self, name: str, shape: tuple[int, ...]) -> Part:
        tensor = super().load(name, shape)
        if tensor.ndim == 1:
            return tensor
        return BlockTensor("F16", (shape[0], shape[1]), tensor.half().numpy().view(np.uint8))


class PackedTables(FolderSource):
    """Serves the embedding and the head as Q8_0 blocks, which are ``seeds[name]``'s."""

    def __init__(self, folder: Path, **seeds: int) -> None:
        super().__init__(folder)
        self.seeds = {f"{name.replace('__', '.')}.weight": seed for name, seed in seeds.items()}
        self.tensors |= {name: torch.empty(97, 32) for name in self.seeds}

    def load(self, name: str, shape: tuple[int, ...]) -> Part:
        if name in self.seeds:
            return random_blocks("Q8_0", 97, 32, self.seeds[name])
        return super().load(name, shape)


@needs_float_kernels
def test_a_tied_head_may_be_there_twice_in_blocks(folders: dict[str, Path]) -> None:
    for seed in (3, 4):
        source = PackedTables(folders["tied"], model__embed_tokens=3, lm_head=seed)
        form = WeightFormat(torch.float32, torch.device("cpu"), packs=True)
        if seed == 3:
            model: Any = load_model(read_config(source.config), source, form).model
            assert model.head.weights == [model.embedding.weight]
            assert model.embedding.weight.dense_NK is None
        else:
            with pytest.raises(CheckpointError, match="differs from the embedding"):
                load_model(read_config(source.config), source, form)


@needs_float_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_of_16_bits_stay_so_on_a_cpu_and_compute_the_same(tmp_path: Path, dtype: str) -> None:
    families.make_checkpoint(tmp_path, "llama/biases", hidden_size=64).to(getattr(torch, dtype)).save_pretrained(
        tmp_path
    )
    checkpoint, device = open_checkpoint(tmp_path), torch.device("cpu")
    config, tokens, found = read_config(checkpoint.config), [[5, 3, 8, 2], [7]], {}
    for name in ("auto", "float32"):
        form = weight_format(ModelSettings(dtype=name), device, checkpoint)
        assert (form.dtype, form.kv_dtype) == (torch.float32, torch.float32)
        loaded = load_model(config, checkpoint, form)
        with LLM(tmp_path, dtype=name, device="cpu", kv_cache_memory=0.01, max_model_len=64) as llm:
            outputs = llm.generate(tokens, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2))
        found[name] = loaded.bytes_by_format, [output.outputs[0] for output in outputs]
    assert found["auto"][0][dtype] > 0
    assert found["auto"][0][dtype] * 2 == found["float32"][0]["float32"] - found["auto"][0]["float32"]
    for ours, expected in zip(found["auto"][1], found["float32"][1], strict=True):
        assert (ours.token_ids, ours.logprobs) == (expected.token_ids, expected.logprobs)


@pytest.mark.parametrize("variant", ["gqa", "tied"])
@torch.inference_mode()
def test_block_weights_are_made_dense_exactly(folders: dict[str, Path], variant: str) -> None:
    rounded = FolderSource(folders[variant])
    for name, tensor in rounded.tensors.items():
        rounded.tensors[name] = tensor.half().float() if tensor.ndim == 2 else tensor
    x = torch.randn(3, 32)
    expected, found = load(rounded), load(Blocks(folders[variant]))
    assert found[1:3] == expected[1:3]
    assert torch.equal(found.model.logits(x), expected.model.logits(x))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    families.make_checkpoint(tmp_path, "deepseek_v3/groups")
    source = FolderSource(tmp_path)
    extra = f"model.layers.{source.config['num_hidden_layers']}."
    source.tensors[extra + "enorm.weight"] = torch.ones(2)
    with pytest.raises(CheckpointError, match=r"enorm\.weight"):
        load(source)
    source.tensors[extra + "eh_proj.weight"] = torch.ones(2, 2)
    load(source)


def test_gpt2_may_have_the_names_and_masks_of_its_first_publication(tmp_path: Path) -> None:
    families.make_checkpoint(tmp_path, "gpt2/small")
    source, other = FolderSource(tmp_path), FolderSource(tmp_path)
    assert all(name.startswith("transformer.") for name in source.tensors)
    other.tensors = {name.removeprefix("transformer."): tensor for name, tensor in source.tensors.items()}
    for layer in range(2):
        other.tensors[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
        other.tensors[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    models: list[Any] = [load(source).model, load(other).model]
    weights = [model.layers[1].mlp.up.weights[0].weight_NK for model in models]
    assert torch.equal(*weights)
    assert torch.equal(weights[0], source.tensors["transformer.h.1.mlp.c_fc.weight"].t())


def test_parts_of_one_kind_are_one_weight(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gqa")
    source = FolderSource(tmp_path)
    loaded = load(source, torch.bfloat16)
    layer: Any = loaded.model.layers[0]  # type: ignore[attr-defined]
    assert len(layer.qkv_proj.weights) == len(layer.mlp.up.weights) == 1
    num_parameters = sum(tensor.numel() for tensor in source.tensors.values())
    assert (loaded.num_parameters, loaded.num_bytes) == (num_parameters, 2 * num_parameters)


def test_tied_head_shares_the_memory_of_the_embedding(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "tied")
    source = FolderSource(tmp_path)
    loaded = load(source)
    model: Any = loaded.model
    assert model.head.weights[0].weight_NK.data_ptr() == model.embedding.weight.weight_NK.data_ptr()
    assert loaded.num_parameters == sum(weight.numel() for weight in reference.parameters())


def test_a_named_method_must_be_that_of_the_checkpoint() -> None:
    """As other servers want it, ``quantization`` may say how a checkpoint is quantised."""

    def form(name: str, method: str | None) -> WeightFormat:
        found: Any = SimpleNamespace(config={"quantization_config": {"quant_method": method}} if method else {})
        found.has_blocks = method == "gguf"
        return weight_format(ModelSettings(quantization=name), torch.device("cpu"), found)

    for method in STORED_METHODS:
        assert form(method, method).quantization is None
    for method, told in [(None, "not quantised"), ("gptq", "quantised by gptq"), ("gguf", "quantised by gguf")]:
        with pytest.raises(ConfigError, match=f"quantization: awq names .* are {told}"):
            form("awq", method)


def test_weights_of_eight_bits_without_scales_are_exact(tmp_path: Path) -> None:
    """F8_E5M2, the start of a float16; beside tensors of types that no model reads."""
    model = families.make_checkpoint(tmp_path, "llama/gqa")
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    tensors[name] = tensors[name].to(torch.float8_e5m2)
    masks = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3, dtype=torch.bool)}
    save_file({**tensors, **masks}, path)
    with torch.no_grad():
        model.get_parameter(name).copy_(tensors[name].float())
    prompt = list(range(40))
    with LLM(tmp_path, dtype="float32", device="cpu", kv_cache_memory=0.01, tokenizer=None) as llm:
        [result] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    with torch.inference_mode():
        wanted = model(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
    for i, entry in enumerate((result.prompt_logprobs or [])[1:]):
        assert (entry or {})[prompt[i + 1]].logprob == pytest.approx(float(wanted[i, prompt[i + 1]]), abs=1e-4)

"""What methods accept besides the plain case: rules for modules, other files, leftovers of writers, random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from octavo.errors import CheckpointError
from octavo.models.meta_model import Outline
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.methods import read_method
from octavo.quant.stored.float4 import Float4Stored
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.scaled import ScaledStored
from octavo.quant.stored.shard import Shard
from octavo.quant.stored.stored_weight import DenseStored, StoredWeight, WeightFormat
from octavo.weights.dummy import DummyCheckpoint
from octavo.weights.safetensors import read_configs
from tests.models.test_sharding import ODD, load
from tests.quant.sources import InMemory, module
from tests.quant.writers import awq, compressed, fp8, gptq, modelopt_fp8, modelopt_nvfp4

NAME = "model.layers.0.mlp.down_proj"
FORM = WeightFormat(torch.float32, torch.device("cpu"))
INT4 = compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)


def read(config: dict[str, Any], tensors: dict[str, Tensor], shape: tuple[int, int], name: str = NAME) -> StoredWeight:
    source = Tensors(module(name, tensors))
    stored = read_method(config).matrix(name, shape, source, False)
    source.finish()
    return stored


def test_rules_of_gptq_for_modules() -> None:
    weight = torch.randn(32, 64)
    config = {
        **gptq(4, 32).config,
        "dynamic": {"-:.*q_proj": {}, "+:.*mlp\\.down": {"bits": 8, "group_size": 16}, ".*up_proj": {"group_size": -1}},
    }
    for name, writer in (("mlp.down_proj", gptq(8, 16)), ("mlp.up_proj", gptq(4, 64)), ("mlp.gate_proj", gptq(4, 32))):
        written, matrix = writer.write(weight)
        assert torch.equal(read(config, written, (32, 64), f"model.layers.0.{name}").dense(FORM), matrix)
    plain = read(config, {"weight": weight}, (32, 64), "model.layers.0.self_attn.q_proj")
    assert torch.equal(plain.dense(FORM), weight)


def test_zero_points_of_gptq_are_undone_with_carries() -> None:
    """GPTQModel subtracts ones from whole words: a zero point of 0 borrows from its neighbour."""
    written, _ = gptq(4, 32, "gptq_v2", has_zeros=True).write(torch.randn(32, 64))
    config = gptq(4, 32, has_zeros=True).config
    written["qzeros"][0, 0] = 0x54321000
    expected = read({**config, "checkpoint_format": "gptq_v2"}, written, (32, 64)).dense(FORM)
    written["qzeros"] -= 0x11111111
    assert torch.equal(read(config, written, (32, 64)).dense(FORM), expected)


def test_the_layout_of_gptq_has_two_keys() -> None:
    """GPTQModel reads ``format`` as well."""
    written, matrix = gptq(4, 32, "gptq_v2", has_zeros=True).write(torch.randn(32, 64))
    config = {key: value for key, value in gptq(4, 32).config.items() if key != "checkpoint_format"}
    assert torch.equal(read({**config, "format": "gptq_v2"}, written, (32, 64)).dense(FORM), matrix)
    both = {**config, "format": "gptq", "checkpoint_format": "gptq_v2"}
    assert torch.equal(read(both, written, (32, 64)).dense(FORM), matrix)
    with pytest.raises(CheckpointError, match=r"quantization_config\.format is 'marlin'; it must be gptq or gptq_v2"):
        read_method({**config, "format": "marlin"})


def test_an_order_of_gptq_that_is_missing_is_named() -> None:
    """Unless groups are those of unordered inputs, or there is one group alone."""
    written, matrix = gptq(4, 16).write(torch.randn(32, 64))
    del written["g_idx"]
    for settings in ({}, {"desc_act": True, "static_groups": True}):
        assert torch.equal(read({**gptq(4, 16).config, **settings}, written, (32, 64)).dense(FORM), matrix)
    with pytest.raises(CheckpointError, match=r"mlp\.down_proj\.g_idx is missing; expected one of shape \[64\]"):
        read({**gptq(4, 16).config, "desc_act": True}, written, (32, 64))
    written, matrix = gptq(4, 64).write(torch.randn(32, 64))
    del written["g_idx"]
    assert torch.equal(read({**gptq(4, 64).config, "desc_act": True}, written, (32, 64)).dense(FORM), matrix)


def test_a_bias_of_zeros_is_left_out() -> None:
    written, matrix = gptq(4, 32).write(torch.randn(32, 64))
    assert torch.equal(read(gptq(4, 32).config, {**written, "bias": torch.zeros(32)}, (32, 64)).dense(FORM), matrix)
    with pytest.raises(CheckpointError, match=r"does not have: model\.layers\.0\.mlp\.down_proj\.bias"):
        read(gptq(4, 32).config, {**written, "bias": torch.ones(32)}, (32, 64))


class CountedName(str):
    """A name that counts how often the beginning of any is looked at."""

    num_looks = 0

    def startswith(self, *prefix: Any) -> bool:
        CountedName.num_looks += 1
        return super().startswith(*prefix)


def test_what_is_left_out_is_found_without_a_look_at_all_names() -> None:
    """A rank leaves out each expert that it does not hold: 64 in each of 48 layers, among 18,000 names, say."""
    names = [CountedName(f"layers.{i}.experts.{j}.{part}") for i in range(12) for j in range(20) for part in "abc"]
    source = Tensors(InMemory(dict.fromkeys(names, torch.zeros(1))))
    CountedName.num_looks = 0
    source.leave_out("layers.1.experts.1.", "layers.5.experts.7.")
    assert CountedName.num_looks == 2 * (3 + 1)
    with pytest.raises(CheckpointError, match=f"{len(names) - 6} tensors that this architecture does not have"):
        source.finish()
    source.leave_out("layers.")
    source.finish()
    source.leave_out("zzz", "a")


def test_groups_of_modules_by_name_pattern_and_class() -> None:
    [(_, int4)] = INT4.config["config_groups"].items()
    fp8_writer = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    [(_, fp8_group)] = fp8_writer.config["config_groups"].items()
    groups = {
        "group_0": {**int4, "format": "pack-quantized"},
        "group_1": {**fp8_group, "format": "float-quantized", "targets": ["re:.*down_proj", "lm_head"]},
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups}
    weight = torch.randn(48, 64)
    for name, writer, kind in (
        ("model.layers.3.mlp.down_proj", fp8_writer, ScaledStored),
        ("lm_head", fp8_writer, ScaledStored),
        ("model.layers.3.mlp.up_proj", INT4, GroupedStored),
    ):
        written, matrix = writer.write(weight)
        stored = read(config, written, (48, 64), name)
        assert isinstance(stored, kind)
        assert torch.equal(stored.dense(FORM), matrix)
    assert isinstance(read(config, {"weight": weight}, (48, 64), "model.embed_tokens"), DenseStored)


@pytest.mark.parametrize("bits", [3, 5, 6])
def test_words_of_older_versions_have_gaps(bits: int) -> None:
    """Before codes crossed words, a word held 32 // bits of them."""
    per_word, (N, K) = 32 // bits, (4, 320)
    codes = torch.randint(0, 1 << bits, (N, K))
    fields = torch.nn.functional.pad(codes, (0, -K % per_word)).view(N, -1, per_word)
    words = (fields << (bits * torch.arange(per_word))).sum(2).to(torch.int32)
    config = compressed("pack-quantized", num_bits=bits, type="int", strategy="group", group_size=20).config
    stored = read(config, {"weight_packed": words, "weight_scale": torch.ones(N, 16)}, (N, K))
    assert torch.equal(stored.dense(FORM), codes.float() - (1 << (bits - 1)))


def test_inputs_in_the_order_of_activations() -> None:
    """``g_idx`` of older checkpoints of compressed-tensors: the group of each input."""
    written, matrix = INT4.write(torch.randn(16, 64))
    order = torch.randperm(64)
    groups = torch.empty(64, dtype=torch.int32)
    groups[order] = (torch.arange(64) // 32).int()
    codes = (matrix / written["weight_scale"].repeat_interleave(32, dim=1)).round().int()[:, torch.argsort(order)] + 8
    fields = (codes.view(16, 8, 8) << (4 * torch.arange(8))).sum(2).to(torch.int32)
    parts = {**written, "weight_packed": fields, "weight_g_idx": groups}
    stored = read(INT4.config, parts, (16, 64))
    assert isinstance(stored, GroupedStored)
    assert stored.order_K is not None
    assert torch.equal(stored.dense(FORM), matrix[:, torch.argsort(order)])
    sorted_groups = {**written, "weight_g_idx": (torch.arange(64) // 32).int()}
    for same in (sorted_groups, {**written, "weight_g_idx": torch.full((64,), -1, dtype=torch.int32)}):
        stored = read(INT4.config, same, (16, 64))
        assert isinstance(stored, GroupedStored)
        assert stored.order_K is None


def test_scales_that_are_powers_of_two() -> None:
    written, _ = fp8(32, 32).write(torch.randn(64, 64))
    scales = torch.tensor([[0.5, 2.0], [4.0, 0.125]])
    parts = {"weight": written["weight"], "weight_scale_inv": scales.to(torch.float8_e8m0fnu)}
    expected = written["weight"].float() * scales.repeat_interleave(32, 0).repeat_interleave(32, 1)
    assert torch.equal(read(fp8(32, 32).config, parts, (64, 64)).dense(FORM), expected)


def test_scales_of_outputs_of_fbgemm() -> None:
    config = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    values, scales = torch.randn(24, 64).to(torch.float8_e4m3fn), torch.rand(24, 1)
    parts = {"weight": values, "weight_scale": scales, "input_scale_ub": torch.tensor([1200.0])}
    stored = read(config, parts, (24, 64))
    assert isinstance(stored, ScaledStored)
    assert torch.equal(stored.dense(FORM), values.float() * scales)


def test_blocks_of_modelopt() -> None:
    values, scales = torch.randn(256, 128).to(torch.float8_e4m3fn), torch.rand(2, 1, 1, 1)
    stored = read(
        {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, {"weight": values, "weight_scale": scales}, (256, 128)
    )
    assert torch.equal(stored.dense(FORM), values.float() * scales.view(2, 1).repeat_interleave(128, 0))


def test_settings_in_files_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    found = read_configs(tmp_path)[0]["quantization_config"]
    written, matrix = modelopt_fp8().write(torch.randn(16, 32))
    assert torch.equal(read(found, written, (16, 32)).dense(FORM), matrix)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    with pytest.raises(CheckpointError, match=r"has both hf_quant_config\.json and quantize_config\.json; keep"):
        read_configs(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": gptq(4, 32).config}))
    assert read_configs(tmp_path)[0]["quantization_config"]["quant_method"] == "gptq"


def test_scales_of_keys_and_values_are_checked_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    names = ("self_attn.k_scale", "self_attn.attn.v_scale", "self_attn.k_proj.k_scale", "self_attn.v_proj.output_scale")
    scales = {f"model.layers.0.{name}": torch.tensor(0.3) for name in names}
    Tensors(InMemory(scales)).finish()
    assert "4 scales of attention are not used, model.layers.0.self_attn.attn.v_scale among them" in caplog.text
    for wrong, message in ((float("nan"), "infinite or not numbers"), (-1.0, "not positive")):
        with pytest.raises(CheckpointError, match=message):
            Tensors(InMemory({**scales, "model.layers.0.self_attn.k_scale": torch.tensor(wrong)})).finish()
    with pytest.raises(CheckpointError, match="expected scales of heads at most"):
        Tensors(InMemory({"a.k_scale": torch.ones(1 << 17)})).finish()


DUMMIES = {
    "gptq": (gptq(4, 16, has_zeros=True), GroupedStored),
    "awq": (awq(16), GroupedStored),
    "int4": (compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=16), GroupedStored),
    "int8": (compressed("int-quantized", num_bits=8, type="int", strategy="channel"), GroupedStored),
    "fp8": (fp8(), ScaledStored),
    "fp8 blocks": (fp8(32, 32), ScaledStored),
    "modelopt": (modelopt_nvfp4(), Float4Stored),
    "mxfp4": (
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        Float4Stored,
    ),
}


@pytest.mark.parametrize("case", DUMMIES)
def test_random_weights_are_those_of_an_unquantised_dummy_rounded(case: str) -> None:
    writer, kind = DUMMIES[case]
    source, method = DummyCheckpoint({}, {}, seed=0), read_method(writer.config)
    stored = method.matrix(NAME, (256, 256), Tensors(source), False)
    assert isinstance(stored, kind)
    exact = source.load(f"{NAME}.weight", (256, 256))
    assert (stored.dense(FORM) - exact).norm() < 0.35 * exact.norm()
    for name in ("lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"):
        assert isinstance(method.matrix(name, (256, 256), Tensors(source), False), DenseStored)


@pytest.mark.parametrize("case", DUMMIES)
def test_random_weights_without_data_take_no_arithmetic(case: str) -> None:
    """A mixture has 100,000 matrices, and PyTorch takes long over each operation on the "meta" device."""

    class Counted(TorchDispatchMode):
        names: ClassVar[set[str]] = set()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.add(str(function).split(".")[1])
            return function(*args, **(kwargs or {}))

    method = read_method(DUMMIES[case][0].config)
    source = DummyCheckpoint({}, {}, seed=0)
    with Counted():
        made = method.matrix(NAME, (256, 256), Tensors(Outline(source)), False)
    assert Counted.names <= {"empty", "full", "ones_like", "_to_copy", "fill_"}
    like = method.matrix(NAME, (256, 256), Tensors(source), False)
    found = [[(v.shape, v.dtype) for v in vars(one).values() if isinstance(v, Tensor)] for one in (made, like)]
    assert found[0] == found[1]


@pytest.mark.parametrize("case", ["gptq", "awq", "int4", "modelopt", "mxfp4"])
def test_random_weights_that_are_not_whole_groups_are_named(case: str) -> None:
    source, method = Tensors(DummyCheckpoint({}, {}, seed=0)), read_method(DUMMIES[case][0].config)
    with pytest.raises(CheckpointError, match=r"mlp\.down_proj has 40 inputs, which are not whole groups of (16|32)"):
        method.matrix(NAME, (64, 40), source, False)


@pytest.mark.parametrize(
    ("architecture", "case"),
    [
        *(("LlamaForCausalLM", case) for case in DUMMIES),
        ("Phi3ForCausalLM", "fp8 blocks"),
        ("MixtralForCausalLM", "gptq"),
    ],
)
def test_shards_of_every_map_make_the_map(architecture: str, case: str) -> None:
    values = {**ODD, "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 8, "num_key_value_heads": 4}
    method = read_method(DUMMIES[case][0].config)
    whole = load(architecture, Shard(0, 1), values, method)[1]
    shards = [load(architecture, Shard(rank, 2), values, method)[1] for rank in range(2)]
    for name in whole.maps:
        matrix, *parts = (matrix_of(weights, name) for weights in (whole, *shards))
        dim = next((dim for dim in (0, 1) if parts[0].shape[dim] != matrix.shape[dim]), None)
        joined = parts[0] if dim is None else torch.cat(parts, dim=dim)
        if name.endswith(("qkv_proj", "gate_up_proj")):
            assert sorted(joined.tolist()) == sorted(matrix.tolist())
        else:
            assert torch.equal(joined, matrix), name


def matrix_of(weights: Any, name: str) -> Tensor:
    part = weights.maps[name]
    dense = torch.cat([weight.dense_NK for weight in part.linear.weights])
    return dense[part.start : part.start + part.size]

"""From a ``quantization_config`` to what reads the tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.formats.mxfp4 import MXFP4
from octavo.quant.formats.plain import PLAIN, Plain
from octavo.quant.methods import read_method, weights_method
from octavo.quant.module_matching import names_module
from octavo.quant.stored.float4 import Float4Stored
from octavo.quant.stored.stored_weight import DenseStored, WeightFormat

FORM = WeightFormat(torch.float32, torch.device("cpu"))


class InMemory:
    is_dummy = False

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = {name.replace("__", "."): tensor for name, tensor in tensors.items()}

    def names(self) -> set[str]:
        return set(self.tensors)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return str(self.tensors[name].dtype), tuple(self.tensors[name].shape)

    def load(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self.tensors[name]


def test_a_checkpoint_without_a_configuration_has_plain_tensors() -> None:
    assert read_method(None) is PLAIN
    assert read_method({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}) == MXFP4(("lm_head",))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"quant_method": "exl2", "bits": 4},
            r"config\.quant_method is 'exl2'; it must be one of auto-round, .*mxfp4\. .*GGUF",
        ),
        ({"bits": 4}, r"quant_method is None; it must be one of auto-round"),
        ({"quant_method": ["fp8"]}, r"quant_method is \['fp8'\]"),
        ("fp8", "quantization_config is 'fp8'; it must be an object"),
        (
            {"quant_method": "bitnet", "use_rms_norm": True},
            "use_rms_norm is True: a norm of each matrix",
        ),
        (
            {"quant_method": "bitnet", "linear_class": "linear"},
            "linear_class is 'linear'; it must be",
        ),
        (
            {"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"},
            "modules_to_not_convert is 'lm_head'; it must be a list of module names",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_method(given)


FP8_SCHEME = {"num_bits": 8, "type": "float"}
WEIGHTS = {"num_bits": 8, "type": "int"}


@pytest.mark.parametrize(
    ("given", "is_fp8"),
    [
        ({"quant_method": "modelopt", "quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, True),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": None, "kv_cache_quant_algo": "NVFP4"}}, False),
        ({"quant_method": "modelopt", "kv_cache_scheme": FP8_SCHEME}, True),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": FP8_SCHEME, "config_groups": {}}, True),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {**FP8_SCHEME, "num_bits": 4}}, False),
        ({"quant_method": "compressed-tensors", "format": "dense"}, True),
    ],
)
def test_weights_are_plain_where_keys_and_values_alone_are_quantised(given: dict[str, Any], is_fp8: bool) -> None:
    assert read_method(given) == Plain(has_fp8_cache_scales=is_fp8)
    assert weights_method(given) is None


@pytest.mark.parametrize(
    "given",
    [
        {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
        {
            "quant_method": "compressed-tensors",
            "kv_cache_scheme": FP8_SCHEME,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
        },
        {"quant_method": "exl2"},
    ],
)
def test_weights_are_quantised_as_the_configuration_names_it(given: dict[str, Any]) -> None:
    assert weights_method(given) == given["quant_method"]


@pytest.mark.parametrize(
    ("name", "is_meant"),
    [
        ("lm_head", True),
        ("model.layers.3.self_attn.q_proj", True),
        ("model.layers.3.mlp.router", True),
        ("model.layers.3.mlp.experts.gate_up_proj", False),
        ("model.layers.3.mlp.router_of_another", False),
        ("old_lm_head", False),
    ],
)
def test_names_mean_modules_and_what_is_in_them(name: str, is_meant: bool) -> None:
    assert names_module(["model.layers.*.self_attn", "mlp.router", "lm_head"], name) is is_meant


def test_plain_matrices_may_be_inputs_by_outputs() -> None:
    source = InMemory(a__weight=torch.randn(4, 3), stack=torch.randn(2, 4, 3))
    tensors = Tensors(source)
    matrix = PLAIN.matrix("a", (3, 4), tensors, True).dense(FORM)
    assert torch.equal(matrix, source.tensors["a.weight"].t())
    assert matrix.is_contiguous()
    stack = PLAIN.stack("stack", (2, 3, 4), tensors, True)
    assert torch.equal(torch.stack([part.dense(FORM) for part in stack]), source.tensors["stack"].mT)
    tensors.finish()


def test_modules_that_are_kept_are_not_unpacked() -> None:
    blocks = torch.randint(0, 256, (2, 4, 1, 16), dtype=torch.uint8)
    source = InMemory(a=torch.randn(2, 32, 4), b_blocks=blocks, b_scales=torch.full((2, 4, 1), 127, dtype=torch.uint8))
    tensors, method = Tensors(source), MXFP4(("a",))
    assert all(isinstance(part, DenseStored) for part in method.stack("a", (2, 4, 32), tensors, True))
    with pytest.raises(CheckpointError, match="2 tensors that this architecture does not have: b_blocks"):
        tensors.finish()
    packed = method.stack("b", (2, 4, 32), tensors, True)
    assert all(isinstance(part, Float4Stored) for part in packed)
    tensors.finish()
    source.tensors["b_scales"] = torch.ones(2, 4, 1)
    with pytest.raises(CheckpointError, match="tensor b_scales is float32; expected uint8"):
        method.stack("b", (2, 4, 32), tensors, True)

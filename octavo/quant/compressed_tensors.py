"""Checkpoints of the compressed-tensors library: integers, FP8 and FP4 in groups of modules.

``config_groups`` maps a name to the modules of a group (``targets``: a class, a module's name, or ``re:`` and a
pattern) and how their weights are stored (``weights``, ``format``). Kernels may round activations to FP8 where the
configuration asks for that (``input_activations``) and weights are FP8, and to INT8 likewise; to nothing else, which is
more precise than what it may ask for.

Shapes: K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.quant.cache_scales import has_fp8_scales
from octavo.quant.dummies import dummy_float4, dummy_grouped, dummy_scaled, is_quantised_dummy
from octavo.quant.fields import num_words, signed, unpack_fields
from octavo.quant.float4 import MXFP4_GROUP, NVFP4_GROUP, checked_exponents, read_mxfp4, read_nvfp4
from octavo.quant.fp8 import read_fp8
from octavo.quant.grouped import GroupedStored
from octavo.quant.groups import in_order, num_groups, read_order
from octavo.quant.keys import INSTEAD, QuantKeys
from octavo.quant.plain import Plain
from octavo.quant.scaled import ScaledStored
from octavo.quant.stored import StoredWeight
from octavo.quant.targets import compiled
from octavo.quant.tensors import Tensors

PACKED, NVFP4, MXFP4, MXFP8 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
NAIVE = ("int-quantized", "float-quantized", "naive-quantized")
FORMATS = (PACKED, NVFP4, MXFP4, MXFP8, *NAIVE)
MIXED = "mixed-precision"
CLASSES = re.compile(r"\w+")
"""A target without dots is a class of modules, such as Linear."""
MXFP8_BLOCK = (1, 32)
INT, FP8, FP4 = ("int", False), ("float", False), ("float", True)
HELD = {
    PACKED: (INT,),
    NVFP4: (FP4,),
    MXFP4: (FP4,),
    MXFP8: (FP8,),
    **dict(zip(NAIVE, ((INT,), (FP8,), (INT, FP8)), strict=True)),
}
"""The numbers that each format can hold: their type, and whether they are floats of 4 bits."""


@dataclass(frozen=True)
class _Scheme:
    """How the weights of a group are stored."""

    format: str
    bits: int
    is_float: bool
    strategy: str
    group: int
    """Inputs of a group, for strategy "group"."""
    block: tuple[int, int] | None
    has_zeros: bool
    rounds_activations: bool
    """Whether activations are numbers of 8 bits as well, of the weights' type."""


@dataclass(frozen=True)
class CompressedTensors(Plain):
    """Modules without a scale are unquantised."""

    groups: tuple[tuple[tuple[str, ...], _Scheme], ...]
    """Targets and scheme of each group."""
    ignored: tuple[str, ...] = ()
    is_cache_fp8: bool = True

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> CompressedTensors:
        """Read a ``quantization_config``. Raises ``CheckpointError``."""
        keys = QuantKeys(values)
        keys.refuse("transform_config", "rotation of weights and activations (Hadamard transforms)")
        sparsity = keys.child("sparsity_config")
        if sparsity is not None:
            sparsity.word("format", ("dense",), "dense", f"Sparse weights (2:4) are not supported. {INSTEAD}")
        default = keys.word("format", (*FORMATS, MIXED, "dense"), PACKED)
        groups = []
        for _, group in (keys.child("config_groups") or QuantKeys({})).children():
            weights = group.child("weights")
            if weights is not None:  # else activations alone are quantised
                form = group.word("format", (*FORMATS, "dense"), default) if default != "dense" else "dense"
                if form != "dense":
                    scheme = _read_scheme(weights, group.child("input_activations"), form)
                    groups.append((group.names("targets"), scheme))
        if not groups and default != "dense" and keys.child("kv_cache_scheme") is None:
            raise keys.wrong("config_groups", "an object with at least one group of quantised weights")
        ignored = keys.names("ignore")
        for name in (*ignored, *(target for targets, _ in groups for target in targets)):
            if name.startswith("re:"):
                compiled(name.removeprefix("re:"), "config_groups or ignore")
        return cls(tuple(groups), ignored, has_fp8_scales(keys))

    @property
    def has_fp8_cache_scales(self) -> bool:
        return self.is_cache_fp8

    def matrix(self, name: str, shape: tuple[int, int], tensors: Tensors, is_transposed: bool) -> StoredWeight:
        scheme = self._scheme(name)
        if is_quantised_dummy(name, (), tensors) and not any(_names(target, name) for target in self.ignored):
            if scheme is not None:
                return _dummy(scheme, name, shape, tensors)
        elif tensors.has(f"{name}.weight_scale"):
            if scheme is None:
                raise CheckpointError(f"module {name} is quantised, but no group of quantization_config targets it")
            return _read(scheme, name, shape, tensors)
        return super().matrix(name, shape, tensors, is_transposed)

    def _scheme(self, name: str) -> _Scheme | None:
        """The scheme of the group that targets the module; names and patterns go before classes."""
        for names in (_names, _names_class):
            for targets, scheme in self.groups:
                if any(names(target, name) for target in targets):
                    return scheme
        return None


def _read_scheme(keys: QuantKeys, activations: QuantKeys | None, form: str) -> _Scheme:
    kind = keys.word("type", ("int", "float"), "int")
    bits = keys.integer("num_bits", range(2, 9) if kind == "int" else (4, 8), 8)
    group_size = keys.get("group_size")
    implied = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategy = keys.word("strategy", ("tensor", "channel", "group", "tensor_group", "block"), implied)
    if (kind, bits == 4 and kind == "float") not in HELD[form]:
        raise keys.wrong("num_bits", f"what the format {form} holds, and type as well")
    group = 0
    if strategy in ("group", "tensor_group"):
        sizes = {NVFP4: (NVFP4_GROUP,), MXFP4: (MXFP4_GROUP,), MXFP8: MXFP8_BLOCK[1:]}.get(form, range(8, 1 << 20))
        group = keys.integer("group_size", sizes)
    block = keys.pair("block_structure")
    if strategy == "block" and block is None:
        raise keys.wrong("block_structure", "a list of two positive integers")
    has_zeros = not keys.flag("symmetric", True)
    if has_zeros and kind == "float":
        raise keys.wrong("symmetric", "true for floating-point weights")
    rounds_activations = (
        activations is not None and activations.get("type", "int") == kind and activations.get("num_bits", 8) == 8
    )
    return _Scheme(form, bits, kind == "float", strategy, group, block, has_zeros, rounds_activations)


def _read(scheme: _Scheme, name: str, shape: tuple[int, int], tensors: Tensors) -> StoredWeight:
    if scheme.format == NVFP4:
        return read_nvfp4(name, shape, tensors, "weight_packed", "weight_global_scale", divides=True)
    if scheme.format == MXFP4:
        return read_mxfp4(name, shape, tensors, "weight_packed")
    tensors.leave_out_activation_scales(name)
    if scheme.format == PACKED:
        return _read_packed(scheme, name, shape, tensors)
    if not scheme.is_float:
        return _read_int8(scheme, name, shape, tensors)
    if scheme.format == MXFP8:
        return _read_mxfp8(name, shape, tensors)
    block = scheme.block if scheme.strategy == "block" else (1, scheme.group) if scheme.group else None
    return read_fp8(name, shape, tensors, "weight_scale", block, scheme.rounds_activations)


def _read_packed(scheme: _Scheme, name: str, shape: tuple[int, int], tensors: Tensors) -> GroupedStored:
    (N, K), bits = shape, scheme.bits
    G = num_groups(name, K, scheme.group or -1)
    codes_NK = _unpacked(f"{name}.weight_packed", shape, bits, tensors)
    if tensors.has(f"{name}.weight_shape"):
        sizes = tensors.typed(f"{name}.weight_shape", (2,), torch.int64, torch.int32)
        tensors.check(sizes == torch.tensor(shape, device=sizes.device), f"tensor {name}.weight_shape is not {shape}")
    scales_NG = _scales(name, N, G, tensors)
    zeros_NG = None
    if scheme.has_zeros:
        zeros_NG = _unpacked(f"{name}.weight_zero_point", (G, N), bits, tensors, is_transposed=True).t().contiguous()
    order_K = read_order(f"{name}.weight_g_idx", K, G, tensors) if tensors.has(f"{name}.weight_g_idx") else None
    return in_order(codes_NK, scales_NG, zeros_NG, bits, order_K)


def _unpacked(name: str, shape: tuple[int, int], bits: int, tensors: Tensors, is_transposed: bool = False) -> Tensor:
    """Signed codes of this shape, packed along the columns; the tensor may be stored transposed.

    Older versions of the library let no code cross words: a word of 3 bits has ten.
    """
    rows, count = shape
    widths = num_words(count, bits), -(-count // (32 // bits))
    found = tensors.shape(name)
    width = widths[1] if found is not None and found[not is_transposed] == widths[1] else widths[0]
    words = tensors.typed(name, (width, rows) if is_transposed else (rows, width), torch.int32)
    if is_transposed:
        words = words.t()
    if width == num_words(count, bits):
        return signed(unpack_fields(words, bits, count), bits)
    shifts = torch.arange(0, 32 // bits * bits, bits, dtype=torch.int32, device=words.device)
    fields = words.contiguous().unsqueeze(2) >> shifts & ((1 << bits) - 1)
    return signed(fields.flatten(1)[:, :count].to(torch.uint8), bits)


def _read_int8(scheme: _Scheme, name: str, shape: tuple[int, int], tensors: Tensors) -> GroupedStored:
    """Integers in a byte each, whatever their bits."""
    N, K = shape
    codes_NK = tensors.typed(f"{name}.weight", shape, torch.int8)
    height, width = scheme.block if scheme.block is not None else (1, scheme.group or -1)
    G, rows = num_groups(name, K, width), -(-N // height)
    scales_NG = _scales(name, rows, G, tensors).repeat_interleave(height, dim=0)[:N]
    zeros_NG = None
    if scheme.has_zeros:
        zeros = tensors.typed(f"{name}.weight_zero_point", _shape_like(name, tensors), torch.int8)
        end = 1 << scheme.bits - 1
        problem = f"tensor {name}.weight_zero_point has zero points that are not from {-end} to {end - 1}"
        tensors.check((zeros >= -end) & (zeros <= end - 1), problem)
        zeros_NG = zeros.reshape(-1, G).expand(rows, G).repeat_interleave(height, dim=0)[:N]
    return GroupedStored(codes_NK, scales_NG, zeros_NG, 8, rounds_activations=scheme.rounds_activations)


def _scales(name: str, rows: int, groups: int, tensors: Tensors) -> Tensor:
    """Scales [rows, groups]; one scale for all is repeated."""
    shapes = ((rows, groups), *(((rows,), (1,), (), (1, 1)) if groups == 1 else ()))
    return tensors.scales(f"{name}.weight_scale", *shapes).reshape(-1, groups).expand(rows, groups).contiguous()


def _shape_like(name: str, tensors: Tensors) -> tuple[int, ...]:
    shape = tensors.shape(f"{name}.weight_scale")
    assert shape is not None, "the scales were read"
    return shape


def _read_mxfp8(name: str, shape: tuple[int, int], tensors: Tensors) -> ScaledStored:
    N, K = shape
    G = num_groups(name, K, MXFP8_BLOCK[1])
    values_NK = tensors.typed(f"{name}.weight", shape, torch.float8_e4m3fn)
    exponents = tensors.typed(f"{name}.weight_scale", (N, G), torch.uint8, torch.float8_e8m0fnu)
    exponents = checked_exponents(f"{name}.weight_scale", exponents, tensors)
    return ScaledStored(values_NK, exponents.view(torch.float8_e8m0fnu).float(), MXFP8_BLOCK)


def _dummy(scheme: _Scheme, name: str, shape: tuple[int, int], tensors: Tensors) -> StoredWeight:
    if scheme.format in (NVFP4, MXFP4):
        return dummy_float4(name, shape, scheme.group, scheme.format == NVFP4, tensors)
    if scheme.is_float:
        blocks = {"block": scheme.block, "tensor": shape, "channel": (1, shape[1])}
        block = blocks.get(scheme.strategy) or (1, scheme.group)
        return dummy_scaled(name, shape, block, scheme.rounds_activations, tensors)
    groups = num_groups(name, shape[1], scheme.group or -1)
    stored = dummy_grouped(name, shape, scheme.bits, groups, scheme.has_zeros, tensors)
    return replace(stored, rounds_activations=scheme.rounds_activations and scheme.format != PACKED)


def _names(target: str, module: str) -> bool:
    """Whether a target or an ignored name names the module itself."""
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), module) is not None
    return target == module


def _names_class(target: str, module: str) -> bool:
    """Whether a target is the class of a module: an embedding, or else any other class."""
    is_class = CLASSES.fullmatch(target) is not None
    return is_class and ("Embedding" in target) == module.endswith(("embed_tokens", "wte"))

"""Checkpoints of the compressed-tensors library: integers, FP8 and FP4 in groups of modules.

``config_groups`` maps a name to the modules of a group (``targets``: a class, a module's name, or ``re:`` and a
pattern) and how their weights are stored (``weights``, ``format``), or the name of a preset to targets alone. Kernels
may round activations to FP8 where the configuration asks for that (``input_activations``) and weights are FP8, and to
INT8 likewise; to nothing else, which is more precise than what it may ask for.

Shapes: K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.quant.cache_scales import has_fp8_scales
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.config_reader import INSTEAD, QuantKeys
from octavo.quant.formats.fp8 import read_fp8
from octavo.quant.formats.plain import Plain
from octavo.quant.module_matching import PATTERN, ModuleTargets, compiled
from octavo.quant.stored.dummy_weights import dummy_float4, dummy_grouped, dummy_scaled, is_quantised_dummy
from octavo.quant.stored.float4 import MXFP4_GROUP, NVFP4_GROUP, checked_exponents, read_mxfp4, read_nvfp4
from octavo.quant.stored.groups import in_order, num_groups, num_words, read_order, signed, unpack_fields
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.scaled import ScaledStored
from octavo.quant.stored.stored_weight import StoredWeight

PACKED, NVFP4, MXFP4, MXFP8 = "pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
BYTES_INT, BYTES_FLOAT = "int-quantized", "float-quantized"
NAIVE = (BYTES_INT, BYTES_FLOAT, "naive-quantized")
FORMATS = (PACKED, NVFP4, MXFP4, MXFP8, *NAIVE)
MIXED = "mixed-precision"
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


def _preset(form: str, weights: Mapping[str, Any], activations: str = "", bits: int = 8) -> Mapping[str, Any]:
    """A group without targets; ``activations``: their type, if they are quantised."""
    given = {"type": activations, "num_bits": bits} if activations else None
    return {"format": form, "weights": weights, "input_activations": given}


_INT8_WEIGHTS = {"num_bits": 8, "type": "int", "strategy": "channel"}
_INT_WEIGHTS: Mapping[int, Mapping[str, Any]] = {
    bits: {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128} for bits in range(2, 9)
}
_FP8_WEIGHTS = {"num_bits": 8, "type": "float"}
_NVFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": NVFP4_GROUP}
_MXFP4_WEIGHTS = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": MXFP4_GROUP}
_MXFP8_WEIGHTS = {**_FP8_WEIGHTS, "strategy": "group", "group_size": MXFP8_BLOCK[1]}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "UNQUANTIZED": {"format": "dense"},
    **{f"W{bits}A16": _preset(PACKED, ints) for bits, ints in _INT_WEIGHTS.items()},
    "W4A16_ASYM": _preset(PACKED, {**_INT_WEIGHTS[4], "symmetric": False}),
    **{f"W{bits}A8": _preset(BYTES_INT, _INT_WEIGHTS[bits], "int") for bits in range(2, 8)},
    **{f"W{bits}A4": _preset(BYTES_INT, _INT_WEIGHTS[bits], "int", 4) for bits in range(2, 5)},
    **dict.fromkeys(("W8A8", "INT8"), _preset(BYTES_INT, _INT8_WEIGHTS, "int")),
    "W4AFP8": _preset(BYTES_INT, _INT_WEIGHTS[4], "float"),
    "FP8": _preset(BYTES_FLOAT, {**_FP8_WEIGHTS, "strategy": "tensor"}, "float"),
    "FP8_DYNAMIC": _preset(BYTES_FLOAT, {**_FP8_WEIGHTS, "strategy": "channel"}, "float"),
    "FP8_BLOCK": _preset(BYTES_FLOAT, {**_FP8_WEIGHTS, "strategy": "block", "block_structure": (128, 128)}, "float"),
    "NVFP4A16": _preset(NVFP4, _NVFP4_WEIGHTS),
    "NVFP4": _preset(NVFP4, _NVFP4_WEIGHTS, "float", 4),
    "MXFP4A16": _preset(MXFP4, _MXFP4_WEIGHTS),
    "MXFP4": _preset(MXFP4, _MXFP4_WEIGHTS, "float", 4),
    "MXFP4XFP8": _preset(MXFP4, _MXFP4_WEIGHTS, "float"),
    "MXFP8A16": _preset(MXFP8, _MXFP8_WEIGHTS),
    "MXFP8": _preset(MXFP8, _MXFP8_WEIGHTS, "float"),
}
"""Groups by the names that the library has for them, in the formats that it chooses where none is given."""


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
    """Modules whose weight is floating-point numbers without a scale are unquantised."""

    schemes: ModuleTargets[_Scheme]
    """Of groups whose weights are quantised."""
    ignored: tuple[str, ...] = ()
    """Names and patterns of unquantised modules; used for random weights alone."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Plain:
        """Read a ``quantization_config``; weights are unquantised if none of its groups has any.

        Raises ``CheckpointError``.
        """
        keys = QuantKeys(_without_presets(values))
        keys.refuse("transform_config", "rotation of weights and activations (Hadamard transforms)")
        sparsity = keys.child("sparsity_config")
        if sparsity is not None:
            sparsity.word("format", ("dense",), "dense", f"Sparse weights (2:4) are not supported. {INSTEAD}")
        default = keys.word("format", (*FORMATS, MIXED, "dense"), PACKED)
        groups = []
        for name, group in (keys.child("config_groups") or QuantKeys({})).children():
            weights = group.child("weights")
            if weights is not None:  # else activations alone are quantised
                form = group.word("format", (*FORMATS, "dense"), default) if default != "dense" else "dense"
                if form != "dense":
                    scheme = _read_scheme(weights, group.child("input_activations"), form)
                    groups.append((f"config_groups.{name}.targets", group.names("targets"), scheme))
        if not groups and default != "dense" and keys.child("kv_cache_scheme") is None:
            raise keys.wrong("config_groups", "an object with at least one group of quantised weights")
        is_fp8 = has_fp8_scales(keys)
        if not groups:
            return Plain(has_fp8_cache_scales=is_fp8)
        return cls(ModuleTargets.of(groups), keys.names("ignore"), has_fp8_cache_scales=is_fp8)

    def matrix(self, name: str, shape: tuple[int, int], tensors: Tensors, is_transposed: bool) -> StoredWeight:
        scheme, weight = self.schemes.find(*tensors.names_of(name)), f"{name}.weight"
        if is_quantised_dummy(name, (), tensors) and not any(_ignores(ignored, name) for ignored in self.ignored):
            if scheme is not None:
                return _dummy(scheme, name, shape, tensors)
        elif any(map(tensors.has, (f"{name}.weight_scale", f"{name}.weight_packed"))) or tensors.needs_scales(weight):
            if scheme is None:
                raise CheckpointError(f"module {name} is quantised, but no group of quantization_config targets it")
            return _read(scheme, name, shape, tensors)
        return super().matrix(name, shape, tensors, is_transposed)


def _without_presets(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration with its presets expanded. Raises ``CheckpointError``."""
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping):
        return values
    has_format = values.get("format") not in (None, MIXED)
    expanded = {}
    for name, group in groups.items():
        if isinstance(group, list):
            if name.upper() not in PRESETS:
                known = " or ".join(PRESETS)
                found = f"config: quantization_config.config_groups.{name} is a list"
                raise CheckpointError(f"{found}; such a group must be one of the presets {known}. {INSTEAD}")
            group = {**PRESETS[name.upper()], "targets": group}
            if has_format:
                del group["format"]
        expanded[name] = group
    return {**values, "config_groups": expanded}


def _read_scheme(keys: QuantKeys, activations: QuantKeys | None, form: str) -> _Scheme:
    kind = keys.word("type", ("int", "float"), "int", any_case=True)
    bits = keys.integer("num_bits", range(2, 9) if kind == "int" else (4, 8), 8)
    group_size = keys.get("group_size")
    implied = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategies = ("tensor", "channel", "group", "tensor_group", "block")
    strategy = keys.word("strategy", strategies, implied, any_case=True)
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
        activations is not None
        and str(activations.get("type", "int")).lower() == kind
        and activations.get("num_bits", 8) == 8
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


def _ignores(ignored: str, module: str) -> bool:
    """Whether an entry of ``ignore`` is the module's name, or a pattern that matches it."""
    if ignored.startswith(PATTERN):
        return compiled(ignored.removeprefix(PATTERN), "ignore").match(module) is not None
    return ignored == module

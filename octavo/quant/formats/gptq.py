"""GPTQ checkpoints (arXiv 2210.17323), in the layout of AutoGPTQ and GPTQModel.

The tensors of a module, b = bits::

    qweight  int32 [K b / 32, N]   codes, packed along the inputs
    qzeros   int32 [G, N b / 32]   zero points, packed along the outputs
    scales   float [G, N]
    g_idx    int32 [K]             the group of each input

An entry is ``(code - zero) * scale``, all of group ``g_idx[k]``. In version 1 of the layout ("gptq") the zero points
are stored minus one: of 3 bits each for itself, else all of a word at once.

Shapes: K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.config_reader import QuantKeys
from octavo.quant.formats.plain import Plain
from octavo.quant.module_matching import compiled
from octavo.quant.stored.dummy_weights import dummy_grouped, is_quantised_dummy
from octavo.quant.stored.groups import group_size, in_order, num_groups, num_words, read_order, signed, unpack_fields
from octavo.quant.stored.stored_weight import StoredWeight

BITS = (2, 3, 4, 8)
V1, V2 = "gptq", "gptq_v2"


@dataclass(frozen=True)
class ModuleRule:
    """How a module is quantised."""

    bits: int
    group: int
    """Inputs of a group; -1: all of them."""


@dataclass(frozen=True)
class GPTQ(Plain):
    """Modules without ``qweight`` are unquantised."""

    rule: ModuleRule
    version: str
    is_symmetric: bool = True
    """``sym``; used for random weights and outlines alone."""
    dynamic: tuple[tuple[re.Pattern[str], ModuleRule | None], ...] = ()
    """Patterns of module names, matched from the start, with their rules; ``None``: unquantised. The first counts."""
    named: Mapping[str, ModuleRule | None] = field(default_factory=dict, hash=False)
    """Rules by full module name, which take precedence over ``dynamic``."""
    is_ordered: bool = False
    """``desc_act`` without ``static_groups``: inputs are assigned to groups freely, so that ``g_idx`` must be there."""

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> GPTQ:
        """Read a ``quantization_config``. Raises ``CheckpointError``."""
        keys = QuantKeys(values)
        rule = read_rule(keys, ModuleRule(4, 128))
        version_key = "checkpoint_format" if keys.get("checkpoint_format") is not None else "format"
        instead = "Convert it to this layout with GPTQModel, or use another checkpoint"
        version = keys.word(version_key, (V1, V2), V1, instead)
        keys.refuse("rotation", "rotation of activations")
        pack_dtype = keys.get("pack_dtype", "int32")
        if str(pack_dtype).removeprefix("torch.") != "int32":
            raise keys.wrong("pack_dtype", "int32")
        dynamic = []
        rules = keys.child("dynamic")
        for key, given in () if rules is None else rules.children():
            pattern = compiled(key.removeprefix("-:").removeprefix("+:"), "dynamic")
            dynamic.append((pattern, None if key.startswith("-:") else read_rule(given, rule)))
        is_ordered = keys.flag("desc_act") and not keys.flag("static_groups")
        return cls(rule, version, keys.flag("sym", True), tuple(dynamic), is_ordered=is_ordered)

    def matrix(self, name: str, shape: tuple[int, int], tensors: Tensors, is_transposed: bool) -> StoredWeight:
        rule = self._rule_of(tensors.names_of(name))
        if rule is not None and is_quantised_dummy(name, (), tensors):
            groups = num_groups(name, shape[1], rule.group)
            return dummy_grouped(name, shape, rule.bits, groups, not self.is_symmetric, tensors)
        if rule is None or not tensors.has(f"{name}.qweight"):
            return super().matrix(name, shape, tensors, is_transposed)
        (N, K), bits = shape, rule.bits
        G = num_groups(name, K, rule.group)
        words = tensors.typed(f"{name}.qweight", (num_words(K, bits), N), torch.int32)
        codes_NK = signed(unpack_fields(words.t(), bits, K), bits)
        scales_NG = tensors.scales(f"{name}.scales", (G, N)).t()
        zero_words = tensors.typed(f"{name}.qzeros", (G, num_words(N, bits)), torch.int32)
        zeros_NG = self._zeros(zero_words, bits, N)
        has_order = tensors.has(f"{name}.g_idx") or (self.is_ordered and G > 1)
        order_K = read_order(f"{name}.g_idx", K, G, tensors) if has_order else None
        tensors.leave_out_zeros(f"{name}.bias", (N,))  # some writers give one to every module
        return in_order(codes_NK, scales_NG.contiguous(), zeros_NG, bits, order_K)

    def _rule_of(self, names: Sequence[str]) -> ModuleRule | None:
        """The rule of the module of these names."""
        for name in names:
            if name in self.named:
                return self.named[name]
        return next((rule for pattern, rule in self.dynamic if any(map(pattern.match, names))), self.rule)

    def _zeros(self, words: Tensor, bits: int, num_outputs: int) -> Tensor | None:
        """Zero points [N, G]; ``None`` if all are in the middle of the range, as those of symmetric checkpoints."""
        if self.version == V1 and bits != 3:
            words = words + sum(1 << at for at in range(0, 32, bits))  # writers subtract this, with carries
        zeros = unpack_fields(words, bits, num_outputs)
        if self.version == V1 and bits == 3:
            zeros = zeros + 1 & 7
        zeros_NG = signed(zeros, bits).t().contiguous()
        are_zero = self.is_symmetric if zeros_NG.is_meta else not zeros_NG.any()
        return None if are_zero else zeros_NG


def read_rule(keys: QuantKeys, default: ModuleRule) -> ModuleRule:
    """The rule of an object of the configuration. Raises ``CheckpointError``."""
    return ModuleRule(keys.integer("bits", BITS, default.bits), group_size(keys, default=default.group))

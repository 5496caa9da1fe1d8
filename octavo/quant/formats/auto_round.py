"""AutoRound checkpoints (arXiv 2309.05516): the layouts of GPTQ and AWQ, with a configuration of their own.

``packing_format`` names the layout. ``extra_config`` has the bits and group size of modules that differ from the rest;
16 bits mean unquantised. Its keys are full module names, thousands in a mixture of experts, or regular expressions for
them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.quant.config_reader import QuantKeys
from octavo.quant.formats.awq import AWQ
from octavo.quant.formats.awq import BITS as AWQ_BITS
from octavo.quant.formats.gptq import BITS, GPTQ, V1, V2, ModuleRule, read_rule
from octavo.quant.module_matching import compiled
from octavo.quant.stored.groups import group_size

LAYOUTS = {"auto_round:auto_gptq": V1, "auto_round:gptqmodel": V2, "auto_round:auto_awq": "awq"}
UNQUANTISED = 16
FULL_NAME = re.compile(r"[\w.]+")


def read_auto_round(values: Mapping[str, Any]) -> GPTQ | AWQ:
    """The method of a ``quantization_config``. Raises ``CheckpointError``."""
    keys = QuantKeys(values)
    keys.word("data_type", ("int",), "int")
    layout = LAYOUTS[keys.word("packing_format", LAYOUTS, "auto_round:auto_gptq")]
    rule = read_rule(keys, ModuleRule(4, 128))
    extra = keys.child("extra_config")
    patterns, named = [], {}
    for key, given in () if extra is None else extra.children():
        bits = given.integer("bits", (*BITS, UNQUANTISED), rule.bits)
        own = None if bits == UNQUANTISED else ModuleRule(bits, group_size(given, default=rule.group))
        if layout == "awq" and own not in (None, rule):
            raise given.wrong("bits", f"{AWQ_BITS} or {UNQUANTISED}, with the groups of all others, in this layout")
        if FULL_NAME.fullmatch(key):
            named[key] = own
        else:
            patterns.append((compiled(f"(?:{key})$", "extra_config"), own))
    if layout == "awq":
        keys.integer("bits", (AWQ_BITS,), AWQ_BITS)
        return AWQ(rule.group)
    return GPTQ(rule, layout, keys.flag("sym", True), tuple(patterns), named)

"""Scales of keys and values in a checkpoint, with which an FP8 KV cache holds them: one of a layer, or of each KV head.

A key divided by its scale is what the cache holds. Names are those of compressed-tensors (``self_attn.k_scale`` and
``v_scale``, of older versions ``k_proj.output_scale`` and ``v_proj.output_scale``), of ModelOpt (``k_proj.k_scale`` and
``v_proj.v_scale``), and of vLLM's first such checkpoints (``kv_scale`` for both).

Shapes: K kv heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch

from octavo.ops.attention.attention import KVScales
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.config_reader import QuantKeys
from octavo.quant.stored.shard import Section, Shard
from octavo.quant.stored.stored_weight import DenseStored, WeightFormat

SCALE = re.compile(r"(?:^|\.)(?:layers|h)\.(\d{1,6})\.(?:\w{1,40}\.){1,4}?(?:(k|v|kv)_scale|(k|v)_proj\.output_scale)$")
CACHE_KEYS = ("kv_cache_scheme", "kv_cache_quant_algo")
"""Keys of a ``quantization_config`` that say how keys and values are quantised."""


def has_fp8_scales(keys: QuantKeys) -> bool:
    """Whether scales of keys and values, if a checkpoint has any, are for numbers of 8 bits; NVFP4's are others."""
    scheme = keys.child("kv_cache_scheme")
    bits = 8 if scheme is None else scheme.get("num_bits", 8)
    return keys.get("kv_cache_quant_algo", "FP8") == "FP8" and bits == 8


def read_cache_scales(
    tensors: Tensors, num_kv_heads: Mapping[int, int], shard: Shard, device: torch.device
) -> dict[int, KVScales]:
    """The scales of each layer that has any, of the device's heads; a part without a scale is stored as it is.

    ``num_kv_heads`` are those of the layers that cache keys and values, on all devices together. Scales of other layers
    and sizes are not read. Raises ``CheckpointError`` naming a tensor with a scale that is not a positive number.
    """
    found: dict[int, KVScales] = {}
    for name in sorted(tensors.names):
        if match := SCALE.search(name):
            layer, parts, shape = int(match[1]), match[2] or match[3], tensors.shape(name) or ()
            K = num_kv_heads.get(layer)
            if K is not None and math.prod(shape) in (1, K):
                whole = DenseStored((tensors.cache_scales(name, shape).reshape(-1, 1).expand(K, 1),))
                own = shard.sections(name, whole, [Section(K, K)])
                scale_K = own.dense(WeightFormat(torch.float32, device)).flatten().contiguous()
                keys_K, values_K = found.get(layer) or (torch.ones_like(scale_K), torch.ones_like(scale_K))
                found[layer] = KVScales(scale_K if "k" in parts else keys_K, scale_K if "v" in parts else values_K)
    return found

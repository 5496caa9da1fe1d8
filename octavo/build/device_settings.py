"""The device of an engine, and its data types, as the settings ask for them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from octavo import ops
from octavo.config import STORED_METHODS, ModelSettings
from octavo.errors import ConfigError
from octavo.models.layer_cache import LayerCacheSpec
from octavo.models.multimodal_text import text_config
from octavo.ops import dispatch
from octavo.ops.attention.cached_rows import INT4, VECTOR
from octavo.ops.device_backend import backend_of
from octavo.plugins import CPU, GPU
from octavo.quant.methods import weights_method
from octavo.quant.stored.block_weight import without_kernel
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.memory_budget import release_unused
from octavo.system.cpus import default_num_threads
from octavo.weights.checkpoint import Checkpoint
from octavo.weights.dtypes import DTYPES, stated_dtype

PACKED = {"int8": torch.int8, "int4": INT4}
"""Types of the KV cache whose rows have scales of their own."""
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Makes torch ask for transparent huge pages, of 2 MiB, for tensors at least as large: Linux as usually set up
("madvise") gives them to those alone who ask. Reading weights then misses the TLB less often. torch reads this variable
once, at its first tensor."""


def prepared_device(settings: ModelSettings) -> torch.device:
    """The device, with the number of CPU threads set; or with GPU kernels being loaded while the model is, and all
    memory free that is not in use."""
    device = resolve_device(settings.device)
    num_threads = max(1, default_num_threads() // settings.ranks_per_node)
    if device.type == "cpu":
        os.environ.setdefault(HUGE_PAGES, "1")
        _share_cores(num_threads)
    else:
        if settings.ranks_per_node > 1:  # ranks that load weights at once would wait for each other's threads
            torch.set_num_threads(num_threads)
        release_unused(device)
        backend_of(device.type).start_loading(settings.kernel_cache)
    return device


def _share_cores(count: int) -> None:
    """Assign the cores to the threads of compiled kernels, if any: torch's spinning threads would occupy them."""
    if ops.linear.chosen("cpu", torch.float32) == dispatch.REFERENCE:
        torch.set_num_threads(count)
        return
    backend_of(CPU).set_num_threads(count)


def resolve_kv_dtype(name: str, form: WeightFormat, cache: Sequence[LayerCacheSpec]) -> torch.dtype:
    """The data type of cached keys and values; "auto" follows the weights. Raises ``ConfigError``."""
    if name in (*PACKED, "fp8") and any(spec.beside is not None for spec in cache):
        raise ConfigError(f"kv_cache_dtype: {name} is not for the compressed entries of this model; leave it out")
    if name in PACKED and form.device.type != CPU:
        for spec in cache:
            if spec.kind == "latent":
                raise ConfigError(f"kv_cache_dtype: {name} is for keys and values on a GPU, not for latents; use fp8")
            if name == "int4" and spec.head_dim % VECTOR:
                raise ConfigError(
                    f"kv_cache_dtype: int4 on a GPU needs a head_dim that {VECTOR} divides, not {spec.head_dim}; use "
                    "int8"
                )
    return PACKED.get(name) or {**DTYPES, "fp8": torch.float8_e4m3fn}.get(name, form.kv_dtype)


def resolve_device(name: str) -> torch.device:
    """The device of a setting; "auto" uses a GPU if there is one. Raises ``ConfigError``."""
    if name == GPU and not torch.cuda.is_available():
        raise ConfigError("device: cuda was requested, but torch finds no CUDA device")
    return torch.device(GPU if name == GPU or (name == "auto" and torch.cuda.is_available()) else CPU)


def weight_format(settings: ModelSettings, device: torch.device, checkpoint: Checkpoint) -> WeightFormat:
    """The format of weights and activations. Raises ``ConfigError`` for weights that cannot be quantised as asked,
    and ``CheckpointError``.

    "auto" is float32 on a CPU; on a GPU it is float16 for a float16 checkpoint, else bfloat16. Weights of fewer bits
    stay so if there is a kernel for them, which an explicit dtype on a CPU rules out.
    """
    method = quant_method(checkpoint)
    quantization = settings.quantization if method != settings.quantization else None
    if quantization in STORED_METHODS:
        found = "not quantised" if method is None else f"quantised by {method}"
        raise ConfigError(
            f"quantization: {quantization} names how a checkpoint is quantised, and the weights of this one are "
            f"{found}; leave it out, or quantise unquantised ones by fp8, int8 or int4"
        )
    if quantization is not None and method is not None:
        raise ConfigError(
            f"quantization: {quantization} is for unquantised checkpoints, and the weights of this one are quantised "
            f"already ({method}); leave it out, the format is read from the checkpoint"
        )
    head, num_copies = settings.quantize_lm_head, settings.num_redundant_experts * settings.enable_eplb
    make = functools.partial(
        WeightFormat,
        device=device,
        quantization=quantization,
        quantizes_head=head,
        keeps_experts_whole=settings.enable_expert_parallel,
        keeps_attention_whole=settings.enable_dp_attention,
        num_spare_experts=-(-num_copies // settings.tensor_parallel_size),
    )
    if settings.dtype != "auto":
        if device.type == "cpu" and (quantization or head):
            name = "quantize_lm_head" if quantization is None else "quantization"
            raise ConfigError(f"{name}: needs dtype auto on a CPU, where {settings.dtype} would make all weights dense")
        return make(DTYPES[settings.dtype], packs=device.type != "cpu")
    if device.type == "cpu":
        is_quantised = bool(method or quantization or head)
        return make(torch.float32, packs=without_kernel("cpu") is None, is_quantised=is_quantised)
    return make(torch.float16 if stated_dtype(checkpoint.config) == torch.float16 else torch.bfloat16, packs=True)


def kernel_compilation(form: WeightFormat, kv_dtype: torch.dtype) -> AbstractContextManager[None]:
    """A context in which CPU kernels are compiled on two cores; no effect without kernels to compile."""
    if form.device.type != "cpu" or ops.attention.chosen("cpu", form.dtype) == dispatch.REFERENCE:
        return contextlib.nullcontext()
    return backend_of(CPU).compiling_in_background(kv_dtype)


def quant_method(checkpoint: Checkpoint) -> str | None:
    """How the checkpoint's weights are quantised: its ``quant_method``, or "gguf"; ``None`` if they are not.

    Raises ``CheckpointError``.
    """
    if checkpoint.has_blocks:
        return "gguf"
    return weights_method(text_config(checkpoint.config).get("quantization_config"))

"""The ranks of an engine as its first process sees them, and the ranks of an engine on one device: none but itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from octavo.config import ModelSettings
from octavo.errors import ConfigError
from octavo.models.layer_cache import PipelineStage
from octavo.models.model_config import ModelConfig
from octavo.models.parts import DecoderConfig
from octavo.models.registry import has_attention_of_rows
from octavo.ops.collective import SINGLE_RANK, Collective
from octavo.ops.device_backend import is_gpu
from octavo.plugins import CPU
from octavo.runtime.memory_budget import Limits
from octavo.runtime.ranks.stage_link import StageLink
from octavo.steps.messages import Executor

OnLost = Callable[[int], None]
"""Called in a thread when a rank has ended, with its return code; negative: the signal that ended it."""


class Ranks(Protocol):
    """What the first rank does with the others, in this order, while an engine is built."""

    @property
    def collective(self) -> Collective:
        """That of the first rank, with those of its stage."""
        ...

    def link(self, dtype: torch.dtype, width: int) -> StageLink | None:
        """The first rank's way to other stages, if there are any; see ``StageLink``."""
        ...

    def least_free(self, free: int) -> int:
        """Wait until all ranks have loaded their weights: bytes that each may allocate; ``free`` are the first's."""
        ...

    def settle(self, limits: Limits) -> None:
        """Have every rank allocate memory for these limits."""
        ...

    def executor(self, own: Executor) -> Executor:
        """The executor of all ranks, when all are ready; ``own`` is that of the first."""
        ...

    def report_to(self, on_lost: OnLost | None) -> None:
        """Call ``on_lost`` when a rank ends from now on."""
        ...

    def end(self) -> None:
        """End the other ranks."""
        ...


class OneRank:
    """An engine on one device."""

    collective = SINGLE_RANK

    def link(self, dtype: torch.dtype, width: int) -> StageLink | None:
        """See ``Ranks``."""
        return None

    def least_free(self, free: int) -> int:
        """See ``Ranks``."""
        return free

    def settle(self, limits: Limits) -> None:
        """See ``Ranks``."""

    def executor(self, own: Executor) -> Executor:
        """See ``Ranks``."""
        return own

    def report_to(self, on_lost: OnLost | None) -> None:
        """See ``Ranks``."""

    def end(self) -> None:
        """See ``Ranks``."""


def check_divides(model: ModelConfig, settings: ModelSettings, device: torch.device) -> None:
    """Raise ``ConfigError`` if a model cannot be divided among ranks as the settings ask for."""
    size = settings.tensor_parallel_size
    _check_stages(model, settings.pipeline_parallel_size, device)
    if is_gpu(device) and settings.enable_eplb and settings.batch_invariant:
        raise ConfigError("enable_eplb: does not go with batch_invariant on GPUs, where moves change the order of sums")
    if settings.enable_dp_attention:
        _check_sequences(model, device)
    else:
        _check_heads(model, size)
    for name, width in _widths(model, settings):
        if width % size:
            raise ConfigError(f"tensor_parallel_size: {size} does not divide the width of the {name}, {width}")
    if settings.decode_context_parallel_size > 1:
        _check_parts(model, size, settings.decode_context_parallel_size)


def _check_sequences(model: ModelConfig, device: torch.device) -> None:
    """Raise ``ConfigError`` if ranks cannot compute attention for sequences of their own."""
    if not has_attention_of_rows(model):
        raise ConfigError(f"enable_dp_attention: does not go with the layers of {model.architecture}")
    if is_gpu(device) and any(spec.index_dim for spec in model.cache):
        raise ConfigError("enable_dp_attention: on GPUs, does not go with attention to what an indexer chooses")


def _check_heads(model: ModelConfig, size: int) -> None:
    """Raise ``ConfigError`` if attention cannot be divided by heads."""
    kv_heads = max(spec.num_kv_heads for spec in model.cache)
    parts = model.layers if isinstance(model, DecoderConfig) else ()
    for heads in sorted({model.num_heads, *(part.attention.num_heads for part in parts)}):
        if heads % size:
            raise ConfigError(f"tensor_parallel_size: {size} does not divide the model's {heads} attention heads")
    if model.num_output_groups % size and model.num_output_groups > 1:
        raise ConfigError(f"tensor_parallel_size: {size} does not divide the {model.num_output_groups} groups of heads")
    for units in {tensor.num_units for spec in model.cache for tensor in spec.state}:
        if units % size:
            raise ConfigError(f"tensor_parallel_size: {size} does not divide the {units} key heads of recurrent layers")
    if kv_heads and (kv_heads % min(size, kv_heads) or size % min(size, kv_heads)):
        raise ConfigError(
            f"tensor_parallel_size: {size} must divide the model's {kv_heads} KV heads, or be a multiple of them"
        )


def _check_stages(model: ModelConfig, count: int, device: torch.device) -> None:
    name = f"pipeline_parallel_size: {count}"
    if count == 1:
        return
    if device.type != CPU:
        raise ConfigError(f"{name} is for CPUs; on GPUs, set tensor_parallel_size")
    if not model.has_stages:
        raise ConfigError(f"{name} does not go with {model.architecture}, whose layers need more than the one before")
    if count > model.num_layers:
        raise ConfigError(f"{name} is more than the model's {model.num_layers} layers")
    for own in (PipelineStage(number, count).layers(model.num_layers) for number in range(count)):
        for i in own:
            if (source := model.cache[i].shared_with) is not None and source not in own:
                raise ConfigError(
                    f"{name}: layer {i} reads what layer {source} caches, which another process would have"
                )


def _widths(model: ModelConfig, settings: ModelSettings) -> Iterator[tuple[str, int]]:
    """What ranks divide of feed-forward layers. Raises ``ConfigError`` for fewer experts than ranks to divide them."""
    for moe in model.mixtures if isinstance(model, DecoderConfig) else ():
        if not settings.enable_expert_parallel:
            yield "experts", moe.expert_size
        elif moe.num_experts < settings.tensor_parallel_size:
            raise ConfigError(
                f"enable_expert_parallel: {moe.num_experts} experts cannot be divided among "
                f"{settings.tensor_parallel_size} ranks; leave it out"
            )
        yield "shared expert", moe.shared_size
    dense = sorted(model.dense_sizes) if isinstance(model, DecoderConfig) else [model.ffn_size]
    yield from (("feed-forward layer", width) for width in dense)


def _check_parts(model: ModelConfig, size: int, num_parts: int) -> None:
    name, specs = f"decode_context_parallel_size: {num_parts}", [spec for spec in model.cache if spec.kind != "state"]
    if not specs:
        raise ConfigError(f"{name} needs a KV cache to divide, and the model has recurrent states alone")
    for heads in sorted({spec.num_kv_heads for spec in specs}):
        copies = size // min(size, heads)
        if copies % num_parts:
            raise ConfigError(
                f"{name} must divide the {copies} of {size} ranks that hold the same of the model's {heads} KV heads"
            )
    if any(spec.index_dim for spec in specs):
        raise ConfigError(f"{name} does not go with attention to what an indexer chooses of the whole context")
    if any(spec.window for spec in specs):
        raise ConfigError(f"{name} needs full attention, and the model has layers with a sliding window")
    if isinstance(model, DecoderConfig) and any(part.attention.slopes for part in model.layers):
        raise ConfigError(f"{name} does not go with the model's ALiBi slopes")
    if isinstance(model, DecoderConfig) and any(part.attention.has_bias_of_distance for part in model.layers):
        raise ConfigError(f"{name} does not go with the model's biases of distances")

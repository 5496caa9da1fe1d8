"""LoRA adapters of a loaded model: applied next to its weights, or merged into them.

Shapes: K inputs, N outputs, R rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from octavo.config import ModelSettings, parse_lora_modules
from octavo.errors import CheckpointError, ConfigError
from octavo.layers.linear import Linear
from octavo.layers.lora import AdaptedLinear, AdapterRows
from octavo.layers.stacked_lora import StackedLinear, StackedRows
from octavo.models.linear_parts import MapPart
from octavo.models.meta_model import outlined_maps
from octavo.models.model_config import ModelConfig
from octavo.models.multimodal_text import own_name
from octavo.models.registry import LoadedModel, load_model
from octavo.ops.collective import SINGLE_RANK, Collective
from octavo.ops.device_backend import is_gpu
from octavo.ops.linear.linear import LowRank
from octavo.quant.checkpoint_tensors import TensorSource
from octavo.quant.stored.stored_weight import DenseWeight, WeightFormat, dtype_name
from octavo.weights.adapter import read_adapter

HEAD = "lm_head"


class ModelAdapters:
    """Loads and unloads numbered adapters in the linear maps of one model.

    Updates of maps whose names begin with one of ``unused`` are passed over: the model does not compute them.
    """

    def __init__(
        self, maps: Mapping[str, MapPart], rows: AdapterRows, form: WeightFormat, unused: tuple[str, ...] = ()
    ) -> None:
        self.rows = rows
        self.maps = maps
        self._form = form
        self._unused = unused

    def load(self, number: int, path: str) -> None:
        """Load the adapter in the folder ``path``; raises ``CheckpointError``, leaving the model unchanged."""
        changes = list(changes_of(Path(path), self.maps, self._form, self._unused))
        rank = max((len(change.down_RK) for _, change in changes), default=0)
        if self.rows.max_rank is not None and rank > self.rows.max_rank:
            raise CheckpointError(f"{path}: has rank {rank}; max_lora_rank allows {self.rows.max_rank} on this device")
        for linear, change in changes:
            assert isinstance(linear, AdaptedLinear), "this model was not loaded for adapters"
            linear.add(number, change)
        if is_gpu(self._form.device):
            torch.cuda.current_stream().synchronize()  # steps run on another stream

    def unload(self, number: int) -> None:
        """Remove an adapter, which no later step may use."""
        for part in self.maps.values():
            if isinstance(part.linear, AdaptedLinear):
                part.linear.remove(number)


def make_stacks(maps: Mapping[str, MapPart], form: WeightFormat) -> int:
    """Allocate room for adapters in every linear map; returns its bytes."""
    parts: dict[StackedLinear, list[MapPart]] = {}
    for name, part in maps.items():
        if isinstance(part.linear, StackedLinear) and name != HEAD:
            parts.setdefault(part.linear, []).append(part)
    like = torch.empty(0, dtype=form.dtype, device=form.device)
    return sum(
        linear.make_room([(part.start, part.size) for part in own], own[0].num_inputs, like)
        for linear, own in parts.items()
    )


def merge(path: Path, maps: Mapping[str, MapPart], form: WeightFormat) -> None:
    """Merge an adapter into the model's weights, in float32. Raises ``CheckpointError``, also for quantised weights."""
    for linear, change in changes_of(path, maps, form):
        weight_NK = _dense(path, linear)
        merged_NK = weight_NK.float()
        rows = slice(change.start, change.start + len(change.up_NR))
        if merged_NK.data_ptr() == weight_NK.data_ptr():
            merged_NK = merged_NK.clone()  # it may be a mapped file
        merged_NK[rows] += change.up_NR.float() @ change.down_RK.float()
        linear.weights[0] = DenseWeight(merged_NK.to(form.dtype))


def check_merge(settings: ModelSettings, maps: Mapping[str, MapPart]) -> None:
    """Check whether ``merge`` can merge the adapter of the settings, if that is asked for, from an outline's maps.

    Raises ``CheckpointError``.
    """
    folders = parse_lora_modules(settings.lora_modules).values() if settings.merge_lora else ()
    for path in map(Path, folders):
        for linear, _ in changes_of(path, maps, WeightFormat(torch.float32, torch.device("meta"))):
            _dense(path, linear)


def _dense(path: Path, linear: Linear) -> Tensor:
    """The dense matrix of a map that the adapter in ``path`` changes. Raises ``CheckpointError`` for another."""
    [weight, *others] = linear.weights
    weight_NK = weight.dense_NK
    if others or weight_NK is None:
        raise CheckpointError(f"{path}: cannot be merged into quantised weights; use enable_lora")
    return weight_NK


def changes_of(
    path: Path, maps: Mapping[str, MapPart], form: WeightFormat, unused: tuple[str, ...] = ()
) -> Iterator[tuple[Linear, LowRank]]:
    """The low-rank update of each linear map by the adapter in a folder. Raises ``CheckpointError``.

    ``unused``: see ``ModelAdapters``.
    """
    for name, (down, up, scale) in read_adapter(path).factors.items():
        part = maps.get(own_name(name))
        if part is None and name.startswith(unused):
            continue
        if part is None or own_name(name) == HEAD:
            raise CheckpointError(f"{path}: {name} cannot be adapted: it is not a linear map of the model's layers")
        found, expected = (len(up), down.shape[1]), part.shape
        if found != expected:
            raise CheckpointError(f"{path}: {name} has an update of shape {list(found)}; expected {list(expected)}")
        factors = part.own_update(down, up.float() * scale)
        down_RK, up_NR = (factor.to(form.device, form.dtype).contiguous() for factor in factors)
        yield part.linear, LowRank(part.start, down_RK, up_NR)


def load_with_adapters(
    settings: ModelSettings,
    config: ModelConfig,
    source: TensorSource,
    form: WeightFormat,
    collective: Collective = SINGLE_RANK,
) -> tuple[LoadedModel, ModelAdapters | None]:
    """Load the model, with room for adapters or with the configured adapter merged into it; see ``load_model``.

    Raises ``ConfigError`` for settings that contradict each other.
    """
    modules = parse_lora_modules(settings.lora_modules)
    if not settings.enable_lora:
        if bool(modules) != settings.merge_lora or len(modules) > 1:
            raise ConfigError("lora_modules: needs enable_lora, or merge_lora and one adapter")
        if settings.merge_lora:
            check_merge(settings, outlined_maps(config, source, form, collective.size))
        loaded = load_model(config, source, form, collective=collective)
        for path in modules.values():
            merge(Path(path), loaded.maps, form)
        return loaded, None
    if settings.merge_lora:
        raise ConfigError("merge_lora: cannot be combined with enable_lora; leave out one of them")
    rows = AdapterRows() if form.device.type == "cpu" else StackedRows(settings.max_loras, settings.max_lora_rank)
    loaded = load_model(config, source, form, rows, collective)
    if isinstance(rows, StackedRows):
        stacks = Counter({dtype_name(form.dtype): make_stacks(loaded.maps, form)})
        loaded = loaded._replace(bytes_by_format=Counter(loaded.bytes_by_format) + stacks)
    return loaded, ModelAdapters(loaded.maps, rows, form)

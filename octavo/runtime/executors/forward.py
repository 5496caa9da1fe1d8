"""The forward pass of a model over its caches, in the fastest form of the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from octavo import ops
from octavo.models.registry import CausalLM
from octavo.ops import dispatch
from octavo.ops.attention.attention import LayerCache, PagedRows
from octavo.ops.device_backend import Recorder, backend_of
from octavo.runtime.executors.recorded_forward import RecordedCall, RecordedForward
from octavo.runtime.executors.step_program import Forward, Logits


def make_forward(
    model: CausalLM, caches: Sequence[LayerCache], device: torch.device, enforce_eager: bool = False
) -> Forward:
    """``model.forward`` over these caches; on CPUs with compiled kernels, one that replays recorded kernel calls unless
    ``enforce_eager`` is set."""
    plain = partial(_forward, model, caches)
    has_states = any(cache.states for cache in caches)
    return recorded(plain, device, enforce_eager, getattr(model, "layers", ()), has_states)


def recorded(
    compute: Callable[..., Tensor],
    device: torch.device,
    enforce_eager: bool = False,
    layers: Sequence[Any] = (),
    has_states: bool = False,
) -> Callable[..., Tensor]:
    """``compute``, or on CPUs with compiled kernels a ``RecordedForward`` of it, unless ``enforce_eager`` is set."""
    record = _recorder(device, enforce_eager)
    return compute if record is None else RecordedForward(compute, record, layers, has_states)


def make_logits(model: CausalLM, device: torch.device, enforce_eager: bool = False) -> Logits:
    """``model.logits``, replayed where the forward pass is; the result is then valid until the next call."""
    record = _recorder(device, enforce_eager)
    return model.logits if record is None else RecordedCall(model.logits, record)


def _recorder(device: torch.device, enforce_eager: bool) -> Recorder | None:
    if enforce_eager or ops.linear.chosen(device.type, torch.float32) == dispatch.REFERENCE:
        return None
    return backend_of(device.type).recorder()


def _forward(
    model: CausalLM,
    caches: Sequence[LayerCache],
    token_ids_T: Tensor,
    positions_T: Tensor,
    rows: PagedRows,
    *given: Tensor,
) -> Tensor:
    return model.forward(token_ids_T, positions_T, caches, rows, *given)

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
from octavo.ops.attention import LayerCache, PagedRows
from octavo.runtime.step_program import Forward, Logits


def make_forward(
    model: CausalLM, caches: Sequence[LayerCache], device: torch.device, enforce_eager: bool = False
) -> Forward:
    """``model.forward`` over these caches; on CPUs with compiled kernels, one that replays recorded kernel calls unless
    ``enforce_eager`` is set."""
    plain = partial(_forward, model, caches)
    return recorded(plain, device, enforce_eager, getattr(model, "layers", ()))


def recorded(
    compute: Callable[..., Tensor], device: torch.device, enforce_eager: bool = False, layers: Sequence[Any] = ()
) -> Callable[..., Tensor]:
    """``compute``, or on CPUs with compiled kernels a ``RecordedForward`` of it, unless ``enforce_eager`` is set."""
    if not _records(device, enforce_eager):
        return compute
    from octavo.runtime.recorded_forward import RecordedForward  # needs numba

    return RecordedForward(compute, layers)


def make_logits(model: CausalLM, device: torch.device, enforce_eager: bool = False) -> Logits:
    """``model.logits``, replayed where the forward pass is; the result is then valid until the next call."""
    if not _records(device, enforce_eager):
        return model.logits
    from octavo.runtime.recorded_forward import RecordedCall

    return RecordedCall(model.logits)


def _records(device: torch.device, enforce_eager: bool) -> bool:
    return device.type == "cpu" and not enforce_eager and ops.linear.chosen("cpu", torch.float32) != dispatch.REFERENCE


def _forward(
    model: CausalLM, caches: Sequence[LayerCache], token_ids_T: Tensor, positions_T: Tensor, rows: PagedRows
) -> Tensor:
    return model.forward(token_ids_T, positions_T, caches, rows)

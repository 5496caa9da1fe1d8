"""The forward pass of a model over its caches, in the fastest form of the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from octavo import ops
from octavo.models.registry import CausalLM
from octavo.ops import dispatch
from octavo.ops.attention import LayerCache, PagedRows
from octavo.runtime.step_program import Forward


def make_forward(
    model: CausalLM, caches: Sequence[LayerCache], device: torch.device, enforce_eager: bool = False
) -> Forward:
    """``model.forward`` over these caches; on CPUs with compiled kernels, one that replays recorded kernel calls unless
    ``enforce_eager`` is set."""
    plain = partial(_forward, model, caches)
    if device.type != "cpu" or enforce_eager or ops.linear.chosen("cpu", torch.float32) == dispatch.REFERENCE:
        return plain
    from octavo.runtime.recorded_forward import RecordedForward  # needs numba

    return RecordedForward(model, caches)


def _forward(
    model: CausalLM, caches: Sequence[LayerCache], token_ids_T: Tensor, positions_T: Tensor, rows: PagedRows
) -> Tensor:
    return model.forward(token_ids_T, positions_T, caches, rows)

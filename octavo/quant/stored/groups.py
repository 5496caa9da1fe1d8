"""Makes ``GroupedStored`` of what several formats have in common.

Shapes: K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.quant.config_reader import QuantKeys
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.tensors import Tensors


def group_size(keys: QuantKeys, key: str = "group_size", default: int = 128) -> int:
    """Inputs of a group; -1: all of them. Raises ``CheckpointError``."""
    size = keys.get(key, default)
    if isinstance(size, bool) or not isinstance(size, int) or (size != -1 and not 8 <= size <= 1 << 20):
        raise keys.wrong(key, "-1 (one group) or a number of inputs from 8 to 1048576")
    return size


def num_groups(name: str, num_inputs: int, group: int) -> int:
    """The number of groups of ``group`` inputs; -1 is one group. Raises ``CheckpointError`` naming the module."""
    if group == -1:
        return 1
    if num_inputs % group:
        raise CheckpointError(f"module {name} has {num_inputs} inputs, which are not whole groups of {group}")
    return num_inputs // group


def read_order(name: str, num_inputs: int, groups: int, tensors: Tensors) -> Tensor | None:
    """The inputs sorted by group, from each input's group in the tensor ``name``; ``None`` if they are sorted.

    Raises ``CheckpointError`` if groups are not all of the same size.
    """
    groups_K = tensors.typed(name, (num_inputs,), torch.int32, torch.int64).long()
    if groups_K.is_meta or groups == 1:
        return None
    size, plain_K = num_inputs // groups, torch.arange(num_inputs) // (num_inputs // groups)
    if torch.equal(groups_K, plain_K) or torch.all(groups_K == -1):
        return None
    if not 0 <= int(groups_K.min()) <= int(groups_K.max()) < groups:
        raise CheckpointError(f"tensor {name} has groups that are not from 0 to {groups - 1}")
    if not torch.all(torch.bincount(groups_K, minlength=groups) == size):
        raise CheckpointError(f"tensor {name} does not assign {size} inputs to each of {groups} groups")
    return torch.argsort(groups_K, stable=True)


def in_order(
    codes_NK: Tensor, scales_NG: Tensor, zeros_NG: Tensor | None, bits: int, order_K: Tensor | None
) -> GroupedStored:
    """The matrix whose codes are in the order of inputs, with its columns sorted by ``order_K``."""
    if order_K is not None:
        codes_NK = codes_NK[:, order_K]
    return GroupedStored(codes_NK, scales_NG, zeros_NG, bits, order_K)

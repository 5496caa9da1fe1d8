"""Integers of a few bits, and the groups of inputs that share a scale.

Shapes: R rows, K inputs, N outputs, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from octavo.errors import CheckpointError
from octavo.quant.checkpoint_tensors import Tensors
from octavo.quant.config_reader import QuantKeys
from octavo.quant.stored.int_group_weight import GroupedStored


def num_words(count: int, bits: int) -> int:
    """Words that hold ``count`` integers without gaps."""
    return -(-count * bits // 32)


def unpack_fields(words: Tensor, bits: int, count: int) -> Tensor:
    """The first ``count`` integers of ``bits`` bits, from 1 to 8, of each row of int32 words [R, any], as uint8.

    Integers follow one another from the lowest bit on without gaps, also across words.
    """
    data = words.reshape(-1).view(torch.uint8).view(len(words), -1)
    if bits == 8:
        return data[:, :count]
    if bits == 4:
        return torch.stack((data & 15, data >> 4), dim=2).flatten(1)[:, :count]
    # Eight integers take `bits` bytes. The first 16 bits from the byte in which an integer begins hold all of it.
    data = functional.pad(data, (0, -data.shape[1] % bits + bits))
    octets, mask = data.view(len(data), -1, bits).to(torch.int16), (1 << bits) - 1
    after = functional.pad(octets, (0, 1))
    fields = [
        (octets[:, :, at // 8] | (after[:, :, at // 8 + 1] << 8)) >> at % 8 & mask for at in range(0, 8 * bits, bits)
    ]
    return torch.stack(fields, dim=2).flatten(1)[:, :count].to(torch.uint8)


def signed(codes: Tensor, bits: int) -> Tensor:
    """Unsigned integers of ``bits`` bits (uint8), minus 2 ** (bits - 1), as int8."""
    return (codes ^ 128 if bits == 8 else codes - (1 << (bits - 1))).view(torch.int8)


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

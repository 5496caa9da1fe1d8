"""``rotary_angles``: products in float32 as the contract defines them, cosines and sines rounded once."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from octavo.ops.attention import axis_angles, rotary_angles
from octavo_kernels.cpu.calls import call
from octavo_kernels.cpu.compiled import compiled_task
from octavo_kernels.cpu.host import FLOAT_FEATURES, missing
from octavo_kernels.cpu.memory import fields, read, view
from octavo_kernels.cpu.task_driver import task_driver

ANGLES_A_PIECE = 64
ARGUMENTS = fields(task=int, T=int, piece=int, positions=int, frequencies=int, cos=int, sin=int, R=int, factor=float)


@functools.cache
def _task() -> int:
    """Task over rows."""

    def turn(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, ARGUMENTS)
        positions, frequencies = view(a.positions, a.T, np.int64), view(a.frequencies, a.R, np.float32)
        cos, sin = view(a.cos, a.T * a.R, np.float32), view(a.sin, a.T * a.R, np.float32)
        for t in range(begin, end):
            position = np.float32(positions[t])
            for i in range(a.R):
                angle = np.float64(position * frequencies[i])
                cos[t * a.R + i] = np.float32(np.cos(angle)) * np.float32(a.factor)
                sin[t * a.R + i] = np.float32(np.sin(angle)) * np.float32(a.factor)

    return compiled_task(turn)


def _supports(dtype: torch.dtype) -> str | None:
    return missing(FLOAT_FEATURES) if dtype == torch.int64 else f"positions must be int64, got {dtype}"


@rotary_angles.kernel(device="cpu", name="numba", preference=10, supports=_supports)
def rotary_angles_numba(positions_T: Tensor, frequencies_R: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """See ``ops.rotary_angles``."""
    positions, frequencies = positions_T.contiguous(), frequencies_R.float().contiguous()
    T, R = len(positions), len(frequencies)
    cos_TR, sin_TR = torch.empty(T, R), torch.empty(T, R)
    arguments = np.empty(1, ARGUMENTS)
    addresses = positions.data_ptr(), frequencies.data_ptr(), cos_TR.data_ptr(), sin_TR.data_ptr()
    arguments[0] = (_task(), T, max(1, ANGLES_A_PIECE // max(1, R)), *addresses, R, factor)
    call(task_driver(), arguments)
    return cos_TR, sin_TR


AXIS_ARGUMENTS = fields(
    task=int,
    T=int,
    piece=int,
    positions=int,
    shifts=int,
    axes=int,
    frequencies=int,
    cos=int,
    sin=int,
    R=int,
    A=int,
    factor=float,
)


@functools.cache
def _axis_task() -> int:
    """Task over rows, whose position depends on the pair."""

    def turn(arguments: int, begin: int, end: int) -> None:
        a = read(arguments, AXIS_ARGUMENTS)
        positions, frequencies = view(a.positions, a.T, np.int64), view(a.frequencies, a.R, np.float32)
        shifts, axes = view(a.shifts, a.A * a.T, np.int64), view(a.axes, a.R, np.int64)
        cos, sin = view(a.cos, a.T * a.R, np.float32), view(a.sin, a.T * a.R, np.float32)
        for t in range(begin, end):
            for i in range(a.R):
                position = np.float32(positions[t] + shifts[axes[i] * a.T + t])
                angle = np.float64(position * frequencies[i])
                cos[t * a.R + i] = np.float32(np.cos(angle)) * np.float32(a.factor)
                sin[t * a.R + i] = np.float32(np.sin(angle)) * np.float32(a.factor)

    return compiled_task(turn)


@axis_angles.kernel(device="cpu", name="numba", preference=10, supports=_supports)
def axis_angles_numba(
    positions_T: Tensor, shifts_AT: Tensor, axes_R: Tensor, frequencies_R: Tensor, factor: float
) -> tuple[Tensor, Tensor]:
    """See ``ops.axis_angles``."""
    positions, shifts, axes = positions_T.contiguous(), shifts_AT.contiguous(), axes_R.contiguous()
    frequencies = frequencies_R.float().contiguous()
    T, R = len(positions), len(frequencies)
    cos_TR, sin_TR = torch.empty(T, R), torch.empty(T, R)
    arguments = np.empty(1, AXIS_ARGUMENTS)
    inputs = positions.data_ptr(), shifts.data_ptr(), axes.data_ptr(), frequencies.data_ptr()
    outputs = cos_TR.data_ptr(), sin_TR.data_ptr()
    piece = max(1, ANGLES_A_PIECE // max(1, R))
    arguments[0] = (_axis_task(), T, piece, *inputs, *outputs, R, len(shifts), factor)
    call(task_driver(), arguments)
    return cos_TR, sin_TR

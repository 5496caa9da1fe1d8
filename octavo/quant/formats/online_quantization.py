"""Quantisation of 16- and 32-bit weights while they are loaded: settings ``quantization`` and ``quantize_lm_head``.

Matrices are quantised one by one on the device that computes with them, a few rows at a time, so that loading takes
little more memory than the result.

    fp8    e4m3 numbers with a scale for each output, for activations of 8 bits where kernels have them
    int8   symmetric integers with a scale for each output
    int4   symmetric integers with a scale for each group of inputs: the one of least squared error

Shapes: K inputs, N outputs, R rows at a time, G groups of K / G inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from octavo.errors import CheckpointError
from octavo.ops.device_backend import is_gpu
from octavo.plugins import CPU, GPU
from octavo.quant.stored.int_group_weight import GroupedStored
from octavo.quant.stored.scaled import ScaledStored
from octavo.quant.stored.stored_weight import DenseStored, StoredWeight, WeightFormat

GROUPS = (128, 64, 32)
"""Lengths of INT4 groups: the first that divides the inputs. If none does, the matrix becomes INT8."""
CLIPS = (7.0, 7.5, 8.0, 8.5, 9.0, 9.5)
"""Scales that are tried for an INT4 group: its largest number becomes code -7, -7.5 and so on, before rounding and
clipping to -8."""
LARGEST_E4M3 = 448.0
SMALLEST_SCALE = 1e-30
"""Of rows and groups of zeros."""
AT_ONCE = {CPU: 1 << 16, GPU: 1 << 24}
"""Weights quantised at once; on a CPU they stay in the cache."""


def quantized(name: str, stored: StoredWeight, form: WeightFormat) -> StoredWeight:
    """The matrix of linear map ``name`` as ``form.quantization`` says. Maps to a single output stay as they are.

    Raises ``CheckpointError`` for a matrix that is quantised already, or with numbers that are not finite.
    """
    if form.quantization is None or stored.shape[0] == 1:
        return stored
    if not isinstance(stored, DenseStored):
        raise CheckpointError(f"{name} is quantised already; leave out quantization")
    if form.device.type == "meta":
        return _outlined(form.quantization, stored.shape, stored.parts[0].dtype)
    return _QUANTIZERS[form.quantization](name, stored, form.device)


@functools.cache
def _outlined(quantization: str, shape: tuple[int, int], dtype: torch.dtype) -> StoredWeight:
    """A matrix of these sizes without content, of which a model has many: the arithmetic takes long on "meta", too."""
    matrix = torch.empty(shape, dtype=dtype, device="meta")
    return _QUANTIZERS[quantization]("", DenseStored((matrix,)), matrix.device)


def quantized_head(name: str, stored: StoredWeight, form: WeightFormat) -> StoredWeight:
    """The map to logits, or the embedding that it is tied to, as INT8 if ``form`` says so and it is not quantised yet.

    INT8 whatever ``form.quantization`` is: errors in logits count most, and those of INT4 and FP8 are larger.
    """
    if not form.quantizes_head or not isinstance(stored, DenseStored):
        return stored
    return _to_int8(name, stored, form.device)


def return_memory(device: torch.device) -> None:
    """Return what loading a large matrix took besides the result: PyTorch would place weights in parts of it, none of
    which could be returned for the KV cache any more."""
    if is_gpu(device):
        torch.cuda.empty_cache()


def _to_fp8(name: str, stored: DenseStored, device: torch.device) -> ScaledStored:
    def quantize(weight_RK: Tensor) -> tuple[Tensor, Tensor]:
        scales_R1 = (_largest(name, weight_RK) / LARGEST_E4M3).clamp_min_(SMALLEST_SCALE)
        numbers_RK = (weight_RK / scales_R1).clamp_(-LARGEST_E4M3, LARGEST_E4M3)
        return numbers_RK.to(torch.float8_e4m3fn).view(torch.uint8), scales_R1

    bits_NK, scales_N1 = _joined(stored, device, quantize)
    values_NK = bits_NK.view(torch.float8_e4m3fn)
    return ScaledStored(values_NK, scales_N1, (1, stored.shape[1]), rounds_activations=True)


def _to_int8(name: str, stored: DenseStored, device: torch.device) -> GroupedStored:
    def quantize(weight_RK: Tensor) -> tuple[Tensor, Tensor]:
        scales_R1 = _storable(_largest(name, weight_RK) / 127)
        return (weight_RK / scales_R1).round_().clamp_(-128, 127).to(torch.int8), scales_R1

    codes_NK, scales_N1 = _joined(stored, device, quantize)
    return GroupedStored(codes_NK, scales_N1, None, 8)


def _to_int4(name: str, stored: DenseStored, device: torch.device) -> GroupedStored:
    K = stored.shape[1]
    group = next((length for length in GROUPS if K % length == 0), None)
    if group is None:
        return _to_int8(name, stored, device)

    def quantize(weight_RK: Tensor) -> tuple[Tensor, Tensor]:
        _largest(name, weight_RK)
        codes_RK, scales_RG = _int4_groups(weight_RK.view(len(weight_RK), -1, group))
        return codes_RK.flatten(1).to(torch.int8), scales_RG

    codes_NK, scales_NG = _joined(stored, device, quantize)
    return GroupedStored(codes_NK, scales_NG, None, 4)


def _int4_groups(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [R, G, K / G] and scales [R, G] of float32 groups [R, G, K / G].

    The number of largest magnitude gets a negative code, as there are more of these. The best of the scales of
    ``CLIPS`` is then fitted to the codes that it gives, by least squares.
    """
    extremes = weight.gather(2, weight.abs().argmax(2, keepdim=True))
    best, least = extremes / -8, torch.full_like(extremes, torch.inf)
    for clip in CLIPS:
        scales = extremes / -clip
        error = (_codes(weight, scales).mul_(scales).sub_(weight)).square_().sum(2, keepdim=True)
        best = torch.where(error < least, scales, best)
        least = torch.minimum(error, least)
    codes = _codes(weight, best)
    fitted = (codes * weight).sum(2, keepdim=True) / codes.square().sum(2, keepdim=True).clamp_min_(1)
    scales = _storable(torch.where(fitted.isfinite(), fitted, best))
    return _codes(weight, scales), scales.squeeze(2)


def _codes(weight: Tensor, scales: Tensor) -> Tensor:
    """The nearest codes, as float32; 0 in groups of zeros."""
    inverse = torch.where(scales.abs() < SMALLEST_SCALE, 0.0, 1 / scales)
    return (weight * inverse).round_().clamp_(-8, 7)


def _storable(scales: Tensor) -> Tensor:
    """Scales rounded to float16, which halves their bytes, where that changes them by less than 0.1 %."""
    half = scales.half().float()
    close = (half - scales).abs() <= scales.abs() * 2**-10
    nonzero = torch.where(scales.abs() < SMALLEST_SCALE, SMALLEST_SCALE, scales)
    return torch.where(close & (half != 0), half, nonzero)


def _largest(name: str, weight_RK: Tensor) -> Tensor:
    """The largest magnitude of each row [R, 1]. Raises ``CheckpointError`` for numbers that are not finite."""
    largest_R1 = weight_RK.abs().amax(1, keepdim=True)
    if not largest_R1.is_meta and not largest_R1.isfinite().all():
        raise CheckpointError(f"{name} has weights that are infinite or not numbers, which cannot be quantised")
    return largest_R1


def _joined(
    stored: DenseStored, device: torch.device, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """The two results of ``quantize`` for all rows; it gets a few at a time, in float32 on the device."""
    wholes: list[Tensor] = []
    start = 0
    for weight_RK in _few_rows(stored, device):
        parts = quantize(weight_RK)
        wholes = wholes or [part.new_empty(stored.shape[0], part.shape[1]) for part in parts]
        for whole, part in zip(wholes, parts, strict=True):
            whole[start : start + len(part)] = part
        start += len(weight_RK)
    first, second = wholes
    return first, second


def _few_rows(stored: DenseStored, device: torch.device) -> Iterator[Tensor]:
    N, K = stored.shape
    step = max(1, AT_ONCE.get(device.type, N * K) // K)
    for part in stored.parts:
        for start in range(0, len(part), step):
            yield part[start : start + step].to(device).float()


_QUANTIZERS: dict[str, Callable[[str, DenseStored, torch.device], StoredWeight]] = {
    "fp8": _to_fp8,
    "int8": _to_int8,
    "int4": _to_int4,
}

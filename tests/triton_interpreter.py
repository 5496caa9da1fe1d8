"""Triton kernels run in Triton's interpreter where there is no CUDA device, and are compiled where there is one.

Interpretation is decided when ``@triton.jit`` decorates a function, the ones of ``triton.language`` included, so it
has to be asked for before triton is first imported, by whichever library: ``tests/conftest.py`` imports this module
before anything else. The environment variable is taken back at once: processes that tests start are not to inherit it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

import numpy as np
import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if HAS_TRITON and DEVICE == "cpu":
    assert "triton" not in sys.modules, "triton was imported before its interpreter could be asked for"
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton import knobs
    from triton.runtime import interpreter

    propagate, knobs.propagate_env = knobs.propagate_env, False
    knobs.runtime.interpret = True
    knobs.propagate_env = propagate
    del os.environ["TRITON_INTERPRET"]

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """Triton 3.6 takes ``int()`` of arrays of one element for loop bounds, which numpy 2.4 refuses."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_tensor_and_index

    _splat = interpreter.InterpreterBuilder.create_splat

    def _splat_of_bools(builder: Any, shape: Any, scalar: Any) -> Any:
        """Triton 3.7 to 3.9 spread the result of a comparison as 32-bit integers, which no mask may be."""
        spread = _splat(builder, shape, scalar)
        return interpreter.TensorHandle(spread.data.astype(scalar.data.dtype), spread.dtype)

    interpreter.InterpreterBuilder.create_splat = _splat_of_bools

    _dot = interpreter.InterpreterBuilder.create_dot

    def _dot_of_bfloat16(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
        """Triton 3.6 multiplies the bit patterns of bfloat16 numbers, which it keeps as integers."""
        return _dot(builder, *(_as_float32(x) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *rest)

    def _as_float32(x: Any) -> Any:
        return interpreter.TensorHandle(_widened(x.data), tl.float32)

    interpreter.InterpreterBuilder.create_dot = _dot_of_bfloat16

    _convert = interpreter._convert_float

    def _convert_as_gpus_do(data: Any, source: Any, target: Any, mode: Any) -> Any:
        """Triton cuts where GPUs round to bfloat16, and loses the carry when a number rounds up in float8 (3.6).

        GPUs clamp to the range of float8, too.
        """
        if source == tl.bfloat16 and target == tl.float32:
            return _widened(data)
        if target not in (tl.bfloat16, tl.float8e4nv):
            return _convert(data, source, target, mode)
        wide = data if source == tl.float32 else _convert(data, source, tl.float32, None).view(np.float32)
        numbers = torch.from_numpy(np.array(wide))
        if target == tl.bfloat16:
            return numbers.bfloat16().view(torch.int16).numpy().view(np.uint16)
        return numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    def _widened(bits: Any) -> Any:
        return (bits.astype(np.uint32) << 16).view(np.float32)

    interpreter._convert_float = _convert_as_gpus_do

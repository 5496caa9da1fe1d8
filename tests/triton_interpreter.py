"""Triton kernels run in Triton's interpreter where there is no CUDA device, and are compiled where there is one.

Interpretation is decided when ``@triton.jit`` decorates a function, the ones of ``triton.language`` included, so it
has to be asked for before triton is first imported, by whichever library: ``tests/conftest.py`` imports this module
before anything else. The environment variable is taken back at once: processes that tests start are not to inherit it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import os
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from tests.tiers import nightly_after

HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def quick_first(count: int, values: Iterable[Any]) -> list[Any]:
    """Values of a parameter, or tuples of several. All but the first ``count`` are nightly where kernels run in the
    interpreter, which is slow."""
    return list(values) if DEVICE == "cuda" else nightly_after(count, values)


if HAS_TRITON and DEVICE == "cpu":
    assert "triton" not in sys.modules, "triton was imported before its interpreter could be asked for"
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl
    from triton import knobs
    from triton.language.semantic import TritonSemantic
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

    def _dot(builder: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        """The product without a BLAS, in which the bits of a row may depend on its place in the matrix.

        Triton 3.6 multiplies the bit patterns of bfloat16 numbers, which it keeps as integers.
        """
        left, right = (_as_numbers(x) for x in (a, b))
        product = np.einsum("...ik,...kj->...ij", left, right, dtype=d.data.dtype, casting="unsafe")
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def _as_numbers(x: Any) -> Any:
        if x.dtype.scalar == tl.bfloat16:
            return _widened(x.data)
        if x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating():
            return _convert(x.data, x.dtype, tl.float16, None).view(np.float16)
        return x.data

    interpreter.InterpreterBuilder.create_dot = _dot

    # What stands next to a NaN, as of GPUs; Triton 3.6 gives the NaN.
    interpreter.InterpreterBuilder.create_maxnumf = lambda builder, a, b: builder.binary_op(a, b, np.fmax)
    interpreter.InterpreterBuilder.create_minnumf = lambda builder, a, b: builder.binary_op(a, b, np.fmin)

    def _bfloat16(builder: Any, value: float) -> Any:
        """Constants, which Triton 3.6 has in other types alone."""
        return builder.create_fp_trunc(builder.get_fp32(value), tl.bfloat16)

    interpreter.InterpreterBuilder.get_bf16 = _bfloat16

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

    # Sums of integers are computed a second time to compare them with their bounds, and then nobody asks.
    _options = interpreter.interpreter_builder.options
    assert not _options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(_options, sanitize_overflow=False)

    _patch_lang = interpreter._patch_lang

    @functools.cache
    def _languages(function: Any) -> list[Any]:
        return [value for value in function.__globals__.values() if value is tl or value is tl.core]

    def _patch_lang_once(function: Any) -> Any:
        """Every call within a kernel patches the language again, for a third of all time: once a launch is enough."""
        is_launched = not tl.core.is_builtin(tl.core.tensor.__add__)
        if is_launched and not any(tl.core.is_builtin(language.load) for language in _languages(function)):
            return interpreter._LangPatchScope()
        return _patch_lang(function)

    interpreter._patch_lang = _patch_lang_once

    _np_dtype = interpreter._get_np_dtype
    _np_dtypes: dict[str, Any] = {}

    def _known_np_dtype(dtype: Any) -> Any:
        """Triton writes its table of types anew for each question."""
        name = dtype.scalar.name
        if name not in _np_dtypes:
            _np_dtypes[name] = _np_dtype(dtype)
        return _np_dtypes[name]

    interpreter._get_np_dtype = _known_np_dtype

    _make_block = tl.core.block_type.__init__
    _blocks: dict[Any, dict[str, Any]] = {}

    def _make_block_once(block: Any, element: Any, shape: Any) -> None:
        """Triton checks and names the type of every result anew; those of numbers are few."""
        if type(element) is not tl.core.dtype:
            _make_block(block, element, shape)
            return
        key = element.name, *(size.value if type(size) is tl.constexpr else size for size in shape)
        if key not in _blocks:
            _make_block(block, element, shape)
            sizes = tl.core.tuple([tl.constexpr(size) for size in block.shape])
            _blocks[key] = {**block.__dict__, "key": key, "sizes": sizes, "numel_of_sizes": tl.constexpr(block.numel)}
        block.__dict__.update(_blocks[key])

    tl.core.block_type.__init__ = _make_block_once

    _make_tensor = tl.core.tensor.__init__

    def _make_tensor_of_known_type(tensor: Any, handle: Any, type: Any) -> None:
        """Triton counts and wraps the sizes of every result anew."""
        known = type.__dict__
        if "sizes" not in known:
            _make_tensor(tensor, handle, type)
            key = tensor.dtype.name, *(size.value for size in tensor.shape)
            known.update(key=key, sizes=tensor.shape, numel_of_sizes=tensor.numel)
            return
        tensor.handle, tensor.type, tensor.dtype = handle, type, type.scalar
        tensor.shape, tensor.numel = known["sizes"], known["numel_of_sizes"]

    tl.core.tensor.__init__ = _make_tensor_of_known_type

    _joint = functools.cache(np.broadcast_shapes)

    def _sizes(tensor: Any) -> tuple[int, ...]:
        return tuple(tensor.type.shape.values) if tensor.type.is_block() else ()

    def _broadcast_as_numpy(semantic: Any, left: Any, right: Any) -> Any:
        """Triton compares the sizes of both one by one, each of them wrapped for it, and adds axes one by one."""
        if left.shape.values == right.shape.values:
            return left, right
        sizes = _joint(_sizes(left), _sizes(right))
        return _spread(left, sizes), _spread(right, sizes)

    def _spread(tensor: Any, sizes: tuple[int, ...]) -> Any:
        if _sizes(tensor) == sizes:
            return tensor
        handle = interpreter.TensorHandle(np.broadcast_to(tensor.handle.data, sizes), tensor.handle.dtype.scalar)
        return tl.tensor(handle, tl.block_type(tensor.dtype, list(sizes)))

    TritonSemantic.broadcast_impl_value = _broadcast_as_numpy

    _operands = TritonSemantic.binary_op_type_checking_impl
    _numbers: dict[Any, Any] = {}
    MOST_NUMBERS = 5_000
    USUAL = frozenset(("fp32", "int32", "int64", "int1"))
    OFFSETS = frozenset(("int32", "int64"))
    SUM = True, True

    def _operands_once(semantic: Any, left: Any, right: Any, *rules: Any, **options: Any) -> Any:
        """Triton looks at the types of operands that are alike, spreads what numpy spreads, and converts a number anew,
        to the type and the shape of the operand before it, for each operation."""
        is_number = type(right) in (int, float)
        if options or type(left) is not tl.tensor or not (is_number or type(right) is tl.tensor):
            return _operands(semantic, left, right, *rules, **options)
        is_pointer = type(left.dtype) is tl.pointer_type
        if is_pointer and not is_number and rules == SUM:
            is_spread = right.dtype.name in OFFSETS
        else:
            is_spread = not is_number and left.dtype is right.dtype and right.dtype.name in USUAL
        if is_spread:
            sizes = _joint(_sizes(left), _sizes(right))
            return _typed(left, sizes), _typed(right, sizes)
        if is_pointer or not is_number:
            return _operands(semantic, left, right, *rules)
        key = right, type(right), left.type.key, rules
        if (number := _numbers.get(key)) is not None:
            return left, number
        same, number = _operands(semantic, left, right, *rules)
        if same is left:
            if len(_numbers) == MOST_NUMBERS:
                _numbers.clear()
            _numbers[key] = number
        return same, number

    def _typed(tensor: Any, sizes: tuple[int, ...]) -> Any:
        """An operand of an operation of numpy, which spreads it."""
        if _sizes(tensor) == sizes:
            return tensor
        return tl.tensor(tensor.handle, tl.block_type(tensor.dtype, list(sizes)))

    TritonSemantic.binary_op_type_checking_impl = _operands_once

    _equal = tl.dtype.__eq__

    def _equal_or_same(one: Any, other: Any) -> bool:
        """Types of numbers are few objects; Triton unwraps each and compares their names."""
        return one is other or _equal(one, other)

    tl.dtype.__eq__ = _equal_or_same

    _unwrap = tl.core._unwrap_if_constexpr
    PLAIN = frozenset((tl.tensor, tl.dtype, tl.block_type, tl.pointer_type, int, float, bool, str, type(None)))

    def _unwrap_if_wrapped(value: Any) -> Any:
        """Triton asks for five types in turn, of all that it is given."""
        return value if type(value) in PLAIN else _unwrap(value)

    tl.core._unwrap_if_constexpr = _unwrap_if_wrapped

    _builtin = tl.tensor.__add__.__code__
    _patch_attribute = interpreter._patch_attr

    def _patch_attribute_directly(place: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        """Triton filters the arguments of each call, and then looks for what it has just given."""
        if getattr(member, "__code__", None) is not _builtin:
            _patch_attribute(place, name, member, builder, scope)
            return
        function, semantic = member.__wrapped__, interpreter.interpreter_semantic

        def called(*args: Any, **options: Any) -> Any:
            options["_semantic"] = semantic
            return function(*args, **options)

        scope.set_attr(place, name, called)

    interpreter._patch_attr = _patch_attribute_directly

    class _TypeWhenAsked:
        """The type of a tuple, of which every tensor has one as its shape and hardly any is asked for its type."""

        def __get__(self, values: Any, owner: Any) -> Any:
            values.type = tl.core._type_for_tuple_values(values.values)
            return values.type

    _make_tuple = tl.core.tuple.__init__

    def _make_tuple_untyped(values: Any, args: Any, type: Any = None) -> None:
        if type is None:
            values.values = list(args)
        else:
            _make_tuple(values, args, type)

    tl.core.tuple.__init__ = _make_tuple_untyped
    tl.core.tuple.type = _TypeWhenAsked()

"""A kernel to compile as a message, so that another process compiles the same kernel into Triton's cache.

Triton finds a compiled kernel on disk by a digest of its source, its types, its constants and the compiler's options.
So a kernel that another process has compiled from the same of these is loaded, not compiled again.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import msgspec
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.runtime.jit import DependenciesFinder, JITFunction

from octavo.errors import CANCELLATIONS


class CompileJob(msgspec.Struct, array_like=True, frozen=True):
    """One compilation. Constants and attributes are by their path: the place of a parameter, and within a tuple."""

    source: tuple[str, str]
    """Module and name of the class of sources: Triton's or Gluon's."""
    function: tuple[str, str]
    signature: dict[str, Any]
    constants: list[tuple[list[int], Any]]
    attributes: list[tuple[list[int], Any]]
    options: dict[str, Any]
    target: tuple[str, Any, int]
    digest: str
    """Of the source: the other process has the same kernel if it finds the same."""


_decode = msgspec.msgpack.Decoder(CompileJob).decode
_take_over = DependenciesFinder._update_hash


def _ask_and_take_over(finder: DependenciesFinder, called: Any) -> None:
    """Put a function that a kernel calls into the kernel's digest.

    The digest has the constants that the function uses. Triton 3.6 takes them over as they are known, which they are
    once the function's own digest was asked for: without that, a process that compiled other kernels before would have
    another digest for the same kernel.
    """
    _ = called.cache_key
    _take_over(finder, called)


DependenciesFinder._update_hash = _ask_and_take_over


def described(compile_one: Callable[[], Any]) -> bytes | None:
    """The job of a function that Triton gives to the executor of its ``AsyncCompileMode``.

    Its variables say what is to be compiled. ``None`` if they are unknown, as in another version of Triton, or if a
    constant cannot be sent, such as a layout: the function is then called here.
    """
    found = inspect.getclosurevars(compile_one).nonlocals
    try:
        source, options, target = found["src"], found["options"], found["target"]
        job = CompileJob(
            (type(source).__module__, type(source).__name__),
            (source.fn.fn.__module__, source.fn.fn.__qualname__),
            {name: _sendable(value) for name, value in source.signature.items()},
            [(list(path), _sendable(value)) for path, value in source.constants.items()],
            [(list(path), _sendable(value)) for path, value in source.attrs.items()],
            {name: _sendable(value) for name, value in vars(options).items()},
            (target.backend, target.arch, target.warp_size),
            source.hash(),
        )
    except (KeyError, AttributeError, TypeError):
        return None
    return msgspec.msgpack.encode(job)


def execute(message: bytes) -> str:
    """Compile the kernel of a job into the cache; returns why that failed, or ""."""
    job = _decode(message)
    try:
        kind: type[ASTSource] = _named(job.source)
        constants = {tuple(path): _received(value) for path, value in job.constants}
        attributes = {tuple(path): _received(value) for path, value in job.attributes}
        signature = {name: _received(value) for name, value in job.signature.items()}
        source = kind(_named(job.function), signature, constants, attributes)
        if source.hash() != job.digest:
            return f"{job.function[1]} is another kernel here"
        options = {name: _received(value) for name, value in job.options.items()}
        kernel = triton.compile(source, target=GPUTarget(*job.target), options=options)
    except CANCELLATIONS:
        raise
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # without its launcher in the cache, the first launch builds it
        importlib.import_module("triton.backends.nvidia.driver").CudaLauncher(kernel.src, kernel.metadata)
    return ""


def _named(name: tuple[str, str]) -> Any:
    module, attribute = name
    return getattr(importlib.import_module(module), attribute)


def _sendable(value: Any) -> Any:
    """``value`` in types of MessagePack. Raises ``TypeError``."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case tuple() | list() if type(value) in (tuple, list):
            return {"tuple" if isinstance(value, tuple) else "list": [_sendable(item) for item in value]}
        case tl.dtype() if type(value) is tl.dtype:
            return {"dtype": value.name}
        case tl.constexpr():
            return {"constexpr": _sendable(value.value)}
        case JITFunction():
            return {"function": [value.fn.__module__, value.fn.__qualname__]}
    raise TypeError(f"{type(value).__name__} cannot be sent")


def _received(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    match kind:
        case "tuple":
            return tuple(_received(item) for item in content)
        case "list":
            return [_received(item) for item in content]
        case "dtype":
            return tl.dtype(content)
        case "constexpr":
            return tl.constexpr(_received(content))
    return _named(tuple(content))

"""Compiling kernels, once per machine: the decorators, and the folder that keeps the compiled code.

numba's own cache looks at the file that a function is written in, not at the files that it calls into. The
folder's name therefore carries a digest of this whole package, so that changed kernels are never mixed with
old ones. numba itself tells CPUs and its own versions apart. Where a disk is full or cannot be written, kernels are
compiled in memory, at each start.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeAlias

import numba
from numba import extending, types
from numba.core import sigutils
from numba.core.ccallback import CFunc
from numba.core.compiler_lock import global_compiler_lock

from octavo.collector import without_collections
from octavo.config import cache_dir

numba_config: Any = numba.config
normalize_signature: Any = sigutils.normalize_signature
Constant: TypeAlias = int
logger = logging.getLogger(__name__)
LONGEST_WAIT = 120.0
"""Seconds, far more than any kernel takes: who is stopped half-way through compiling must not stop all others."""


@functools.cache
def cache_folder() -> Path | None:
    """Where compiled kernels are kept, under the user's cache folder; ``None`` when it cannot be written."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    folder = cache_dir() / "kernels" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it cannot be written")
    except OSError as error:
        _warn_that_nothing_is_kept(folder, error.strerror or str(error))
        return None
    return folder


@functools.cache
def _warn_that_nothing_is_kept(folder: Path, reason: str) -> None:
    """Say so once for each reason."""
    logger.warning("compiled kernels cannot be kept in %s (%s); each start compiles them anew", folder, reason)


def is_missing(name: str) -> bool:
    """Whether the folder could keep compiled code of the function ``name``, or one within it, and does not."""
    folder = cache_folder()
    return folder is not None and not any(folder.rglob(f"*.{name}.*.nbi"))


@contextlib.contextmanager
def _numba_cache() -> Iterator[bool]:
    """Point numba at our folder while a function is decorated; other users of numba keep their own setting."""
    folder, config = cache_folder(), numba_config
    before = config.CACHE_DIR
    if folder is None:
        yield False
        return
    config.CACHE_DIR = str(folder)
    try:
        yield True
    finally:
        config.CACHE_DIR = before


def _keep_if_possible(code: Any) -> None:
    """Have a function's compiled code kept, and go on when that fails: it is in memory."""
    save = code._cache.save_overload

    def save_if_possible(signature: Any, compiled_code: Any) -> None:
        try:
            save(signature, compiled_code)
        except OSError as error:
            _warn_that_nothing_is_kept(cache_dir(), error.strerror or str(error))

    code._cache.save_overload = save_if_possible


@contextlib.contextmanager
def _alone(function: Callable[..., Any]) -> Iterator[None]:
    """Keep other processes from compiling ``function`` meanwhile, so that they find it compiled.

    All variants of a function share an index in numba's folder. Two processes that each put a variant into the index
    that they read before would choose one name for both, and code would be loaded for the other variant.
    """
    folder = cache_folder()
    # The compiler's lock comes first, or a thread that holds it could wait for a file of one that waits for it.
    # A tenth of a compilation would be looking for garbage among all that torch has made.
    with contextlib.ExitStack() as locks, global_compiler_lock, without_collections():
        if folder is not None:
            name = f"{function.__module__}.{function.__qualname__}.lock".replace("<locals>.", "")
            with contextlib.suppress(OSError):  # the folder is gone, or knows no locks
                _lock(locks.enter_context(open(folder / name, "ab")))
        yield


def _lock(file: IO[bytes]) -> None:
    """Wait for a file's lock, which closing it releases; after LONGEST_WAIT, do without."""
    import fcntl  # where there is none, nothing is ever compiled

    deadline = time.monotonic() + LONGEST_WAIT
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.02)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile when first called, without the interpreter lock; division by zero gives inf or nan, as in numpy."""
    with _numba_cache() as cache:
        code: Any = numba.njit(nogil=True, error_model="numpy", cache=cache)(function)
        if cache:
            _keep_if_possible(code)
    compile_signature = code.compile

    def compile_alone(signature: Any) -> Any:
        with _alone(function):
            return compile_signature(signature)

    code.compile = compile_alone
    return code  # type: ignore[no-any-return]


def compiled_task(function: Callable[[int, int, int], None]) -> int:
    """Compile ``function(arguments, begin, end)`` now and return its address, for ``threads.run``."""
    return _compiled_now(types.void(types.intp, types.int64, types.int64), function)


def compiled_driver(function: Callable[[int, int], int]) -> int:
    """Compile ``function(pool, arguments)``, 0 when all is well, and return its address, for ``calls.call``."""
    return _compiled_now(types.int64(types.intp, types.intp), function)


def _compiled_now(signature: Any, function: Callable[..., Any]) -> int:
    with _numba_cache() as cache, _alone(function):
        code: Any = CFunc(function, normalize_signature(signature), locals={}, options={"error_model": "numpy"})
        if cache:
            code.enable_caching()
            _keep_if_possible(code)
        code.compile()
    _code.append(code)
    return int(code.address)


_code: list[Any] = []
"""Code that is called by its address: it is never freed."""


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """For use within compiled functions: compiled with each of them.

    Parameters that have to be constants, because ``emitted`` code is made of them, are annotated as ``Constant``: else
    numba first tries, in vain, to compile the function and all that it calls for any value of them.
    """

    def definition(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return function

    takes_constants = "Constant" in function.__annotations__.values()
    options: Any = {"no_cfunc_wrapper": True}  # nobody calls it by its address
    extending.overload(function, options, strict=False, prefer_literal=takes_constants)(definition)
    return function


def copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """For use in one place of a compiled function, where it is written out before anything is compiled.

    What is ``inlined`` is compiled on its own as well, with all that it calls, which takes longer for large functions.
    """
    return numba.njit(inline="always")(function)


def emitted(definition: Callable[..., Any]) -> Callable[..., Any]:
    """For use within compiled functions: ``definition`` gets the arguments' types and says how to emit the code.

    A literal, or a variable of an enclosing function, arrives as a literal type with its value.
    """
    return extending.intrinsic(prefer_literal=True)(definition)

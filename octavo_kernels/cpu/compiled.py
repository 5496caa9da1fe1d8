"""Compiling kernels once per machine: the decorators, and the cache folder of compiled code.

numba's own cache checks the file that defines a function, not the files whose functions it calls. The folder's name
therefore contains a digest of this entire package, so that changed kernels are never mixed with old ones. numba itself
distinguishes CPUs and its own versions. Where the package is does not matter: another environment or checkout of the
same kernels finds them compiled (numba 0.62 and later; earlier versions look by path). If the disk is full or not
writable, kernels are compiled in memory at each start.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
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

from octavo.config import cache_dir
from octavo.system.garbage_collection import without_collections

numba_config: Any = numba.config
normalize_signature: Any = sigutils.normalize_signature
Constant: TypeAlias = int
logger = logging.getLogger(__name__)
LONGEST_WAIT = 120.0
"""Seconds, far more than any kernel takes: a process stopped while compiling must not block all others."""


def kernels_folder() -> Path:
    """Folder of compiled kernels, in the user's cache folder, named by a digest of the kernels' sources."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return cache_dir() / "kernels" / digest.hexdigest()[:16]


@functools.cache
def cache_folder() -> Path | None:
    """``kernels_folder``, which now exists; ``None`` when it cannot be written."""
    folder = kernels_folder()
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
    """Log a warning, once for each reason."""
    logger.warning("compiled kernels cannot be kept in %s (%s); each start compiles them anew", folder, reason)


def is_missing(function: Callable[..., Any]) -> bool:
    """Whether the cache is usable but lacks compiled code of a function or of one within it."""
    folder = cache_folder()
    name = f"{function.__module__.rpartition('.')[2]}.{function.__qualname__}"
    return folder is not None and not any(folder.rglob(f"{name}[.-]*.nbi"))


class ByModule:
    """Where numba keeps a function's compiled code: in a folder named after its module, whatever the path of that."""

    def __init__(self, function: Callable[..., Any], source: str) -> None:
        self._py_file = source  # numba's warnings name it
        self._line = function.__code__.co_firstlineno
        self._folder = Path(numba_config.CACHE_DIR, function.__module__)

    @classmethod
    def from_function(cls, function: Callable[..., Any], source: str) -> ByModule:
        return cls(function, source)

    def ensure_cache_path(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return _digest(self._py_file)

    def get_disambiguator(self) -> str:
        return str(self._line)


@functools.cache
def _digest(source: str) -> str:
    return hashlib.sha256(Path(source).read_bytes()).hexdigest()


@contextlib.contextmanager
def _numba_cache() -> Iterator[bool]:
    """Point numba at our folder while a function is decorated; other users of numba keep their own setting."""
    folder = cache_folder()
    if folder is None:
        yield False
        return
    with contextlib.ExitStack() as restored:
        ours = {"CACHE_DIR": str(folder), "CACHE_LOCATOR_CLASSES": f"{__name__}.{ByModule.__name__}"}
        for name, value in ours.items():
            restored.callback(setattr, numba_config, name, getattr(numba_config, name, ""))
            setattr(numba_config, name, value)
        yield True


def _keep_if_possible(code: Any) -> None:
    """Enable the cache for a function's compiled code; on failure the code stays in memory only."""
    save = code._cache.save_overload

    def save_if_possible(signature: Any, compiled_code: Any) -> None:
        try:
            save(signature, compiled_code)
        except OSError as error:
            _warn_that_nothing_is_kept(cache_dir(), error.strerror or str(error))

    code._cache.save_overload = save_if_possible


@contextlib.contextmanager
def _alone(function: Callable[..., Any]) -> Iterator[None]:
    """Prevent other processes from compiling ``function`` in this block, so that they find it compiled afterwards.

    All variants of a function share an index in numba's folder. Two processes that each add a variant to the index
    they read before would give both the same file name, and code of the wrong variant would be loaded.
    """
    folder = cache_folder()
    # The compiler's lock is taken first; the reverse order could deadlock with a thread that holds it.
    # Garbage collection over all of torch's objects would take a tenth of a compilation.
    with contextlib.ExitStack() as locks, global_compiler_lock, without_collections():
        if folder is not None:
            name = f"{function.__module__}.{function.__qualname__}.lock".replace("<locals>.", "")
            with contextlib.suppress(OSError):  # the folder is gone, or does not support locks
                _lock(locks.enter_context(open(folder / name, "ab")))
        yield


def _lock(file: IO[bytes]) -> None:
    """Wait for a file's lock, which closing it releases; after LONGEST_WAIT, do without."""
    import fcntl  # on platforms without it, nothing is ever compiled

    deadline = time.monotonic() + LONGEST_WAIT
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.02)


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile at the first call; runs without the interpreter lock; division by zero gives inf or nan, as in numpy."""
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
    """Compile ``function(pool, arguments)``, which returns 0 on success, and return its address, for ``calls.call``."""
    return _compiled_now(types.int64(types.intp, types.intp), function)


def task(function: Callable[[int, int, int], None]) -> Callable[[], int]:
    """``compiled_task`` when it is first asked for: the decorated name gives the address."""
    return _later(compiled_task, function)


def driver(function: Callable[[int, int], int]) -> Callable[[], int]:
    """``compiled_driver`` when it is first asked for: the decorated name gives the address."""
    return _later(compiled_driver, function)


def _later(compile_now: Callable[..., int], function: Callable[..., Any]) -> Callable[[], int]:
    @functools.cache
    @functools.wraps(function)
    def address() -> int:
        return compile_now(function)

    return address


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
"""Code called by its address, kept referenced so that it is never freed."""


RARE: list[Callable[[], int]] = []
"""Functions that compile what the first steps of an engine do not use, but others may."""


def rarely_used(address: Callable[[], int]) -> Callable[[], int]:
    """For a task or a driver: it is compiled or loaded without being asked for, as all others would wait for the first
    request that needs it."""
    RARE.append(address)
    return address


def load_rare() -> None:
    """Load all code that is used rarely, or compile it."""
    for address in RARE:
        address()


def inlined(function: Callable[..., Any]) -> Callable[..., Any]:
    """For use within compiled functions: compiled with each of them.

    Parameters that must be constants, because ``emitted`` code depends on them, are annotated as ``Constant``: else
    numba first tries, in vain, to compile the function and its callees for non-constant values.
    """

    def definition(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        return function

    takes_constants = "Constant" in function.__annotations__.values()
    options: Any = {"no_cfunc_wrapper": True}  # it is never called by its address
    extending.overload(function, options, strict=False, prefer_literal=takes_constants)(definition)
    return function


def copied(function: Callable[..., Any]) -> Callable[..., Any]:
    """For use in one place of a compiled function, into which its source is inlined before compilation.

    ``inlined`` functions are also compiled separately, with all their callees, which takes longer for large functions.
    """
    return numba.njit(inline="always")(function)


def intrinsic(definition: Callable[..., Any]) -> Callable[..., Any]:
    """For use within compiled functions: ``definition`` gets the arguments' types and returns the code generator.

    A literal, or a variable of an enclosing function, arrives as a literal type with its value.
    """
    return extending.intrinsic(prefer_literal=True)(definition)


def emitted(result: Any = types.void, **kinds: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For use within compiled functions: the decorated function writes the LLVM instructions of a call of it.

    It takes a builder, then the call's arguments: numbers of Python where they are annotated as ``Constant``, for
    others the ``ir.Value``, of 64 bits unless ``kinds`` has another type by the parameter's name. It returns the value
    of type ``result``.
    """

    def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
        names = list(inspect.signature(function).parameters)[1:]
        are_constants = [function.__annotations__[name] == "Constant" for name in names]

        @functools.wraps(function)
        def definition(_context: Any, *given: Any) -> Any:
            pairs = list(zip(given, are_constants, strict=True))
            if not all(isinstance(kind, types.IntegerLiteral) for kind, is_constant in pairs if is_constant):
                return None
            own = [kinds.get(name, types.intp) for name in names]
            signature = [kind if is_constant else other for (kind, is_constant), other in zip(pairs, own, strict=True)]

            def emit(c: Any, b: Any, _s: Any, args: Any) -> Any:
                values = [
                    kind.literal_value if is_constant else x for x, (kind, is_constant) in zip(args, pairs, strict=True)
                ]
                found = function(b, *values)
                return c.get_dummy_value() if result == types.void else found

            return result(*signature), emit

        return intrinsic(definition)

    return decorated

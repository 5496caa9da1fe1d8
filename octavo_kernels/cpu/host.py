"""CPU features of this machine, and why kernels decline."""

from __future__ import annotations

import functools
import platform
import sys
from typing import Any

import llvmlite.binding
import numba

numba_config: Any = numba.config
FLOAT_FEATURES = ("avx2", "fma", "f16c")
VNNI_FEATURES = ("avx512f", "avx512bw", "avx512vnni")


@functools.cache
def cpu_features() -> frozenset[str]:
    """The usable instruction sets, by LLVM's names.

    Those that this CPU has and the operating system supports, unless ``NUMBA_CPU_FEATURES`` lists others
    ("+avx2,+fma,..."), for which numba then compiles.
    """
    forced: str | None = numba_config.CPU_FEATURES
    if forced is not None:
        return frozenset(name[1:] for name in forced.split(",") if name.startswith("+"))
    return frozenset(name for name, there in llvmlite.binding.get_host_cpu_features().items() if there)


@functools.cache
def is_zen() -> bool:
    """Whether this CPU is one of AMD's, for choices between instructions that give the same bits."""
    return bool(llvmlite.binding.get_host_cpu_name().startswith("znver"))


@functools.cache
def missing(features: tuple[str, ...]) -> str | None:
    """Why code that needs ``features`` cannot run here; ``None`` if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    absent = [name for name in features if name not in cpu_features()]
    return f"this CPU lacks {', '.join(absent)}" if absent else None

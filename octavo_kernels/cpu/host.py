"""CPU features of this machine, and why kernels decline."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba

numba_config: Any = numba.config
IS_ARM = platform.machine() in ("aarch64", "arm64")
FLOAT_FEATURES = ("neon",) if IS_ARM else ("avx2", "fma", "f16c")
VNNI_FEATURES = ("avx512f", "avx512bw", "avx512vnni")
ARM_NAMES = (("dotprod", "DotProd", "asimddp"), ("i8mm", "I8MM", "i8mm"))
"""What LLVM, macOS and Linux call features that make a difference to kernels."""
USED_FEATURES = (*FLOAT_FEATURES, *(names[0] for names in ARM_NAMES)) if IS_ARM else (*FLOAT_FEATURES, *VNNI_FEATURES)
"""Those that make a difference to kernels."""
PLATFORMS = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))


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


def arm_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The instruction sets of an Arm processor, as ``NUMBA_CPU_FEATURES``: LLVM looks for few of them, and knows others
    only of the processors that it has a name for."""
    found = {"neon", *(name for name, there in llvmlite.binding.get_host_cpu_features().items() if there)}
    if sys.platform == "darwin":
        found |= {name for name, apples, _ in ARM_NAMES if _has_apples(f"hw.optional.arm.FEAT_{apples}")}
    else:
        with contextlib.suppress(OSError):
            words = set(cpuinfo.read_text().split())
            found |= {name for name, _, linux in ARM_NAMES if linux in words}
    return ",".join(f"+{name}" for name in sorted(found))


def _has_apples(name: str) -> bool:
    """Whether macOS has a number of this name that is not 0 (sysctl(3))."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return not failed and value.value != 0


if IS_ARM and numba_config.CPU_FEATURES is None:
    numba_config.CPU_FEATURES = arm_features()


@functools.cache
def is_zen() -> bool:
    """Whether this CPU is one of AMD's, for choices between instructions that give the same bits."""
    return bool(llvmlite.binding.get_host_cpu_name().startswith("znver"))


@functools.cache
def missing(features: tuple[str, ...]) -> str | None:
    """Why code that needs ``features`` cannot run here; ``None`` if it can."""
    if (sys.platform, platform.machine()) not in PLATFORMS:
        here = f"{sys.platform} on {platform.machine()}"
        return f"needs Linux on x86-64 or Arm (64 bits), or macOS on Apple silicon; this is {here}"
    absent = [name for name in features if name not in cpu_features()]
    return f"this CPU lacks {', '.join(absent)}" if absent else None

"""What this machine can run: why a kernel must decline."""

from __future__ import annotations

import functools
import platform
import sys

import llvmlite.binding

FLOAT_FEATURES = ("avx2", "fma", "f16c")
BLOCK_FEATURES = ("avx512f", "avx512bw", "avx512vnni")


@functools.cache
def cpu_features() -> frozenset[str]:
    """The instruction sets of this CPU that the operating system lets us use, by LLVM's names."""
    return frozenset(name for name, there in llvmlite.binding.get_host_cpu_features().items() if there)


def missing(features: tuple[str, ...]) -> str | None:
    """Why code that needs ``features`` cannot run here; ``None`` if it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    absent = [name for name in features if name not in cpu_features()]
    return f"this CPU lacks {', '.join(absent)}" if absent else None

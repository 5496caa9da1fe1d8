"""Requirements that ``octavo doctor --check`` compares with the machine, for scripts that decide whether to start."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from octavo.config import cache_dir
from octavo.errors import ConfigError
from octavo.system.cpus import num_cpus

GIB = 2**30
NVIDIA_SMI_SECONDS = 30


class Quantity(NamedTuple):
    """One thing that is measured, and the kind of its limit."""

    limit: str
    """``least`` or ``most``."""
    measure: Callable[[], float]
    help: str


def _memory() -> float:
    import torch

    from octavo.runtime.memory import free_memory

    return free_memory(torch.device("cpu"), 1.0) / GIB


def _disk() -> float:
    folder = cache_dir()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / GIB


def _load() -> float:
    return os.getloadavg()[0] / num_cpus()


def _gpus() -> float:
    import torch

    return torch.cuda.device_count()


def _gpu_memory() -> float:
    import torch

    return min((torch.cuda.mem_get_info(index)[0] / GIB for index in range(torch.cuda.device_count())), default=0.0)


def _gpu_utilization() -> float:
    """Per cent of the busiest GPU, by the driver."""
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_SECONDS)
        return max(float(line) for line in found.stdout.splitlines())
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ConfigError(f"check: gpu-utilization: nvidia-smi does not tell it: {error}") from None


QUANTITIES: Mapping[str, Quantity] = {
    "cores": Quantity("least", num_cpus, "processors for this process"),
    "load": Quantity("most", _load, "load average of the last minute for each of them"),
    "memory": Quantity("least", _memory, "free memory, GiB"),
    "disk": Quantity("least", _disk, "free space for models, GiB"),
    "gpus": Quantity("least", _gpus, "CUDA devices"),
    "gpu-memory": Quantity("least", _gpu_memory, "free memory of each CUDA device, GiB"),
    "gpu-utilization": Quantity("most", _gpu_utilization, "of the busiest GPU, per cent"),
}


def parse_requirements(texts: Sequence[str]) -> dict[str, float]:
    """``["memory:8", "gpus:1"]`` as limits by name. Raises ``ConfigError``."""
    limits: dict[str, float] = {}
    for text in texts:
        name, _, limit = text.partition(":")
        if name not in QUANTITIES:
            raise ConfigError(f"check: {name!r} is not one of {', '.join(QUANTITIES)}")
        try:
            limits[name] = float(limit)
        except ValueError:
            raise ConfigError(f"check: {text!r} is not NAME:NUMBER, such as memory:8") from None
        if not 0 <= limits[name] < float("inf"):
            raise ConfigError(f"check: {text!r}: the number must be finite and not below 0")
    return limits


def check(limits: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """The name of each requirement, and what was found. Raises ``ConfigError`` at the end if one is not met."""
    failed = []
    for name, limit in limits.items():
        quantity = QUANTITIES[name]
        value = quantity.measure()
        is_met = value >= limit if quantity.limit == "least" else value <= limit
        found = f"{value:.4g}, at {quantity.limit} {limit:g} wanted"
        yield name, f"{found}: {'ok' if is_met else 'NOT MET'} ({quantity.help})"
        if not is_met:
            failed.append(f"{name} is {found}")
    if failed:
        raise ConfigError(f"check: {'; '.join(failed)}")

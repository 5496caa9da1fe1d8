"""``octavo doctor [MODEL]``: report versions, devices, kernels and problems of this installation."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from octavo import __version__
from octavo.cli.settings import add_settings, load_config
from octavo.config import DEFAULT_MODEL, EngineConfig, cache_dir
from octavo.errors import ConfigError, OctavoError
from octavo.system.cpus import num_cpus, processor_name

# ---- Requirements that ``octavo doctor --check`` compares with the machine, for scripts that decide whether to
# start.

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

    from octavo.runtime.memory_budget import free_memory

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


NAME = "doctor"
HELP = "show versions, devices, kernels and the memory budget of a model"

PACKAGES = (
    "torch",
    "triton",
    "numba",
    "numpy",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "starlette",
    "uvicorn",
    "msgspec",
)

EXIT_PROBLEM = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A model to load, every setting of the engine, and requirements."""
    add_settings(parser, EngineConfig)
    parser.add_argument(
        "--check",
        nargs="+",
        default=[],
        metavar="NAME:LIMIT",
        help="exit with 1 unless the machine has these: " + ", ".join(_limit(name) for name in QUANTITIES),
    )


def _limit(name: str) -> str:
    return f"{name} (at {QUANTITIES[name].limit}: {QUANTITIES[name].help})"


def run(args: argparse.Namespace) -> int:
    """Print all sections; return 1 if one of them reports a problem."""
    config = load_config(EngineConfig, args)
    limits = parse_requirements(args.check)
    sections: list[tuple[str, Callable[[EngineConfig], Iterator[str]]]] = [
        ("versions", _versions),
        ("machine", _machine),
        ("models", _models),
        ("model", _model),
        ("kernels", _kernels),
    ]
    if limits:
        sections.append(("checks", lambda _: (_row(*found) for found in check(limits))))
    is_well = True
    for title, lines in sections:
        print(title)
        try:
            for line in lines(config):
                print(f"  {line}", flush=True)
        except OctavoError as error:
            print(f"  PROBLEM: {error}")
            is_well = False
    return 0 if is_well else EXIT_PROBLEM


def _versions(config: EngineConfig) -> Iterator[str]:
    yield _row("octavo", __version__)
    yield _row("python", f"{platform.python_version()} on {platform.platform()}")
    for package in PACKAGES:
        try:
            yield _row(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield _row(package, "not installed" + (", which only GPUs need" if package == "triton" else ""))


def _machine(config: EngineConfig) -> Iterator[str]:
    import torch

    from octavo.build.device_settings import resolve_device
    from octavo.ops.device_backend import backend_of
    from octavo.plugins import CPU, GPU
    from octavo.runtime.memory_budget import free_memory
    from octavo.system.cpus import num_hardware_threads, num_physical_cores

    cores, threads = num_physical_cores(), num_hardware_threads()
    yield _row("processor", f"{processor_name()}, {cores} cores with {threads} threads for this process")
    for name, value in backend_of(CPU).describe():
        yield _row(name, value)
    yield _row("free memory", _size(free_memory(torch.device("cpu"), 1.0)))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield _row(f"{GPU}:{index}", f"{properties.name}, {_size(properties.total_memory)}")
    if not torch.cuda.is_available():
        yield _row(GPU, "torch finds no device")
    yield _row("used", f"{resolve_device(config.model.device)} (setting device: {config.model.device})")


def _models(config: EngineConfig) -> Iterator[str]:
    yield _row("kept in", str(_default_model_file(config).parent))
    state = "present" if _default_model_file(config).is_file() else "not downloaded yet; the first use downloads it"
    yield _row(DEFAULT_MODEL, state)


def _model(config: EngineConfig) -> Iterator[str]:
    """Load the model and report its sizes. The default model is skipped unless present: nothing is downloaded."""
    name = config.model.model
    if name == DEFAULT_MODEL and not _default_model_file(config).is_file():
        yield "not loaded: the default model is not downloaded yet, and no other is given"
        return
    from octavo.build.build_engine import build_engine
    from octavo.runtime.memory_budget import MemoryBudget

    _, info = build_engine(config)
    yield _row("name", name)
    yield _row("kind", f"{info.architecture}, {info.num_parameters / 1e6:,.1f} M parameters, {info.dtype}")
    if (num_ranks := info.tensor_parallel_size * info.pipeline_parallel_size) > 1:
        yield _row("ranks", f"{num_ranks}; memory is that of each")
    yield _row("context", f"{info.max_model_len} tokens")
    yield _row("kv cache", f"{info.num_kv_blocks} blocks of {info.block_size} tokens")
    for group in info.kv_groups[1:]:
        layers = f"for the {group.num_layers} layers with a window of {group.window}"
        yield _row("kv cache", f"{group.num_blocks} blocks of {info.block_size} tokens, {layers}")
    yield _row("step", f"at most {info.max_num_seqs} sequences and {info.max_num_batched_tokens} tokens")
    for format_name, size in sorted(info.weight_bytes.items()):
        yield _row("weights", f"{_size(size)} in {format_name}")
    for line in MemoryBudget(**info.memory).table().splitlines():
        yield _row("memory", line)


def _kernels(config: EngineConfig) -> Iterator[str]:
    from octavo.build.device_settings import resolve_device
    from octavo.ops import dispatch
    from octavo.weights.dtypes import DTYPES

    device = resolve_device(config.model.device)
    automatic = "float32" if device.type == "cpu" else "bfloat16"
    dtype = DTYPES[automatic if config.model.dtype == "auto" else config.model.dtype]
    yield f"for {str(dtype).removeprefix('torch.')} on {device.type}"
    for choice in dispatch.choices(device.type, dtype):
        yield _row(choice.op, f"{choice.kernel}: " + ("runs" if choice.chosen else choice.reason))


def _default_model_file(config: EngineConfig) -> Path:
    from octavo.weights.default_model import SMOLLM2_135M, models_dir

    folder = config.model.download_dir
    return (Path(folder).expanduser() if folder else models_dir()) / SMOLLM2_135M.file_name


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:>10,.1f} MiB"


def _row(name: str, value: str) -> str:
    return f"{name:<19} {value}"

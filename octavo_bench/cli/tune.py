"""``octavo tune MODEL``: measure the fastest kernels for a model's matrices on this GPU, for all later starts."""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from octavo.cli.settings import add_settings, load_config
from octavo.cli.terminal import note, size_text
from octavo.config import FULL, EngineConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    import torch

NAME = "tune"
HELP = "measure the fastest kernels for a model's matrices on this GPU, for all later starts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A model, and every setting of the engine: they decide which matrices a GPU has."""
    add_settings(parser, EngineConfig)
    help = "also compile all kernels, and write them and the measurements to FILE, or add to it, for --kernel-cache"
    parser.add_argument("--export", metavar="FILE", type=Path, help=help)


def run(args: argparse.Namespace) -> int:
    """Measure every matrix product of the model, also those measured before, with a progress bar."""
    config = load_config(EngineConfig, args)
    _tune(config) if args.export is None else _export(config, args.export.expanduser())
    return 0


def _export(config: EngineConfig, path: Path) -> None:
    """Compile into an empty cache, without kernels of other programs, and write or add them to a file."""
    from octavo.ops.device_backend import backend_of

    if not path.parent.is_dir():
        raise ConfigError(f"export: there is no folder {path.parent}")
    known = str(path) if path.is_file() else config.model.kernel_cache
    model = dataclasses.replace(config.model, warmup=FULL, kernel_cache=known)
    with tempfile.TemporaryDirectory(prefix="octavo_kernels_") as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        device = _tune(dataclasses.replace(config, model=model))
        count = backend_of(device.type).pack_kernels(path, device)
    note(f"{count} files of compiled kernels are in {path} ({size_text(path.stat().st_size)})")


def _tune(config: EngineConfig) -> torch.device:
    """Returns the device on which kernels were measured."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from octavo.build.build_engine import build_engine
    from octavo.build.device_settings import resolve_device
    from octavo.engine.runner.kernel_tuning import TuningPlan
    from octavo.ops.device_backend import backend_of, is_gpu

    device = resolve_device(config.model.device)
    if not is_gpu(device):
        raise ConfigError("tune: kernels are tuned for NVIDIA GPUs; torch finds none here")
    if config.model.batch_invariant:
        raise ConfigError("tune: the kernels of --batch-invariant do not depend on measurements")
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn()
    started = time.monotonic()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("loading and compiling", total=1.0)

        def report(share: float, key: str) -> None:
            progress.update(task, completed=share, description=f"{key} rows")

        engine, _ = build_engine(config, tuning=TuningPlan(again=True, report=report))
        engine.close()
    gpu, taken = torch.cuda.get_device_name(device), time.monotonic() - started
    note(f"kernels for {gpu} are in {backend_of(device.type).measurements(device)} ({taken:.0f} s)")
    return device

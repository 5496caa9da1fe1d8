"""What several measurements take on the command line."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Collection
from importlib.util import find_spec
from typing import Any

from octavo.cli.settings import above_zero, flag_name, load_config, positive
from octavo.config import EngineConfig, cache_dir
from octavo.errors import ConfigError


def numbers(text: str) -> list[int]:
    """``"1,4,16"`` as numbers of at least 1."""
    return [positive(part) for part in text.split(",")]


def reals(text: str) -> list[float]:
    """``"1,2.5"`` as numbers."""
    return [float(part) for part in text.split(",")]


def rates(text: str) -> list[float]:
    """``"1,2.5"`` as numbers above 0."""
    return [above_zero(part) for part in text.split(",")]


def percentiles(text: str) -> list[float]:
    """``"50,99.9"`` as numbers from 0 to 100."""
    found = reals(text)
    if not all(0 <= percent <= 100 for percent in found):
        raise argparse.ArgumentTypeError(f"each must be from 0 to 100, got {text}")
    return found


def json_object(text: str) -> dict[str, Any]:
    """An object of JSON."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text}")
    return found


def words(text: str) -> list[str]:
    """``"a,b"`` as words."""
    return text.split(",")


def require_cuda(measurement: str) -> None:
    """Raise ``ConfigError`` unless there is a CUDA device, and Triton to compile kernels for it."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"bench {measurement}: there is no CUDA device here")
    if find_spec("triton") is None:
        raise ConfigError(f"bench {measurement}: the package triton is not installed; `pip install triton` installs it")


def refuse_unused(args: argparse.Namespace, names: Collection[str], advice: str) -> None:
    """Raise ``ConfigError`` if one of these arguments of the measurement is given, as it would have no effect."""
    for name in names:
        if getattr(args, name) != args.kind_parser.get_default(name):
            raise ConfigError(f"{flag_name(name)}: {advice}")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The settings of a measurement. A shape's name stands for its made-up folder, with random weights."""
    return with_folder(load_config(EngineConfig, args))


def with_folder(config: EngineConfig) -> EngineConfig:
    """The settings with the folder that a shape's name stands for, if the model is one."""
    from octavo_bench.dummy_models import model_folder
    from octavo_fleet.sim.shapes import SHAPES

    if config.model.model not in SHAPES:
        return config
    folder = model_folder(config.model.model, cache_dir() / "shapes")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, model=str(folder), load_format="dummy"))

"""``octavo pull MODEL``: fetch a model, so that it starts without a download."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from octavo.cli.settings import add_some_settings, load_config
from octavo.cli.terminal import note
from octavo.config import EngineConfig
from octavo.errors import ConfigError

NAME = "pull"
HELP = "fetch a model of the Hugging Face Hub, or the default model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and where it comes from and goes to."""
    parser.add_argument(
        "name",
        metavar="MODEL",
        help="Hugging Face id, such as Qwen/Qwen3-8B, owner/name:Q4_K_M for a GGUF file, or smollm2-135m",
    )
    add_some_settings(parser, ["revision", "download_dir", "load_format", "offline"])


def run(args: argparse.Namespace) -> int:
    """Fetch what is missing, with progress on standard error, and print the path."""
    from octavo.weights.hub import resolve_model

    if Path(args.name).expanduser().exists():
        raise ConfigError(f"model: {args.name!r} is a path on this machine; there is nothing to fetch")
    settings = dataclasses.replace(load_config(EngineConfig, args).model, model=args.name)
    print(resolve_model(settings))
    note(f"`octavo serve {args.name}` serves it")
    return 0

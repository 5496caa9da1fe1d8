"""``octavo show MODEL``: describe a model on this machine, from its headers."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from octavo.cli.models import describe
from octavo.cli.settings import add_some_settings, load_config
from octavo.cli.terminal import size_text
from octavo.config import EngineConfig, ModelSettings

NAME = "show"
HELP = "describe a model on this machine: size, architecture, formats, chat template, sampling defaults"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, where models are, and where its other files are if it has weights alone."""
    parser.add_argument("name", metavar="MODEL", help="name of a model, as `octavo list` shows it, or a path")
    add_some_settings(parser, ["download_dir", "revision", "load_format", "hf_config_path", "tokenizer"])


def run(args: argparse.Namespace) -> int:
    """Print what the files of the model say."""
    from octavo.weights.gguf.split_files import gguf_in, parts_of
    from octavo.weights.local_models import find_local

    settings = load_config(EngineConfig, args).model
    path = Path(args.name).expanduser()
    path = gguf_in(path) or parts_of(path)[0] if path.exists() else find_local(args.name, settings).path
    for line in _lines(path, dataclasses.replace(settings, model=str(path))):
        print(line)
    return 0


def _lines(path: Path, settings: ModelSettings) -> Iterator[str]:
    import torch

    from octavo.build.device_settings import weight_format
    from octavo.models.meta_model import outline
    from octavo.models.registry import read_config
    from octavo.text.tokenizer import load_tokenizer
    from octavo.weights.checkpoint import open_checkpoint
    from octavo.weights.generation_config import chosen_config, sampling_defaults
    from octavo.weights.gguf.split_files import parts_of

    files = parts_of(path) if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = size_text(sum(file.stat().st_size for file in files))
    yield f"{path}: {size} in {len(files)} file{'s'[: len(files) != 1]}"
    checkpoint = open_checkpoint(path, settings.load_format, config_folder=settings.hf_config_path)
    model = read_config(checkpoint.config)
    yield from describe(
        model, outline(model, checkpoint, weight_format(settings, torch.device("cpu"), checkpoint)), checkpoint
    )
    tokenizer = load_tokenizer(Path(settings.tokenizer or path))
    yield f"chat template: {'yes' if tokenizer is not None and tokenizer.chat_template else 'no'}"
    own = chosen_config(settings.generation_config, checkpoint.generation_config, path)
    defaults = sampling_defaults(settings.generation_config, own)
    yield "sampling defaults: " + (", ".join(f"{name} {value}" for name, value in defaults.items()) or "none")

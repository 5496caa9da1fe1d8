"""``octavo rm MODEL``: delete a model from this machine."""

from __future__ import annotations

import argparse
import sys

from octavo.cli.settings import add_some_settings, load_config
from octavo.cli.terminal import note, size_text
from octavo.config import EngineConfig
from octavo.errors import ConfigError

NAME = "rm"
HELP = "delete a model from this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, and where models are."""
    parser.add_argument("name", metavar="MODEL", help="name of a model, as `octavo list` shows it")
    parser.add_argument("-y", "--yes", action="store_true", help="delete it without asking")
    add_some_settings(parser, ["download_dir"])


def run(args: argparse.Namespace) -> int:
    """Ask, and delete the model with all its revisions; return 1 if the answer is no."""
    from octavo.weights.local_models import find_local

    model = find_local(args.name, load_config(EngineConfig, args).model)
    place = model.folder or model.path
    if not args.yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"rm: {place} would be deleted; confirm it with --yes")
        note(f"{place} ({size_text(model.num_bytes)}) is for all programs that use this cache")
        if input("Delete it? [y/N] ").strip().lower() not in ("y", "yes"):
            return 1
    model.remove()
    note(f"deleted {place} ({size_text(model.num_bytes)})")
    return 0

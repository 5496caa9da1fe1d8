"""``octavo list``: the models on this machine."""

from __future__ import annotations

import argparse
import time

from octavo.cli.settings import add_some_settings, load_config
from octavo.cli.terminal import note, size_text, table
from octavo.config import EngineConfig

NAME = "list"
HELP = "list the models on this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where models are."""
    add_some_settings(parser, ["download_dir"])


def run(args: argparse.Namespace) -> int:
    """Print a line for each model."""
    from octavo.weights.local_models import local_models

    models = local_models(load_config(EngineConfig, args).model)
    rows = [["model", "size", "downloaded", "path"]]
    for model in models:
        day = time.strftime("%Y-%m-%d", time.localtime(model.changed))
        rows.append([model.name, size_text(model.num_bytes), day, str(model.path)])
    print(table(rows, right=[1]))
    if not models:
        note("no models are here yet; `octavo pull MODEL` fetches one")
    return 0

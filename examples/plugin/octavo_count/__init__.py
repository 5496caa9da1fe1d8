"""``octavo count [MODEL] --text TEXT ...``: how many tokens texts have. A command of a package of its own.

``pip install`` of this folder adds it: the package names this module as an entry point of the group
``octavo.commands``. What is heavy is imported in ``run``, so that `octavo --help` stays quick.
"""

import argparse
from pathlib import Path

from octavo.cli.settings import add_some_settings, load_config
from octavo.config import EngineConfig

NAME = "count"
HELP = "count the tokens of texts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model, whose tokenizer counts, and the texts."""
    add_some_settings(parser, ["model", "revision", "offline", "download_dir"])
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--text", nargs="+", required=True, help="texts to count the tokens of")


def run(args: argparse.Namespace) -> int:
    """Print a line for each text."""
    from octavo.text.tokenizer import load_tokenizer
    from octavo.weights.hub import resolve_model

    tokenizer = load_tokenizer(Path(resolve_model(load_config(EngineConfig, args).model)))
    if tokenizer is None:
        print("this model has no tokenizer")
        return 1
    for text in args.text:
        print(f"{len(tokenizer.encode(text)):>6} {text}")
    return 0

"""``octavo cache``: what Octavo keeps on disk, where, and how large it is."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from octavo.cli.settings import add_some_settings, load_config
from octavo.cli.terminal import note, size_text, table
from octavo.config import EngineConfig, cache_dir
from octavo.errors import ConfigError

NAME = "cache"
HELP = "show what Octavo keeps on disk, where, and how large it is"
KINDS = {
    "models": "the default model",
    "kernels": "compiled kernels for CPUs",
    "tuned": "measurements of kernels for GPUs",
    "tokenizers": "marks of tokenizers that were found sound",
    "shapes": "configurations of models with random weights, for benchmarks",
}
"""What the folders in the cache folder hold."""


class CacheFolder(NamedTuple):
    """A folder, and what it holds."""

    path: Path
    content: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where models are, and whether to delete."""
    parser.add_argument("--prune", action="store_true", help="delete kernels that other versions of Octavo compiled")
    add_some_settings(parser, ["download_dir"])


def run(args: argparse.Namespace) -> int:
    """Print a line for each folder; with --prune, delete outdated kernels first."""
    if args.prune:
        _prune()
    places = list(_places(load_config(EngineConfig, args)))
    rows = [["size", "content", "folder"]]
    rows += [[size_text(_num_bytes(place.path)), place.content, str(place.path)] for place in places]
    print(table(rows, right=[0]))
    return 0


def _places(config: EngineConfig) -> Iterator[CacheFolder]:
    from octavo.weights.local_models import hub_folder

    own = cache_dir()
    for folder in sorted(own.iterdir()) if own.is_dir() else ():
        if folder.is_dir():
            yield CacheFolder(folder, KINDS.get(folder.name, "other"))
    yield CacheFolder(hub_folder(config.model), "models of the Hugging Face Hub")
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache").expanduser()
    if triton.is_dir():
        yield CacheFolder(triton, "compiled kernels for GPUs, of all programs that use Triton")
    if config.cache.kv_offload_dir is not None:
        yield CacheFolder(Path(config.cache.kv_offload_dir).expanduser(), "offloaded KV blocks")


def _num_bytes(folder: Path) -> int:
    """Size of the files in a folder; links to other files count nothing."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def _prune() -> None:
    """Delete the folders of kernels of other sources than those of this version. Raises ``ConfigError``."""
    from octavo.ops.device_backend import backend_of
    from octavo.plugins import CPU

    current = backend_of(CPU).compiled_kernels()
    outdated = [] if current is None else [folder for folder in current.parent.glob("*") if folder != current]
    freed = sum(map(_num_bytes, outdated))
    for folder in outdated:
        try:
            shutil.rmtree(folder)
        except OSError as error:
            raise ConfigError(f"cache: cannot delete {error.filename}: {error.strerror}") from None
    note(f"deleted the kernels of {len(outdated)} other versions ({size_text(freed)})")

"""Reads the tokenizer of a folder in a process with limits first: its files may take any time and memory to read.

What was read once is trusted, by the digest of the files: from then on the limits of texts (``tokenizer_limits.py``)
hold without a process.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import tokenizers

from octavo import __version__
from octavo.config import cache_dir
from octavo.errors import CheckpointError
from octavo.system.child_process import ChildLost, ChildProcess
from octavo.system.child_worker import RENDERED
from octavo.text.tokenizers.folder_tokenizer import FILES

WORKER = "octavo.text.tokenizers.tokenizer_worker"
HARMLESS_BYTES = 64 << 10
"""Files of so many bytes together cannot hold enough to take long."""
LIMITS = {"max_seconds": 30.0, "max_memory": 2 << 30, "max_output": 1 << 10}
"""Wall and processor seconds, and bytes: several times what vocabularies of 256k tokens take on a busy machine."""
PLACE = "tokenizers"
"""Folder in the cache folder, with an empty file for each digest."""


def check_folder(folder: Path) -> None:
    """Raise ``CheckpointError`` if the tokenizer of ``folder`` cannot be read within the limits, or at all."""
    files = [folder / name for name in FILES if (folder / name).is_file()]
    try:
        if sum(file.stat().st_size for file in files) <= HARMLESS_BYTES:
            return
        mark = cache_dir() / PLACE / _digest(files)
        if mark.exists():
            return
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be read: {error}") from None
    try:
        process = ChildProcess(WORKER, LIMITS)
        with contextlib.closing(process):
            kind, message = process.ask(str(folder.resolve()))
    except ChildLost as error:
        raise CheckpointError(f"{folder}: its tokenizer cannot be read: {error}") from None
    if kind != RENDERED:
        raise CheckpointError(message)
    with contextlib.suppress(OSError):  # it is then read in a process again
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def _digest(files: list[Path]) -> str:
    """Of the files with their names, and of what reads them."""
    found = hashlib.sha256(f"{__version__} {tokenizers.__version__}".encode())
    for file in files:
        with file.open("rb") as content:
            found.update(file.name.encode() + hashlib.file_digest(content, "sha256").digest())
    return found.hexdigest()

"""Files and folders that only their owner may read: what clients sent and were answered is in them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

FILE_MODE = 0o600
FOLDER_MODE = 0o700
_OTHERS = 0o077

logger = logging.getLogger(__name__)


def make_private_folder(path: Path, is_own: Callable[[str], bool]) -> None:
    """Make a folder for its owner alone. Raises ``OSError``.

    A folder that exists becomes one only if ``is_own`` holds for the name of everything in it: it may be one that
    others need, such as /tmp.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        if all(is_own(child.name) for child in path.iterdir()):
            make_private(path, FOLDER_MODE)


def make_private_database(path: Path) -> None:
    """Make an empty file for an SQLite database, or take one that exists; SQLite gives the files beside it its mode.

    Raises ``OSError``.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE))
    for suffix in ("", "-wal", "-shm"):
        file = path.with_name(path.name + suffix)
        if file.exists():
            make_private(file, FILE_MODE)


def make_private(path: Path, mode: int) -> None:
    """Give ``path`` a mode unless only its owner can reach it already. Where that is not possible, the log says so."""
    if path.stat().st_mode & _OTHERS:
        try:
            path.chmod(mode)
        except OSError as error:
            logger.warning("%s can be read by other users of this machine: %s", path, error.strerror)


def write_private(path: Path, content: bytes) -> None:
    """Write a new file. Raises ``OSError``."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE), "wb") as file:
        file.write(content)

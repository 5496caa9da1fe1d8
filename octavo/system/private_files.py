"""Files and folders that only their owner may read, for requests and responses of clients."""

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

    An existing folder is changed only if ``is_own`` holds for every name in it: otherwise it may be a shared folder,
    such as /tmp.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        if all(is_own(child.name) for child in path.iterdir()):
            make_private(path, FOLDER_MODE)


def make_private_database(path: Path) -> None:
    """Create an empty SQLite database file, or restrict an existing one; SQLite copies its mode to -wal and -shm.

    Raises ``OSError``.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, FILE_MODE))
    for suffix in ("", "-wal", "-shm"):
        file = path.with_name(path.name + suffix)
        if file.exists():
            make_private(file, FILE_MODE)


def make_private(path: Path, mode: int) -> None:
    """Set the mode of ``path`` if other users can access it; log a warning on failure."""
    if path.stat().st_mode & _OTHERS:
        try:
            path.chmod(mode)
        except OSError as error:
            logger.warning("%s can be read by other users of this machine: %s", path, error.strerror)


def write_private(path: Path, *contents: bytes | memoryview) -> None:
    """Write a file with mode ``FILE_MODE``, replacing an existing one. Raises ``OSError``."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE), "wb") as file:
        for content in contents:
            file.write(content)

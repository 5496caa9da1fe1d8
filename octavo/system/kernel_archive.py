"""Compiled kernels in one file, with which a first start compiles next to nothing.

The file is a ZIP archive: ``key.json`` says for what its kernels were compiled, ``measured.json`` has what was
measured, and ``cache/FOLDER/NAME`` are files of Triton's cache, those alone that a start loads. Triton lists a kernel's
files by absolute paths, so these lists are written anew. Kernels are code, which must be trusted; names and sizes here
are not.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock

from octavo.errors import CANCELLATIONS

MOST_BYTES = 2**30
"""Of the file, and of all that is in it."""
MOST_FILES = 2**16
SHIPPED = "octavo_kernel_caches"
"""Folder beside the packages, which a distribution of its own can bring."""
KEY, MEASURED = "key.json", "measured.json"
LIST = "__grp__"
"""Before the name of a kernel's metadata: that of its list."""
_MEMBER = re.compile(rf"cache/([A-Z2-7]{{52}})/((?!{LIST})\w[\w.-]{{0,199}}\.(?:json|cubin|so))", re.ASCII)
logger = logging.getLogger(__name__)


def shipped(gpu: str) -> Path | None:
    """The file of compiled kernels that is installed beside this package for the GPU of this name, if any."""
    path = Path(__file__).parents[2] / SHIPPED / f"{gpu.replace(' ', '_')}.zip"
    return path if path.is_file() else None


@dataclass(frozen=True)
class KernelFiles:
    """What such a file is made of, and what is made of it."""

    key: Mapping[str, str]
    """For what kernels are compiled: names and versions."""
    cache: Path
    """Triton's."""
    manager: Callable[[str], Any]
    """Triton's, of a folder in it; a kernel is there once its manager has a list of its files."""
    measured: Path
    """What was measured on this machine: entries of several sections, as JSON."""

    def pack(self, path: Path) -> int:
        """Write the file, at once; returns how many files of compiled kernels are in it."""
        written = path.with_name(f"{path.name}.{os.getpid()}")
        found = {f"cache/{file.parent.name}/{file.name}": file for file in sorted(self.cache.glob("*/*"))}
        members = {name: file.read_bytes() for name, file in found.items() if _MEMBER.fullmatch(name)}
        if len(members) > MOST_FILES - 2 or sum(map(len, members.values())) > MOST_BYTES:
            raise ValueError(f"the cache has more than {MOST_FILES} files, or {MOST_BYTES} bytes")
        with zipfile.ZipFile(written, "w") as archive:
            for name, content in ((KEY, self.key), (MEASURED, _entries(self.measured))):
                archive.writestr(zipfile.ZipInfo(name), json.dumps(content, indent=1), zipfile.ZIP_DEFLATED)
            for name, code in members.items():
                archive.writestr(zipfile.ZipInfo(name), code, zipfile.ZIP_DEFLATED)
        written.replace(path)
        return len(members)

    def take(self, path: Path) -> None:
        """Unpack a file; one that cannot be used is reported, whatever is wrong with it, and nothing more."""
        try:
            count = self.unpack(path)
        except CANCELLATIONS:
            raise
        except BaseException as error:
            logger.warning("the compiled kernels of %s are not used: %s", path, error)
        else:
            logger.info("%d compiled kernels of %s were not in the cache yet", count, path)

    def unpack(self, path: Path) -> int:
        """Write the kernels and measurements that are lacking here; returns how many folders of the cache those are.

        Nothing is written of a file that is refused, by ``ValueError``; of a damaged one, whole kernels at most.
        """
        count = 0
        with zipfile.ZipFile(path) as archive:
            folders, theirs, key = _checked(archive, path), json.loads(archive.read(KEY)), self.key
            if names := [name for name in {**key, **theirs} if theirs.get(name) != key.get(name)]:
                raise ValueError("it is for " + "; ".join(f"{n} {theirs.get(n)}, not {key.get(n)}" for n in names))
            measured = json.loads(archive.read(MEASURED))
            if not isinstance(measured, dict) or not all(isinstance(part, dict) for part in measured.values()):
                raise ValueError("its measurements are no sections of entries")
            for folder, members in folders.items():
                manager, lists = self.manager(folder), [name for name in members if name.endswith(".json")]
                if not all(map(manager.has_file, members)) or not all(map(manager.get_group, lists)):
                    files = {
                        name: manager.get_file(name) or manager.put(archive.read(member), name)
                        for name, member in members.items()
                    }
                    for name in lists:
                        manager.put_group(name, files)
                    count += 1
            self._add_measured(measured)
        return count

    def _add_measured(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        self.measured.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(self.measured.with_suffix(".lock")):
            own = _entries(self.measured)
            both = {name: {**found.get(name, {}), **own.get(name, {})} for name in {**own, **found}}
            if both != own:
                written = self.measured.with_name(f"{self.measured.name}.{os.getpid()}")
                written.write_text(json.dumps(both, indent=1))
                written.replace(self.measured)


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def _checked(archive: zipfile.ZipFile, path: Path) -> dict[str, dict[str, str]]:
    """Members by the name that their files will have, by folder. Raises ``ValueError`` unless all are as expected."""
    if path.stat().st_mode & stat.S_IWOTH:
        raise ValueError("every user of this machine may write it, and its kernels are code")
    members = archive.infolist()
    if max(path.stat().st_size, sum(member.file_size for member in members)) > MOST_BYTES or len(members) > MOST_FILES:
        raise ValueError(f"it has more than {MOST_FILES} files, or {MOST_BYTES} bytes")
    folders = defaultdict[str, dict[str, str]](dict)
    for member in members:
        if match := _MEMBER.fullmatch(member.filename):
            folders[match[1]][match[2]] = member.filename
        elif member.filename not in (KEY, MEASURED):
            raise ValueError(f"{member.filename!r} is no file of a kernel")
    return folders

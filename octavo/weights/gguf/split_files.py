"""The parts of a GGUF file that was split: ``big-Q8_0-00001-of-00002.gguf`` and so on, as ``gguf-split`` names them."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.errors import ConfigError

_PART = re.compile(r"-(\d{5})-of-(\d{5})(?=((?i:\.gguf))?\Z)", re.ASCII)


def number_and_count(name: str) -> tuple[int, int] | None:
    """Which part a file is by its name, from 1, and of how many; ``None`` if it is no part."""
    found = _PART.search(name)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        return None
    return int(found[1]), int(found[2])


def without_number(name: str) -> str:
    """The name of a file before it was split."""
    return _PART.sub("", name)


def part_names(name: str) -> list[str]:
    """The names, or paths, of all parts of the file of which ``name`` is one; ``name`` alone if it is no part."""
    found = number_and_count(name)
    if found is None:
        return [name]
    count = found[1]
    place = _PART.search(name)
    assert place is not None
    before, behind = name[: place.start()], name[place.end() :]
    return [f"{before}-{number:05}-of-{count:05}{behind}" for number in range(1, count + 1)]


def parts_of(path: Path) -> list[Path]:
    """The paths of all parts, which need not exist; the path alone of a file that is no part."""
    return [path.with_name(name) for name in part_names(path.name)]


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file in a folder without ``config.json``, or its first part; ``None`` if there is none.

    Raises ``ConfigError`` if there are several.
    """
    if not folder.is_dir() or (folder / "config.json").exists():
        return None
    files = [path for path in folder.iterdir() if path.suffix.lower() == ".gguf" and not path.name.startswith("mmproj")]
    names = sorted({part_names(path.name)[0] for path in files})
    if len(names) > 1:
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise ConfigError(f"model: {str(folder)!r} has several GGUF files; give the path of one: {shown}")
    return folder / names[0] if names else None

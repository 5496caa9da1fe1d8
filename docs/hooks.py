"""Hooks of mkdocs: the README as home page, and files outside docs/ that pages link to.

Pages link to files of the repository by relative paths, so that they work on GitHub. Each file that is linked is copied
into the site under its path in the repository; links to folders, which a site has no page for, become plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]*)(#[^)\s]*)?\)")
ALWAYS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files: Files, config: Any) -> Files:
    """Add the files outside docs/ that pages, and the files added, link to."""
    waiting = [ROOT / name for name in ALWAYS]
    waiting += [target for page in (ROOT / "docs").rglob("*.md") for target in _outside(page)]
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        files.append(File.generated(config, _name(path), abs_src_path=str(path)))
        waiting += _outside(path) if path.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Make links lead to where the site has their targets."""
    source = Path(page.file.abs_src_path)
    start = Path(page.file.src_uri).parent

    def moved(found: re.Match[str]) -> str:
        mark, text, target, anchor = found.groups()
        path = _target(source, target)
        if path is None:
            return found[0]
        if path.is_dir():
            return text
        return f"{mark}[{text}]({os.path.relpath(_name(path), start)}{anchor or ''})"

    return LINK.sub(moved, markdown)


def _outside(page: Path) -> list[Path]:
    """The files outside docs/ that a page links to."""
    targets = (_target(page, found[3]) for found in LINK.finditer(page.read_text()))
    return [path for path in targets if path and path.is_file() and not path.is_relative_to(ROOT / "docs")]


def _target(page: Path, target: str) -> Path | None:
    """The file or folder of the repository that a link leads to."""
    if not target or ":" in target:
        return None
    path = (page.parent / target).resolve()
    return path if path.exists() and path.is_relative_to(ROOT) else None


def _name(path: Path) -> str:
    """The path of a file in the site's sources."""
    if path == ROOT / "README.md":
        return "index.md"
    home = ROOT / "docs" if path.is_relative_to(ROOT / "docs") else ROOT
    return path.relative_to(home).as_posix()

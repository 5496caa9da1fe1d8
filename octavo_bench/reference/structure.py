"""The drawing in docs/structure.md: the folders of each package, those that import others above these."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from octavo_bench.reference.filling import filled

ROOT = Path(__file__).parents[2]
PACKAGES = ("octavo_bench", "octavo_fleet", "octavo_server", "octavo_kernels", "octavo")
"""From the outermost to the core; none but the last is imported by it."""
WIDTH = 62


def page() -> str:
    """The page with a fresh drawing."""
    return filled("structure.md", {"drawing": ("```text", *_drawing(), "```")})


def _drawing() -> Iterator[str]:
    for package in PACKAGES:
        levels = list(_levels(_imports(package)))
        yield f"{package} ".ljust(WIDTH + 4, "-")
        for level in levels:
            yield from _lines(level)
    yield "-" * (WIDTH + 4)


def _lines(names: list[str]) -> Iterator[str]:
    line = " "
    for name in names:
        if len(line) + len(name) > WIDTH:
            yield line
            line = " "
        line += f"   {name}"
    yield line


def _imports(package: str) -> dict[str, set[str]]:
    """For each folder of a package, the other folders of which it imports something when it is imported."""
    folders = sorted(path.name for path in (ROOT / package).iterdir() if (path / "__init__.py").exists())
    found: dict[str, set[str]] = {}
    for folder in folders:
        names = {name for path in (ROOT / package / folder).rglob("*.py") for name in _names(path)}
        tops = {name.split(".")[1] for name in names if name.startswith(f"{package}.")}
        found[folder] = tops & set(folders) - {folder}
    return found


def _names(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))


def _levels(imports: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """The folders from top to bottom: each is above all that it imports. Those that import each other share a level."""
    heights = dict.fromkeys(imports, 0)
    for _ in imports:
        for folder, others in imports.items():
            below = [heights[other] for other in others if folder not in imports[other]]
            heights[folder] = max([heights[folder], *(height + 1 for height in below)])
    for height in sorted(set(heights.values()), reverse=True):
        yield [folder for folder in imports if heights[folder] == height]

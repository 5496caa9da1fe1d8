"""Write every generated page of docs/: ``python -m octavo_bench.reference``, in the root of the repository."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from octavo.cli import reference as flags
from octavo_bench.reference import endpoints_page, models_page, python_api, structure

PAGES: Mapping[str, Callable[[], str]] = {
    "endpoints.md": endpoints_page.page,
    "flags.md": flags.page,
    "models.md": models_page.page,
    "python_reference.md": python_api.page,
    "structure.md": structure.page,
}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (Path("docs") / name).write_text(page())

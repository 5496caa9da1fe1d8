"""Pages of docs/ with parts that programs write; what stands around these is written by hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PLACE = re.compile(r"<!-- written: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def filled(name: str, parts: Mapping[str, Iterable[str]]) -> str:
    """The page with fresh lines between ``<!-- written: PART -->`` and ``<!-- end -->``.

    Raises ``ValueError`` for a page without a place for each part.
    """
    page = (DOCS / name).read_text()
    if [found[1] for found in PLACE.finditer(page)] != [*parts]:
        raise ValueError(f"docs/{name} must have a place for each of {', '.join(parts)}, in this order")
    fresh = {part: "\n".join(lines).strip("\n") for part, lines in parts.items()}
    return PLACE.sub(lambda found: f"<!-- written: {found[1]} -->\n\n{fresh[found[1]]}\n\n<!-- end -->", page)


def table(*rows: Sequence[str]) -> Iterator[str]:
    """The lines of a table in Markdown; the first row has the titles."""
    for number, row in enumerate(rows):
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |"
        if number == 0:
            yield "|---" * len(row) + "|"

"""Draw the pictures of these pages from the records that they show: ``python docs/learn/draw.py`` in the root."""

from __future__ import annotations

import re
from pathlib import Path

from octavo_bench.records.gate import read_record
from octavo_bench.records.plots import draw

RECORD = re.compile(r"<!-- report (\S+) -->")


def main() -> None:
    for page in sorted(Path("docs/learn").glob("*.md")):
        if found := RECORD.search(page.read_text()):
            draw(read_record(Path(found[1])), page.with_suffix(".svg"))


if __name__ == "__main__":
    main()

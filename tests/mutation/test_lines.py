"""The breakages are about lines that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

import octavo
from tests.mutation.mutants import MUTANTS

PACKAGE = Path(octavo.__file__).parent


@pytest.mark.parametrize("file", sorted({mutant.file for mutant in MUTANTS}))
def test_each_breakage_has_its_line_once(file: str) -> None:
    source = (PACKAGE / file).read_text()
    for mutant in MUTANTS:
        if mutant.file == file:
            assert source.count(mutant.old) == 1, f"tests/mutation/mutants.py: {mutant.old!r} is gone, or there twice"

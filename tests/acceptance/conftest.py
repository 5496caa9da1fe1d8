"""Real servers have all cores, as users run them."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def as_by_default(all_cores: None) -> None:
    pass

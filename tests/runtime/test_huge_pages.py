"""An engine on a CPU gets transparent huge pages for its tensors where the system gives them on madvise(2)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
PROGRAM = """
import re, pathlib, torch
from octavo.config import ModelSettings
from octavo.build.device_settings import prepared_device
prepared_device(ModelSettings(device="cpu"))
weights = torch.ones(16 << 20)
print(re.search(r"AnonHugePages: *([0-9]+)", pathlib.Path("/proc/self/smaps_rollup").read_text())[1])
"""


@pytest.mark.skipif(
    not ENABLED.exists() or "[madvise]" not in ENABLED.read_text(),
    reason="huge pages are on for all, or off",
)
def test_large_tensors_lie_in_huge_pages() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "THP_MEM_ALLOC_ENABLE"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 32 << 10, "in KiB, of 64 MiB"

"""What kernels take on GPUs that are not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.triton_interpreter import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="there its own kernels are compiled")


@pytest.mark.nightly
@pytest.mark.slow
def test_kernels_of_wide_heads_fit_gpus_with_little_shared_memory(tmp_path: Path) -> None:
    """Of most GPUs of compute capability 8.6, 8.9 and 12.0 a program may have 99 KiB."""
    command = [sys.executable, "-m", "octavo_bench.kernel_resources", "gemma-3-4b", "--gpu", "l40s"]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [*command, "--steps", "16 sequences", "prompt"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for kernel in ("prefill", "decode", "rms_norm", "skinny"):
        assert f" {kernel} " in done.stdout
    assert "cannot run" not in done.stdout

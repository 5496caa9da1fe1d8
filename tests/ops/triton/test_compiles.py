"""What every kernel launches passes the front end of the compiler, as for an H200 and an A100, without one.

The interpreter runs kernels as Python, which lets a variable change its type between two branches, say.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from octavo_kernels.triton.launch import GLUON_VERSION
from tests.tiers import nightly_after
from tests.triton_interpreter import DEVICE

KERNELS = Path(__file__).parents[3] / "octavo_kernels"
SCRIPT = """
import sys
from collections import Counter

import torch
from triton.compiler import compiler
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

passed, known, most = Counter(), set(), int(sys.argv[1])

class Passed(BaseException):
    pass

def noting(made):
    def make_ir(self, *args, **kwargs):
        # What is launched with other sizes is often the same code.
        if passed[self.name] < most and (key := self.hash()) not in known:
            known.add(key)
            made(self, *args, **kwargs)
            passed[self.name] += 1
        raise Passed

    return make_ir

for source in (compiler.ASTSource, GluonASTSource):
    source.make_ir = noting(source.make_ir)
run = JITFunction.run

def passing(self, *args, **kwargs):
    try:
        return run(self, *args, **kwargs)
    except Passed:
        return None

JITFunction.run = passing

from octavo_kernels.triton import launch
from octavo_bench.kernel_resources import TARGETS, pretend
from tests.ops.triton.kernel_runs import calls

launch._compiling.set(set())
launch._pdl.set(True)
for gpu in ("h100", "a100"):
    pretend(TARGETS[gpu])
    for name, call in calls(torch.device("cpu")):
        if name.endswith("float32") or (gpu == "a100" and not name.startswith("grouped")):
            continue  # experts alone have kernels of their own on a GPU of Hopper's
        try:
            call()
        except Exception as error:
            print("FAILED", gpu, name, error)
print(*passed)
"""


LAUNCHERS = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

built = []

class Device:
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    launcher_cls = staticmethod(lambda src, metadata: built.append(src.name))

driver.set_active(Device())
from octavo_kernels.triton.launch import compiling
from octavo_kernels.triton.norms import rms_norm_triton

x = torch.zeros(4, 64)
with compiling():
    for _ in range(3):
        for dtype in (torch.float32, torch.bfloat16):
            rms_norm_triton(x.to(dtype), torch.ones(64, dtype=dtype), 1e-6)
    assert not built
print(*built)
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="there they are compiled to the end")
@pytest.mark.parametrize("most", nightly_after(1, (2, 10**6)))
def test_every_launch_passes_the_front_end(most: int, tmp_path: Path) -> None:
    """``most``: so many forms of a kernel."""
    printed = run_alone(SCRIPT, tmp_path, str(most))
    assert "FAILED" not in printed, printed[-4000:]
    in_gluon = [
        KERNELS / "hopper" / name
        for name in ("prefill_attention.py", "streamed_gemv.py", "streamed_output_mlp.py", "pipelined_gemm.py")
    ]
    unknown = [] if triton.__version__.startswith(GLUON_VERSION) else in_gluon
    paths = [*(KERNELS / "triton").rglob("*.py"), *(KERNELS / "hopper").glob("*.py")]
    sources = "".join(path.read_text() for path in paths if path not in unknown)
    assert set(printed.split()) == set(re.findall(r"^def (\w*kernel)\(", sources, re.MULTILINE))


def test_launchers_are_built_with_the_kernels_and_once(tmp_path: Path) -> None:
    assert run_alone(LAUNCHERS, tmp_path).split() == ["rms_norm_kernel"] * 2, "one for each type of numbers"


def run_alone(script: str, cache: Path, *arguments: str) -> str:
    """What a process prints that compiles for real, into an empty cache."""
    environment = {"TRITON_CACHE_DIR": str(cache), "PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout

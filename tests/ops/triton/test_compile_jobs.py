"""Kernels that another process compiles are found in Triton's cache. No GPU is needed: the job names the target."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from octavo.system.kernel_compiler import Compilers, CompilersLost

SCRIPT = """
import msgspec
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource

from octavo.system.kernel_compiler import Compilers
from octavo_kernels.triton import compile_jobs
from octavo_kernels.triton.stepping import _publish_kernel as kernel

def main():
    types = "*i32 *i64 *i32 *i32 *i64 *i32 *i32 constexpr constexpr i32 i32 i32".split() + 4 * ["constexpr"]
    signature = dict(zip(kernel.arg_names, types, strict=True))
    constants = {(7,): None, (8,): None, (12,): 4, (13,): 256, (14,): False, (15,): False}
    src = ASTSource(kernel, signature, constants, {(0,): [["tt.divisibility", 16]]})
    target = GPUTarget("cuda", 90, 32)
    options = triton.compiler.make_backend(target).parse_options({"num_warps": 4})

    def compile_one():
        return src, target, options

    job = compile_jobs.described(compile_one)
    compilers = Compilers(1, "octavo_kernels.triton.compiler_process")
    assert compilers.compile(job) == ""
    hits = []
    triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    triton.compile(src, target=target, options=options.__dict__)
    assert hits == [True], hits
    other = msgspec.structs.replace(compile_jobs._decode(job), digest="of another source")
    assert "another" in compilers.compile(msgspec.msgpack.encode(other))
    missing = msgspec.structs.replace(compile_jobs._decode(job), function=("octavo.types", "nothing"))
    assert "AttributeError" in compilers.compile(msgspec.msgpack.encode(missing))
    assert compile_jobs.described(lambda: None) is None, "as in a version of Triton that names its variables otherwise"

main()
"""

SENDER = """
import sys
from pathlib import Path

import msgspec
import torch
from triton import knobs
from triton.runtime.cache import get_cache_key
from triton.runtime.jit import JITFunction

from octavo_bench.kernel_resources import TARGETS, pretend
from octavo_kernels.triton import launch
from octavo_kernels.triton.compile_jobs import described
from tests.ops.triton.kernel_runs import calls

jobs = {}

def note(kernel, key, signature, device, constants, options, attributes, warmup):
    _, _, target, backend, _ = kernel.device_caches[device]
    src = kernel.ASTSource(kernel, signature, constants, attributes)

    def compile_one():
        return src, options, target

    jobs[get_cache_key(src, backend, options, {})] = described(compile_one)

JITFunction._do_compile = note
launch._compiling.set(set())
for gpu in ("h100", "a100"):
    pretend(TARGETS[gpu])
    for has_pdl in (True, False):
        launch._pdl.set(has_pdl)
        for _, call in calls(torch.device("cpu")):
            call()
Path(sys.argv[1]).write_bytes(msgspec.msgpack.encode(jobs))
"""

RECEIVER = """
import sys
from collections import Counter
from pathlib import Path

import msgspec
import triton
from triton.runtime.cache import get_cache_key

from octavo_kernels.triton import compile_jobs

class Found(BaseException):
    pass

def compile(src, target, options):
    backend = triton.compiler.make_backend(target)
    raise Found(get_cache_key(src, backend, backend.parse_options(options), {}))

triton.compile = compile
jobs = msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes())
others = Counter()
for key, job in reversed(jobs.items()):
    answer = compile_jobs.execute(job) if job is not None else "not sent: " + key
    if answer != "Found: " + key:
        others[answer] += 1
print(len(jobs), dict(others))
"""

ECHO = """
import os, socket, sys
from octavo.system.child_worker import LENGTH, receive
control, *connections = (socket.socket(fileno=int(text)) for text in sys.argv[1:])
while (message := receive(connections[0])) not in (None, b"end"):
    answer = f"{os.getpid()}".encode()
    connections[0].sendall(LENGTH.pack(len(answer)) + answer)
"""


@pytest.mark.slow
def test_a_kernel_that_another_process_compiled_is_loaded(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


def test_every_launch_is_the_same_kernel_in_another_process(tmp_path: Path) -> None:
    """To the key in Triton's cache, whichever kernels either process had before: here in the reverse order."""
    jobs = str(tmp_path / "jobs")
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    for script in (SENDER, RECEIVER):
        command = [sys.executable, "-c", script, jobs]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr[-3000:]
    count, others = done.stdout.split(maxsplit=1)
    assert int(count) > 400
    assert others.strip() == "{}"


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module whose process answers each job with its number."""
    (tmp_path / "echo_process.py").write_text(ECHO)
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(root)]))
    return "echo_process"


def _ends(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_a_process_that_ends_is_lost_to_its_engine(echo: str) -> None:
    compilers = Compilers(1, echo)
    assert int(compilers.compile(b"a job")) != os.getpid()
    with pytest.raises(CompilersLost):
        compilers.compile(b"end")
    with pytest.raises(CompilersLost):
        compilers.compile(b"a job")


def test_the_processes_end_with_what_they_compile_for(echo: str) -> None:
    compilers = Compilers(1, echo)
    first = int(compilers.compile(b"a job"))
    compilers.close()
    assert _ends(first)
    script = f"import time; from octavo.system.kernel_compiler import Compilers; c = Compilers(1, {echo!r}); "
    script += "print(c.compile(b'a job'), flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        second = int(engine.stdout.readline())
        engine.send_signal(signal.SIGKILL)
    assert _ends(second)


@pytest.mark.parametrize("is_ready", [True, False])
def test_the_processes_of_triton_end_with_a_killed_engine(is_ready: bool) -> None:
    """Also while they import what they need."""
    script = "import time; from octavo.system.kernel_compiler import Compilers; "
    script += "c = Compilers(2, 'octavo_kernels.triton.compiler_process'); print(flush=True); time.sleep(60)"
    with psutil.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as engine:
        engine.stdout.readline()
        num_processes = 3 if is_ready else 1
        end = time.monotonic() + 60
        while len(started := engine.children(recursive=True)) < num_processes:
            assert time.monotonic() < end, "they do not start"
            time.sleep(0.05)
        engine.kill()
    assert not psutil.wait_procs(started, timeout=30)[1]

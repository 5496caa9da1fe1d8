"""Files of compiled kernels: what one process compiled, another with an empty cache loads. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from triton import knobs
from triton.runtime.cache import FileCacheManager

from octavo.system import kernel_archive
from octavo.system.kernel_archive import KEY, MEASURED, KernelFiles
from octavo_kernels.triton import config_tables
from octavo_kernels.triton.backend import TritonBackend

KEYS = {"GPU": "NVIDIA Test", "torch": "2.11.0", "octavo": "0.1.0"}
FOLDER, OTHER = 52 * "A", 52 * "B"
SCRIPT = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource
from triton.runtime import build

from octavo_kernels.triton.stepping import _publish_kernel as kernel

hits, builds, compile_c = [], [], build._build
build._build = lambda *args: builds.append(args[0]) or compile_c(*args)
triton.knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
types = "*i32 *i64 *i32 *i32 *i64 *i32 *i32 constexpr constexpr i32 i32 i32".split() + 4 * ["constexpr"]
signature = dict(zip(kernel.arg_names, types, strict=True))
constants = {(7,): None, (8,): None, (12,): 4, (13,): 256, (14,): False, (15,): False}
source = ASTSource(kernel, signature, constants, {(0,): [["tt.divisibility", 16]]})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
launcher = '#include <Python.h>\\nstatic PyModuleDef m = {PyModuleDef_HEAD_INIT, "launcher"};\\n'
launcher += "PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&m); }"
assert build.compile_module_from_src(launcher, "launcher").__name__ == "launcher"
print(compiled.kernel[:4], hits, len(builds))
"""


def files(cache: Path) -> KernelFiles:
    """With this folder as Triton's cache."""

    def manager(folder: str) -> FileCacheManager:
        with knobs.cache.scope():
            knobs.cache.dir = str(cache)
            return FileCacheManager(folder)

    return KernelFiles(KEYS, cache, manager, cache.parent / "measured.json")


def compiled_in(cache: Path) -> str:
    """What a process says that needs a kernel and its launcher, with this folder as Triton's cache."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_kernels_of_a_file_are_not_compiled_again(tmp_path: Path) -> None:
    first, second, path = tmp_path / "first", tmp_path / "second", tmp_path / "kernels.zip"
    assert compiled_in(first) == r"b'\x7fELF' [False] 1"
    assert files(first).pack(path) == 3, "a kernel, its metadata and its launcher"
    assert files(second).unpack(path) == 2
    assert compiled_in(second) == r"b'\x7fELF' [True] 0"
    assert files(second).unpack(path) == 0, "there is nothing left to unpack"


def archive(path: Path, *names: str, key: object = KEYS) -> Path:
    """A file with members of these names."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as written:
        for name, content in ((KEY, json.dumps(key)), (MEASURED, "{}"), *((name, "code") for name in names)):
            written.writestr(name, content)
    return path


def files_under(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_what_the_cache_has_stays_and_what_it_lacks_is_added(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    (cache / FOLDER).mkdir(parents=True)
    (cache / OTHER).mkdir()  # as Triton leaves it when it looks for a kernel
    for kind in ("json", "cubin"):
        (cache / FOLDER / f"kernel.{kind}").write_text("its own")
    members = [f"cache/{folder}/kernel.{kind}" for folder in (FOLDER, OTHER) for kind in ("json", "cubin")]
    assert files(cache).unpack(archive(tmp_path / "a.zip", *members)) == 2, (
        "a process may end before it lists its files"
    )
    assert (cache / FOLDER / "kernel.cubin").read_text() == "its own"
    for folder in (FOLDER, OTHER):
        assert files_under(cache / folder) == {"kernel.json", "kernel.cubin", "__grp__kernel.json"}
    listed = json.loads((cache / OTHER / "__grp__kernel.json").read_text())["child_paths"]
    assert listed == {name: str(cache / OTHER / name) for name in ("kernel.json", "kernel.cubin")}
    assert set(os.listdir(cache)) == {FOLDER, OTHER}


@pytest.mark.parametrize(
    "key",
    [{**KEYS, "torch": "2.10.0"}, {"torch": "2.10.0"}, {**KEYS, "more": "1"}, {}],
    ids=["another version", "less", "more", "nothing"],
)
def test_a_file_for_something_else_is_refused(key: dict[str, str], tmp_path: Path) -> None:
    path = archive(tmp_path / "a.zip", f"cache/{FOLDER}/kernel.cubin", key=key)
    with pytest.raises(ValueError, match="it is for ") as refusal:
        files(tmp_path / "cache").unpack(path)
    if len(key) == len(KEYS):
        assert str(refusal.value) == "it is for torch 2.10.0, not 2.11.0"
    assert files_under(tmp_path) == {"a.zip"}


@pytest.mark.parametrize(
    "name",
    [
        *("../kernel.cubin", "/tmp/kernel.cubin", "kernel.cubin", "cache/kernel.cubin", "cache/a/kernel.cubin"),
        *("cache/FOLDER/../kernel.cubin", "cache/FOLDER/..", "cache/../FOLDER/kernel.cubin", "cache//FOLDER/k.cubin"),
        *("cache/FOLDER/a/kernel.cubin", "cache/FOLDER/kernel.py", "cache/FOLDER/.json", "cache/FOLDER/__grp__k.json"),
        *("cache\\FOLDER\\k.cubin", "cache/FOLDER/LONG.cubin", "other/FOLDER/kernel.cubin", "cache/FOLDER/k.cubin/"),
    ],
)
def test_a_file_with_another_name_in_it_is_refused_as_a_whole(name: str, tmp_path: Path) -> None:
    name = name.replace("FOLDER", FOLDER).replace("LONG", 250 * "k")
    path = archive(tmp_path / "a.zip", f"cache/{FOLDER}/kernel.cubin", name)
    with pytest.raises(ValueError, match="is no file of a kernel"):
        files(tmp_path / "deep" / "cache").unpack(path)
    assert files_under(tmp_path) == {"a.zip"}


def test_links_are_files_of_their_text(tmp_path: Path) -> None:
    """A ZIP archive may say that a member is a link; nothing is made of it but a file."""
    path, cache = tmp_path / "a.zip", tmp_path / "cache"
    with zipfile.ZipFile(archive(path), "a") as written:
        link = zipfile.ZipInfo(f"cache/{FOLDER}/kernel.cubin")
        link.external_attr = 0o120777 << 16
        written.writestr(link, "/etc/passwd")
    files(cache).unpack(path)
    assert (cache / FOLDER / "kernel.cubin").read_text() == "/etc/passwd"
    assert not (cache / FOLDER / "kernel.cubin").is_symlink()


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = archive(tmp_path / "a.zip", f"cache/{FOLDER}/kernel.cubin")
    with zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as written:
        written.writestr(f"cache/{OTHER}/kernel.cubin", bytes(10**6))
    monkeypatch.setattr(kernel_archive, "MOST_BYTES", 10**6)
    with pytest.raises(ValueError, match="more than"):
        files(tmp_path / "cache").unpack(path)
    assert files_under(tmp_path) == {"a.zip"}


@pytest.fixture
def loading(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TritonBackend:
    """A backend for a GPU of which nothing is known, with empty caches."""
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "octavo"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(config_tables, "_driver_version", lambda: "1.2")
    monkeypatch.setattr(kernel_archive, "SHIPPED", tmp_path / "shipped")
    return TritonBackend()


GPU = torch.device("cuda:0")


def test_a_start_takes_kernels_and_measurements_that_it_lacks(
    loading: TritonBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = config_tables.own_path(GPU)
    own.parent.mkdir(parents=True)
    own.write_text(json.dumps({"linear": {"64x32, 1": {"kernel": "cublas"}, "64x32, 16": {"kernel": "cublas"}}}))
    (tmp_path / "triton" / FOLDER).mkdir(parents=True)
    (tmp_path / "triton" / FOLDER / "kernel.cubin").write_text("code")
    path = tmp_path / "shipped" / "NVIDIA_Test.zip"
    path.parent.mkdir()
    assert loading.pack_kernels(path, GPU) == 1
    (tmp_path / "triton" / FOLDER / "kernel.cubin").unlink()
    mine = {"linear": {"64x32, 1": {"kernel": "gemv", "block_n": 8}}}
    own.write_text(json.dumps(mine))
    loading._load(GPU, None)
    assert (tmp_path / "triton" / FOLDER / "kernel.cubin").read_text() == "code"
    assert json.loads(own.read_text()) == {"linear": {**mine["linear"], "64x32, 16": {"kernel": "cublas"}}}
    assert not caplog.records


@pytest.mark.parametrize("cut", [0, 10, 200, -30])
def test_a_damaged_file_is_reported(
    cut: int, loading: TritonBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = archive(tmp_path / "a.zip", f"cache/{FOLDER}/kernel.cubin")
    path.write_bytes(path.read_bytes()[:cut])
    loading._load(GPU, str(path))
    assert "a.zip are not used: File is not a zip file" in caplog.text


def test_a_start_goes_on_without_a_file_that_it_cannot_use(
    loading: TritonBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = archive(tmp_path / "other.zip", f"cache/{FOLDER}/kernel.cubin")
    loading._load(GPU, str(path))
    assert "other.zip are not used: it is for " in caplog.text
    loading._load(GPU, str(tmp_path / "gone.zip"))
    assert "No such file" in caplog.text
    assert not (tmp_path / "triton").exists()


def test_nothing_is_written_where_measurements_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as written:
        for name, content in ((KEY, json.dumps(KEYS)), (MEASURED, "[1]"), (f"cache/{FOLDER}/kernel.cubin", "code")):
            written.writestr(name, content)
    with pytest.raises(ValueError, match="measurements"):
        files(tmp_path / "cache").unpack(path)
    assert not (tmp_path / "cache" / FOLDER / "kernel.cubin").exists()


def test_a_file_that_everybody_may_write_is_not_trusted(
    loading: TritonBackend, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = archive(tmp_path / "a.zip", f"cache/{FOLDER}/kernel.cubin")
    path.chmod(0o666)
    loading._load(GPU, str(path))
    assert "a.zip are not used: every user of this machine may write it, and its kernels are code" in caplog.text
    assert not (tmp_path / "triton").exists()

"""GGUF files in parts, as gguf-py splits them: all are read, or an error says which one is not there or of another."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest
import torch

from octavo.cache.build_offload import fingerprint
from octavo.cli import main
from octavo.config import ModelSettings
from octavo.errors import CheckpointError, ConfigError
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.gguf.gguf_reader import GGUFFile
from octavo.weights.gguf.split_files import part_names
from octavo.weights.hub import resolve_model
from octavo_fleet.transformers.model import pretrained
from tests.models.checkpoints import make_checkpoint
from tests.models.gguf_files import write_gguf
from tests.weights.gguf_bytes import llama_file

PARTS = [f"model-{number:05}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same model in a file and in three parts."""
    folder = tmp_path_factory.mktemp("made")
    model = make_checkpoint(folder, "gqa")
    write_gguf(folder, model)
    count = len(GGUFFile.open(folder / "model.gguf").tensors)
    write_gguf(folder, model, tensors_of_a_part=-(-count // 3))
    assert {path.name for path in folder.glob("*.gguf")} == {"model.gguf", *PARTS}
    return folder


@pytest.fixture
def parts(made: Path, tmp_path: Path) -> Path:
    """A folder with the parts alone."""
    for name in PARTS:
        shutil.copy(made / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize("given", PARTS)
def test_any_part_is_the_file(made: Path, given: str) -> None:
    whole, split = (open_checkpoint(made / name) for name in ("model.gguf", given))
    assert split.config == whole.config
    assert split.names() == whole.names()
    for name in whole.names():
        kind, shape = whole.describe(name)
        assert split.describe(name) == (kind, shape)
        stored = whole.load(name, shape), split.load(name, shape)
        assert isinstance(stored[0], torch.Tensor)
        assert isinstance(stored[1], torch.Tensor)
        assert torch.equal(*stored)


def test_the_names_of_many_parts_take_no_time_to_speak_of() -> None:
    """Files are listed by others: a name may be as long, and its number as large, as they like."""
    started = time.thread_time()
    names = part_names("x-00001-of-00002.gguf" * 100 + "-00003-of-80000.GGUF")
    assert (len(names), names[2]) == (80_000, "x-00001-of-00002.gguf" * 100 + "-00003-of-80000.GGUF")
    assert time.thread_time() - started < 1


def test_a_folder_is_its_only_file(parts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for given in (parts, *(parts / name for name in PARTS)):
        assert resolve_model(ModelSettings(model=str(given))) == parts / PARTS[0]
    assert main(["models", str(parts), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert main(["models", str(parts / PARTS[2]), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == said
    assert main(["show", str(parts)]) == 0
    size = sum((parts / name).stat().st_size for name in PARTS) / 2**10
    assert f"{size:.1f} KiB in 3 files" in capsys.readouterr().out
    before = fingerprint(parts / PARTS[0])
    (parts / PARTS[1]).touch()
    assert fingerprint(parts / PARTS[0]) != before
    (parts / "mmproj-F16.gguf").write_bytes(b"GGUF")
    assert resolve_model(ModelSettings(model=str(parts))) == parts / PARTS[0]
    (parts / "other.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=rf"has several GGUF files; give the path of one: {PARTS[0]}, other\.gguf"):
        resolve_model(ModelSettings(model=str(parts)))


@pytest.mark.parametrize("lost", PARTS)
def test_a_missing_part_is_named(parts: Path, lost: str) -> None:
    (parts / lost).unlink()
    for given in [name for name in PARTS if name != lost]:
        with pytest.raises(CheckpointError, match=rf"{lost}: is missing; {given} is one of 3 parts"):
            open_checkpoint(parts / given)
    with pytest.raises(CheckpointError, match=f"{lost}: is missing"):
        open_checkpoint(resolve_model(ModelSettings(model=str(parts))))


def test_parts_of_other_files_are_refused(parts: Path) -> None:
    shutil.copy(parts / PARTS[1], parts / PARTS[2])
    with pytest.raises(CheckpointError, match=rf"{PARTS[2]}: tensor '.*' is in an earlier part, too"):
        open_checkpoint(parts / PARTS[0])
    (parts / PARTS[2]).write_bytes(llama_file())
    with pytest.raises(CheckpointError, match=r"tensor '.*' is in an earlier part|'split.count' is 1, but by its name"):
        open_checkpoint(parts / PARTS[0])


def test_parts_in_another_order_are_refused(parts: Path) -> None:
    first, second = ((parts / name).read_bytes() for name in PARTS[:2])
    (parts / PARTS[0]).write_bytes(second)
    (parts / PARTS[1]).write_bytes(first)
    with pytest.raises(CheckpointError, match=rf"{PARTS[0]}: metadata 'split\.no' is 1; it must be 0"):
        open_checkpoint(parts / PARTS[0])


@pytest.mark.parametrize(
    ("changes", "name", "message"),
    [
        ({}, PARTS[0], "is missing"),
        ({}, "model-00001-of-00001.gguf", ""),
        ({"split.count": 1, "split.no": 0, "split.tensors.count": 20}, "model.gguf", ""),
        ({"split.count": 3}, "renamed.gguf", r"'split\.count' is 3, but by its name it is one of 1 parts"),
        ({"split.count": "3"}, "renamed.gguf", r"'split\.count' is '3', but"),
    ],
)
def test_names_and_counts_agree(tmp_path: Path, changes: dict[str, object], name: str, message: str) -> None:
    (tmp_path / name).write_bytes(llama_file(changes))
    if not message:
        assert open_checkpoint(tmp_path / name).names()
        return
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path / name)


def test_a_number_of_tensors_that_is_wrong(parts: Path) -> None:
    content = (parts / PARTS[2]).read_bytes()
    at = content.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
    (parts / PARTS[2]).write_bytes(content[:at] + b"\x63\x00\x00\x00" + content[at + 4 :])
    with pytest.raises(CheckpointError, match=rf"{PARTS[2]}: metadata 'split\.tensors\.count' is 99; it must be"):
        open_checkpoint(parts / PARTS[0])


def test_the_library_reads_no_parts(parts: Path) -> None:
    with pytest.raises(CheckpointError, match="does not read a GGUF file in parts"):
        pretrained(parts / PARTS[0])


def test_names_of_parts() -> None:
    assert part_names("a/b-Q8_0-00002-of-00002.GGUF") == [f"a/b-Q8_0-0000{number}-of-00002.GGUF" for number in (1, 2)]
    for name in (
        "a.gguf",
        "a-00000-of-00002.gguf",
        "a-00003-of-00002.gguf",
        "a-00001-OF-00002.gguf",
        "a-00001-of-00002.gguf\n",
    ):
        assert part_names(name) == [name]

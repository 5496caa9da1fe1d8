"""``octavo pull``, ``list``, ``show``, ``rm`` and ``cache``: the models on this machine, and what is kept on disk."""

from __future__ import annotations

import io
import shutil
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.cli.terminal import size_text, table
from octavo.weights.default_model import SMOLLM2_135M
from tests.llm.tiny import write_checkpoint

COMMIT = "0" * 39 + "1"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A download folder with the model acme/tiny, laid out as by the hub's library."""
    repo = tmp_path / "models" / "models--acme--tiny"
    source = write_checkpoint(tmp_path / "source")
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, repo / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    monkeypatch.setenv("OCTAVO_DOWNLOAD_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("OCTAVO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "models"


def test_models_are_listed_shown_and_deleted(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert line.split()[0] == "acme/tiny"
    assert line.endswith(f" {hub / 'models--acme--tiny' / 'snapshots' / COMMIT}")
    assert main(["rm", "acme/tiny", "--yes"]) == 0
    assert not list(hub.glob("models--*"))
    assert main(["list"]) == 0
    assert "no models are here yet" in capsys.readouterr().err


def test_the_default_model_is_one_file(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = hub / SMOLLM2_135M.file_name
    file.write_bytes(b"x" * 2048)
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    name, size, unit, _, path = lines[2].split(maxsplit=4)
    assert (name, size, unit, path) == ("smollm2-135m", "2.0", "KiB", str(file))
    assert main(["rm", "smollm2-135m", "--yes"]) == 0
    assert not file.exists()
    assert (hub / "models--acme--tiny").exists()


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("no", 1), ("", 1)])
def test_rm_asks_on_a_terminal(hub: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: answer)
    assert main(["rm", "acme/tiny"]) == code
    assert (hub / "models--acme--tiny").exists() == bool(code)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["rm", "acme/tiny"], "confirm it with --yes"),
        (["rm", "../models"], "'../models' is not on this machine"),
        (["show", "acme/tinny"], "did you mean 'acme/tiny'?"),
        (["pull", "."], "is a path on this machine"),
    ],
)
def test_errors_say_what_to_do(
    hub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(argv) == 2
    assert message in capsys.readouterr().err
    assert (hub / "models--acme--tiny").exists()


def test_show_describes_a_model(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "acme/tiny", "--load-format", "dummy"]) == 0
    text = capsys.readouterr().out
    assert "parameters" in text
    assert "chat template: yes" in text
    assert "sampling defaults: " in text


def test_show_reads_what_a_folder_of_weights_lacks_from_others(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, weights = hub.parent / "source", hub.parent / "weights"
    weights.mkdir()
    command = ["show", str(weights), "--load-format", "dummy"]
    assert main([*command, "--hf-config-path", str(source)]) == 0
    text = capsys.readouterr().out
    assert "LlamaForCausalLM" in text
    assert "chat template: no" in text
    assert main([*command, "--hf-config-path", str(source), "--tokenizer", str(source)]) == 0
    assert "chat template: yes" in capsys.readouterr().out
    assert main(command) == 2


def test_pull_prints_the_path_and_fetches_nothing_twice(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "acme/tiny"]) == 0
    assert capsys.readouterr().out == f"{hub / 'models--acme--tiny' / 'snapshots' / COMMIT}\n"


def test_cache_shows_what_lies_where_and_prunes_kernels(hub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernels = hub.parent / "cache" / "kernels"
    (kernels / "outdated").mkdir(parents=True)
    (kernels / "outdated" / "code.nbc").write_bytes(b"x" * 3000)
    assert main(["cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split(maxsplit=6) == ["2.9", "KiB", "compiled", "kernels", "for", "CPUs", str(kernels)]
    assert any(line.endswith(str(hub)) for line in lines)
    assert main(["cache", "--prune"]) == 0
    assert not (kernels / "outdated").exists()
    assert "deleted the kernels of 1 other versions (2.9 KiB)" in capsys.readouterr().err


def test_tables_are_aligned() -> None:
    assert table([["a", "b"], ["long", "1"], ["c", "22"]], right=[1]) == "a      b\nlong   1\nc     22"
    assert [size_text(size) for size in (0, 1023, 1536, 5 << 20, 3 << 40)] == [
        *("0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3,072.0 GiB")
    ]

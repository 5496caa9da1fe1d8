"""How classes of transformers are served, found by tiny checkpoints in child processes."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.models.multimodal_text import TEXT_PARTS
from octavo.models.registry import ARCHITECTURES
from octavo_bench.architectures import SETTINGS, Judged, _told, add_to_record, causal_classes, read_record
from octavo_bench.chaos.tiny_model import write_tiny_model
from octavo_bench.cli.results import EXIT_WORSE
from octavo_bench.reference.models_page import RECORD


@pytest.mark.slow
@pytest.mark.nightly
def test_one_of_each_kind(capsys: pytest.CaptureFixture[str]) -> None:
    expected = {
        "GPTJForCausalLM": "backend, own cache, not every layer's attention can be replaced",
        "HeliumForCausalLM": "backend, paged",
        "MusicgenForCausalLM": "refused, CheckpointError: MusicgenForCausalLM cannot be served",
        "SeedOssForCausalLM": "native",
    }
    assert main(["bench", "architectures", *expected]) == 0
    lines = sorted(capsys.readouterr().out.splitlines())
    for line, (name, kind) in zip(lines, expected.items(), strict=True):
        assert line.startswith(f"{name}: {kind}")


def test_a_record_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "record.jsonl"
    add_to_record(record, Judged("LlamaForCausalLM", "refused", "library='0.1'", library="0.1"))
    add_to_record(record, Judged("LlamaForCausalLM", "wrong", "it differs"))
    assert [item.kind for item in read_record(record)] == ["wrong"]
    written = record.read_text()
    assert main(["bench", "architectures", "LlamaForCausalLM", "--output", str(record)]) == EXIT_WORSE
    assert (capsys.readouterr().out, record.read_text()) == ("", written)


def test_every_class_is_named_once() -> None:
    names = [name for _, name in causal_classes()]
    assert len(names) == len(set(names)) > 150


def test_the_record_has_every_class_and_none_fails() -> None:
    found = read_record(RECORD)
    assert not [item for item in found if item.kind in ("wrong", "crash")]
    refused = [item for item in found if item.kind == "refused"]
    assert len(refused) < 10
    assert all(item.note for item in refused)
    built = {item.architecture for item in found if item.kind != "not built"}
    assert {item.architecture for item in found if item.kind == "native"} == built & {*ARCHITECTURES, *TEXT_PARTS}
    judged = {item.library for item in found}
    if judged == {version("transformers")}:
        assert {item.architecture for item in found} == {name for _, name in causal_classes()}


def test_what_the_command_says_of_a_checkpoint(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    settings = {**SETTINGS, "load_format": "dummy"}
    assert _told(folder, settings) == ("supported", "LlamaForCausalLM: supported")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hidden_act": "no-such"}))
    assert _told(folder, settings) == ("refused", "")

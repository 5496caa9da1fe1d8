"""`octavo bench sanity`: families of models, tiny."""

from __future__ import annotations

import pytest

from octavo.cli import main
from octavo.models.registry import ARCHITECTURES, read_config
from octavo_bench import sanity


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tiny_shapes_are_read(name: str) -> None:
    assert read_config(sanity.tiny_config(name)).num_layers in (2, 4)


@pytest.mark.slow
def test_families_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "sanity", "--families", "GPT2LMHeadModel", "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert [line.split(" | ")[-1] for line in table.splitlines()[2:3]] == ["True |"]


def test_other_tokens_are_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = iter([[[1]], [[1]], [[2]], [[1]], [[1]], [[1]]])
    monkeypatch.setattr(sanity, "_tokens", lambda engine: next(made))
    assert main(["bench", "sanity", "--families", "Qwen2ForCausalLM", "--device", "cpu"]) == 1
    assert "other tokens in chunks" in capsys.readouterr().out
    assert main(["bench", "sanity", "--families", "colours"]) == 2

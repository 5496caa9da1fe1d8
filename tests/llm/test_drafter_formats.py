"""The weights of a drafter are of their own format, whatever the model's become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.build import build_engine as build
from octavo.errors import ConfigError
from octavo.models.registry import LoadedModel, load_model
from tests.models.families import make_checkpoint
from tests.quant.writers import awq, gptq, quantise
from tests.tiers import one_in

SETTINGS: dict[str, Any] = {"device": "cpu", "block_size": 8, "num_kv_blocks": 60, "max_num_batched_tokens": 48}
WRITERS = {"gptq": gptq(4, 16), "awq": awq(16)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in several formats."""
    found = {name: tmp_path_factory.mktemp("model") for name in ("dense", *WRITERS)}
    make_checkpoint(found["dense"], "llama/gqa", hidden_size=64, intermediate_size=96)
    for name, writer in WRITERS.items():
        quantise(found["dense"], found[name], writer)
    return found


@one_in(3)
@pytest.mark.parametrize(
    ("target", "quantization", "drafter", "has_int4"),
    [
        ("dense", "int4", "gptq", True),
        ("dense", "int4", "dense", True),
        ("gptq", "gptq", "awq", True),
        ("gptq", "gptq", "dense", False),
    ],
)
def test_a_drafter_is_loaded_as_it_is_stored(
    folders: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    quantization: str,
    drafter: str,
    has_int4: bool,
) -> None:
    """One that is not quantised may become what the model becomes."""
    drafters: list[LoadedModel] = []

    def noted(*args: Any, **options: Any) -> LoadedModel:
        drafters.append(load_model(*args, **options))
        return drafters[-1]

    monkeypatch.setattr("octavo.build.build_drafter.load_model", noted)
    config = {"method": "draft_model", "model": str(folders[drafter]), "adaptive": False}
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(folders[target], **SETTINGS, quantization=quantization, speculative_config=config) as llm:
        assert len(llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids) == 8
        assert llm.engine.stats().num_drafts > 0
    assert [any(kind.startswith("int") for kind in drafters[0].bytes_by_format)] == [has_int4]


def test_a_quantised_drafter_is_not_quantised_again(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is said before the model's weights are loaded."""
    monkeypatch.setattr(build, "load_any", lambda *_: pytest.fail("the model's weights were loaded"))
    config = {"method": "draft_model", "model": str(folders["gptq"]), "quantization": "int8"}
    with pytest.raises(ConfigError, match=r"speculative_config: quantization: int8 .* quantised already \(gptq\)"):
        LLM(folders["dense"], **SETTINGS, speculative_config=config)

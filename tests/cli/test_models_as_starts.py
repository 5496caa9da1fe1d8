"""What `octavo models` says of damaged checkpoints, and of memory, is what a start says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.cli import main
from octavo.errors import CheckpointError, ConfigError
from tests.backends.checkpoints import save_checkpoint
from tests.models import vision
from tests.models.adapter_files import make_adapter
from tests.models.encoder_families import make_encoder
from tests.models.families import make_checkpoint
from tests.models.gguf_files import write_gguf
from tests.models.test_projector import made as with_projector

WEIGHTS = "model.safetensors"
POOLED = [
    {"name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
DENSE = {"name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


Change = Callable[[Path], object]
"""What makes or damages the checkpoint in a folder."""


def write(name: str, content: Any) -> Change:
    return lambda folder: (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def unchanged(folder: Path) -> None:
    pass


def llama(folder: Path) -> object:
    return make_checkpoint(folder, "llama/gqa")


def configured(**values: Any) -> Change:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return change


def without(part: str) -> Change:
    """Without the first tensor that has this in its name."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        del tensors[next(name for name in sorted(tensors) if part in name)]
        save_file(tensors, folder / WEIGHTS)

    return change


def with_dense(num_rows: int, width: int) -> Change:
    """With a map of 8 outputs behind the pooling, whose matrix has so many rows; without the matrix if these are 0."""

    def change(folder: Path) -> None:
        write("modules.json", [*POOLED, DENSE])(folder)
        for name in ("1_Pooling", "2_Dense"):
            (folder / name).mkdir()
        write("1_Pooling/config.json", {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True})(folder)
        write("2_Dense/config.json", {"in_features": width, "out_features": 8, "bias": False})(folder)
        if num_rows:
            save_file({"linear.weight": torch.ones(num_rows, width)}, folder / "2_Dense" / WEIGHTS)

    return change


DAMAGED: dict[str, tuple[Change, Change, dict[str, Any]]] = {
    "token id": (llama, configured(pad_token_id="x"), {}),
    "sampling parameter": (llama, write("generation_config.json", {"temperature": "hot"}), {}),
    "tokenizer": (llama, write("tokenizer.json", "{"), {}),
    "chat template that is not there": (llama, unchanged, {"chat_template": "/nowhere.jinja"}),
    "module": (llama, write("modules.json", [*POOLED[:1], {**DENSE, "type": "models.Other"}]), {}),
    "width of a map behind pooling": (llama, with_dense(8, 31), {}),
    "shape of a map behind pooling": (llama, with_dense(7, 32), {}),
    "no map behind pooling": (llama, with_dense(0, 32), {}),
    "head that is no copy": (llama, configured(tie_word_embeddings=True), {}),
    "tensor of a tower": (lambda folder: vision.make(folder, "gemma3"), without("vision_tower"), {}),
    "tensor of a tower with axes": (lambda folder: vision.make(folder, "qwen2_5_vl"), without("visual.merger"), {}),
    "sampling parameter, by transformers": (
        lambda folder: save_checkpoint("diffllama", folder),
        write("generation_config.json", {"top_p": 7}),
        {"backend": "transformers"},
    ),
    "a setting of prefixes without any": (
        lambda folder: save_checkpoint("openai-gpt", folder),
        unchanged,
        {"backend": "transformers", "eviction_policy": "lfu"},
    ),
    "adapters of DeBERTa": (lambda folder: make_encoder(folder, "DebertaV2/Model"), unchanged, {"enable_lora": True}),
    "ranks of an encoder": (lambda folder: make_encoder(folder, "Bert/Model"), unchanged, {"tensor_parallel_size": 2}),
}


def flags(settings: dict[str, Any]) -> list[str]:
    named = {f"--{name.replace('_', '-')}": value for name, value in settings.items()}
    return [name if value is True else f"{name}={value}" for name, value in named.items()]


@pytest.mark.parametrize("name", DAMAGED)
def test_what_a_start_refuses_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, damage, settings = DAMAGED[name]
    make(tmp_path)
    damage(tmp_path)
    settings = {"device": "cpu", "num_kv_blocks": 40, **settings}
    with pytest.raises((CheckpointError, ConfigError)) as error, LLM(tmp_path, **settings):
        pass
    capsys.readouterr()
    assert main(["models", str(tmp_path), *flags(settings)]) == 2
    shown = capsys.readouterr()
    assert str(error.value) in shown.err
    assert "supported" not in shown.out


def test_adapters_of_an_encoder_are_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bert, other, adapter = (tmp_path / name for name in ("bert", "other", "adapter"))
    model = make_encoder(bert, "Bert/Model")
    kind = {"model_class": type(model), "target_modules": ["query", "value"], "task_type": "FEATURE_EXTRACTION"}
    make_adapter(bert, adapter, 1, **kind)
    assert main(["models", str(adapter), "--device", "cpu"]) == 0
    assert "adapter adapter fits: it changes 4 of" in capsys.readouterr().out
    make_encoder(other, "DistilBert/Model")
    settings = {"device": "cpu", "enable_lora": True, "lora_modules": f"a={adapter}"}
    with pytest.raises(CheckpointError) as error:
        LLM(other, **settings)
    assert main(["models", str(other), *flags(settings)]) == 2
    assert str(error.value) in capsys.readouterr().err


def text_and_tower(folder: Path) -> Path:
    """Two GGUF files, whose tensors lack axes that those of the library have."""
    with_projector("qwen3_5", folder)
    return next(path for path in folder.rglob("*.gguf") if "mmproj" not in path.name)


MADE: dict[str, Change] = {
    "llama": llama,
    "gguf": lambda folder: write_gguf(folder, make_checkpoint(folder, "llama/gqa")),
    "gguf with a tower": text_and_tower,
    "gemma3": lambda folder: vision.make(folder, "gemma3"),
    "qwen2_5_vl": lambda folder: vision.make(folder, "qwen2_5_vl"),
    "diffllama": lambda folder: save_checkpoint("diffllama", folder),
    "openai-gpt": lambda folder: save_checkpoint("openai-gpt", folder),
}


@pytest.mark.parametrize("name", MADE)
def test_memory_is_that_of_a_start(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A tower's weights and the models of other backends are counted, too."""
    found = MADE[name](tmp_path)
    path = found if isinstance(found, Path) else tmp_path
    backend = {"backend": "transformers"} if name in ("diffllama", "openai-gpt") else {}
    settings = {"device": "cpu", "num_kv_blocks": 100, "dtype": "float32", **backend}
    with LLM(path, **settings) as llm:
        expected = llm.info.memory
    capsys.readouterr()
    assert main(["models", str(path), *flags(settings)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for part in ("weights", "kv_cache"):
        assert any(part.replace("_", " ") in line and f"{expected[part] / 2**20:,.1f} MiB" in line for line in lines)

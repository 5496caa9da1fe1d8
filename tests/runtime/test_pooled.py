"""Vectors of texts that a decoder makes, against transformers: in chunks, beside requests that generate."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from octavo.build.build_engine import build_engine
from octavo.config import EngineConfig
from octavo.errors import CheckpointError, ConfigError
from octavo.models.registry import ARCHITECTURES
from octavo.sampling_params import SamplingParams
from octavo.text.embedding_vectors import result_of
from octavo.types import Output, Request, Task
from tests.models.encoder_families import word_tokenizer
from tests.models.families import ROWS, VOCAB_SIZE, make_checkpoint
from tests.ops.cpu_cases import needs_float_kernels
from tests.runtime.thread_ranks import ranks_as_threads
from tests.tiers import nightly_after, one_in

FIRST = ("llama/gqa", "gpt2/small", "qwen3/biases", "gemma3/two_ropes")
FAMILIES = [*FIRST, *{row.partition("/")[0]: row for row in reversed(ROWS) if row not in FIRST}.values()]
"""A row of each family."""
LABELS = {"num_labels": 3, "id2label": {0: "no", 1: "maybe", 2: "yes"}}
LENGTHS = (300, 1, 17, 130)
TEXTS = [random.Random(i).choices(range(VOCAB_SIZE), k=length) for i, length in enumerate(LENGTHS)]


def serve(folder: Path, **settings: Any) -> dict[int, Output]:
    """Embed every text twice, and continue the same texts meanwhile; the last news of each request."""
    values = {"model": str(folder), "device": "cpu", "dtype": "float32", "max_num_batched_tokens": 48, "block_size": 16}
    engine, info = build_engine(EngineConfig.from_flat({**values, "kv_cache_memory": 0.05, **settings}))
    assert info.tasks == ("generate", "embed", "token_embed")
    last: dict[int, Output] = {}
    for again in (0, 1):
        for i, text in enumerate(TEXTS):
            engine.add(Request(20 * again + i, text, SamplingParams(max_tokens=0), 0, task="embed"))
            engine.add(Request(20 * again + 10 + i, text, SamplingParams(temperature=0), 8))
        while engine.has_work:
            for output in engine.step():
                last[output.request_id] = output
            engine.check()
    return last


@one_in(5)
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("row", ["llama/gqa", "gpt2/small", "gemma2/capped"])
def test_vectors_are_those_of_transformers(row: str, pooling: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, row)
    found = serve(tmp_path, pooling_type=pooling)
    for i, text in enumerate(TEXTS):
        with torch.inference_mode():
            rows = model.base_model(torch.tensor([text]), use_cache=False).last_hidden_state[0]
        wanted = rows[-1] if pooling == "last" else rows.mean(dim=0)
        for again in (0, 20):
            output = found[i + again]
            assert output.values is not None
            assert output.finish_reason == "length"
            vector = np.frombuffer(output.values, dtype="<f4")
            np.testing.assert_allclose(vector / np.linalg.norm(vector), wanted / wanted.norm(), atol=1e-5)
            assert not output.num_cached_tokens, "rows that are cached have no vectors any more"
    assert found[10].finish_reason is not None
    assert found[30].num_cached_tokens, "prompts that are continued share blocks as ever"


def test_the_first_token_of_a_decoder_is_no_vector_of_the_text(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama/gqa")
    with pytest.raises(ConfigError, match="pooling_type"):
        serve(tmp_path, pooling_type="cls")


def test_a_vector_that_is_no_number_ends_its_request_alone(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, "llama/gqa")
    with torch.no_grad():
        model.get_input_embeddings().weight[TEXTS[1][0]] = torch.nan
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())
    found = serve(tmp_path)
    assert found[1].error is not None
    assert found[1].values is None
    spoilt = [i for i, text in enumerate(TEXTS) if TEXTS[1][0] in text]
    assert all(found[i].values is not None for i in range(len(TEXTS)) if i not in spoilt)


def results(folder: Path, task: Task, tasks: tuple[Task, ...], **settings: Any) -> list[np.ndarray]:
    """What ``task`` makes of every text, in chunks."""
    values = {"model": str(folder), "device": "cpu", "dtype": "float32", "max_num_batched_tokens": 48, "block_size": 16}
    engine, info = build_engine(EngineConfig.from_flat({**values, "kv_cache_memory": 0.05, **settings}))
    assert info.tasks == tasks
    for i, text in enumerate(TEXTS):
        engine.add(Request(i, text, SamplingParams(max_tokens=0), 0, task=task))
    found: dict[int, np.ndarray] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.values is not None, output
            found[output.request_id] = result_of(task, output.values, info.pooling)
    return [found[i] for i in range(len(TEXTS))]


@pytest.mark.parametrize("row", nightly_after(len(FIRST), FAMILIES))
def test_a_decoder_without_a_head_embeds(row: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, row, AutoModel)
    tokens = results(tmp_path, "token_embed", ("embed", "token_embed"))
    for text, found, of_tokens in zip(TEXTS, results(tmp_path, "embed", ("embed", "token_embed")), tokens, strict=True):
        with torch.inference_mode():
            rows = model(torch.tensor([text]), use_cache=False).last_hidden_state[0]
        wanted = rows / rows.norm(dim=1, keepdim=True)
        np.testing.assert_allclose(found, wanted[-1], atol=5e-5)
        np.testing.assert_allclose(of_tokens, wanted, atol=5e-5)


@pytest.mark.parametrize("row", nightly_after(len(FIRST), FAMILIES))
@pytest.mark.parametrize("num_labels", [3, 1])
def test_a_decoder_that_classifies(row: str, num_labels: int, tmp_path: Path) -> None:
    changes = LABELS if num_labels == 3 else {"num_labels": 1}
    model = made_with(AutoModelForSequenceClassification, tmp_path, row, **changes)
    tasks: tuple[Task, ...] = ("classify",) if num_labels == 3 else ("score", "classify")
    for text, found in zip(TEXTS, results(tmp_path, "classify", tasks), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([text]), use_cache=False).logits[0]
        np.testing.assert_allclose(found, logits.softmax(dim=-1) if num_labels == 3 else logits.sigmoid(), atol=1e-5)


@pytest.mark.parametrize("row", nightly_after(2, FAMILIES))
def test_a_decoder_that_classifies_tokens(row: str, tmp_path: Path) -> None:
    model = made_with(AutoModelForTokenClassification, tmp_path, row, **LABELS)
    for text, found in zip(TEXTS, results(tmp_path, "token_classify", ("token_classify",)), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([text]), use_cache=False).logits[0]
        np.testing.assert_allclose(found, logits.softmax(dim=-1), atol=1e-5)


@needs_float_kernels
@pytest.mark.parametrize("task", nightly_after(1, ("classify", "token_classify")))
def test_ranks_find_the_labels_of_one_device(task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks_as_threads(monkeypatch)
    kind = AutoModelForSequenceClassification if task == "classify" else AutoModelForTokenClassification
    made_with(kind, tmp_path, "qwen3/wide_heads", **LABELS)
    one, two = (results(tmp_path, task, (task,), tensor_parallel_size=size) for size in (1, 2))
    for found, expected in zip(two, one, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_ranker_that_says_yes_or_no(is_tied: bool, tmp_path: Path) -> None:
    """As Qwen3-Reranker is meant: a checkpoint that generates, and the chance of one of two words."""
    model = make_checkpoint(tmp_path, "qwen3/biases", tie_word_embeddings=is_tied)
    words = word_tokenizer(has_types=False)
    words.save(str(tmp_path / "tokenizer.json"))
    no, yes = (words.token_to_id(word) for word in ("nobody", "it"))
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["nobody", "it"]}
    found = results(tmp_path, "score", ("score", "classify"), hf_overrides=json.dumps(overrides))
    for text, score in zip(TEXTS, found, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([text]), use_cache=False).logits[0, -1]
        assert score[0] == pytest.approx(float(logits[[no, yes]].softmax(dim=-1)[1]), abs=1e-5)


@pytest.mark.parametrize("tokens", [["bird"], ["birds", "it"], [1, 97], 5])
def test_other_words_of_a_ranker_are_refused(tokens: Any, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3/biases")
    word_tokenizer(has_types=False).save(str(tmp_path / "tokenizer.json"))
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": tokens}
    with pytest.raises((CheckpointError, ConfigError), match="classifier_from_token"):
        results(tmp_path, "score", ("score",), hf_overrides=json.dumps(overrides))


def made_with(auto_class: Any, folder: Path, row: str, **changes: Any) -> PreTrainedModel:
    """The row's model of this class; skips families that have none."""
    if type(AutoConfig.for_model(ROWS[row][0])) not in auto_class._model_mapping:
        pytest.skip("transformers has no such class of this family")
    return make_checkpoint(folder, row, auto_class, **changes)


def test_every_architecture_may_be_headless() -> None:
    """All but those whose classes end otherwise."""
    others = [name for name in ARCHITECTURES if not name.endswith(("ForCausalLM", "LMHeadModel"))]
    assert sorted(others) == ["ChatGLMForConditionalGeneration", "ChatGLMModel"], "names that checkpoints have"

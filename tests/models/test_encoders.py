"""Every encoder against transformers, through the real engine: many texts of all lengths in few batches."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from octavo.build.build_engine import build_engine
from octavo.cli import main
from octavo.config import EngineConfig
from octavo.engine.engine import Engine
from octavo.errors import CheckpointError, ConfigError
from octavo.models.encoders import BIDIRECTIONAL, ENCODERS
from octavo.models.registry import read_config
from octavo.sampling_params import SamplingParams
from octavo.text.embedding_vectors import result_of
from octavo.types import EngineInfo, Request, Task
from tests.models.adapter_files import make_adapter
from tests.models.encoder_families import (
    MAX_LEN,
    ROWS,
    SHAPES,
    VARIANTS,
    VOCAB_SIZE,
    make_encoder,
    write_dense,
    write_pooling,
)
from tests.tiers import nightly, one_in

LENGTHS = (MAX_LEN, 1, 2, 17, 64, MAX_LEN - 1, 3, 40)
TEXTS = [random.Random(i).choices(range(6, VOCAB_SIZE), k=length) for i, length in enumerate(LENGTHS)]
JUDGES = [row for row, (name, _) in ROWS.items() if name.endswith("ForSequenceClassification")]
TAGGERS = [row for row, (name, _) in ROWS.items() if name.endswith("ForTokenClassification")]
OTHERS = [row for row in ROWS if row not in (*JUDGES, *TAGGERS)]


def often(rows: list[str]) -> list[Any]:
    """One row of each kind of head, and all others for `make nightly` alone."""
    return [row if row in VARIANTS or row.endswith("Model") or row.startswith("Bert") else nightly(row) for row in rows]


def build(folder: Path, **settings: Any) -> tuple[Engine, EngineInfo]:
    values = {"model": str(folder), "device": "cpu", "dtype": "float32", "max_num_batched_tokens": 130, **settings}
    return build_engine(EngineConfig.from_flat(values))


def answers(
    built: tuple[Engine, EngineInfo], task: Task, second_start: int | None = None, adapters: Sequence[str] = ("",)
) -> list[np.ndarray]:
    engine, info = built
    for i, text in enumerate(TEXTS):
        start = None if second_start is None else min(second_start, len(text))
        adapter = adapters[i % len(adapters)]
        engine.add(Request(i, text, SamplingParams(max_tokens=0), 0, task=task, second_start=start, adapter=adapter))
    found: dict[int, np.ndarray] = {}
    while engine.has_work:
        for output in engine.step():
            assert output.values is not None, output
            found[output.request_id] = result_of(task, output.values, info.pooling)
        engine.check()
    return [found[i] for i in range(len(TEXTS))]


@torch.inference_mode()
def token_vectors(model: PreTrainedModel, text: list[int]) -> torch.Tensor:
    return model.base_model(torch.tensor([text]), attention_mask=torch.ones(1, len(text))).last_hidden_state[0]


@one_in(2)
@pytest.mark.parametrize("row", often(OTHERS))
def test_vectors_are_those_of_transformers(row: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path, row)
    engine, info = built = build(tmp_path)
    assert info.tasks == ("embed", "token_embed")
    texts, tokens = answers(built, "embed"), answers(built, "token_embed")
    for text, of_text, of_tokens in zip(TEXTS, texts, tokens, strict=True):
        wanted = token_vectors(model, text)
        mean = wanted.mean(dim=0)
        np.testing.assert_allclose(of_text, mean / mean.norm(), atol=1e-5)
        np.testing.assert_allclose(of_tokens, wanted / wanted.norm(dim=1, keepdim=True), atol=1e-5)
    assert engine.stats().num_steps < 2 * len(TEXTS), "texts were not put together"


@pytest.mark.parametrize("row", ["Bert/ForMaskedLM", nightly("DistilBert/ForMaskedLM"), nightly("Roberta/ForMaskedLM")])
@pytest.mark.parametrize("is_in_files", [True, False])
def test_sparse_vectors_are_the_largest_logits_of_each_token(row: str, is_in_files: bool, tmp_path: Path) -> None:
    model = make_encoder(tmp_path, row)
    if is_in_files:
        kinds = ("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling")
        modules = [
            {"type": f"sentence_transformers.sparse_encoder.models.{kind}", "path": path} for kind, path in kinds
        ]
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        (tmp_path / "1_SpladePooling").mkdir()
        settings = {"pooling_strategy": "max", "activation_function": "relu", "word_embedding_dimension": VOCAB_SIZE}
        (tmp_path / "1_SpladePooling" / "config.json").write_text(json.dumps(settings))
    _, info = built = build(tmp_path, **({} if is_in_files else {"pooling_type": "splade"}))
    assert (info.tasks, info.embedding_size) == (("embed",), VOCAB_SIZE)
    assert info.pooling.is_sparse
    vectors = answers(built, "embed")
    for text, found in zip(TEXTS, vectors, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([text]), attention_mask=torch.ones(1, len(text))).logits[0]
        np.testing.assert_allclose(found, logits.relu().log1p().amax(dim=0), atol=1e-5)
    assert 0 < (np.stack(vectors) == 0).sum() < len(TEXTS) * VOCAB_SIZE


def test_memory_of_sparse_vectors_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_encoder(tmp_path, "Bert/ForMaskedLM")
    dense, sparse = (build(tmp_path, **kind)[1] for kind in ({}, {"pooling_type": "splade"}))
    results = sparse.max_num_seqs * VOCAB_SIZE * 4
    assert sparse.memory["activations"] >= dense.memory["activations"] + 2 * results
    limits = f"--max-num-seqs {sparse.max_num_seqs} --max-num-batched-tokens {sparse.max_num_batched_tokens}".split()
    assert main(["models", str(tmp_path), "--device", "cpu", "--pooling-type", "splade", *limits]) == 0
    found = re.search(r"([\d.]+) MiB of weights and ([\d.]+) MiB of activations", capsys.readouterr().out)
    assert found is not None
    assert [float(each) for each in found.groups()] == [
        round(sparse.memory[name] / 2**20, 1) for name in ("weights", "activations")
    ]


def test_a_masked_language_model_without_its_head_gives_dense_vectors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_encoder(tmp_path, "Bert/ForMaskedLM")
    path = tmp_path / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if not name.startswith("cls.")}, path)
    assert main(["models", str(tmp_path)]) == 0
    assert "BertForMaskedLM" in capsys.readouterr().out
    assert build(tmp_path)[1].tasks == ("embed", "token_embed")
    with pytest.raises(CheckpointError, match=r"cls\.predictions"):
        build(tmp_path, pooling_type="splade")


def test_sparse_vectors_need_a_map_to_the_vocabulary(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert/Model")
    with pytest.raises(ConfigError, match=r"pooling_type: splade: .* BertForMaskedLM"):
        build(tmp_path, pooling_type="splade")
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.SpladePooling", "path": "1"}]))
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "config.json").write_text(json.dumps({"pooling_strategy": "sum"}))
    with pytest.raises(CheckpointError, match="pooling_strategy"):
        build(tmp_path)


@pytest.mark.parametrize(("mode", "row"), [("cls_token", 0), ("lasttoken", -1)])
@pytest.mark.parametrize("normalizes", [True, False])
def test_vectors_are_made_as_the_checkpoint_says(tmp_path: Path, mode: str, row: int, normalizes: bool) -> None:
    model = make_encoder(tmp_path, "Bert/Model")
    write_pooling(tmp_path, f"pooling_mode_{mode}", normalizes)
    for text, found in zip(TEXTS, answers(build(tmp_path), "embed"), strict=True):
        wanted = token_vectors(model, text)[row]
        np.testing.assert_allclose(found, wanted / wanted.norm() if normalizes else wanted, atol=1e-5)


@pytest.mark.parametrize("row", ["Bert/Model", "Bert/ForMaskedLM", "Roberta/Model"])
def test_older_names_of_norms(row: str, tmp_path: Path) -> None:
    make_encoder(tmp_path, row)
    expected = answers(build(tmp_path), "embed")
    path, older = tmp_path / "model.safetensors", {"weight": "gamma", "bias": "beta"}
    tensors = {
        re.sub(r"(?<=LayerNorm\.)(weight|bias)$", lambda found: older[found[0]], name): tensor
        for name, tensor in load_file(path).items()
    }
    assert sum(name.endswith("LayerNorm.gamma") for name in tensors) >= 5
    save_file(tensors, path)
    np.testing.assert_array_equal(answers(build(tmp_path), "embed"), expected)


@pytest.mark.parametrize(
    ("row", "maps"),
    [
        ("Bert/Model", ["query", "value", "dense"]),
        nightly("Bert/ForMaskedLM", ["query", "attention.output.dense"]),
        nightly("ModernBert/Model", ["Wqkv", "Wo"]),
    ],
)
def test_adapters_in_one_batch_are_those_that_peft_merges(row: str, maps: list[str], tmp_path: Path) -> None:
    made = make_encoder(tmp_path / "base", row)
    merged = {"": made}
    for seed, name in enumerate(("one", "two")):
        kind = {"model_class": type(made), "target_modules": maps, "task_type": "FEATURE_EXTRACTION"}
        merged[name] = make_adapter(tmp_path / "base", tmp_path / name, seed, **kind)
    modules = ",".join(f"{name}={tmp_path / name}" for name in merged if name)
    built, alone = build(tmp_path / "base", enable_lora=True, lora_modules=modules), build(tmp_path / "base")
    found, names, plain = answers(built, "embed", adapters=list(merged)), list(merged), answers(alone, "embed")
    for i, text in enumerate(TEXTS):
        wanted = token_vectors(merged[names[i % 3]], text).mean(dim=0)
        np.testing.assert_allclose(found[i], wanted / wanted.norm(), atol=1e-5)
        assert np.array_equal(found[i], plain[i]) == (names[i % 3] == "")


@torch.inference_mode()
def logits(model: PreTrainedModel, text: list[int], second_start: int) -> torch.Tensor:
    inputs = {"attention_mask": torch.ones(1, len(text), dtype=torch.long)}
    if getattr(model.config, "type_vocab_size", 0) > 1:
        first = min(second_start, len(text))
        inputs["token_type_ids"] = torch.tensor([[0] * first + [1] * (len(text) - first)])
    return model(torch.tensor([text]), **inputs).logits[0]


@one_in(2)
@pytest.mark.parametrize("row", often(JUDGES))
def test_scores_are_those_of_transformers(row: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path, row)
    _, info = built = build(tmp_path)
    is_score = model.config.num_labels == 1
    assert info.tasks == (("score", "classify") if is_score else ("classify",))
    assert len(info.pooling.labels) == model.config.num_labels
    for text, found in zip(TEXTS, answers(built, "score" if is_score else "classify", second_start=9), strict=True):
        wanted = logits(model, text, 9)
        if not is_score and row != "bert/several_may_hold":
            wanted = wanted.softmax(dim=-1)
        elif not row.endswith("logits"):
            wanted = wanted.sigmoid()
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("row", often(TAGGERS))
def test_tokens_have_the_labels_of_transformers(row: str, tmp_path: Path) -> None:
    model = make_encoder(tmp_path, row)
    _, info = built = build(tmp_path)
    assert (info.tasks, info.pooling.labels) == (("token_classify",), ("no", "maybe", "yes"))
    for text, found in zip(TEXTS, answers(built, "token_classify", second_start=9), strict=True):
        np.testing.assert_allclose(found, logits(model, text, 9).softmax(dim=-1), atol=1e-5)


@pytest.mark.parametrize("row", ["roberta/judge", "xlm_roberta/judge"])
def test_a_pooler_that_the_head_does_not_use_is_left_out(row: str, tmp_path: Path) -> None:
    make_encoder(tmp_path, row)
    expected = answers(build(tmp_path), "score")
    path = tmp_path / "model.safetensors"
    pooler = {"roberta.pooler.dense.weight": torch.ones(32, 32), "roberta.pooler.dense.bias": torch.ones(32)}
    save_file({**load_file(path), **pooler}, path)
    np.testing.assert_array_equal(answers(build(tmp_path), "score"), expected)


@one_in(3)
@pytest.mark.parametrize("row", [f"{family}/Model" for family in SHAPES] + ["t5/relu", "gemma/bidirectional"])
def test_an_answer_has_the_same_bits_alone(row: str, tmp_path: Path) -> None:
    make_encoder(tmp_path, row)
    together = answers(build(tmp_path, max_num_batched_tokens=1000), "embed")
    alone = answers(build(tmp_path, max_num_seqs=1), "embed")
    assert all(np.array_equal(a, b) for a, b in zip(together, alone, strict=True))


def test_every_architecture_has_a_row() -> None:
    others = {"BgeM3EmbeddingModel"}  # a RobertaModel with maps behind it, with a test of its own below
    assert {name for name, _ in ROWS.values()} == {*ENCODERS, *BIDIRECTIONAL} - others
    assert all(hasattr(transformers, name) for name in ENCODERS.keys() - others)


@pytest.mark.parametrize("row", often(list(ROWS)))
def test_every_key_that_transformers_writes_is_known(
    row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_encoder(tmp_path, row)
    read_config(json.loads((tmp_path / "config.json").read_text()))
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"hidden_act": "gelu_10"}, "hidden_act"),
        ({"hidden_size": 30}, "hidden_size"),
        ({"architectures": ["MPNetModel"], "relative_attention_num_buckets": 64}, "num_buckets is 64; it must be 32"),
        ({"architectures": ["BertForSequenceClassification"], "num_labels": 0}, "num_labels"),
        ({"architectures": ["RobertaModel"], "pad_token_id": 500}, "max_position_embeddings is 120; .* above 501"),
    ],
)
def test_other_arithmetic_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], named: str) -> None:
    make_encoder(tmp_path, "Bert/Model")
    values = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(CheckpointError, match=named):
        read_config({**values, **changes})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_model_len": MAX_LEN + 1}, "max_model_len"),
        ({"max_num_batched_tokens": MAX_LEN - 1}, "max_num_batched_tokens"),
        ({"max_itl": 1.0}, "max_itl"),
        ({"tpot_target": 1.0, "scheduling_policy": "deadline"}, "tpot_target"),
        ({"speculative_config": '{"method": "ngram"}'}, "speculative_config"),
        ({"lora_modules": "a=b", "merge_lora": True}, "merge_lora"),
        ({"lora_modules": "a=b"}, "enable_lora"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    make_encoder(tmp_path, "Bert/Model")
    with pytest.raises(ConfigError, match=named):
        build(tmp_path, **settings)


@pytest.mark.parametrize(
    ("modules", "named"),
    [
        ([{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], "config.json"),
        ([{"type": "sentence_transformers.models.LSTM", "path": "2_LSTM"}], "LSTM"),
        ([{"type": "sentence_transformers.models.Pooling", "path": "../elsewhere"}], "path"),
        ([{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}], "config.json"),
        ({}, "list"),
    ],
)
def test_modules_of_other_arithmetic_are_refused_by_name(tmp_path: Path, modules: object, named: str) -> None:
    make_encoder(tmp_path, "Bert/Model")
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match=named):
        build(tmp_path)


def test_linear_maps_behind_the_pooling(tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "Bert/Model")
    first, second = write_dense(tmp_path, [(32, 20), (20, 12)], is_pooled=True)
    _, info = built = build(tmp_path)
    assert (info.embedding_size, info.pooling.token_size) == (12, 32)
    for text, found in zip(TEXTS, answers(built, "embed"), strict=True):
        with torch.inference_mode():
            wanted = second(first(token_vectors(model, text).mean(dim=0)).tanh())
        np.testing.assert_allclose(found, wanted / wanted.norm(), atol=1e-5)


def test_linear_maps_of_tokens(tmp_path: Path) -> None:
    """As in checkpoints of ColBERT's kind, whose vectors of tokens are compared one by one."""
    model = make_encoder(tmp_path, "Bert/Model")
    [linear] = write_dense(tmp_path, [(32, 10)], is_pooled=False)
    _, info = built = build(tmp_path)
    assert (info.tasks, info.pooling.token_size) == (("token_embed",), 10)
    for text, found in zip(TEXTS, answers(built, "token_embed"), strict=True):
        with torch.inference_mode():
            wanted = linear(token_vectors(model, text))
        np.testing.assert_allclose(found, wanted / wanted.norm(dim=1, keepdim=True), atol=1e-5)


def test_sparse_and_token_vectors_of_bge_m3(tmp_path: Path) -> None:
    """Maps in files of their own: vectors of all tokens but the first, weights of all but the first and the last."""
    model = make_encoder(tmp_path, "roberta/far_padding")
    write_pooling(tmp_path, "pooling_mode_cls_token", normalizes=True)
    torch.manual_seed(2)
    vectors, weights = torch.nn.Linear(32, 12), torch.nn.Linear(32, 1)
    torch.save(vectors.state_dict(), tmp_path / "colbert_linear.pt")
    torch.save(weights.state_dict(), tmp_path / "sparse_linear.pt")
    assert build(tmp_path)[1].tasks == ("embed", "token_embed")  # PyTorch files are read if they are asked for
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    _, info = built = build(tmp_path, load_format="pt")
    assert (info.tasks, info.pooling.token_size) == (("embed", "token_embed", "token_classify"), 12)
    tasks: tuple[Task, ...] = ("embed", "token_embed", "token_classify")
    for text, of_text, of_tokens, of_weights in zip(TEXTS, *(answers(built, task) for task in tasks), strict=True):
        with torch.inference_mode():
            x_TD = token_vectors(model, text)
            wanted, counts = vectors(x_TD[1:]), weights(x_TD[1:-1]).relu()
        np.testing.assert_allclose(of_text, x_TD[0] / x_TD[0].norm(), atol=1e-5)
        np.testing.assert_allclose(of_tokens, wanted / wanted.norm(dim=1, keepdim=True), atol=1e-5)
        np.testing.assert_allclose(of_weights, counts, atol=1e-5)
    torch.save({"weight": torch.zeros(12)}, tmp_path / "colbert_linear.pt")
    with pytest.raises(CheckpointError, match=r"colbert_linear\.pt: must hold the weight and the bias"):
        build(tmp_path, load_format="pt")


def test_linear_maps_of_other_sizes_are_refused(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert/Model")
    write_dense(tmp_path, [(31, 20)], is_pooled=True)
    with pytest.raises(CheckpointError, match="in_features is 31"):
        build(tmp_path)


def test_modes_of_pooling_that_are_not_known_are_refused(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert/Model")
    write_pooling(tmp_path, "pooling_mode_max_tokens", True)
    with pytest.raises(CheckpointError, match="pooling_mode_max_tokens"):
        build(tmp_path)


def test_the_longest_text_is_that_which_the_makers_allow(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert/Model")
    assert build(tmp_path)[1].max_model_len == MAX_LEN
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 50, "do_lower_case": false}')
    assert build(tmp_path)[1].max_model_len == 50
    assert build(tmp_path, max_model_len=60)[1].max_model_len == 60


def test_an_encoder_that_is_asked_to_generate_ends_the_request_with_an_error(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert/Model")
    engine, _ = build(tmp_path)
    engine.add(Request(1, [7, 8], SamplingParams(), 4))
    [output] = engine.step()
    assert output.error is not None
    assert "cannot generate" in output.error
    assert not engine.has_work

"""``LLM.embed`` and ``LLM.score``: the same as over HTTP, whatever the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo import LLM, BeamSearchParams, InvalidParameter, RequestError
from tests.models.encoder_families import make_encoder, word_tokenizer, write_dense

TEXTS = ["A bird sings", "in the old tree", "nobody hears it and the birds sing", "a"]


@torch.inference_mode()
def vector_of(model: Any, ids: list[int]) -> np.ndarray:
    mean = model.base_model(torch.tensor([ids]), torch.ones(1, len(ids))).last_hidden_state[0].mean(dim=0)
    return np.asarray(mean / mean.norm())


def test_vectors_and_cosines_of_an_encoder(tmp_path: Path) -> None:
    model, tokenizer = make_encoder(tmp_path, "Bert/Model"), word_tokenizer(has_types=True)
    with LLM(tmp_path, device="cpu", max_num_seqs=2) as llm:
        found = llm.embed([*TEXTS, [7, 8, 9]])
        short = llm.embed(TEXTS[0], dimensions=5)
        scores = llm.score(TEXTS[0], TEXTS[1:])
        pairs = llm.score(TEXTS, TEXTS[::-1])
    ids = [*(tokenizer.encode(text).ids for text in TEXTS), [7, 8, 9]]
    vectors = [vector_of(model, one) for one in ids]
    assert [output.prompt_token_ids for output in found] == ids
    for output, vector in zip(found, vectors, strict=True):
        np.testing.assert_allclose(output.outputs.embedding, vector, atol=1e-5)
    first = vectors[0][:5]
    np.testing.assert_allclose(short[0].outputs.embedding, first / np.linalg.norm(first), atol=1e-5)
    assert [output.outputs.score for output in scores] == pytest.approx(
        [vectors[0] @ v for v in vectors[1:4]], abs=1e-5
    )
    crossed = [a @ b for a, b in zip(vectors[:4], vectors[3::-1], strict=True)]
    assert [output.outputs.score for output in pairs] == pytest.approx(crossed, abs=1e-5)


def test_a_judge_scores_and_makes_no_vectors(tmp_path: Path) -> None:
    model, tokenizer = make_encoder(tmp_path, "bert/judge"), word_tokenizer(has_types=True)
    with LLM(tmp_path, device="cpu") as llm:
        found = llm.score(TEXTS[0], TEXTS)
        with pytest.raises(InvalidParameter, match="it cannot embed"):
            llm.embed(TEXTS)
        for call in (llm.generate, llm.stream, lambda text: llm.beam_search(text, BeamSearchParams(1, 1))):
            with pytest.raises(InvalidParameter, match="it cannot generate"):
                call("a")
    for output, text in zip(found, TEXTS, strict=True):
        pair = tokenizer.encode(TEXTS[0], text)
        with torch.inference_mode():
            logits = model(torch.tensor([pair.ids]), token_type_ids=torch.tensor([pair.type_ids])).logits
        assert output.prompt_token_ids == pair.ids
        assert output.outputs.score == pytest.approx(float(logits.sigmoid()), abs=1e-5)


def test_a_decoder_makes_embeddings_in_a_batch_with_texts(llm: LLM) -> None:
    long = "x" * 200  # several chunks
    alone = llm.embed(long)[0].outputs.embedding
    assert np.linalg.norm(alone) == pytest.approx(1, abs=1e-5)
    assert len(alone) == llm.info.embedding_size
    assert [output.outputs.embedding for output in llm.embed(["a", long])][1] == alone
    assert llm.score(long, [long, "b"])[0].outputs.score == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda llm: llm.embed(["a", ""]), "prompts[1]"),
        (lambda llm: llm.embed(["a", [9999]]), "prompts[1]"),
        (lambda llm: llm.embed("a" * 300), "prompt"),
        (lambda llm: llm.embed("a", dimensions=0), "dimensions"),
        (lambda llm: llm.embed("a", dimensions=33), "dimensions"),
        (lambda llm: llm.embed("a", dimensions="3"), "dimensions"),
        (lambda llm: llm.score(1, "a"), "text_1"),
        (lambda llm: llm.score("a", ["b", 2]), "text_2"),
        (lambda llm: llm.score([], "a"), "text_1"),
        (lambda llm: llm.score("a", []), "text_2"),
        (lambda llm: llm.score(["a", "b"], ["c", "d", "e"]), "text_1"),
    ],
)
def test_bad_texts_are_refused_by_name(call: Any, param: str, llm: LLM) -> None:
    with pytest.raises(RequestError) as found:
        call(llm)
    assert found.value.param == param


def test_a_classifier_has_labels_and_logits(tmp_path: Path) -> None:
    model = make_encoder(tmp_path, "Bert/ForSequenceClassification")
    ids = [[2, 5, 6, 7, 3], [2, 8, 3]]
    with LLM(tmp_path, device="cpu", dtype="float32") as llm:
        assert llm.info.pooling.labels == ("no", "maybe", "yes")
        found, logits, same = llm.classify(ids), llm.reward(ids), llm.encode(ids)
    for i, tokens in enumerate(ids):
        with torch.inference_mode():
            wanted = model(torch.tensor([tokens]), torch.ones(1, len(tokens))).logits[0]
        np.testing.assert_allclose(found[i].outputs.probs, wanted.softmax(dim=-1), atol=1e-5)
        np.testing.assert_allclose(logits[i].outputs.data, wanted, atol=1e-5)
        assert same[i].outputs.data.tolist() == found[i].outputs.probs
        assert (found[i].outputs.num_classes, found[i].prompt_token_ids) == (3, tokens)


def test_texts_are_compared_token_by_token(tmp_path: Path) -> None:
    make_encoder(tmp_path, "Bert/Model")
    write_dense(tmp_path, [(32, 10)], is_pooled=False)
    with LLM(tmp_path, device="cpu", dtype="float32") as llm:
        rows = [output.outputs.data for output in llm.encode(TEXTS[:2])]
        scores = llm.score(TEXTS[0], TEXTS[:2])
    assert [rows[i].shape[1] for i in range(2)] == [10, 10]
    wanted = [(rows[0] @ rows[i].T).max(axis=1).sum() for i in range(2)]
    assert [output.outputs.score for output in scores] == pytest.approx(wanted, abs=1e-5)

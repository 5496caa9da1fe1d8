"""Vectors and scores over HTTP, from tiny random models, read by the openai client too."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import numpy as np
import openai
import pytest
import torch

from octavo.config import ServeConfig
from octavo_server.pooling_requests import MAX_TEXTS
from tests.conftest import Server, start_server
from tests.models.encoder_families import MAX_LEN, make_encoder, word_tokenizer
from tests.server.threaded_server import ThreadedServer

pytestmark = pytest.mark.slow  # real engines

TEXTS = ["A bird sings", "in the old tree", "nobody hears it and the birds sing", "a"]
SETTINGS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 3}


class EncoderServer(ThreadedServer):
    """With the methods of ``Server``."""

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return self.client.post(path, json=body)


class Served:
    """A server, and the model that it must agree with."""

    def __init__(self, folder: Path, row: str, **settings: str) -> None:
        self.model = make_encoder(folder, row)
        self.tokenizer = word_tokenizer(has_types=True)
        self.server: Server | EncoderServer = self._start(
            {"model": str(folder), "served_model_name": "tiny", **SETTINGS, **settings}
        )
        self.client = openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0)

    def _start(self, settings: dict[str, Any]) -> Server | EncoderServer:
        return EncoderServer(ServeConfig.from_flat(settings))

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        response = self.server.post(path, body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def refusal(self, path: str, **body: Any) -> tuple[int, str]:
        response = self.server.post(path, body)
        return response.status_code, response.json()["error"]["param"]

    @torch.inference_mode()
    def vector(self, ids: list[int]) -> np.ndarray:
        mean = self.model(torch.tensor([ids]), torch.ones(1, len(ids))).last_hidden_state[0].mean(dim=0)
        return np.asarray(mean / mean.norm())

    @torch.inference_mode()
    def rows(self, text: str) -> np.ndarray:
        ids = self.tokenizer.encode(text).ids
        return np.asarray(self.model(torch.tensor([ids]), torch.ones(1, len(ids))).last_hidden_state[0])

    @torch.inference_mode()
    def logits(self, *texts: str) -> torch.Tensor:
        pair = self.tokenizer.encode(*texts)
        ids, types = torch.tensor([pair.ids]), torch.tensor([pair.type_ids])
        return self.model(ids, torch.ones_like(ids), token_type_ids=types).logits[0]

    def score(self, first: str, second: str) -> float:
        return float(self.logits(first, second).sigmoid())


class ServedByProcesses(Served):
    """What users start."""

    def _start(self, settings: dict[str, Any]) -> Server:
        flags = ((f"--{name.replace('_', '-')}", str(value)) for name, value in settings.items())
        return start_server(*itertools.chain.from_iterable(flags))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = ServedByProcesses(tmp_path_factory.mktemp("encoder"), "Bert/Model")
    yield served
    served.server.stop()


@pytest.fixture(scope="module")
def sorter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("sorter"), "Bert/ForSequenceClassification")
    yield served
    served.server.stop()


@pytest.fixture
def splade(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path, "Bert/ForMaskedLM", pooling_type="splade")
    yield served
    served.server.stop()


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(tmp_path_factory.mktemp("judge"), "bert/judge")
    yield served
    served.server.stop()


def test_the_openai_client_reads_vectors(encoder: Served) -> None:
    """The client asks for base64 by itself, and for floats when told to."""
    for given in ({}, {"encoding_format": "float"}):
        answer = encoder.client.embeddings.create(model="tiny", input=TEXTS, **given)  # type: ignore[arg-type]
        assert [entry.index for entry in answer.data] == list(range(len(TEXTS)))
        assert answer.model_dump()["id"].startswith("embd-"), "as vLLM has it, and Mistral's client needs it"
        ids = [encoder.tokenizer.encode(text).ids for text in TEXTS]
        for entry, tokens in zip(answer.data, ids, strict=True):
            np.testing.assert_allclose(entry.embedding, encoder.vector(tokens), atol=1e-5)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
        assert answer.model == "tiny"


def test_base64_holds_little_endian_floats(encoder: Served) -> None:
    plain = encoder.post("/v1/embeddings", input="a bird")["data"][0]["embedding"]
    packed = encoder.post("/v1/embeddings", input="a bird", encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), dtype="<f4").tolist() == plain


def test_vectors_of_fewer_dimensions_are_of_length_one_too(encoder: Served) -> None:
    whole = np.array(encoder.post("/v1/embeddings", input="a bird")["data"][0]["embedding"])
    cut = encoder.post("/v1/embeddings", input="a bird", dimensions=7)["data"][0]["embedding"]
    np.testing.assert_allclose(cut, whole[:7] / np.linalg.norm(whole[:7]), atol=1e-6)


def test_vectors_of_the_gemini_api(encoder: Served) -> None:
    contents = [{"parts": [{"text": text}]} for text in TEXTS]
    whole = [entry["embedding"] for entry in encoder.post("/v1/embeddings", input=TEXTS)["data"]]
    cut = encoder.post("/v1/embeddings", input=TEXTS[0], dimensions=7)["data"][0]["embedding"]
    path = "/v1beta/models/tiny"
    assert encoder.post(f"{path}:embedContent", content=contents[0])["embedding"]["values"] == whole[0]
    requests = [{"model": "models/tiny", "content": content, "taskType": "RETRIEVAL_QUERY"} for content in contents]
    answer = encoder.post(f"{path}:batchEmbedContents", requests=requests)
    assert [each["values"] for each in answer["embeddings"]] == whole
    assert answer["usageMetadata"]["promptTokenCount"] == sum(len(encoder.tokenizer.encode(text).ids) for text in TEXTS)
    shorter = {"content": contents[0], "output_dimensionality": 7}
    assert encoder.post(f"{path}:embedContent", **shorter)["embedding"]["values"] == cut
    assert encoder.post(f"{path}:batchEmbedContents", requests=[shorter])["embeddings"] == [{"values": cut}]
    for given in ({"outputDimensionality": 7000}, {"content": {"parts": [{"inlineData": {}}]}}):
        refused = encoder.server.post(f"{path}:embedContent", {"content": contents[0], **given})
        violation = refused.json()["error"]["details"][0]["fieldViolations"][0]
        assert violation["field"] == next(iter(given)), refused.text


def test_inputs_may_be_token_ids(encoder: Served) -> None:
    ids = [encoder.tokenizer.encode(text).ids for text in TEXTS]
    of_text = [entry["embedding"] for entry in encoder.post("/v1/embeddings", input=TEXTS)["data"]]
    assert [entry["embedding"] for entry in encoder.post("/v1/embeddings", input=ids)["data"]] == of_text
    assert encoder.post("/v1/embeddings", input=ids[0])["data"][0]["embedding"] == of_text[0]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [97]}, "input"),
        ({"input": "a " * 119}, "input"),
        ({"input": ["a"] * (MAX_TEXTS + 1)}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 33}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "priority": 1}, "priority"),
    ],
)
def test_bad_fields_are_refused_by_name(encoder: Served, body: dict[str, Any], param: str) -> None:
    assert encoder.refusal("/v1/embeddings", **body) == (400, param)


def test_an_unknown_model_is_not_found(encoder: Served) -> None:
    assert encoder.refusal("/v1/embeddings", model="other", input="a") == (404, "model")


def test_an_encoder_generates_nothing(encoder: Served, judge: Served) -> None:
    assert encoder.refusal("/v1/completions", prompt="a bird") == (400, "model")
    assert judge.refusal("/v1/embeddings", input="a bird") == (400, "model")


def test_without_a_judge_scores_are_cosines(encoder: Served) -> None:
    vectors = [encoder.vector(encoder.tokenizer.encode(text).ids) for text in TEXTS]
    answer = encoder.post("/v1/score", text_1=TEXTS[0], text_2=TEXTS)
    wanted = [float(vectors[0] @ vector) for vector in vectors]
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(wanted, abs=1e-5)
    alike = ["a"] * (MAX_TEXTS + 1)  # one vector, but as many comparisons
    assert encoder.refusal("/v1/rerank", query="a", documents=alike) == (400, "documents")


def test_scores_are_those_of_transformers(judge: Served) -> None:
    answer = judge.post("/v1/score", text_1=TEXTS[0], text_2=TEXTS)
    assert [entry["score"] for entry in answer["data"]] == pytest.approx(
        [judge.score(TEXTS[0], text) for text in TEXTS], abs=1e-5
    )
    pairs = judge.post("/v1/score", text_1=TEXTS, text_2=TEXTS[::-1])["data"]
    assert [entry["score"] for entry in pairs] == pytest.approx(
        [judge.score(*pair) for pair in zip(TEXTS, TEXTS[::-1], strict=True)], abs=1e-5
    )
    assert answer["usage"]["prompt_tokens"] == sum(len(judge.tokenizer.encode(TEXTS[0], text).ids) for text in TEXTS)


def test_documents_are_ranked(judge: Served) -> None:
    scores = [judge.score("old birds", text) for text in TEXTS]
    order = sorted(range(len(TEXTS)), key=lambda i: -scores[i])
    results = judge.post("/v1/rerank", query="old birds", documents=[{"text": TEXTS[0]}, *TEXTS[1:]])["results"]
    assert [result["index"] for result in results] == order
    assert [result["relevance_score"] for result in results] == pytest.approx([scores[i] for i in order], abs=1e-5)
    assert [result["document"]["text"] for result in results] == [TEXTS[i] for i in order]
    best = judge.post("/v1/rerank", query="old birds", documents=TEXTS, top_n=1, return_documents=False)["results"]
    assert best == [{"index": order[0], "relevance_score": results[0]["relevance_score"]}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": "a"}, "text_2"),
        ("/v1/score", {"text_1": [], "text_2": "a"}, "text_1"),
        ("/v1/score", {"text_1": ["a", "bird"], "text_2": ["a", "a", "a"]}, "text_1"),
        ("/v1/score", {"text_1": "a " * 80, "text_2": "a " * 80}, "text_2"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "a"}]}, "documents"),
    ],
)
def test_bad_pairs_are_refused_by_name(judge: Served, path: str, body: dict[str, Any], param: str) -> None:
    assert judge.refusal(path, **body) == (400, param)


def test_a_text_has_a_score_for_each_label(sorter: Served) -> None:
    wanted = [sorter.logits(text).softmax(dim=-1) for text in TEXTS]
    data = sorter.post("/classify", input=TEXTS)["data"]
    for entry, probs in zip(data, wanted, strict=True):
        np.testing.assert_allclose(entry["probs"], probs, atol=1e-5)
        assert (entry["label"], entry["num_classes"]) == (("no", "maybe", "yes")[int(probs.argmax())], 3)
    raw = sorter.post("/classify", input=TEXTS[0], use_activation=False)["data"][0]["probs"]
    np.testing.assert_allclose(raw, sorter.logits(TEXTS[0]), atol=1e-5)
    assert sorter.refusal("/v1/score", text_1="a", text_2="a") == (400, "model")
    assert sorter.refusal("/pooling", input="a", dimensions=3) == (400, "dimensions")


def test_tokens_have_vectors(encoder: Served) -> None:
    [entry] = encoder.post("/pooling", input=TEXTS[0], task="token_embed")["data"]
    rows = encoder.rows(TEXTS[0])
    np.testing.assert_allclose(entry["data"], rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-5)
    [packed] = encoder.post("/pooling", input=TEXTS[0], task="token_embed", encoding_format="base64")["data"]
    found = np.frombuffer(base64.b64decode(packed["data"]), dtype="<f4")
    assert found.tolist() == np.ravel(entry["data"]).tolist()
    [whole] = encoder.post("/pooling", input=TEXTS[0], normalize=False)["data"]
    np.testing.assert_allclose(whole["data"], rows.mean(axis=0), atol=1e-5)
    assert encoder.refusal("/pooling", input="a", task="classify") == (400, "model")


def test_texts_that_are_too_long_may_be_shortened(encoder: Served, judge: Served) -> None:
    words = "a bird " * 80
    for most, side in ((-1, "right"), (7, "right"), (7, "left")):
        fields = {"truncate_prompt_tokens": most, "truncation_side": side}
        encoder.tokenizer.enable_truncation(MAX_LEN if most < 0 else most, direction=side)
        judge.tokenizer.enable_truncation(MAX_LEN if most < 0 else most, direction=side)
        found = encoder.post("/v1/embeddings", input=[words], **fields)
        np.testing.assert_allclose(
            found["data"][0]["embedding"], encoder.vector(encoder.tokenizer.encode(words).ids), atol=1e-5
        )
        for pair in (("a bird sings", words), (words, "a"), (words, words)):
            score = judge.post("/v1/score", text_1=pair[0], text_2=pair[1], **fields)["data"][0]["score"]
            assert score == pytest.approx(judge.score(*pair), abs=1e-5)
    encoder.tokenizer.no_truncation()
    judge.tokenizer.no_truncation()
    assert encoder.refusal("/v1/embeddings", input="a", truncate_prompt_tokens=0) == (400, "truncate_prompt_tokens")
    assert encoder.refusal("/v1/embeddings", input="", truncate_prompt_tokens=5) == (400, "input")


def test_tei_embeds(encoder: Served) -> None:
    vectors = [encoder.vector(encoder.tokenizer.encode(text).ids) for text in TEXTS]
    np.testing.assert_allclose(encoder.server.post("/embed", {"inputs": TEXTS}).json(), vectors, atol=1e-5)
    client = huggingface_hub.InferenceClient(model=encoder.server.url)
    np.testing.assert_allclose(client.feature_extraction(TEXTS[0]), [vectors[0]], atol=1e-5)
    raw = encoder.server.post("/embed", {"inputs": TEXTS[0], "normalize": False}).json()
    np.testing.assert_allclose(raw, [encoder.rows(TEXTS[0]).mean(axis=0)], atol=1e-5)
    of_all = encoder.server.post("/embed_all", {"inputs": TEXTS[:2]}).json()
    for found, text in zip(of_all, TEXTS[:2], strict=True):
        np.testing.assert_allclose(found, encoder.rows(text), atol=1e-5)
    compared = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    found = encoder.server.post("/similarity", {"inputs": compared}).json()
    assert found == pytest.approx([float(vectors[0] @ vector) for vector in vectors], abs=1e-5)
    info = encoder.server.get("/info").json()
    assert (info["model_type"], info["max_input_length"]) == ({"embedding": {"pooling": "auto"}}, MAX_LEN)
    long = {"inputs": "a bird " * 80}
    refused = encoder.server.post("/embed", long)
    assert (refused.status_code, refused.json()["error_type"]) == (400, "Validation")
    assert encoder.server.post("/embed", {**long, "truncate": True}).status_code == 200


def test_sparse_vectors(splade: Served, encoder: Served) -> None:
    for text, found in zip(TEXTS, splade.server.post("/embed_sparse", {"inputs": TEXTS}).json(), strict=True):
        wanted = splade.logits(text).relu().log1p().amax(dim=0)
        assert [entry["index"] for entry in found] == wanted.nonzero()[:, 0].tolist()
        assert [entry["value"] for entry in found] == pytest.approx(wanted[wanted > 0].tolist(), abs=1e-5)
        dense = splade.post("/v1/embeddings", input=text)["data"][0]["embedding"]
        np.testing.assert_allclose(dense, wanted, atol=1e-5)
    refused = encoder.server.post("/embed_sparse", {"inputs": TEXTS})
    assert (refused.status_code, refused.json()["error_type"]) == (400, "Validation")
    assert "splade" in refused.json()["error"]


def test_tei_ranks(judge: Served) -> None:
    scores = [judge.score("old birds", text) for text in TEXTS]
    order = sorted(range(len(TEXTS)), key=lambda i: -scores[i])
    found = judge.server.post("/rerank", {"query": "old birds", "texts": TEXTS, "return_text": True}).json()
    assert [(entry["index"], entry["text"]) for entry in found] == [(i, TEXTS[i]) for i in order]
    assert [entry["score"] for entry in found] == pytest.approx([scores[i] for i in order], abs=1e-5)
    raw = judge.server.post("/rerank", {"query": "old birds", "texts": TEXTS, "raw_scores": True}).json()
    logits = [float(judge.logits("old birds", TEXTS[i])) for i in order]
    assert [entry["score"] for entry in raw] == pytest.approx(logits, abs=1e-5)
    others = judge.post("/rerank", query="old birds", documents=TEXTS)["results"]
    assert others == judge.post("/v2/rerank", query="old birds", documents=TEXTS)["results"]
    assert [entry["index"] for entry in others] == order
    assert judge.server.get("/info").json()["model_type"]["reranker"]["id2label"] == {"0": "LABEL_0"}


def test_tei_predicts(sorter: Served) -> None:
    def wanted(*texts: str) -> list[dict[str, Any]]:
        scores = sorter.logits(*texts).softmax(dim=-1).tolist()
        rows = [{"score": score, "label": name} for score, name in zip(scores, ("no", "maybe", "yes"), strict=True)]
        return sorted(rows, key=lambda row: -row["score"])

    def check(found: list[dict[str, Any]], *texts: str) -> None:
        assert [row["label"] for row in found] == [row["label"] for row in wanted(*texts)]
        assert [row["score"] for row in found] == pytest.approx([row["score"] for row in wanted(*texts)], abs=1e-5)

    check(sorter.server.post("/predict", {"inputs": TEXTS[0]}).json(), TEXTS[0])
    check(sorter.server.post("/predict", {"inputs": TEXTS[:2]}).json(), *TEXTS[:2])
    first, second = sorter.server.post("/predict", {"inputs": [[TEXTS[0]], TEXTS[1:3]]}).json()
    check(first, TEXTS[0])
    check(second, *TEXTS[1:3])
    check(sorter.server.post("/", {"inputs": TEXTS[3]}).json(), TEXTS[3])
    assert sorter.server.post("/predict", {"inputs": ["a", "a", "a"]}).status_code == 400

"""GET /v1/models, POST /tokenize and /detokenize."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.config import ServeConfig
from octavo_server.model_name import served_model_names
from tests.server.conftest import Served
from tests.server.in_process import IM_END, MAX_MODEL_LEN, TEMPLATE


def test_models(served: Served) -> None:
    listed = served.client.get("/v1/models").json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model["id"] == "test"
    assert model["object"] == "model"
    assert model["max_model_len"] == MAX_MODEL_LEN
    assert model["input_modalities"] == ["text"]
    assert model["type"] == "base"  # by which Mistral's SDK knows it
    assert model["max_context_length"] == MAX_MODEL_LEN
    assert model["capabilities"] == {"completion_chat": True, "vision": False}
    assert served.client.get("/v1/models/test").json() == model
    error = served.client.get("/v1/models/owner/other").json()["error"]
    assert error["message"] == "The model `owner/other` does not exist. This server serves `test`."
    assert error["code"] == "model_not_found"
    message = served.client.get("/v1/models/Test").json()["error"]["message"]
    assert message.endswith("This server serves `test`. Names are case-sensitive.")


def test_paths_as_groqs_client_has_them(served: Served) -> None:
    """https://github.com/groq/groq-python: its base URL has no path, and its paths begin with /openai/v1."""
    assert served.client.get("/openai/v1/models").json() == served.client.get("/v1/models").json()
    assert served.client.get("/openai/stats").status_code == 404


def test_a_name_with_slashes(serve_app: Any) -> None:
    served = serve_app(model="owner/name")
    assert served.client.get("/v1/models/owner/name").json()["id"] == "owner/name"


def test_names_of_models(tmp_path: Path) -> None:
    (tmp_path / "tiny.Q4.gguf").touch()
    for model, setting, *names in (
        ("smollm2-135m", None, "smollm2-135m"),
        ("owner/name", None, "owner/name"),
        (str(tmp_path), None, tmp_path.name),
        (str(tmp_path) + "/", None, tmp_path.name),
        (str(tmp_path / "tiny.Q4.gguf"), None, "tiny.Q4"),
        (str(tmp_path), "mine", "mine"),
        (str(tmp_path), " mine, gpt-4o,mine,", "mine", "gpt-4o"),
    ):
        config = ServeConfig.from_flat({"model": model, "served_model_name": setting})
        assert served_model_names(config) == tuple(names)


def test_tokenize_a_prompt(served: Served) -> None:
    response = served.client.post("/tokenize", json={"prompt": "aé<|im_end|>", "return_token_strs": True})
    assert response.json() == {
        "count": 4,
        "max_model_len": MAX_MODEL_LEN,
        "tokens": [97, 0xC3, 0xA9, IM_END],
        "token_strs": ["a", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"],
    }
    assert served.client.post("/tokenize", json={"prompt": "a"}).json()["token_strs"] is None


def test_tokenize_a_conversation(serve_app: Any) -> None:
    served = serve_app()
    messages = [{"role": "user", "content": "Hi"}]
    tokens = served.client.post("/tokenize", json={"messages": messages}).json()["tokens"]
    served.chat(messages=messages)
    assert tokens == served.engine.requests[0].prompt_tokens


def test_detokenize(served: Served) -> None:
    text = "naïve <|im_end|> 😀"
    tokens = served.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert served.client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": text}
    assert served.client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_what_the_tokenizer_is(served: Served, serve_app: Any) -> None:
    info = served.client.get("/tokenizer_info").json()
    assert info.pop("chat_template") == TEMPLATE
    assert info == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": None,
        "model_max_length": MAX_MODEL_LEN,
    }
    assert serve_app(tokenizer=None).client.get("/tokenizer_info").status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "messages"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x" * (MAX_MODEL_LEN * 20)}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_bad_requests(served: Served, path: str, body: dict[str, Any], field: str) -> None:
    response = served.client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field

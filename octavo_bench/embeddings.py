"""Embeddings of texts of mixed lengths beside sentence-transformers: the same texts in turns, compared as ratios."""

from __future__ import annotations

import math
import os
import random
import string
import time
from pathlib import Path
from typing import Any

import numpy as np

from octavo.config import EngineConfig, to_flat
from octavo.llm.llm import LLM
from octavo.system.cpus import default_num_threads
from octavo.text.embedding_vectors import cosine
from octavo.weights.hub import resolve_model
from octavo_bench.records.report import beside
from octavo_bench.serving.peer_process import OFFLINE, SCRIPTS, PeerProcess

MEDIAN_WORDS, SPREAD = 36, 0.9
"""Lengths are log-normal: half of the texts have fewer words, one in forty six times as many."""
MOST_WORDS = 168
"""Of at most three letters, hence tokens, each: no text is longer than 512 tokens."""
FIGURES = ("finish_s", "cpu_s")


def random_texts(count: int) -> list[str]:
    """Texts of words that no vocabulary has as a whole."""
    rng = random.Random(0)
    lengths = [round(rng.lognormvariate(math.log(MEDIAN_WORDS), SPREAD)) for _ in range(count)]
    return [" ".join(_word(rng) for _ in range(max(1, min(length, MOST_WORDS)))) for length in lengths]


def _word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 3)))


def measure(config: EngineConfig, python: Path, texts: int, rounds: int, batch: int = 32) -> dict[str, Any]:
    """``compare`` with an interpreter that has sentence-transformers, on the same device and in the same data type.

    It computes ``batch`` texts at a time, of like length.
    """
    model, threads = resolve_model(config.model), default_num_threads()
    plain, values = to_flat(EngineConfig()), to_flat(config)
    given = {name: value for name, value in values.items() if value != plain[name] and name != "model"}
    script = str(SCRIPTS / "run_sentence_transformers.py")
    llm = LLM(model, **given)
    device, dtype = llm.info.device, llm.info.dtype
    command = [str(python), script, str(model), str(threads), device, dtype, str(batch)]
    peer = PeerProcess(command, {**os.environ, **OFFLINE, "TOKENIZERS_PARALLELISM": "true"})
    try:
        row = compare(llm, peer, texts, rounds)
    finally:
        peer.close()
    about = {"model": config.model.model, "device": device, "dtype": dtype, "quantization": config.model.quantization}
    return {**about, "threads": threads, "peer": peer.about, "rows": [row]}


def compare(llm: LLM, peer: PeerProcess, count: int, rounds: int) -> dict[str, Any]:
    """Seconds of both, by the clock and of processors: medians, and those of the peer's over ours, round by round.

    Also the cosine of both engines' vectors of one text. The first round is not counted.
    """
    texts = random_texts(count)
    pairs = [(_run(llm, texts), peer.run({"texts": texts})) for _ in range(rounds + 1)]
    ours, theirs = (answer["first"] for answer in pairs[0])
    row: dict[str, Any] = {"num_texts": count, "cosine": round(cosine(np.asarray(ours), np.asarray(theirs)), 6)}
    return row | {figure: beside([(a[figure], b[figure]) for a, b in pairs[1:]], 3, "less") for figure in FIGURES}


def _run(llm: LLM, texts: list[str]) -> dict[str, Any]:
    start, cpu = time.perf_counter(), time.process_time()
    outputs = llm.embed(texts)
    times = {"finish_s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu}
    return {**times, "first": outputs[0].outputs.embedding}

"""Adapters on a CUDA device, through graphs: the tokens of the models that PEFT merges them into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.making import serve
from tests.models.test_adapters import COUNT, KINDS, PROMPT, Made, ask

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    kinds = [KINDS[i % len(KINDS)] for i in range(COUNT)]
    return Made(tmp_path_factory.mktemp("adapters"), "llama/biases", kinds)


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"batch_invariant": True}], ids=str)
def test_sixteen_adapters_and_none_in_one_batch(made: Made, settings: dict[str, Any]) -> None:
    engine = made.build(device="cuda", max_loras=COUNT, **settings)
    requests = [ask(i, name, PROMPT) for i, name in enumerate(made.models)]
    for request, outputs in zip(requests, serve(engine, requests).values(), strict=True):
        made.check(request.adapter, PROMPT, outputs)


def test_graphs_serve_adapters_that_are_loaded_later(made: Made) -> None:
    engine = made.build(["a0"], device="cuda", max_loras=2)
    made.check("a0", PROMPT, serve(engine, [ask(0, "a0", PROMPT)])[0])
    engine.adapters.load("a3", made.paths["a3"])
    requests = [ask(1, "a0", PROMPT), ask(2, "a3", PROMPT), ask(3, "", PROMPT)]
    for request, outputs in zip(requests, serve(engine, requests).values(), strict=True):
        made.check(request.adapter, PROMPT, outputs)
    engine.adapters.unload("a0")
    engine.adapters.load("a1", made.paths["a1"])
    made.check("a1", PROMPT, serve(engine, [ask(4, "a1", PROMPT)])[4])


def test_batch_invariant_bits_of_an_adapters_rows_do_not_depend_on_the_batch(made: Made, tmp_path: Path) -> None:
    engine = made.build(device="cuda", max_loras=COUNT, batch_invariant=True, dtype="bfloat16")
    alone = serve(engine, [ask(0, "a0", PROMPT[:30])])[0]
    beside = serve(engine, [ask(1, "", PROMPT), ask(2, "a0", PROMPT[:30]), ask(3, "a3", PROMPT)])[2]
    assert [output.logprobs for output in alone] == [output.logprobs for output in beside]

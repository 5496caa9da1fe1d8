"""The default model's weights, greedy tokens and log-probabilities against those of transformers in float32."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.weights.checkpoint import open_checkpoint
from octavo.weights.gguf.block_formats import BlockTensor, dequantize
from tests.gguf_reference import read_once
from tests.tiers import nightly_after

pytestmark = [pytest.mark.model, pytest.mark.slow]

LENGTHS = [33, 5, 8, 6, 11, 16, 17, 31, 32, 48, 64, 100, 127, 256, 300, 511, 1100]
SHORT = 3, 24
"""So many prompts, and so many tokens of each."""
LONG = len(LENGTHS), 64
CACHE: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 32, "max_num_seqs": 32}
"""Every prompt with its answer takes several blocks, and the first prompt more than one step."""
TIE = 1e-3
"""Where the reference's two best logits are closer than this, either token is right."""


@pytest.fixture(scope="module")
def llm(default_model_path: Path) -> Any:
    with LLM(str(default_model_path), dtype="float32", **CACHE) as llm:
        yield llm


@pytest.fixture(scope="module")
def reference(default_model_path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    folder, file = default_model_path.parent, default_model_path.name
    with read_once():
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()


def prompts(llm: LLM, count: int) -> list[list[int]]:
    """Stretches of ordinary English text, of the lengths above, no two with the same beginning."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    tokens = llm.get_tokenizer().encode(text)
    return [tokens[17 * i : 17 * i + length] for i, length in enumerate(LENGTHS[:count])]


def test_every_weight_equals_the_reference(default_model_path: Path, reference: Any) -> None:
    checkpoint = open_checkpoint(default_model_path)
    parameters = dict(reference.named_parameters())
    assert checkpoint.names() == set(parameters)
    for name, parameter in parameters.items():
        found = checkpoint.load(name, tuple(parameter.shape))
        dense = torch.from_numpy(dequantize(found)) if isinstance(found, BlockTensor) else found
        assert torch.equal(dense, parameter.detach()), name
    for key in ("hidden_size", "head_dim", "rms_norm_eps", "vocab_size", "tie_word_embeddings", "num_key_value_heads"):
        assert checkpoint.config[key] == getattr(reference.config, key)
    assert checkpoint.generation_config["eos_token_id"] == reference.generation_config.eos_token_id


@pytest.mark.parametrize(("count", "num_tokens"), nightly_after(1, (SHORT, LONG)))
def test_greedy_tokens_equal_the_reference(llm: LLM, reference: Any, count: int, num_tokens: int) -> None:
    """Batched, chunked and paged, every prompt's greedy tokens are the reference's own."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=1)
    ties = 0
    asked = prompts(llm, count)
    for prompt, result in zip(asked, llm.generate(asked, params), strict=True):
        output = result.outputs[0]
        known: list[int] = []
        tokens, logprobs = list(output.token_ids), list(output.logprobs or [])
        while True:
            with torch.inference_mode():
                given = torch.tensor([prompt + known + tokens])
                rows = reference(given, logits_to_keep=len(tokens) + 1).logits[0, :-1].float()
            parted = compare(rows, tokens, logprobs)
            if parted is None:
                break
            # A tie: go on from the reference's own token.
            ties += 1
            known += [*tokens[:parted], int(rows[parted].argmax())]
            rest = num_tokens - len(known)
            if not rest:
                break
            again = SamplingParams(temperature=0, max_tokens=rest, ignore_eos=True, logprobs=1)
            output = llm.generate([prompt + known], again)[0].outputs[0]
            tokens, logprobs = list(output.token_ids), list(output.logprobs or [])
    print(f"{count} prompts, {num_tokens} tokens each, {ties} ties resolved from the reference")
    assert ties <= 3


def compare(rows: torch.Tensor, tokens: list[int], logprobs: list[Any]) -> int | None:
    """Check tokens and log-probabilities row by row; the first row that parts from the reference, if it is a tie."""
    expected = torch.log_softmax(rows, -1)
    for i, token in enumerate(tokens):
        best = rows[i].topk(2)
        if token != int(best.indices[0]):
            gap = float(best.values[0] - best.values[1])
            assert gap < TIE, f"token {i}: {token}, the reference has {int(best.indices[0])} by {gap}"
            return i
        ours = logprobs[i][token].logprob
        assert math.isclose(ours, float(expected[i, token]), abs_tol=2e-3), f"log-probability of token {i}"
    return None

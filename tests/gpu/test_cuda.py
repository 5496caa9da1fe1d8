"""The engine on a CUDA device gives what it gives on the CPU. Skipped where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.ops.sampling.noise import exponentials, token_hashes
from octavo_bench.offline import wait_until_prepared
from tests.gpu.checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = [[(7 * i + 3 * j) % 128 for j in range(length)] for i, length in enumerate([1, 5, 16, 17, 64, 150])]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama."""
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def generate(folder: Path, device: str, dtype: str, params: SamplingParams) -> list[tuple[list[int], list[float]]]:
    settings = {"block_size": 16, "num_kv_blocks": 64, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    with LLM(str(folder), device=device, dtype=dtype, **settings) as llm:
        outputs = [result.outputs[0] for result in llm.generate(PROMPTS, params)]
    return [
        (list(o.token_ids), [row[t].logprob for row, t in zip(o.logprobs or [], o.token_ids, strict=True)])
        for o in outputs
    ]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=24, ignore_eos=True, logprobs=1),
        SamplingParams(
            temperature=1,
            top_k=20,
            min_p=0.01,
            repetition_penalty=1.1,
            seed=6,
            max_tokens=24,
            ignore_eos=True,
            logprobs=1,
        ),
    ],
)
def test_tokens_and_logprobs_are_those_of_the_cpu(checkpoint: Path, params: SamplingParams) -> None:
    on_cpu = generate(checkpoint, "cpu", "float32", params)
    on_gpu = generate(checkpoint, "cuda", "float32", params)
    for (tokens, logprobs), (expected, expected_logprobs) in zip(on_gpu, on_cpu, strict=True):
        assert tokens == expected
        assert logprobs == pytest.approx(expected_logprobs, abs=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_types_run(checkpoint: Path, dtype: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
    for tokens, logprobs in generate(checkpoint, "cuda", dtype, params):
        assert len(tokens) == 8
        assert all(logprob <= 0 for logprob in logprobs)


def test_noise_is_the_same_on_every_device() -> None:
    hashes = token_hashes(49152, torch.device("cpu"))
    for position in (0, 1, 77, 100_000):
        on_cpu = exponentials(hashes, 2**63 + 5, position)
        on_gpu = exponentials(hashes.cuda(), 2**63 + 5, position).cpu()
        assert torch.allclose(on_cpu, on_gpu, rtol=1e-6, atol=0)


def test_an_engine_finds_the_memory_of_the_one_before_it(tmp_path: Path) -> None:
    """Each takes most of the device, in one piece, in which the next one's weights of more than 1 MiB must not lie."""
    write_checkpoint(tmp_path, "llama", hidden_size=1024, intermediate_size=2048)
    for _ in range(3):
        with LLM(str(tmp_path), device="cuda", gpu_memory_utilization=0.7) as llm:
            assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids
            wait_until_prepared()


@pytest.mark.parametrize("num_kv_blocks", [64, 20], ids=["roomy", "tight"])
def test_guesses_change_nothing(checkpoint: Path, num_kv_blocks: int) -> None:
    """Among requests that want log-probabilities, so that steps of the host's and of the device's own alternate."""
    settings = {"block_size": 16, "max_num_batched_tokens": 48, "max_num_seqs": 8, "dtype": "float32"}
    params = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1 if i % 3 == 2 else None)
        for i in range(len(PROMPTS))
    ]
    with LLM(str(checkpoint), device="cuda", num_kv_blocks=64, **settings) as llm:
        expected = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params)]
    guesses = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    with LLM(
        str(checkpoint), device="cuda", num_kv_blocks=num_kv_blocks, speculative_config=guesses, **settings
    ) as llm:
        found = [result.outputs[0].token_ids for result in llm.generate(PROMPTS, params)]
        stats = llm.engine.stats()
        llm.engine.check()
    assert found == expected
    assert 0 < stats.num_accepted_drafts <= stats.num_drafts

"""A sequence's tokens and log-probabilities are those of its solo run, to the bit, whatever runs beside it.

The model is small, but computed as a real one is: block weights of several kinds, a 16-bit cache, recorded steps.
In a quarter of the mixes kinds also differ within a layer's query, key and value.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.models.layer_cache import kv_groups
from octavo.models.registry import load_model, read_config
from octavo.quant.checkpoint_tensors import Part
from octavo.quant.stored.stored_weight import WeightFormat
from octavo.runtime.executors.forward import make_forward
from octavo.runtime.kv_storage import KVStorage
from octavo.sampling_params import SamplingParams
from octavo.steps.limits import StepLimits
from octavo.types import Request
from octavo_kernels.cpu import threads
from tests.ops.cpu_cases import needs_float_kernels, random_blocks
from tests.runtime.making import CPU, host_runner
from tests.tiers import nightly_after

pytestmark = needs_float_kernels
VOCAB = 331
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
MIXES, QUICK_MIXES = 100, 16


KINDS = ("Q4_1", "Q4_0", "Q5_1")


class BlockSource:
    """Random weights: matrices in blocks, of a kind that goes by the name."""

    is_dummy = True
    config = CONFIG

    def __init__(self, is_mixed: bool) -> None:
        """Unless kinds ``is_mixed``, matrices that take the same input are of one."""
        self.is_mixed = is_mixed

    def names(self) -> set[str]:
        return set()

    def load(self, name: str, shape: tuple[int, ...]) -> Part:
        seed = sum(name.encode())
        if len(shape) == 1:
            return 1 + torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2
        together = {"o_proj": 1, "down_proj": 2}.get(name.split(".")[-2], 0)
        kind = "Q8_0" if "embed" in name else KINDS[seed % 3 if self.is_mixed else together]
        return random_blocks(kind, *shape, seed=seed)


class Loaded:
    def __init__(self, is_mixed: bool) -> None:
        source: Any = BlockSource(is_mixed)
        self.config = read_config(CONFIG)
        self.model = load_model(self.config, source, WeightFormat(torch.float32, CPU, packs=True)).model

    def engine(self, num_blocks: int, block_size: int, batch: int, chunk: int, caching: bool) -> Engine:
        storage = KVStorage(
            self.config.cache, kv_groups(self.config.cache), [num_blocks], block_size, torch.float16, CPU
        )
        storage.pools[0][0].fill_(torch.nan)
        cache = KVCache(num_blocks, block_size, caching)
        scheduler = Scheduler(cache, max_num_seqs=batch, max_num_batched_tokens=max(chunk, batch))
        self.forward = make_forward(self.model, storage.layers, CPU)
        limits = StepLimits(batch, max(chunk, batch), num_blocks)
        runner = host_runner(self.model, storage, VOCAB, limits, self.forward)
        return Engine(scheduler, runner)


Answer = tuple[list[int], list[float]]


def answers(engine: Engine, requests: list[Request], choose: random.Random) -> dict[int, Answer]:
    """Tokens and log-probabilities of requests that arrive at random moments."""
    waiting, found = list(requests), {request.id: Answer(([], [])) for request in requests}
    while waiting or engine.has_work:
        for _ in range(choose.choice([0, 1, 1, 3])):
            if waiting:
                engine.add(waiting.pop())
        for output in engine.step() if engine.has_work else []:
            assert output.error is None
            tokens, logprobs = found[output.request_id]
            tokens.extend(output.tokens)
            logprobs.extend(entry.logprob for entry in output.logprobs or [])
    return found


def random_requests(choose: random.Random) -> list[Request]:
    """One to sixteen, some of which begin alike."""
    shared = [choose.randrange(VOCAB) for _ in range(160)]
    requests = []
    for i in range(choose.randint(1, 16)):
        own = [choose.randrange(VOCAB) for _ in range(choose.choice([1, 3, 17, 60, 150]))]
        prompt = shared[: choose.choice([0, 0, 33, 64, 160])] + own
        params = SamplingParams(temperature=choose.choice([0.0, 0.8, 1.0]), logprobs=2, ignore_eos=True)
        requests.append(Request(i + 1, prompt, params, choose.randint(1, 40), seed=choose.randrange(2**40)))
    return requests


@pytest.mark.parametrize("mixes", nightly_after(1, (QUICK_MIXES, MIXES)))
@pytest.mark.parametrize("part", nightly_after(2, (0, 3, 1, 2)))
def test_random_mixes_give_the_bits_of_solo_runs(part: int, mixes: int) -> None:
    loaded = Loaded(is_mixed=part == 3)
    preempted = recorded = 0
    try:
        for mix in range(part, mixes, 4):
            choose = random.Random(mix)
            requests = random_requests(choose)
            threads.set_num_threads(choose.choice([1, 2, 3, 32]))
            block_size = choose.choice([4, 5, 16, 32])
            longest = max(len(request.prompt_tokens) + request.max_tokens for request in requests)
            num_blocks = -(-longest // block_size) * choose.choice([1, 2, 5]) + 1  # often too few: preemption
            engine = loaded.engine(
                num_blocks,
                block_size,
                choose.choice([1, 4, 16]),
                choose.choice([7, 16, 50, 512]),
                choose.random() < 0.5,
            )
            together = answers(engine, requests, choose)
            preempted += engine.scheduler.stats.num_preemptions
            recorded += len(loaded.forward._steps)
            threads.set_num_threads(1)
            solo = loaded.engine(60, 16, 1, 512, False)
            for request in requests:
                alone = answers(solo, [request], choose)
                assert together[request.id] == alone[request.id], (mix, request.id)
    finally:
        threads.set_num_threads(1)
    assert preempted, "no mix was short of blocks"
    assert recorded, "no step was recorded"

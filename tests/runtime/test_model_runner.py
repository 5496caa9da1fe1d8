"""The runner under the real engine: the tokens of transformers, whatever the batch, the chunks and the blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.runner.step_encoder import NOT_NUMBERS
from octavo.engine.scheduler import Scheduler
from octavo.engine.speculative.speculation import Speculation
from octavo.errors import RunnerError
from octavo.layers.embedding import Embedding
from octavo.models.layer_cache import kv_groups
from octavo.models.registry import load_model, read_config
from octavo.quant.stored.stored_weight import DenseWeight, WeightFormat
from octavo.runtime.executors import step_program
from octavo.runtime.kv_storage import KVStorage
from octavo.sampling_params import SamplingParams
from octavo.steps.limits import StepLimits
from octavo.types import Output, Request, Scheduled, Sequence
from tests.models import families
from tests.models.checkpoints import FolderSource, make_checkpoint
from tests.runtime.making import CPU, host_runner
from tests.speculating import speculating
from tests.tiers import one_in

VOCAB = 97


class Loaded:
    """One small model, and engines around it."""

    def __init__(self, folder: Path, family: str | None = None) -> None:
        """Llama, or a row of ``families``."""
        self.reference: Any = families.make_checkpoint(folder, family) if family else make_checkpoint(folder, "gqa")
        source = FolderSource(folder)
        self.config = read_config(source.config)
        self.model = load_model(self.config, source, WeightFormat(torch.float32, CPU)).model
        self.known: dict[tuple[tuple[int, ...], int], list[int]] = {}
        """What transformers generates: several tests ask for the same."""

    def engine(
        self,
        num_blocks: int = 100,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        depth: int = 1,
        speculation: Speculation | None = None,
    ) -> Engine:
        storage = KVStorage(
            self.config.cache, kv_groups(self.config.cache), [num_blocks], block_size, torch.float32, CPU
        )
        storage.pools[0][0].fill_(torch.nan)
        scheduler = Scheduler(
            KVCache(num_blocks, block_size),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            speculation=speculation,
        )
        limits = StepLimits(max_num_seqs, max_num_batched_tokens, 120 // block_size, max_drafts=4)
        runner = host_runner(self.model, storage, VOCAB, limits)
        return Engine(scheduler, runner, depth=depth)

    def logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            result: torch.Tensor = self.reference(torch.tensor([tokens])).logits[0]
        return result

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """What transformers generates."""
        key = tuple(prompt), count
        if key not in self.known:
            self.known[key] = self._greedy(prompt, count)
        return self.known[key]

    def _greedy(self, prompt: list[int], count: int) -> list[int]:
        with torch.inference_mode():
            found = self.reference.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt)),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        tokens: list[int] = found[0, len(prompt) :].tolist()
        return tokens


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded(tmp_path_factory.mktemp("model"))


def run(engine: Engine, requests: list[Request]) -> dict[int, list[Output]]:
    outputs: dict[int, list[Output]] = {request.id: [] for request in requests}
    for request in requests:
        engine.add(request)
    for _ in range(2000):
        if not engine.has_work:
            return outputs
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check()
    raise AssertionError("the engine does not come to an end")


def tokens_of(outputs: dict[int, list[Output]]) -> dict[int, list[int]]:
    return {key: [token for output in some for token in output.tokens] for key, some in outputs.items()}


def requests(count: int, **params: Any) -> list[Request]:
    rng = random.Random(5)
    lengths = [rng.choice([1, 3, 17, 40, 60]) for _ in range(count)]
    return [
        Request(i, rng.choices(range(VOCAB), k=length), SamplingParams(**params), 12 + i % 5, seed=i)
        for i, length in enumerate(lengths)
    ]


MIXED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 20, "repetition_penalty": 1.2},
    {"temperature": 0, "presence_penalty": 0.5, "logprobs": 2},
    {"temperature": 1, "min_p": 0.05, "min_tokens": 3, "stop_token_ids": (1, 2, 3), "logit_bias": {7: 2.0}},
]
ENGINES: list[dict[str, Any]] = [
    {},
    {"block_size": 1, "num_blocks": 300},
    {"block_size": 16, "max_num_batched_tokens": 9},
    {"depth": 2},
    {"num_blocks": 22, "block_size": 4},
    {"num_blocks": 22, "block_size": 4, "depth": 2},
]


@pytest.mark.parametrize("settings", ENGINES, ids=str)
def test_greedy_tokens_are_those_of_transformers(loaded: Loaded, settings: dict[str, Any]) -> None:
    some = requests(10, temperature=0)
    found = tokens_of(run(loaded.engine(**settings), some))
    assert found == {r.id: loaded.greedy(r.prompt_tokens, r.max_tokens) for r in some}


@one_in(5)
@pytest.mark.parametrize("settings", ENGINES, ids=str)
def test_mixed_requests_give_what_each_gives_alone(loaded: Loaded, settings: dict[str, Any]) -> None:
    some = [
        Request(r.id, r.prompt_tokens, SamplingParams(**MIXED[r.id % 5]), r.max_tokens, r.seed) for r in requests(15)
    ]
    alone = [tokens_of(run(loaded.engine(), [request]))[request.id] for request in some]
    engine = loaded.engine(**settings)
    together = tokens_of(run(engine, some))
    assert [together[request.id] for request in some] == alone
    if settings.get("num_blocks") == 22:
        assert engine.stats().num_preemptions > 0


def test_a_replayed_request_goes_on_with_the_same_tokens(loaded: Loaded) -> None:
    params = SamplingParams(temperature=1, frequency_penalty=0.5, min_tokens=3)
    request = Request(0, [5, 6, 7], params, 20, seed=3)
    whole = tokens_of(run(loaded.engine(), [request]))[0]
    rest = Request(0, [5, 6, 7], params, 20, seed=3, output_tokens=whole[:8])
    assert whole[:8] + tokens_of(run(loaded.engine(), [rest]))[0] == whole


def test_drafts_change_no_token(loaded: Loaded) -> None:
    some = [
        Request(r.id, r.prompt_tokens, SamplingParams(**MIXED[r.id % 5]), r.max_tokens, r.seed) for r in requests(10)
    ]
    plain_engine = loaded.engine()
    plain = run(plain_engine, some)
    expected, rng = tokens_of(plain), random.Random(1)

    def guesses(seq: Sequence) -> list[int]:
        """What will come, with mistakes."""
        coming = expected[seq.id][seq.num_output_tokens : seq.num_output_tokens + 3]
        return [token if rng.random() < 0.7 else (token + 1) % VOCAB for token in coming]

    engine = loaded.engine(speculation=speculating(guesses))
    found = run(engine, some)
    assert tokens_of(found) == tokens_of(plain)
    assert engine.stats().num_steps < plain_engine.stats().num_steps
    for request in some:
        if request.params.logprobs is not None:
            counts = [len(output.logprobs or []) for output in found[request.id]]
            assert counts == [len(output.tokens) for output in found[request.id]]


def test_logprobs_are_those_of_transformers(loaded: Loaded) -> None:
    request = Request(0, list(range(30)), SamplingParams(temperature=0, logprobs=3), 10)
    outputs = run(loaded.engine(max_num_batched_tokens=8), [request])[0]
    tokens = [token for output in outputs for token in output.tokens]
    expected = loaded.logits([*request.prompt_tokens, *tokens]).log_softmax(-1)[29:-1]
    found = [entry for output in outputs for entry in output.logprobs or []]
    assert [entry.token_id for entry in found] == tokens
    for row, entry in zip(expected, found, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.top_logprobs == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


@pytest.mark.parametrize("rows_at_once", [3, 128])
def test_prompt_logprobs_cover_the_prompt_after_its_first_token(
    loaded: Loaded, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_program, "LOGPROB_ROWS", rows_at_once)
    rng = random.Random(2)
    some = [
        Request(i, rng.choices(range(VOCAB), k=length), SamplingParams(prompt_logprobs=i % 3), 2)
        for i, length in enumerate((1, 2, 33, 20))
    ]
    outputs = run(loaded.engine(max_num_batched_tokens=11), some)
    for request in some:
        prompt = request.prompt_tokens
        expected = loaded.logits(prompt).log_softmax(-1)
        found = {
            output.prompt_logprobs_start + i: entry
            for output in outputs[request.id]
            for i, entry in enumerate(output.prompt_logprobs or [])
        }
        assert sorted(found) == list(range(1, len(prompt)))
        for position, entry in found.items():
            row = expected[position - 1]
            assert entry.token_id == prompt[position]
            assert entry.logprob == pytest.approx(float(row[prompt[position]]), abs=1e-4)
            assert entry.rank == int((row > row[prompt[position]]).sum()) + 1
            assert len(entry.top_ids) == request.id % 3


def test_a_mask_restricts_its_own_sequence(loaded: Loaded) -> None:
    engine = loaded.engine()
    mask = np.zeros(13, dtype=np.uint8)
    mask[5] = 1  # token 40
    params = [SamplingParams(temperature=0), SamplingParams(temperature=0, grammar="40")]
    seqs = [Sequence(Request(i, [1, 2, 3], params[i], 5)) for i in range(2)]
    for i, seq in enumerate(seqs):
        seq.groups[0].block_table = [i]
    plan = [Scheduled(seq, 0, (1, 2, 3), (), True, 0) for seq in seqs]
    free, bound = engine.runner.submit(plan).sample({1: [mask]})
    assert free.tokens == loaded.greedy([1, 2, 3], 1) != [40]
    assert bound.tokens == [40]


def test_stale_items_are_skipped_and_others_are_not(loaded: Loaded) -> None:
    runner = loaded.engine().runner
    seqs = [Sequence(Request(i, [1, 2, 3], SamplingParams(temperature=0), 5)) for i in range(3)]
    for i, seq in enumerate(seqs):
        seq.groups[0].block_table = [i]
    pending = runner.submit([Scheduled(seq, 0, (1, 2, 3), (), True, 0) for seq in seqs])
    for seq in (seqs[0], seqs[2]):
        seq.epoch += 1
    assert [sampled.tokens for sampled in pending.sample({})] == [[], loaded.greedy([1, 2, 3], 1), []]


def test_a_failed_pass_is_a_runner_error_and_only_the_guilty_ends(loaded: Loaded) -> None:
    good = requests(3, temperature=0)
    outputs = run(loaded.engine(), [*good, Request(9, [1, VOCAB + 5], SamplingParams(), 3)])
    assert "IndexError" in (outputs[9][-1].error or "")
    found = tokens_of(outputs)
    assert all(found[r.id] == loaded.greedy(r.prompt_tokens, r.max_tokens) for r in good)
    bad = Sequence(Request(1, [VOCAB], SamplingParams(), 1))
    bad.groups[0].block_table = [0]
    with pytest.raises(RunnerError, match="IndexError"):
        loaded.engine().runner.submit([Scheduled(bad, 0, (VOCAB,), (), True, 0)]).sample({})


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
def test_logits_that_are_not_numbers_end_their_sequence_only(
    loaded: Loaded, prompt_logprobs: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = requests(3, temperature=0)
    expected = {r.id: loaded.greedy(r.prompt_tokens, r.max_tokens) for r in good}
    embedding: Embedding = loaded.model.embedding  # type: ignore[attr-defined]
    assert embedding.weight.dense_NK is not None
    broken = embedding.weight.dense_NK.clone()
    broken[96] = torch.nan
    monkeypatch.setattr(embedding, "weight", DenseWeight(broken))
    safe = [r for r in good if 96 not in [*r.prompt_tokens, *expected[r.id]]]
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    outputs = run(loaded.engine(), [*safe, Request(9, [96, 1, 2], params, 5)])
    assert (outputs[9][-1].finish_reason, outputs[9][-1].error) == ("error", NOT_NUMBERS)
    assert safe
    assert {r.id: tokens_of(outputs)[r.id] for r in safe} == {r.id: expected[r.id] for r in safe}

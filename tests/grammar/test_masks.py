"""The engine's masks: over the oracle, whatever happens to sequences, a text is what a plain loop writes."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from octavo.cache.kv_cache import KVCache
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.engine.speculative.speculation import Speculation
from octavo.grammar import forms
from octavo.grammar.masks import TOO_SLOW, MatcherMasks, MatcherProgress
from octavo.grammar.matchers import GrammarError, compile_matcher, fill_mask, make_tokenizer, new_mask, normalised
from octavo.grammar.vocabulary import Vocabulary
from octavo.sampling_params import SamplingParams
from octavo.types import Masks, Output, Plan, Request, Sampled, Scheduled
from tests.grammar.walks import allowed
from tests.oracle import VOCAB_SIZE, OracleRunner, Tables, ToyProposer, Trouble, choose, digest, empty_digest
from tests.speculating import speculating
from tests.tiers import one_in

EOS = VOCAB_SIZE - 1
CHARACTERS = '{}[]":,0123456789 abcdefghijklmnopqrstuvwxyz-_.n'
TOKENS = [character.encode() for character in CHARACTERS[: VOCAB_SIZE - 2]]
TOKENS += [b""] * (VOCAB_SIZE - 1 - len(TOKENS)) + [b"<eos>"]
VOCABULARY = Vocabulary(TOKENS, [EOS], [EOS])
GRAMMARS = [
    forms.grammar_text(part)
    for part in (
        forms.regex("[a-z]{3,}-[0-9]{2}"),
        forms.choice(["abc", "abcdef", "xyz"]),
        forms.json_schema({"type": "object", "properties": {"ab": {"type": "integer"}}, "required": ["ab"]}),
        forms.json_schema({"type": "array", "items": {"enum": [1, "x", None]}, "minItems": 2}),
        forms.grammar('start: "[" start "]" | "a"'),
    )
]


class AsSets(Mapping[int, list[set[int]]]):
    """Bit masks in the form that the oracle takes."""

    def __init__(self, masks: Masks) -> None:
        self.masks = masks

    def __getitem__(self, key: int) -> list[set[int]]:
        return [set(allowed(mask)) for mask in self.masks[key]]

    def __iter__(self) -> Iterator[int]:
        return iter(self.masks)

    def __len__(self) -> int:
        return len(self.masks)


class SetMasks(MatcherMasks):
    def masks(self, plan: Plan) -> Masks:
        return AsSets(super().masks(plan))


def expected(request: Request) -> tuple[list[int], str]:
    """All output of a request, by a plain loop over a matcher of its own."""
    tokenizer = make_tokenizer(VOCABULARY)
    matcher = compile_matcher(normalised(request.params.grammar or ""), tokenizer)
    mask, prefix = new_mask(tokenizer), empty_digest("")
    for token in request.prompt_tokens:
        prefix = digest(prefix, token)
    output: list[int] = []
    has_ended = False
    while len(output) < request.max_tokens:
        fill_mask(matcher, mask)
        bound = None if has_ended else allowed(mask)
        token = choose(request, len(request.prompt_tokens) + len(output), prefix, bound)
        output.append(token)
        if token in request.eos_token_ids:
            return output, "stop"
        has_ended = has_ended or token == EOS
        assert has_ended or matcher.consume_token(token)
        prefix = digest(prefix, token)
    return output, "length"


def random_request(rng: random.Random, request_id: int) -> Request:
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 20))]
    grammar = rng.choice(GRAMMARS)
    params = SamplingParams(grammar=grammar, logprobs=rng.choice([None, 0]))
    ends = (EOS,) if rng.random() < 0.8 else ()
    request = Request(request_id, prompt, params, max_tokens=rng.randrange(1, 30), eos_token_ids=ends)
    if rng.random() < 0.3:
        output, _ = expected(request)
        done = output[: rng.randrange(len(output))]
        request = Request(request_id, prompt, params, request.max_tokens, 0, ends, done)
    return request


@one_in(3)
@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [False, True])
def test_any_workload_gives_what_a_plain_loop_gives(depth: int, drafts: bool) -> None:
    num_preemptions = num_faults = 0
    for seed in range(12):
        rng = random.Random(seed)
        requests = [random_request(rng, index) for index in range(rng.randrange(4, 9))]
        speculation = Speculation(ToyProposer(rng), 4) if drafts else None
        scheduler = Scheduler(KVCache(13, 4), max_num_seqs=8, max_num_batched_tokens=32, speculation=speculation)
        runner = OracleRunner(4, Trouble(rng, fault_rate=0.05))
        engine = Engine(scheduler, runner, grammars=SetMasks(lambda: VOCABULARY), depth=depth)
        for request in requests:
            engine.add(request)
        outputs: dict[int, list[Output]] = {request.id: [] for request in requests}
        deadline = time.monotonic() + 60
        while engine.has_work:
            for output in engine.step():
                outputs[output.request_id].append(output)
            assert time.monotonic() < deadline, "livelock"
        for request in requests:
            tokens = [token for output in outputs[request.id] for token in output.tokens]
            want, reason = expected(request)
            if outputs[request.id][-1].finish_reason == "error":
                assert outputs[request.id][-1].error == "device fault"
                want = want[: len(request.output_tokens) + len(tokens)]
            else:
                assert outputs[request.id][-1].finish_reason == reason
            assert tokens == want[len(request.output_tokens) :]
        num_preemptions += engine.stats().num_preemptions
        num_faults += runner.num_failed_steps
    assert num_preemptions
    assert num_faults


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("eos_token_ids", [(EOS,), ()])
def test_a_guess_may_be_that_the_text_ends(grammar: str, eos_token_ids: tuple[int, ...]) -> None:
    """Behind a complete text nothing is bound: nobody reads it, but who asked that the end be ignored."""
    speculation = speculating(lambda seq: [EOS, 7])
    scheduler = Scheduler(KVCache(50, 4), max_num_seqs=8, max_num_batched_tokens=32, speculation=speculation)
    masks = SetMasks(lambda: VOCABULARY)
    engine = Engine(scheduler, OracleRunner(4), grammars=masks)
    requests = [
        Request(number, [1, number], SamplingParams(grammar=grammar), 30, eos_token_ids=eos_token_ids)
        for number in range(4)
    ]
    for request in requests:
        engine.add(request)
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.tokens
    assert tokens == {request.id: expected(request)[0] for request in requests}
    assert engine.stats().num_accepted_drafts


def test_a_draft_may_be_a_token_that_the_tokenizer_does_not_have() -> None:
    """A model may have more logits than its tokenizer has tokens, and then a drafter, too."""
    speculation = speculating(lambda seq: [VOCAB_SIZE + 3])
    scheduler = Scheduler(KVCache(50, 4), max_num_seqs=8, max_num_batched_tokens=32, speculation=speculation)
    engine = Engine(scheduler, OracleRunner(4), grammars=SetMasks(lambda: VOCABULARY))
    request = Request(1, [1, 2], SamplingParams(grammar=GRAMMARS[0]), 30, eos_token_ids=(EOS,))
    engine.add(request)
    tokens: list[int] = []
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            tokens += output.tokens
    assert tokens == expected(request)[0]
    assert engine.stats().num_drafts > 0


def prepared(masks: MatcherMasks, grammar: str) -> MatcherProgress:
    params = SamplingParams(grammar=grammar)
    return masks.prepare(Request(1, [1], params, max_tokens=5)).result()


def test_equal_grammars_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []

    def counting(text: str, tokenizer: Any) -> Any:
        compiled.append(text)
        return compile_matcher(text, tokenizer)

    monkeypatch.setattr("octavo.grammar.masks.compile_matcher", counting)
    masks = MatcherMasks(lambda: VOCABULARY)
    first, second = prepared(masks, GRAMMARS[0]), prepared(masks, GRAMMARS[0])
    assert len(compiled) == 1
    assert first.matcher.consume_token(CHARACTERS.index("a"))
    assert not second.matcher.consume_token(CHARACTERS.index("-"))


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.grammar.masks.MAX_KEPT_BYTES", 3 * len(GRAMMARS[0]))
    masks = MatcherMasks(lambda: VOCABULARY)
    for count in range(1, 9):
        prepared(masks, forms.grammar_text(forms.regex(f"[a-z]{{3,}}-[0-9]{{{count}}}")))
    assert 1 <= len(masks._kept) <= 4


def test_a_grammar_that_takes_too_long_ends_its_own_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.grammar.masks.FREE_SECONDS", -1.0)
    scheduler = Scheduler(KVCache(50, 4), max_num_seqs=8, max_num_batched_tokens=32)
    engine = Engine(scheduler, OracleSampler(4), grammars=SetMasks(lambda: VOCABULARY))
    engine.add(Request(1, [1, 2], SamplingParams(grammar=GRAMMARS[0]), max_tokens=20, eos_token_ids=(EOS,)))
    engine.add(Request(2, [1, 2], SamplingParams(), max_tokens=20))
    outputs: dict[int, list[Output]] = {1: [], 2: []}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    assert outputs[1][-1].finish_reason == "error"
    assert outputs[1][-1].error == f"the grammar failed: {TOO_SLOW}"
    assert outputs[2][-1].finish_reason == "length"


class OracleSampler(OracleRunner):
    """Ends a row for which nothing is allowed, as the real sampler does."""

    def _row(self, item: Scheduled, tables: Tables, state: int, masks: Masks) -> Sampled:
        found: list[Collection[int]] | None = masks.get(item.seq.id)
        if found is not None and not found[0]:
            self.trouble.bad_rows[item.seq.id] = 0
        return super()._row(item, tables, state, masks)


def test_masks_are_computed_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    gate: Future[None] = Future()
    real = MatcherMasks._compute

    def held(self: MatcherMasks, tasks: Any) -> Any:
        gate.result()
        return real(self, tasks)

    monkeypatch.setattr(MatcherMasks, "_compute", held)
    masks = MatcherMasks(lambda: VOCABULARY)
    scheduler = Scheduler(KVCache(50, 4), max_num_seqs=8, max_num_batched_tokens=32)
    request = Request(1, [1, 2], SamplingParams(grammar=GRAMMARS[0]), max_tokens=20, eos_token_ids=(EOS,))
    scheduler.add(request).grammar = prepared(masks, GRAMMARS[0])
    coming = masks.masks(scheduler.schedule())
    gate.set_result(None)
    assert {TOKENS[token] for token in allowed(coming[1][0])} <= {c.encode() for c in CHARACTERS}


def test_the_vocabulary_is_loaded_before_the_first_grammar_if_asked_for() -> None:
    loads: list[int] = []

    def load() -> Vocabulary:
        loads.append(threading.get_ident())
        return VOCABULARY

    masks = MatcherMasks(load)
    masks.start_loading()
    while not loads:
        time.sleep(0.001)
    masks.finish_loading()
    request = Request(1, [1], SamplingParams(grammar=forms.grammar_text(forms.regex("a+"))), 5)
    masks.prepare(request).result()
    assert len(loads) == 1, "the first grammar loaded it again"
    assert loads[0] != threading.get_ident(), "it was loaded in the way of the engine's start"


def test_a_vocabulary_that_cannot_be_loaded_is_the_error_of_the_first_grammar() -> None:
    def load() -> Vocabulary:
        raise GrammarError("cannot be used: the model has no tokenizer")

    masks = MatcherMasks(load)
    masks.start_loading()
    masks.finish_loading()
    request = Request(1, [1], SamplingParams(grammar=forms.grammar_text(forms.regex("a+"))), 5)
    with pytest.raises(GrammarError, match="no tokenizer"):
        masks.prepare(request).result()


def test_grammars_that_waited_for_a_start_are_compiled_at_the_priority_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[str] = []

    def compiled(text: str, tokenizer: object) -> object:
        threads.append(threading.current_thread().name)
        return compile_matcher(text, tokenizer)  # type: ignore[arg-type]

    monkeypatch.setattr("octavo.grammar.masks.compile_matcher", compiled)
    masks = MatcherMasks(lambda: VOCABULARY)
    texts = [forms.grammar_text(forms.regex(letter)) for letter in "abc"]
    requests = [Request(1, [1], SamplingParams(grammar=text), 5) for text in texts]
    masks.prepare(requests[0]).result()
    masks.finish_loading()
    masks.prepare(requests[1]).result()
    masks._eager_until = 0.0
    masks.prepare(requests[2]).result()
    assert [name.rpartition("_")[0] for name in threads] == ["grammars", "first grammars", "grammars"]

"""Random workloads for the deciding half: made from a seed, run over the oracle, and checked in every step."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec

from octavo.cache.eviction import POLICIES as EVICTIONS
from octavo.cache.group_cache import GroupSize
from octavo.cache.kv_cache import KVCache
from octavo.cache.node import Node
from octavo.config import SchedulerSettings
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.engine.speculative.draft_choice import DraftChoice
from octavo.engine.speculative.speculation import Speculation
from octavo.engine.timing.step_budget import StepBudget
from octavo.sampling_params import SamplingParams
from octavo.steps.limits import StateSize
from octavo.types import Output, Request, Sequence
from tests.oracle import (
    VOCAB_SIZE,
    DeviceProposer,
    OracleRunner,
    ToyGrammars,
    ToyProposer,
    Trouble,
    expected_output,
)

MAX_STEPS = 20_000


@dataclass(frozen=True)
class Features:
    """What may happen in a workload, besides chunking, shared prefixes, preemption and replay."""

    depth: int = 1
    stages: int = 1
    """Steps that are computed one behind the other."""
    drafts: bool = False
    grammar: bool = False
    fault_rate: float = 0.0
    poison: bool = False
    bad_rows: bool = False
    aborts: bool = False
    policy: str = "fcfs"
    victim: str = "auto"
    max_itl: float | None = None
    varied: bool = False
    """Whether the token budget of each step is drawn by chance, as costs could have it."""
    prefix_caching: bool = True
    parts: bool = True
    """Whether blocks are reused in part."""
    windows: int = 0
    """Widths of sliding windows that layers have: each has a KV group."""
    full_attention: bool = True
    """Whether some layers have full attention; all have, if there are no windows."""
    tiers: str = "none"
    """Where blocks go that the cache gives up: none, host or disk, which has host memory above it."""
    tight: bool = False
    """Hardly more blocks than one sequence needs, and many sequences at once."""

    states: bool = False
    """Whether the model has recurrent state."""
    ranks: int = 1
    """Ranks that have blocks for sequences of their own."""

    @property
    def num_groups(self) -> int:
        """KV groups of the cache."""
        return max(1, self.windows + self.full_attention)


@dataclass
class Workload:
    """Requests with the sizes of the engine that serves them."""

    requests: list[Request]
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    is_roomy: bool
    """Whether nothing is ever evicted or preempted."""
    eviction: str
    watermark: float
    groups: list[GroupSize]
    """KV groups of the cache."""
    states: StateSize | None
    """Pool of recurrent states."""


@dataclass
class Record:
    """What was told about one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_logprobs: dict[int, float] = field(default_factory=dict)
    last: Output | None = None

    def add(self, output: Output) -> None:
        assert self.last is None or self.last.finish_reason is None, "news after the end"
        assert self.last is None or self.last.first_scheduled == output.first_scheduled
        self.tokens += output.tokens
        self.logprobs += [entry.logprob for entry in output.logprobs or []]
        for position, entry in enumerate(output.prompt_logprobs or [], output.prompt_logprobs_start):
            self.prompt_logprobs[position] = entry.logprob
        self.last = output


class WatchedCache(KVCache):
    """Asserts that a prefix is found as far as it was ever computed, when nothing is evicted."""

    def watch(self, workload: Workload, prefix_caching: bool) -> None:
        alone = workload.states is None and len(self.ranks) == 1
        self.must_find = workload.is_roomy and prefix_caching and alone
        self.history: list[tuple[str, list[int | None]]] = []
        self.num_adopted = 0

    def start(self, seq: Sequence, ends: list[Node], may_share: bool, max_step_tokens: int) -> None:
        super().start(seq, ends, may_share, max_step_tokens)
        if self.must_find and may_share:
            best = max((self._common(seq, *entry) for entry in self.history), default=0)
            if self.copy_slots is None:
                best -= best % self.block_size
            assert seq.num_computed_tokens >= best, "a cached prefix was missed"
        self.num_adopted += seq.num_computed_tokens

    def release(self, seq: Sequence) -> None:
        if seq.finish_reason in ("stop", "length"):
            self.history.append((seq.request.cache_salt, seq.tokens[:-1] if seq.num_output_tokens else seq.tokens))
        super().release(seq)

    def _common(self, seq: Sequence, salt: str, computed: list[int | None]) -> int:
        """Tokens that ``seq`` has in common with the full blocks of what was computed before."""
        if salt != seq.request.cache_salt:
            return 0
        most = min(len(computed) // self.block_size * self.block_size, len(seq.tokens) - 1)
        return next((i for i in range(most) if computed[i] != seq.tokens[i]), most)


def watched_cache(workload: Workload, prefix_caching: bool, num_ranks: int = 1) -> WatchedCache:
    """A cache for ``workload``."""
    eviction = workload.eviction if prefix_caching else "lru"
    sizes = workload.groups, workload.block_size, prefix_caching
    given: dict[str, Any] = {"eviction": eviction, "watermark": workload.watermark, "states": workload.states}
    cache = WatchedCache(*sizes, **given, num_ranks=num_ranks)
    cache.watch(workload, prefix_caching)
    return cache


def random_workload(rng: random.Random, features: Features) -> tuple[Workload, set[int]]:
    """A workload, and the ids of the requests in it that use a grammar."""
    block_size = rng.choice([1, 2, 4, 8])
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(30))] for _ in range(3)]
    requests: list[Request] = []
    grammar_users: set[int] = set()
    for request_id in range(rng.randrange(1, 14)):
        if features.grammar and rng.random() < 0.6:
            grammar_users.add(request_id)
        if requests and rng.random() < 0.4:
            prompt = _later_turn(rng, rng.choice(requests))
        else:
            prompt = [*rng.choice(prefixes)[: rng.randrange(31)], *_tokens(rng, rng.randrange(1, 12))]
        requests.append(_random_request(rng, request_id, prompt, request_id in grammar_users))
    sizes = [-(-(len(r.prompt_tokens) + max(r.max_tokens, 1) - 1) // block_size) for r in requests]
    windows = sorted(rng.sample([1, 2, 5, 17], features.windows), reverse=True)
    budget = rng.choice([4, 8, 17]) if windows else 0
    is_roomy = rng.random() < 0.3 and not features.tight
    groups = []
    for window in [0, *windows] if features.full_attention or not windows else windows:
        held = sizes
        if window and not is_roomy:
            held = [min(size, -(-(window + budget) // block_size) + 1) for size in sizes]
        groups.append(GroupSize(_num_blocks(rng, features, held, is_roomy), window))
    max_num_seqs = min(budget or 16, 16 if features.tight else rng.choice([1, 2, 4, 16]))
    budget = budget or max(max_num_seqs, rng.choice([1, 3, 8, 32, 200]))
    eviction = rng.choice(list(EVICTIONS))
    watermark = rng.choice([0.0, 0.0, 0.1, 0.5])
    sizes_of_run = block_size, max_num_seqs, budget, is_roomy, eviction, watermark, groups
    return Workload(requests, *sizes_of_run, _states(rng, features, max_num_seqs)), grammar_users


def _states(rng: random.Random, features: Features, max_num_seqs: int) -> StateSize | None:
    if not features.states:
        return None
    num_held = max_num_seqs * (1 + features.drafts)
    num_slots = num_held + (rng.choice([0, 1, 3]) if features.tight else rng.choice([1, 4, 100]))
    every, interval, has_marks = rng.choice([1, 8, 20]), rng.choice([1, 2, 4, 6]), rng.random() < 0.5
    return StateSize(num_slots, num_held, every, interval, features.drafts, has_marks)


def _num_blocks(rng: random.Random, features: Features, sizes: list[int], is_roomy: bool) -> int:
    """Blocks of a pool in which the requests hold at most so many each."""
    num_spare = rng.randrange(3 if features.tight else max(sizes) * 2)
    return sum(sizes) + 1 if is_roomy else max(sizes) + num_spare


def _later_turn(rng: random.Random, request: Request) -> list[int]:
    """The same prompt again, perhaps with the answer to it and more."""
    answer, _ = expected_output(request)
    num_kept = rng.choice([0, len(answer)])
    return [*request.prompt_tokens, *answer[:num_kept], *_tokens(rng, rng.randrange(3))]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def _random_request(rng: random.Random, request_id: int, prompt: list[int], uses_grammar: bool) -> Request:
    max_tokens = rng.randrange(1, 20) if rng.random() < 0.95 else 0
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randrange(max_tokens + 1) if rng.random() < 0.2 else 0,
        stop_token_ids=tuple(_tokens(rng, rng.choice([0, 0, 1, 2]))),
        prompt_logprobs=0 if rng.random() < 0.15 else None,
        logprobs=0 if rng.random() < 0.2 else None,
    )
    request = Request(
        id=request_id,
        prompt_tokens=prompt,
        params=params,
        max_tokens=max_tokens,
        eos_token_ids=tuple(_tokens(rng, rng.choice([0, 1]))),
        priority=rng.randrange(3),
        cache_salt=rng.choice(["", "", "", "tenant"]),
        tenant=rng.choice(["a", "a", "a", "b", "c"]),
        session=rng.choice(["", "s", "t"]),
        cache_ttl=rng.choice([0.0, 0.0, 0.0, 1e-4, float("inf")]),
        owner=("", "a", "b")[request_id % 3],
        tpot_target=(0.0, 0.03, 0.2)[request_id % 3],
    )
    if rng.random() < 0.15:
        output, _ = expected_output(request, uses_grammar)
        replayed = output[: rng.randrange(len(output))] if output else []
        request = msgspec.structs.replace(request, output_tokens=replayed)
    return request


class VariedBudget(StepBudget):
    """Any budget that costs could lead to."""

    rng = random.Random(3)

    def of_step(self, num_running: int, num_cut: int, num_free: int) -> int:
        most = super().of_step(num_running, num_cut, num_free)
        return self.rng.randint(min(num_running + 1, most), most)


class Run:
    """One workload being served."""

    def __init__(self, seed: int, features: Features) -> None:
        self.rng = rng = random.Random(seed)
        self.features = features
        self.workload, self.grammar_users = random_workload(rng, features)
        self.trouble = Trouble(rng, features.fault_rate)
        for request in self.workload.requests:
            position = rng.randrange(len(request.prompt_tokens) + max(request.max_tokens, 1))
            if features.poison and rng.random() < 0.15:
                self.trouble.poison[request.id] = position
            elif features.bad_rows and rng.random() < 0.3:
                self.trouble.bad_rows[request.id] = position
        self.cache = watched_cache(self.workload, features.prefix_caching, features.ranks)
        self.runner = OracleRunner(
            self.workload.block_size,
            self.trouble,
            reads_live_tables=rng.random() < 0.5,
            windows=[group.window for group in self.workload.groups],
        )
        if self.cache.states is not None:
            self.cache.states.copy = self.runner.copy_state
        if features.parts:
            self.cache.copy_slots = self.runner.copy_slots
        self.engine = Engine(
            Scheduler(
                self.cache,
                max_num_seqs=self.workload.max_num_seqs,
                max_num_batched_tokens=self.workload.max_num_batched_tokens,
                settings=SchedulerSettings(
                    scheduling_policy=features.policy,
                    preemption_victim=features.victim,
                    max_itl=features.max_itl,
                    turn_tokens=3 if features.policy == "decode-round-robin" else None,
                ),
                speculation=self._speculation(),
                num_stages=features.stages,
                clock=self.clock,
            ),
            self.runner,
            grammars=ToyGrammars(self.grammar_users),
            depth=features.depth,
        )
        if features.varied:
            scheduler = self.engine.scheduler
            settings = SchedulerSettings(max_itl=features.max_itl)
            scheduler.step_budget = VariedBudget(settings, self.workload.max_num_batched_tokens, scheduler.waiting)
            VariedBudget.rng.seed(seed)
        self.now = 1.0
        self.records = {request.id: Record() for request in self.workload.requests}
        self.aborted: set[int] = set()

    def _speculation(self) -> Speculation | None:
        if not self.features.drafts:
            return None
        proposer = ToyProposer(self.rng) if self.rng.random() < 0.5 else DeviceProposer(self.rng)
        most = 1 + self.rng.randrange(5)
        return Speculation(proposer, most, DraftChoice(most) if self.rng.random() < 0.3 else None)

    def clock(self) -> float:
        """A time that goes on with every look, faster or slower."""
        self.now += self.rng.random() / 20
        return self.now

    def serve(self) -> None:
        """Serve everything, then check what came out and that nothing is left behind."""
        todo = list(self.workload.requests)
        num_steps = 0
        while todo or self.engine.has_work:
            while todo and (self.rng.random() < 0.4 or not self.engine.has_work):
                self.engine.add(todo.pop(0))
            if self.features.aborts and self.rng.random() < 0.05:
                self._abort_one(len(self.workload.requests) - len(todo))
            for output in self.engine.step():
                assert output.request_id not in self.aborted, "news of an aborted request"
                self.records[output.request_id].add(output)
            self.engine.check()
            self._check_last_plan()
            num_steps += 1
            assert num_steps < MAX_STEPS, "livelock"
        self._check_nothing_left()
        for request in self.workload.requests:
            self._check_record(request)
        self._check_nothing_computed_twice()

    def _abort_one(self, num_added: int) -> None:
        request_id = self.rng.randrange(num_added + 1)
        self.engine.abort(request_id)
        record = self.records.get(request_id)
        if record is not None and request_id < num_added and (record.last is None or record.last.finish_reason is None):
            self.aborted.add(request_id)

    def _check_last_plan(self) -> None:
        if self.runner.plans:
            plan = self.runner.plans[-1]
            num_tokens = sum(len(item.tokens) + len(item.drafts) for item in plan)
            assert num_tokens <= self.workload.max_num_batched_tokens, "over the token budget"
            assert len(plan) <= self.workload.max_num_seqs, "too many sequences in a step"

    def _check_nothing_left(self) -> None:
        scheduler, cache = self.engine.scheduler, self.cache
        for group, size in zip(cache.groups, self.workload.groups, strict=True):
            assert group.num_used == 0, "blocks leaked"
            assert group.num_free + group.num_cached == size.num_blocks
        assert not scheduler.waiting._heap, "the waiting queue keeps something"
        assert not scheduler.suspects.is_active, "somebody is suspected for ever"
        stats = self.engine.stats()
        if not self.features.prefix_caching:
            assert stats.prefix_hits == stats.num_cached_blocks == 0
        assert stats.num_running == stats.num_waiting == stats.num_used_blocks == 0
        assert stats.num_faults == self.runner.num_failed_steps
        assert stats.num_output_tokens == sum(len(record.tokens) for record in self.records.values())
        assert cache.num_copied == self.runner.num_copied

    def _check_record(self, request: Request) -> None:
        record = self.records[request.id]
        want, reason = expected_output(request, request.id in self.grammar_users)
        want = want[len(request.output_tokens) :]
        if request.id in self.aborted:
            assert record.tokens == want[: len(record.tokens)]
            return
        assert record.last is not None, "a request without an answer"
        if record.last.finish_reason == "error":
            assert self._may_fail(request.id), "an innocent request ended with an error"
            assert record.last.error
            assert record.tokens == want[: len(record.tokens)]
            return
        assert record.tokens == want, f"request {request.id}"
        assert record.last.finish_reason == reason
        named = reason == "stop" and want[-1] in request.params.stop_token_ids
        assert record.last.stop_token_id == (want[-1] if named else None)
        assert len(record.logprobs) == (0 if request.params.logprobs is None else len(want))
        if request.params.prompt_logprobs is not None:
            assert sorted(record.prompt_logprobs) == list(range(1, len(request.prompt_tokens)))

    def _may_fail(self, request_id: int) -> bool:
        return request_id in self.trouble.poison or request_id in self.trouble.bad_rows or self.features.fault_rate > 0

    def _check_nothing_computed_twice(self) -> None:
        features, stats = self.features, self.engine.stats()
        can_stop = any(request.eos_token_ids or request.params.stop_token_ids for request in self.workload.requests)
        is_calm = (
            features == Features(drafts=features.drafts, grammar=features.grammar, parts=features.parts)
            and not stats.num_preemptions
        )
        if is_calm and not can_stop:
            sizes = [len(r.prompt_tokens) + max(r.max_tokens, 1) - 1 for r in self.workload.requests]
            assert self.runner.num_computed == sum(sizes) - self.cache.num_adopted

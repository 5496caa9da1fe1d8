"""What each step computes, and what becomes of its results.

There is one primitive: compute positions ``start .. start + n`` of a sequence. Prefill, a chunk of it, decode,
recompute after preemption and verification of drafts are this with different ``n``.
"""

from __future__ import annotations

import time

import msgspec

from octavo.cache.kv_cache import KVCache
from octavo.engine import stopping
from octavo.engine.policies import find_policy
from octavo.engine.suspects import Suspects
from octavo.engine.waiting import WaitingQueue
from octavo.errors import ConfigError, ContextLengthExceeded, InvalidParameter, RunnerError
from octavo.types import EngineStats, FinishReason, Output, Plan, Request, Sampled, Scheduled, Sequence, Status

RUNNING = Status.RUNNING


class Scheduler:
    """Divides the token budget and the blocks among the sequences.

    The rules:

    1. Running sequences go before waiting ones, older (by ``Sequence.order``) before younger.
    2. Each running sequence gets at least one token a step: a chunk of a long prompt leaves one token of the
       budget for everybody behind it. So no decode ever waits for somebody's prefill.
    3. A sequence is admitted when there are blocks for all its tokens, and one more for each that runs: a
       chunked prompt never stalls halfway, and who is admitted is not preempted at once. While the first
       in line has to wait, so do all behind it: nobody is overtaken.
    4. A running sequence that needs a block takes those of the youngest one that is idle, never of an older
       one. So the oldest always advances, and each becomes the oldest in the end.
    5. After a failed forward pass its sequences are tried in smaller groups, alone: see ``Suspects``.

    No cost grows with the number of requests that wait or were ever seen, but for the logarithm of a heap.
    """

    def __init__(self, cache: KVCache, *, max_num_seqs: int, max_num_batched_tokens: int, policy: str = "fcfs") -> None:
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs})"
            )
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.order = find_policy(policy)
        self.num_arrived = 0
        self.waiting = WaitingQueue()
        self.running: dict[int, Sequence] = {}
        """By id, and always in the order of ``Sequence.order``."""
        self.leaving: set[Sequence] = set()
        """Finished, but still in flight: the device may yet write to their blocks."""
        self.suspects = Suspects()
        self.stats = EngineStats(num_blocks=cache.num_blocks)
        """The counters; gauges are filled in by whoever asks."""

    # ---- requests come and go

    def add(self, request: Request) -> Sequence:
        """Let ``request`` wait for its turn; raises ``RequestError`` if it could never be served."""
        self.check_servable(seq := Sequence(request, order=self.order(request, self.num_arrived)))
        self.num_arrived += 1
        self.waiting.push(seq)
        return seq

    def check_servable(self, seq: Sequence) -> None:
        request = seq.request
        if request.id in self.waiting or request.id in self.running:
            raise InvalidParameter("id", f"Request {request.id} is already being served.")
        if not request.prompt_tokens:
            raise InvalidParameter("prompt", "The prompt must have at least one token.")
        if request.output_tokens and len(request.output_tokens) >= request.max_tokens:
            raise InvalidParameter(
                "output_tokens",
                f"Nothing is left to generate: {len(request.output_tokens)} of {request.max_tokens} tokens are there.",
            )
        room = self.cache.num_blocks * self.cache.block_size
        if self.cache.blocks_for(seq.max_computed_tokens) > self.cache.num_blocks:
            raise ContextLengthExceeded(
                f"The prompt has {seq.num_prompt_tokens} tokens and 'max_tokens' is {request.max_tokens}, "
                f"but the KV cache has room for {room} tokens.",
                param="max_tokens",
            )

    def abort(self, request_id: int) -> None:
        """End a sequence without an answer; nothing happens when there is none with this id."""
        if request_id in self.waiting:
            self._finish(self.waiting.remove(request_id), "abort")
        elif request_id in self.running:
            self._finish(self.running[request_id], "abort")

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.leaving or self.waiting)

    # ---- what the next step computes

    def schedule(self) -> Plan:
        """Plan a step. The plan is empty when nothing can be computed before a step in flight is over."""
        if self.suspects.is_active:
            return self._schedule_trial()
        plan: Plan = []
        budget = self.max_num_batched_tokens
        num_behind = len(self.running)
        block_size = self.cache.block_size
        for seq in list(self.running.values()):
            num_behind -= 1
            start = seq.num_computed_tokens
            num_tokens = len(seq.tokens) - start
            if num_tokens <= 0 or start == seq.max_computed_tokens or seq.status is not RUNNING:
                continue  # all is in flight, or just preempted
            if num_tokens > budget - num_behind:
                num_tokens = budget - num_behind
            drafts = self._drafts(seq, num_tokens, budget - num_behind) if seq.draft_tokens else ()
            end = start + num_tokens + len(drafts)
            has_room = end <= len(seq.block_table) * block_size
            if not (has_room or self.cache.reserve(seq, end) or self._preempt_for(seq, end)):
                # Everybody behind is younger and in flight. Left out now, they are idle when it asks again.
                return plan
            plan.append(self._take(seq, num_tokens, drafts))
            budget -= num_tokens + len(drafts)
        self._admit(plan, budget)
        return plan

    def _drafts(self, seq: Sequence, num_tokens: int, limit: int) -> tuple[int, ...]:
        """The drafts to verify after ``num_tokens`` tokens; none before the last token is known."""
        position = seq.num_computed_tokens + num_tokens
        drafts, seq.draft_tokens = seq.draft_tokens, []
        if seq.num_in_flight or position < len(seq.tokens):
            return ()
        return tuple(drafts[: max(0, min(limit - num_tokens, seq.max_computed_tokens - position))])

    def _take(self, seq: Sequence, num_tokens: int, drafts: tuple[int, ...] = ()) -> Scheduled:
        """Put the next ``num_tokens`` tokens of ``seq``, then ``drafts``, in flight."""
        start = seq.num_computed_tokens
        end = start + num_tokens
        tokens = seq.tokens
        samples = end == len(tokens)
        taken = (tokens[start],) if num_tokens == 1 else tuple(tokens[start:end])
        item = Scheduled(seq, start, taken, drafts, samples, seq.epoch)
        if samples:
            tokens.append(None)
        seq.num_computed_tokens = end + len(drafts)
        seq.num_in_flight += 1
        return item

    def _preempt_for(self, seq: Sequence, num_tokens: int) -> bool:
        """Preempt sequences younger than ``seq`` until it has blocks for ``num_tokens`` positions."""
        while victim := self._youngest_idle_behind(seq):
            self._preempt(victim)
            if self.cache.reserve(seq, num_tokens):
                return True
        return False

    def _youngest_idle_behind(self, seq: Sequence) -> Sequence | None:
        for other in reversed(self.running.values()):
            if other is seq:
                break
            if not other.num_in_flight:
                return other
        return None

    def _preempt(self, seq: Sequence) -> None:
        """Take the blocks of ``seq`` back. It waits in its old place; what it published may be found again."""
        self.cache.release(seq)
        del self.running[seq.id]
        seq.status = Status.WAITING
        seq.draft_tokens = []
        seq.epoch += 1
        self.waiting.push(seq)
        self.stats.num_preemptions += 1

    def _admit(self, plan: Plan, budget: int) -> None:
        """Start waiting sequences, in their order, as long as tokens, places and blocks last."""
        youngest = next(reversed(self.running.values()), None)
        num_planned = len(plan)
        while budget and self.waiting and len(self.running) + len(self.leaving) < self.max_num_seqs:
            seq = self.waiting.first()
            if not self._give_blocks(seq):
                break
            self.waiting.pop()
            self.running[seq.id] = seq
            seq.status = RUNNING
            num_tokens = min(len(seq.tokens) - seq.num_computed_tokens, budget)
            plan.append(self._take(seq, num_tokens))
            budget -= num_tokens
        if youngest and len(plan) > num_planned and plan[num_planned].seq.order < youngest.order:
            self.running = dict(sorted(self.running.items(), key=lambda entry: entry[1].order))

    def _give_blocks(self, seq: Sequence) -> bool:
        """Find what is cached of a waiting sequence and reserve blocks for the rest, or change nothing."""
        params = seq.request.params
        # The logits of a cached position are gone, so whoever wants them for the prompt computes all of it.
        node = self.cache.match(seq) if params.prompt_logprobs is None else self.cache.tree.root
        if not self.cache.fits(node, len(seq.tokens), num_spare=len(self.running)):
            return False
        self.cache.adopt(seq, node)
        self.cache.reserve(seq, len(seq.tokens))
        if not seq.first_scheduled:
            seq.first_scheduled = time.monotonic()
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.stats.prefix_queries += seq.num_prompt_tokens
            self.stats.prefix_hits += seq.num_cached_tokens
        return True

    def _schedule_trial(self) -> Plan:
        """Repeat a part of a failed plan. Its blocks are still held, so it needs no room."""
        plan = [self._take(item.seq, len(item.tokens)) for item in self.suspects.next_group()]
        if plan:
            self.suspects.begin(plan)
        return plan

    # ---- what becomes of its results

    def commit(self, plan: Plan, sampled: list[Sampled]) -> list[Output]:
        """Write the results of ``plan`` back, publish what is now computed, retire what ended."""
        self.suspects.acquit(plan)
        outputs = []
        for item, result in zip(plan, sampled, strict=True):
            seq = item.seq
            seq.num_in_flight -= 1
            if item.epoch != seq.epoch:  # it is stale
                self._let_go(seq)
            elif result.error is not None:
                outputs.append(self._end_with_error(seq, result.error))
            elif news := self._accept(item, result):
                outputs.append(news)
        return outputs

    def _accept(self, item: Scheduled, result: Sampled) -> Output | None:
        """Put the sampled tokens in place of the pending one. Returns what there is to tell, if anything."""
        seq, stats = item.seq, self.stats
        num_committed = item.start + len(item.tokens)
        if item.start < seq.num_prompt_tokens:
            stats.num_prompt_tokens += min(num_committed, seq.num_prompt_tokens) - item.start
        tokens: list[int] = []
        reason: FinishReason | None = None
        if item.samples:
            position = num_committed
            tokens, reason = stopping.cut(seq, position, result.tokens)
            seq.tokens[position : position + 1] = tokens
            stats.num_output_tokens += len(tokens)
            if item.drafts:
                seq.num_computed_tokens -= 1 + len(item.drafts) - len(result.tokens)
                num_committed += len(tokens) - 1
        block_size = self.cache.block_size
        if num_committed // block_size > item.start // block_size:
            self.cache.publish(seq, num_committed)
        if reason is not None:
            self._finish(seq, reason)
        elif not tokens and not result.prompt_logprobs:
            return None
        return Output(
            seq.request.id,
            tokens,
            reason,
            stopping.stop_token_id(seq, tokens) if reason == "stop" else None,
            seq.num_cached_tokens,
            seq.first_scheduled,
            result.logprobs and result.logprobs[: len(tokens)],
            result.prompt_logprobs,
            item.start + 1 if result.prompt_logprobs else 0,
        )

    def fail(self, plan: Plan, error: RunnerError) -> list[Output]:
        """Take ``plan`` back, as if it had never been scheduled; who keeps failing alone ends with ``error``."""
        self.stats.num_faults += 1
        members = []
        for item in plan:
            item.seq.num_in_flight -= 1
            if item.is_stale:
                self._let_go(item.seq)
            else:
                members.append(item)
                self._rewind(item)
        convict = self.suspects.accuse(plan, members)
        return [self._end_with_error(convict, str(error))] if convict else []

    def _rewind(self, item: Scheduled) -> None:
        """Take back that ``item`` and everything planned after it was computed."""
        seq = item.seq
        seq.num_faults += 1
        seq.num_computed_tokens = item.start
        seq.draft_tokens = []
        self._disown_steps(seq)

    def _disown_steps(self, seq: Sequence) -> None:
        """Make every step of ``seq`` in flight stale, and forget the tokens that they would sample."""
        seq.epoch += 1
        while seq.tokens[-1] is None:
            seq.tokens.pop()

    def _end_with_error(self, seq: Sequence, error: str) -> Output:
        self._finish(seq, "error")
        return Output(
            seq.id,
            [],
            "error",
            num_cached_tokens=seq.num_cached_tokens,
            first_scheduled=seq.first_scheduled,
            error=error,
        )

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End ``seq``. Its blocks come back now, or when its last step in flight is over."""
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        self._disown_steps(seq)
        self.running.pop(seq.id, None)
        self.leaving.add(seq)
        self._let_go(seq)

    def _let_go(self, seq: Sequence) -> None:
        """Take the blocks of ``seq`` back if it has ended and no step in flight can touch them any more."""
        if seq.status is Status.FINISHED and not seq.num_in_flight:
            self.cache.release(seq)
            self.leaving.remove(seq)

    # ---- how it goes

    def note_step(self, plan: Plan, seconds: float) -> None:
        """Count a step that went well and took ``seconds``."""
        self.stats.num_steps += 1
        self.stats.step_tokens = sum([len(item.tokens) + len(item.drafts) for item in plan])
        self.stats.step_seconds = seconds

    def snapshot(self) -> EngineStats:
        """Counters and gauges as of now; O(1)."""
        return msgspec.structs.replace(
            self.stats,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_used_blocks=self.cache.num_used,
            num_cached_blocks=self.cache.num_cached,
        )

    def check(self) -> None:
        """Assert everything that must hold between two steps. Costs O(pool)."""
        self.cache.check([*self.running.values(), *self.leaving])
        self.waiting.check()
        orders = [seq.order for seq in self.running.values()]
        assert orders == sorted(orders), "running sequences are out of order"
        assert len(self.running) + len(self.leaving) <= self.max_num_seqs, "too many sequences are running"
        for request_id, seq in self.running.items():
            assert seq.id == request_id, "a running sequence is filed under another id"
            assert request_id not in self.waiting, "a sequence is running and waiting"
            assert seq.status is RUNNING, "a running sequence has another status"
            num_covered = len(seq.block_table) * self.cache.block_size
            assert seq.num_computed_tokens <= num_covered, "a computed position has no block"
            is_complete = seq.num_computed_tokens == seq.max_computed_tokens
            assert is_complete or len(seq.tokens) <= seq.max_computed_tokens, "more is planned than is ever needed"
            assert seq.num_computed_tokens <= seq.max_computed_tokens, "more is computed than is ever needed"
            num_pending = seq.tokens.count(None)
            assert num_pending <= seq.num_in_flight, "a pending token will never be sampled"
            assert None not in seq.tokens[: len(seq.tokens) - num_pending], "a token follows a pending one"
        for seq in self.leaving:
            assert seq.status is Status.FINISHED, "a leaving sequence has not ended"
            assert seq.num_in_flight, "a finished sequence keeps its blocks"

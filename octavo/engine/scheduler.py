"""The scheduler: plans each step and commits its results.

There is one primitive: compute positions ``start .. start + n`` of a sequence. Prefill, a chunk of it, decode,
recompute after preemption and verification of drafts are this with different ``n``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future

from octavo.cache.kv_cache import KVCache
from octavo.config import SchedulerSettings
from octavo.engine.cache_report import snapshot
from octavo.engine.fault_isolation import FaultIsolation, divided
from octavo.engine.policies import make_policy
from octavo.engine.policies.policy import PolicyContext
from octavo.engine.policies.victims import VICTIMS
from octavo.engine.runner.route_reading import RouteReading
from octavo.engine.sequence_admission import SequenceAdmission
from octavo.engine.sequence_images import Images, ImageSettings
from octavo.engine.speculative.speculation import NO_DRAFTS, Drafts, Speculation, num_proposed
from octavo.engine.stopping import apply_result, error_output
from octavo.engine.timing.step_budget import StepBudget
from octavo.errors import ConfigError, ContextLengthExceeded, InvalidParameter, RunnerError
from octavo.steps.limits import RopeSets
from octavo.telemetry.request_events import EventLog
from octavo.types import (
    REPETITION,
    EngineStats,
    FinishReason,
    Output,
    Plan,
    Request,
    Sampled,
    Scheduled,
    Sequence,
    Status,
)

RUNNING = Status.RUNNING
DEFAULTS = SchedulerSettings()
PENDING: tuple[int | None, ...] = (None,)
"""The token of a decode whose previous step is still in flight; a constant, since most shares have it."""


class Scheduler(SequenceAdmission):
    """Divides the token budget and the blocks among the sequences.

    The rules:

    1. Running sequences go before waiting ones, older (by ``Sequence.order``) before younger.
    2. Each running sequence gets at least one token per step: a chunk of a long prompt leaves one token of the
       budget for each sequence behind it. So no decode ever waits for the prefill of another sequence.
    3. A sequence is admitted when there are blocks for all its tokens, plus one for each running sequence: a
       chunked prompt never stalls halfway, and an admitted sequence is not preempted at once. Sliding-window groups
       need blocks for one step only, since blocks behind the window are freed. The policy orders the waiting
       sequences; while the first cannot be admitted, no other is.
    4. A running sequence that needs a block preempts a younger, idle one, never an older one. So the oldest
       sequence always advances, and each becomes the oldest eventually.
    5. A policy may preempt running sequences for waiting ones, and chooses which of several unfinished prompts is
       computed first; the first waiting sequence may be one of these.
    6. Of several unfinished prompts the first one is overtaken by shorter ones, the shortest first, if the policy
       ``overtakes``: by at most a tenth of its own tokens (``sequence_admission``). So a short prompt does not wait
       for a long one, and a long one takes at most a tenth longer. The first and the shortest waiting sequence are
       among these, as long as both have a place and blocks.
    7. After a failed forward pass its sequences are retried in smaller groups, each alone: see ``FaultIsolation``.

    No cost grows with the number of requests waiting or ever seen, except the logarithm of a heap.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        settings: SchedulerSettings = DEFAULTS,
        chunked_prefill: bool = True,
        speculation: Speculation | None = None,
        images: ImageSettings | None = None,
        rope_sets: RopeSets | None = None,
        num_stages: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without ``chunked_prefill`` no prompt may be longer than the token budget. ``num_stages``: steps that are
        computed at once, one behind the other, among which sequences are divided."""
        if max_num_batched_tokens < max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({max_num_batched_tokens}) must be at least max_num_seqs ({max_num_seqs})"
            )
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.speculation = speculation
        self.images = None if images is None else Images(images, max_num_batched_tokens)
        """``None`` for a model that takes no images."""
        self.rope_sets = rope_sets
        self.num_stages = num_stages
        self.routes: RouteReading | None = None
        """``None`` if it is not kept which experts tokens use."""
        self.num_lookahead = 0 if speculation is None else speculation.num_lookahead
        self.clock = clock
        self.waiting = make_policy(PolicyContext(cache, max_num_seqs, settings, clock))
        """The policy, which is also the queue of waiting sequences."""
        self.choose_victim = VICTIMS.get(settings.preemption_victim, self.waiting.choose_victim)
        self.step_budget = StepBudget(settings, max_num_batched_tokens, self.waiting)
        self.running, self.leaving, self.yielding, self.promised, self.cut = {}, set(), {}, {}, []
        self.suspects = FaultIsolation()
        self.stats = EngineStats(num_blocks=cache.num_blocks)
        """The counters; ``snapshot`` fills in the gauges."""
        self.events = EventLog(self.stats, clock)

    # ---- adding and aborting requests

    def add(self, request: Request) -> Sequence:
        """Queue ``request``; raises ``RequestError`` if it could never be served."""
        self.check_servable(seq := Sequence(request, groups=self.cache.no_blocks()))
        if self.images is not None:
            self.images.add(seq)
        self.choose_frequencies(seq)
        self.events.note(seq.id, "arrived", tokens=len(seq.tokens), others=len(self.waiting))
        self.waiting.arrive(seq)
        return seq

    def prefetch(self, request: Request) -> Future[None] | None:
        """Start to bring what slower tiers have of ``request`` to host memory; ``None`` if they have nothing, or while
        nothing else is computed and computing it is faster."""
        if self.cache.offload is None:
            return None
        self.choose_frequencies(seq := Sequence(request))
        return self.cache.prefetch(seq, None if self.has_work else self.step_budget.seconds_alone)

    def check_servable(self, seq: Sequence) -> None:
        """Raise ``RequestError`` if ``seq`` could never be served."""
        if seq.id in self.waiting or seq.id in self.running or seq.id in self.promised:
            raise InvalidParameter("id", f"Request {seq.id} is already being served.")
        request, cache = seq.request, self.cache
        if not request.prompt_tokens:
            raise InvalidParameter("prompt", "The prompt must have at least one token.")
        if request.output_tokens and len(request.output_tokens) >= request.max_tokens:
            raise InvalidParameter(
                "output_tokens",
                f"Nothing is left to generate: {len(request.output_tokens)} of {request.max_tokens} tokens are there.",
            )
        if request.images and self.images is None:
            raise InvalidParameter("messages", "This model takes no images.")
        if not cache.could_hold(seq.max_computed_tokens, self.max_num_batched_tokens):
            raise ContextLengthExceeded(
                f"The prompt has {seq.num_prompt_tokens} tokens and 'max_tokens' is {request.max_tokens}, "
                f"but the KV cache has room for {cache.groups[0].num_blocks * cache.block_size} tokens.",
                param="max_tokens",
            )

    def abort(self, request_id: int) -> None:
        """End a sequence without output; does nothing if no sequence has this id."""
        if request_id in self.waiting:
            self._finish(self.waiting.remove(request_id), "abort")
        elif request_id in self.running:
            self._finish(self.running[request_id], "abort")
        elif request_id in self.promised:
            self.waiting.leave(seq := self.promised.pop(request_id))
            self._finish(seq, "abort")
        else:
            for seq in [seq for seq in self.yielding if seq.id == request_id]:
                self._finish(seq, "abort")

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.leaving or self.yielding or self.waiting or self.promised)

    @property
    def holders(self) -> list[Sequence]:
        """The sequences that hold blocks, each of which needs a batch index."""
        return [*self.running.values(), *self.yielding, *self.leaving]

    # ---- planning a step

    def schedule(self) -> Plan:
        """Plan a step. The plan is empty when nothing can be computed before a step in flight is committed."""
        if self.suspects.is_active:
            return self._schedule_trial()
        if self.waiting.preempts_for_waiting:
            self.preempt_for_waiting()
        plan: Plan = []
        if self.images is not None:
            self.images.begin_step()
        num_behind = len(self.running)
        num_free = self.max_num_seqs - num_behind - len(self.leaving) - len(self.yielding)
        chosen = self.step_budget.of_step(num_behind, len(self.cut), num_free)
        total_budget = chosen if self.chunked_prefill else self.max_num_batched_tokens  # a longer prompt never started
        drafts_of, num_drafts = self._drafts(total_budget)
        total_budget = min(total_budget + num_drafts, max(total_budget, self.step_budget.most_mixed))
        shares, prompt_budget = self.share_budget(total_budget - num_drafts) if self.cut else ({}, total_budget)
        total_budget = min(total_budget, prompt_budget + num_drafts)
        budget, self.cut, num_behind = total_budget - sum(shares.values()), [], len(self.running)
        states, blocked = self.cache.states, set[int]()
        for seq in self._of_step():
            num_behind -= 1
            if blocked and seq.dp_rank in blocked:
                continue
            start = seq.num_computed_tokens
            num_tokens = len(seq.tokens) - start
            if num_tokens <= 0 or start == seq.max_computed_tokens or seq.status is not RUNNING:
                continue  # all is in flight, or just preempted
            if start + num_tokens > seq.rope_end:  # it is computed again, with other rotary frequencies
                if not seq.num_in_flight:
                    self._preempt(seq, by=seq)
                continue
            if shares:
                budget += shares.pop(seq, 0)
            most = budget - num_behind
            if states is not None:
                most = min(most, states.room(seq))
            if num_tokens > most:
                num_tokens = most
                self.cut.append(seq)
            asked = num_tokens
            if seq.images is not None and (num_tokens := self._end_of_chunk(seq, num_tokens)) <= 0:
                continue
            drafts = drafts_of.get(seq, ())[: min(most, seq.rope_end - start) - num_tokens] if drafts_of else ()
            if drafts and not self.cache.reserve(seq, start + num_tokens + len(drafts)):
                drafts = ()  # no sequence is preempted for drafts
            num_taken = num_tokens + len(drafts)
            if start + num_taken > seq.capacity and not self._reserve_blocks(seq, start + num_taken):
                # All of its rank behind are younger and in flight. Left out of this step, they are idle at the retry.
                blocked.add(seq.dp_rank)
                if len(blocked) < len(self.cache.ranks):
                    continue
                rest = budget + sum(shares.values())
                break
            self._look_ahead(seq, start + num_taken)
            plan.append(self._take(seq, num_tokens, drafts))
            budget -= min(num_taken, asked + len(drafts))
        else:
            rest = self._admit(plan, budget + sum(shares.values()), blocked)
        self.cache.note_filled(total_budget - rest)
        return plan

    def _drafts(self, budget: int) -> tuple[Drafts, int]:
        """The drafts of running sequences, and how many of them come on top of a step's budget."""
        if self.speculation is None:
            return NO_DRAFTS, 0
        is_mixed = self.speculation.on_device and (self.cut or self.next_admissible() is not None)
        room = self.step_budget.draft_room(budget, len(self.running)) if is_mixed else None
        drafts_of = self.speculation.choose(self.running.values(), room)
        return drafts_of, min(room.num_drafts, sum(map(len, drafts_of.values()))) if room is not None else 0

    def _of_step(self) -> list[Sequence]:
        """The running sequences, the oldest first; with stages, as many as come to each of them, those of no step in
        flight before others, and none whose next token is in flight, as the step would wait for it."""
        if self.num_stages == 1:
            return list(self.running.values())
        most = -(-len(self.running) // self.num_stages)
        known = [seq for seq in self.running.values() if seq.tokens[-1] is not None]
        chosen = {seq.id for seq in sorted(known, key=lambda seq: seq.num_in_flight)[:most]}
        return [seq for seq in known if seq.id in chosen]

    def _take(self, seq: Sequence, num_tokens: int, drafts: tuple[int, ...] = ()) -> Scheduled:
        """Schedule the next ``num_tokens`` tokens of ``seq``, then ``drafts``: they are now in flight."""
        start, tokens, states = seq.num_computed_tokens, seq.tokens, self.cache.states
        end = start + num_tokens
        marks: tuple[tuple[int, int], ...] = ()
        if states is not None and drafts:
            states.checkpoint(seq)
        if states is not None and num_tokens > 1:
            marks = states.mark(seq, end)
        samples = end == len(tokens)
        taken = PENDING
        if tokens[start] is not None:
            taken = (tokens[start],) if num_tokens == 1 else tuple(tokens[start:end])
        if samples:
            tokens.append(None)
        if drafts:
            tokens += [None] * len(drafts)
        seq.num_computed_tokens = end + len(drafts)
        seq.decodes = samples
        seq.num_in_flight += 1
        encodes = () if seq.images is None or self.images is None else self.images.to_encode(seq, start, end)
        proposed = num_proposed(self.speculation)
        return Scheduled(seq, start, taken, drafts, samples, seq.epoch, seq.num_rejected, proposed, encodes, marks)

    def _end_of_chunk(self, seq: Sequence, num_tokens: int) -> int:
        """How many of the next tokens of a sequence with images can be computed now, at most ``num_tokens`` unless
        the chunk would end within an image that has to be computed as one: those come on top of the budget."""
        if self.images is None or seq.num_computed_tokens >= seq.num_prompt_tokens:
            return num_tokens
        found = self.images.end_of_chunk(seq, num_tokens)
        if found > num_tokens and not self.cache.reserve(seq, seq.num_computed_tokens + found):
            found = 0
        if found < num_tokens and seq not in self.cut:
            self.cut.append(seq)
        self.cache.note_filled(max(0, found - num_tokens))
        return found

    def _look_ahead(self, seq: Sequence, num_tokens: int) -> None:
        """Reserve blocks for what a drafter writes behind ``num_tokens`` positions; without room, drafts are worse."""
        if self.num_lookahead:
            self.cache.reserve(seq, min(num_tokens + self.num_lookahead, seq.max_computed_tokens))

    def _reserve_blocks(self, seq: Sequence, num_tokens: int) -> bool:
        """Reserve blocks for ``num_tokens`` positions of ``seq``, preempting younger sequences if necessary."""
        while not self.cache.reserve(seq, num_tokens):
            if (victim := self.choose_victim(self._idle_behind(seq))) is None:
                return False
            self._preempt(victim, by=seq)
        return True

    def _idle_behind(self, seq: Sequence) -> Iterator[Sequence]:
        """Sequences of its rank younger than ``seq`` that are not in flight, youngest first."""
        for other in reversed(self.running.values()):
            if other is seq:
                break
            if not other.num_in_flight and other.dp_rank == seq.dp_rank:
                yield other

    def _preempt(self, seq: Sequence, by: Sequence) -> None:
        """End the run of ``seq``, which is idle, for ``by``, and queue it again."""
        del self.running[seq.id]
        self.waiting.leave(seq)
        self.queue_again(seq, by)

    def _admit(self, plan: Plan, budget: int, blocked: Collection[int]) -> int:
        """Admit waiting sequences in the policy's order, while token budget, batch indices and blocks last; none on the
        ranks ``blocked``, whose running ones wait for blocks.

        Returns the unused part of the budget.
        """
        waiting = self.waiting
        if self.promised or not (self.can_admit and waiting) or waiting.is_closed(self.running):
            return budget
        newest = next(reversed(self.running.values()), None)
        is_sorted = True
        while budget and waiting and self.can_admit:
            seq = waiting.first()
            if (not self.chunked_prefill and len(seq.tokens) > budget) or not self.adopt_and_reserve(seq, blocked):
                break
            waiting.admit(seq)
            self.run(seq)
            num_tokens = len(seq.tokens) - seq.num_computed_tokens
            most = min(budget, seq.capacity - seq.num_computed_tokens, self.cache.room(seq))
            if num_tokens > most:
                num_tokens = most
                self.cut.append(seq)
            asked = num_tokens
            if seq.images is not None:
                num_tokens = self._end_of_chunk(seq, num_tokens)
            if num_tokens > 0:
                self._look_ahead(seq, seq.num_computed_tokens + num_tokens)
                plan.append(self._take(seq, num_tokens))
                budget -= min(num_tokens, asked)
            is_sorted = is_sorted and (newest is None or newest.order < seq.order)
            newest = seq
        if not is_sorted:
            self.running = dict(sorted(self.running.items(), key=lambda entry: entry[1].order))
        return budget

    def _schedule_trial(self) -> Plan:
        """Plan a retry of part of a failed plan. Its blocks are still held, so none are reserved."""
        if self.images is not None:
            self.images.begin_step()
        group = self.suspects.next_group()
        self._start_again([item.seq for item in group if item.seq.state is not None and item.seq.state.is_lost])
        plan: Plan = []
        for seq, num_tokens in divided(group, self.max_num_batched_tokens):
            num_tokens = min(num_tokens, self.cache.room(seq))
            if seq.images is not None and self.images is not None:
                num_tokens = self.images.end_of_chunk(seq, num_tokens)
            if num_tokens > 0:
                plan.append(self._take(seq, num_tokens))
        if plan:
            self.cache.note_filled(sum(len(item.tokens) for item in plan))
            self.suspects.begin(plan)
        return plan

    def _start_again(self, lost: list[Sequence]) -> None:
        """Let sequences that have lost their states start again from what the prefix cache has, or else wait: others
        may hold the blocks that it had shared."""
        for seq in lost:
            self.release(seq)
        for seq in lost:
            ends = self.match_if_it_fits(seq, num_spare=0)
            if ends is not None:
                self.start(seq, ends)
            elif self.yielding.pop(seq, None) is not None:
                self.queue_again(seq, by=seq)
            else:
                self._preempt(seq, by=seq)

    # ---- committing its results

    def commit(self, plan: Plan, sampled: list[Sampled]) -> list[Output]:
        """Append the results of ``plan``, publish the blocks that are now full, finish sequences that ended."""
        self.stats.num_steps += 1
        self.stats.num_scheduled_seqs += len(plan)
        self.suspects.acquit(plan)
        if self.waiting.charges:
            self.waiting.charge(plan, sampled)
        if self.speculation is not None:
            self.speculation.learn(plan, sampled)
        outputs: list[Output] = []
        stats = self.stats
        for item, result in zip(plan, sampled, strict=True):
            seq = item.seq
            seq.num_in_flight -= 1
            if item.epoch != seq.epoch:  # the item is stale
                self._let_go(seq)
            elif result.error is not None:
                outputs.append(self._end_with_error(seq, result.error))
            elif output := self._applied(item, result):
                outputs.append(output)
                if output.finish_reason is not None:
                    if seq.request.transfer is not None:
                        output.transfer = self.cache.hold(seq)
                    if seq.request.params.return_routed_experts and self.routes is not None:
                        self.routes.begin(seq, output)
                    self._finish(seq, output.finish_reason, output.stop_token_id == REPETITION)
        stats.num_output_tokens += sum([len(output.tokens) for output in outputs])
        return outputs

    def _applied(self, item: Scheduled, result: Sampled) -> Output | None:
        if item.seq.images is not None and self.images is not None:
            self.images.commit(item)
        return apply_result(item, result, self.cache, self.stats, self.events)

    def fail(self, plan: Plan, error: RunnerError) -> list[Output]:
        """Undo ``plan`` as if it had never been scheduled; a sequence that fails twice alone ends with ``error``."""
        self.stats.num_faults += 1
        members = []
        for item in plan:
            item.seq.num_in_flight -= 1
            if item.is_stale:
                self._let_go(item.seq)
            else:
                members.append(item)
                self._rewind(item)
        cause = self.suspects.accuse(plan, members)
        return [self._end_with_error(cause, str(error))] if cause else []

    def _rewind(self, item: Scheduled) -> None:
        """Undo the computation of ``item`` and of everything planned after it."""
        seq = item.seq
        seq.num_faults += 1
        self.events.note(seq.id, "fault", start=item.settled_start)
        self.cache.note_filled(item.settled_start - seq.num_computed_tokens)
        seq.num_computed_tokens = item.settled_start
        seq.decodes = False
        if self.images is not None:
            self.images.rewind(seq)
        if self.cache.states is not None:
            self.cache.states.lose(seq)
        self._disown_steps(seq)

    def _disown_steps(self, seq: Sequence) -> None:
        """Make every step of ``seq`` in flight stale, and drop their pending tokens."""
        seq.epoch += 1
        while seq.tokens[-1] is None:
            seq.tokens.pop()

    def _end_with_error(self, seq: Sequence, error: str) -> Output:
        self._finish(seq, "error")
        return error_output(seq, error)

    def _finish(self, seq: Sequence, reason: FinishReason, is_repetition: bool = False) -> None:
        """End ``seq``. Its blocks are released now, or when its last step in flight is committed."""
        seq.status = Status.FINISHED
        seq.finish_reason = reason
        self._disown_steps(seq)
        accepted = seq.num_drafts - seq.num_rejected
        shown, num_tokens = REPETITION if is_repetition else reason, seq.num_output_tokens
        self.events.note(seq.id, "ended", tokens=num_tokens, reason=shown, drafts=seq.num_drafts, accepted=accepted)
        if self.running.pop(seq.id, None) is not None:
            self.waiting.leave(seq)
        self.yielding.pop(seq, None)
        if self.speculation is not None:
            self.speculation.forget(seq)
        self.leaving.add(seq)
        self._let_go(seq)

    def _let_go(self, seq: Sequence) -> None:
        """Release the blocks of ``seq`` if it has finished and no step in flight can still write to them."""
        if seq.status is Status.FINISHED and not seq.num_in_flight:
            self.release(seq)
            self.leaving.remove(seq)

    def clear(self) -> None:
        """Forget what no sequence holds: cached blocks and embeddings."""
        self.cache.clear()
        if self.images is not None:
            self.images.cache.clear()

    # ---- statistics and checks

    def note_step(self, plan: Plan, seconds: float) -> None:
        """Record that a successful step took ``seconds``."""
        self.stats.step_tokens = sum([len(item.tokens) + len(item.drafts) for item in plan])
        self.stats.step_seconds = seconds
        self.step_budget.learn(plan, self.stats.step_tokens, seconds)
        if self.speculation is not None:
            self.speculation.note_step(plan, seconds, self.step_budget.plain_seconds(plan))

    def snapshot(self) -> EngineStats:
        """Counters and gauges as of now; O(1)."""
        num_running, num_waiting = len(self.running) + len(self.yielding), len(self.waiting) + len(self.promised)
        return snapshot(self.stats, self.cache, num_running, num_waiting)

    def check(self) -> None:
        """Assert all invariants that hold between two steps. Costs O(pool)."""
        self.cache.check(self.holders)
        if self.images is not None:
            self.images.cache.check(self.holders)
        self.waiting.check()
        orders = [seq.order for seq in self.running.values()]
        assert orders == sorted(orders), "running sequences are out of order"
        assert len(self.holders) <= self.max_num_seqs, "too many sequences are running"
        for request_id, seq in self.running.items():
            assert seq.id == request_id, "a running sequence is filed under another id"
            assert request_id not in self.waiting, "a sequence is running and waiting"
            assert seq.status is RUNNING, "a running sequence has another status"
            assert seq.num_computed_tokens <= seq.capacity, "a computed position has no block"
            is_complete = seq.num_computed_tokens == seq.max_computed_tokens
            assert is_complete or len(seq.tokens) <= seq.max_computed_tokens, "more is planned than is ever needed"
            assert seq.num_computed_tokens <= seq.max_computed_tokens, "more is computed than is ever needed"
            num_pending = seq.tokens.count(None)
            assert None not in seq.tokens[: len(seq.tokens) - num_pending], "a token follows a pending one"
        for seq in self.yielding:
            assert seq.status is Status.YIELDING, "a yielding sequence has another status"
        for request_id, seq in self.promised.items():
            assert seq.id == request_id, "a promised sequence is filed under another id"
            assert seq.status is Status.WAITING, "a promised sequence has another status"
            assert request_id not in self.waiting, "a sequence is promised a place and waits"
        for seq in self.leaving:
            assert seq.status is Status.FINISHED, "a leaving sequence has not ended"
            assert seq.num_in_flight, "a finished sequence keeps its blocks"

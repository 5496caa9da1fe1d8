"""Which sequences run, and which have their prompts computed first.

A waiting sequence gets the place of a running one that the policy preempts for it, and a short prompt overtakes a long
one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import msgspec

from octavo.cache.kv_cache import KVCache
from octavo.cache.node import Node
from octavo.engine.policies.policy import Policy
from octavo.engine.sequence_images import Images
from octavo.engine.timing.step_budget import StepBudget
from octavo.steps.limits import RopeSets
from octavo.telemetry.request_events import EventLog
from octavo.types import EngineStats, Sequence, Status

OVERTAKEN = 0.1
"""Tokens of shorter prompts that a prompt lets go before it, as a share of its own tokens."""


class SequenceAdmission:
    """The part of the scheduler that decides which sequences run; the state is the scheduler's."""

    cache: KVCache
    clock: Callable[[], float]
    events: EventLog
    stats: EngineStats
    waiting: Policy
    step_budget: StepBudget
    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    images: Images | None
    rope_sets: RopeSets | None
    """Of a model whose rotary frequencies depend on a text's length."""
    running: dict[int, Sequence]
    """By id, always sorted by ``Sequence.order``."""
    leaving: set[Sequence]
    """Finished, but still in flight: the device may still write to their blocks."""
    yielding: dict[Sequence, Sequence]
    """Preempted by the policy, and still in flight: each with the sequence that gets its place."""
    promised: dict[int, Sequence]
    """Sequences for which others yield, by id: they run as soon as there is room."""
    cut: list[Sequence]
    """Sequences whose tokens the last plan computed only in part, and those that run since."""

    def run(self, seq: Sequence) -> None:
        """Let an admitted sequence, which has its blocks, run from now on."""
        self.running[seq.id] = seq
        seq.status = Status.RUNNING

    @property
    def can_admit(self) -> bool:
        is_free = len(self.running) + len(self.leaving) + len(self.yielding) < self.max_num_seqs
        return is_free and self.step_budget.admits(len(self.running))

    def next_admissible(self) -> Sequence | None:
        """The first waiting sequence, if it can be admitted now."""
        waiting = self.waiting
        if self.promised or not (waiting and self.can_admit) or waiting.is_closed(self.running):
            return None
        return first if self.match_if_it_fits(first := waiting.first()) is not None else None

    def match_if_it_fits(
        self, seq: Sequence, num_spare: int | None = None, blocked: Collection[int] = ()
    ) -> list[Node] | None:
        """Last node of the cached prefix in each KV group; ``None`` without blocks for the rest and ``num_spare``.

        Of several ranks with such blocks, none of them ``blocked``, ``seq`` is placed on the one with the longest
        prefix, among those that have at most as many more positions than another as it has tokens: so ranks have about
        as much to attend to.
        """
        if len(self.cache.ranks) == 1:
            return self._match_on_rank(seq, num_spare)
        found = []
        for rank, (first, *_) in enumerate(self.cache.ranks):
            seq.dp_rank = rank
            if rank not in blocked and (ends := self._match_on_rank(seq, num_spare)) is not None:
                found.append((first.num_slots, -ends[0].depth, rank, ends))
        least = min([num_slots for num_slots, *_ in found], default=0)
        near = [entry for entry in found if entry[0] - least <= len(seq.tokens)]
        if not near:
            return None
        _, _, rank, ends = min(near, key=lambda entry: (entry[1], entry[0], entry[2]))
        seq.dp_rank = rank
        return ends

    def _match_on_rank(self, seq: Sequence, num_spare: int | None) -> list[Node] | None:
        """``match_if_it_fits`` on the rank that ``seq`` belongs to."""
        ends = self.cache.match(seq) if may_share(seq) else self.cache.roots(seq)
        running: Collection[Sequence] = self.running.values()
        if len(self.cache.ranks) > 1:
            running = [other for other in running if other.dp_rank == seq.dp_rank]
        budget, least = self.max_num_batched_tokens, len(running) if num_spare is None else num_spare
        has_room = self.cache.admits(seq, ends, budget, least)
        if not has_room and num_spare is None:
            has_room = self.cache.admits(seq, ends, budget, _count_growing(running))
        if seq.images is not None and self.images is not None:
            has_room = has_room and self.images.admits(seq, ends[0].depth * self.cache.block_size)
        return ends if has_room else None

    def adopt_and_reserve(self, seq: Sequence, blocked: Collection[int] = ()) -> bool:
        """Adopt the cached prefix of a waiting sequence and reserve blocks for the rest, or change nothing."""
        ends = self.match_if_it_fits(seq, blocked=blocked)
        if ends is None:
            return False
        self.start(seq, ends)
        turn, before = (0, 0) if seq.first_scheduled else self.cache.sessions.note_found(seq)
        num_found, num_running = seq.num_computed_tokens, len(self.running)
        self.events.note(seq.id, "admitted", tokens=num_found, others=num_running, turn=turn, before=before)
        if not seq.first_scheduled:
            seq.first_scheduled = self.clock()
            seq.num_cached_tokens = min(seq.num_computed_tokens, seq.num_prompt_tokens)
            self.stats.prefix_queries += seq.num_prompt_tokens
            self.stats.prefix_hits += seq.num_cached_tokens
        return True

    def start(self, seq: Sequence, ends: list[Node]) -> None:
        """Give ``seq``, which holds nothing, what ``match_if_it_fits`` found, and blocks and images for the rest."""
        self.cache.start(seq, ends, may_share(seq), self.max_num_batched_tokens)
        if self.images is not None:
            self.images.hold(seq)

    def release(self, seq: Sequence) -> None:
        """Release what ``seq`` holds."""
        self.cache.release(seq)
        if self.images is not None:
            self.images.release(seq)

    def queue_again(self, seq: Sequence, by: Sequence) -> None:
        """Release the blocks of ``seq`` for ``by``; those that are published may still be matched."""
        self.events.note(seq.id, "preempted", tokens=seq.num_computed_tokens, by=by.id)
        self.release(seq)
        seq.status = Status.WAITING
        seq.decodes = False
        seq.epoch += 1
        seq.num_preemptions += 1
        self.choose_frequencies(seq)
        self.waiting.push(seq)
        self.stats.num_preemptions += 1

    def choose_frequencies(self, seq: Sequence) -> None:
        """Choose the rotary frequencies of a waiting sequence by its length; those with others share no blocks."""
        if self.rope_sets is None:
            return
        before, request = seq.rope_set, seq.request
        seq.rope_set, seq.rope_end = self.rope_sets.of(seq.num_prompt_tokens, len(seq.tokens))
        seq.salt = f"{request.cache_salt}\0{seq.rope_set}" if seq.rope_set else request.cache_salt
        if seq.rope_set != before and seq.num_preemptions and request.params.prompt_logprobs is not None:
            params = msgspec.structs.replace(request.params, prompt_logprobs=None)  # they are told, of the prompt alone
            seq.request = msgspec.structs.replace(request, params=params)

    def preempt_for_waiting(self) -> None:
        """Preempt what the policy chooses, one for each of the first waiting sequences, which run in their places.

        A sequence in flight cannot release its blocks: it is left out of further plans until it is idle, and its place
        is promised to the waiting one. A waiting one that the policy would preempt another for runs from now on also
        where a place is free, as those behind it need places, too. The others are admitted later, within the token
        budget.
        """
        self._keep_promises()
        waiting, num_tokens = self.waiting, sum([len(seq.tokens) for seq in self.promised.values()])
        while waiting and self.running:
            seq = waiting.first()
            if (victim := waiting.preempt_for(seq, self.running)) is None:
                break
            has_place = not self.promised and self.can_admit and self.match_if_it_fits(seq) is not None
            num_tokens += len(seq.tokens)
            is_too_much = num_tokens > self.max_num_batched_tokens or not self.chunked_prefill
            if is_too_much and (has_place or self.promised):
                break
            if not has_place:
                del self.running[victim.id]
                waiting.leave(victim)
                victim.status = Status.YIELDING
                self.yielding[victim] = seq
            waiting.admit(seq)
            self.promised[seq.id] = seq
            self._keep_promises()

    def _keep_promises(self) -> None:
        """Preempt the yielding sequences that are idle, and let as many promised ones run as there is room for.

        When nothing yields any more, the others wait again.
        """
        for seq, by in [(seq, by) for seq, by in self.yielding.items() if not seq.num_in_flight]:
            del self.yielding[seq]
            self.queue_again(seq, by)
        is_sorted = True
        for seq in list(self.promised.values()):
            if not (self.can_admit and self.chunked_prefill and self.adopt_and_reserve(seq)):
                break
            self.run(self.promised.pop(seq.id))
            self.cut.append(seq)
            is_sorted = False
        if not is_sorted:
            self.running = dict(sorted(self.running.items(), key=lambda entry: entry[1].order))
        while self.promised and not self.yielding:
            _, seq = self.promised.popitem()
            self.waiting.leave(seq)
            self.waiting.push(seq)

    def share_budget(self, budget: int) -> tuple[dict[Sequence, int], int]:
        """The tokens of the budget reserved for each unfinished prompt, in the policy's order, while they last; and the
        budget, which is less on a slow device when a prompt overtakes.

        These are the prompts of the sequences in ``cut`` and of the first waiting one, if it can be admitted.
        """
        pending = [seq for seq in self.cut if seq.status is Status.RUNNING]
        if (first := self.next_admissible()) is not None:
            pending.append(first)
        if not pending:
            return {}, budget
        leader, *others = sorted(pending, key=self.waiting.prefill_rank)
        overtaking = self._overtaking(leader, others, first) if self.waiting.overtakes else []
        if overtaking:
            brief = self.step_budget.brief(budget, len(self.running), _num_uncomputed(leader))
            budget = min(budget, max(brief, len(self.running) + sum(map(_num_uncomputed, overtaking))))
        shares, left = dict[Sequence, int](), budget - len(self.running)
        for seq in [*overtaking, leader, *[seq for seq in others if seq not in overtaking]]:
            if left <= 0:
                break
            shares[seq] = min(_num_uncomputed(seq), left)
            left -= shares[seq]
        if left <= 0:
            leader.num_overtaken += sum([shares.get(seq, 0) for seq in overtaking])
        return shares, budget

    def _overtaking(self, leader: Sequence, others: list[Sequence], first: Sequence | None) -> list[Sequence]:
        """The sequences of ``others`` and the shortest waiting ones that overtake ``leader``; the latter run from now
        on."""
        left = int(OVERTAKEN * len(leader.tokens)) - leader.num_overtaken
        overtaking = []
        for seq in sorted(others, key=_num_uncomputed):
            if (count := _num_uncomputed(seq)) > left:
                break
            overtaking.append(seq)
            left -= count
        while first is not None and (seq := self.waiting.shortest()) is not first and len(seq.tokens) <= left:
            if not self._fit_both(seq, first) or not self.adopt_and_reserve(seq):
                break
            self.waiting.admit(seq)
            self.run(seq)
            self.running = dict(sorted(self.running.items(), key=lambda entry: entry[1].order))
            overtaking.append(seq)
            left -= len(seq.tokens)
        return overtaking

    def _fit_both(self, seq: Sequence, first: Sequence) -> bool:
        """Whether there are a place and blocks for ``first`` even if ``seq`` is admitted before it."""
        if len(self.running) + len(self.leaving) + len(self.yielding) + 2 > self.max_num_seqs:
            return False
        num_spare = len(self.running) + 1 + -(-len(seq.tokens) // self.cache.block_size)
        return self.match_if_it_fits(first, num_spare) is not None


def _count_growing(running: Collection[Sequence]) -> int:
    """Running sequences that may need another block, for which one is left: none, if a block holds a context."""
    return sum(seq.capacity < seq.max_computed_tokens for seq in running)


def _num_uncomputed(seq: Sequence) -> int:
    return len(seq.tokens) - seq.num_computed_tokens


def may_share(seq: Sequence) -> bool:
    """Whether ``seq`` can start from cached blocks.

    Logits and hidden states of cached positions are not kept, so prompt log-probabilities and the tasks other than
    generate compute the entire prompt.
    """
    return seq.request.params.prompt_logprobs is None and seq.request.task == "generate"

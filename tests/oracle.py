"""A runner without a model that notices every mistake of the deciding half.

Instead of keys and values, each KV slot holds a digest of the whole prefix it should encode, salt included.
Every slot that a step would read is checked, so that reading a block too early, too late, or of somebody
else fails at once. The next token follows from the digest: a right text means right bookkeeping all along.

It is as hostile as a device may be. Failed steps, results nobody wants any more and rejected drafts leave
garbage behind. It keeps its own copies of the block tables, and refreshes only what it is told has changed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

from octavo.engine.speculative.proposer import Proposal
from octavo.errors import RunnerError
from octavo.types import (
    ON_DEVICE,
    FinishReason,
    GroupBlocks,
    Masks,
    Plan,
    Request,
    Sampled,
    Scheduled,
    Sequence,
    TokenLogprobs,
)

Act = Callable[[dict[int, int], dict[int, int]], None]
"""Changes slots between two steps."""

Tables = list[list[int]]
"""A sequence's block table in each KV group."""

VOCAB_SIZE = 50
NUM_DEVICE_DRAFTS = 4
GARBAGE = -1
GROUP_SLOTS = 1 << 32
"""Slots of one KV group come after all those of the group before."""


def digest(prefix_digest: int, token: int) -> int:
    return hash((prefix_digest, token)) & 0xFFFFFFFFFFFF


def empty_digest(salt: str) -> int:
    return sum(salt.encode()) + 7


def likely_token(prefix_digest: int, allowed: Collection[int] | None = None) -> int:
    """The "model": the one token that follows a prefix, among those allowed."""
    assert allowed is None or allowed, "nothing is allowed"
    token = (prefix_digest * 2654435761 >> 7) % VOCAB_SIZE
    while allowed is not None and token not in allowed:
        token = (token + 1) % VOCAB_SIZE
    return token


def masked_stops(request: Request, position: int) -> frozenset[int]:
    """Tokens that the sampler must not choose at ``position``, because of ``min_tokens``."""
    if position - len(request.prompt_tokens) >= request.params.min_tokens:
        return frozenset()
    return frozenset(request.eos_token_ids) | frozenset(request.params.stop_token_ids)


def choose(request: Request, position: int, prefix_digest: int, mask: Collection[int] | None) -> int:
    allowed = set(range(VOCAB_SIZE)) if mask is None else set(mask)
    return likely_token(prefix_digest, allowed - masked_stops(request, position) or allowed)


def expected_output(request: Request, uses_grammar: bool = False) -> tuple[list[int], FinishReason]:
    """What ``request`` must give, by a plain loop: all its output tokens, replayed ones included."""
    state, prefix = 1, empty_digest(request.cache_salt)
    for token in request.prompt_tokens:
        prefix = digest(prefix, token)
    output: list[int] = []
    while len(output) < request.max_tokens:
        mask = ToyGrammars.allowed(state) if uses_grammar else None
        token = choose(request, len(request.prompt_tokens) + len(output), prefix, mask)
        output.append(token)
        if token in request.eos_token_ids or token in request.params.stop_token_ids:
            return output, "stop"
        prefix, state = digest(prefix, token), ToyGrammars.advanced(state, token)
    return output, "length"


def logprob_at(prefix_digest: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -float(prefix_digest % 1009), 1, [], [])


class ToyGrammars:
    """A grammar for some requests: which tokens are allowed depends on all the tokens before."""

    def __init__(self, users: Collection[int] = ()) -> None:
        self.users = users

    def prepare(self, request: Request) -> Future[Any]:
        raise AssertionError("no request names a grammar")

    @staticmethod
    def advanced(state: int, token: int) -> int:
        return (state * 7 + token) % 11

    @staticmethod
    def allowed(state: int) -> set[int]:
        return {token for token in range(VOCAB_SIZE) if token % 11 != state}

    def masks(self, plan: Plan) -> Masks:
        masks: dict[int, list[set[int]]] = {}
        for item in plan:
            if item.samples and item.seq.id in self.users and not item.is_stale:
                state = self._state(item)
                masks[item.seq.id] = [self.allowed(state)]
                for token in item.known_drafts:
                    state = self.advanced(state, token)
                    masks[item.seq.id].append(self.allowed(state))
        return masks

    def _state(self, item: Scheduled) -> int:
        state = 1
        for token in item.seq.tokens[item.seq.num_prompt_tokens : _end(item)]:
            assert token is not None, "a mask is asked for before the tokens are known"
            state = self.advanced(state, token)
        return state


class ToyProposer:
    """Guesses the next tokens, right most of the time."""

    num_lookahead = 0

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def propose(self, seq: Sequence, count: int) -> Proposal:
        prefix = empty_digest(seq.request.cache_salt)
        num_pending = seq.tokens.count(None)
        for token in seq.tokens[: len(seq.tokens) - num_pending]:
            assert token is not None, "a token follows a pending one"
            prefix = digest(prefix, token)
        guesses = guess_tokens(self.rng, prefix, num_pending + min(count, self.rng.randrange(5)))
        return Proposal(tuple(guesses[num_pending:]))

    def forget(self, seq: Sequence) -> None:
        """There is nothing to forget."""


class DeviceProposer:
    """Leaves the drafts to the device."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.num_lookahead = rng.randrange(4)

    def propose(self, seq: Sequence, count: int) -> Proposal:
        return Proposal((ON_DEVICE,) * min(count, self.rng.randrange(NUM_DEVICE_DRAFTS + 1)))

    def forget(self, seq: Sequence) -> None:
        """There is nothing to forget."""


def guess_tokens(rng: random.Random, prefix: int, count: int) -> list[int]:
    """What may follow a prefix; each token is right most of the time."""
    guesses: list[int] = []
    for _ in range(count):
        guesses.append(likely_token(prefix) if rng.random() < 0.7 else rng.randrange(VOCAB_SIZE))
        prefix = digest(prefix, guesses[-1])
    return guesses


@dataclass
class Trouble:
    """What goes wrong on the device."""

    rng: random.Random = field(default_factory=random.Random)
    fault_rate: float = 0.0
    """Share of steps that fail by chance."""
    poison: dict[int, int] = field(default_factory=dict)
    """Request id to the position at which every step that computes it, or one after it, fails."""
    bad_rows: dict[int, int] = field(default_factory=dict)
    """Request id to the position at which its own result is an error, and nobody else's."""

    def strikes(self, plan: Plan) -> bool:
        poisoned = any(_end(item) > self.poison.get(item.seq.id, 1 << 30) for item in plan)
        return poisoned or self.rng.random() < self.fault_rate

    def spoils(self, item: Scheduled) -> bool:
        return _end(item) > self.bad_rows.get(item.seq.id, 1 << 30)


def _end(item: Scheduled) -> int:
    return item.settled_start + len(item.tokens)


class OracleRunner:
    """Executes plans in the order of their submission; see the top of this module."""

    def __init__(
        self,
        block_size: int,
        trouble: Trouble | None = None,
        reads_live_tables: bool = False,
        windows: Iterable[int] = (0,),
    ) -> None:
        """``windows`` are those of the KV groups: in each, a row reads so many positions up to its own, and no others;
        with 0, all."""
        self.block_size = block_size
        self.groups = [(GROUP_SLOTS * index, window) for index, window in enumerate(windows)]
        """First slot of each KV group, and its window."""
        self.trouble = trouble or Trouble()
        self.reads_live_tables = reads_live_tables
        """Whether a step uses the block table as it is when executed, and not as it was when submitted."""
        self.slots: dict[int, int] = {}
        self.states: dict[int, int] = {}
        """Digest of the prefix after which each slot of recurrent state holds the state."""
        self.acts: list[Act] = []
        """Asked for since the last step was submitted."""
        self.unfinished: deque[PendingStep] = deque()
        self.tables: dict[GroupBlocks, tuple[int, list[int]]] = {}
        self.digests: dict[Sequence, list[int]] = {}
        self.drafted: WeakKeyDictionary[Sequence, tuple[int, ...]] = WeakKeyDictionary()
        """What the drafter of this device proposes next."""
        self.plans: list[Plan] = []
        self.num_checked_reads = 0
        self.num_computed = 0
        self.num_copied = 0
        self.num_failed_steps = 0

    def submit(self, plan: Plan) -> PendingStep:
        assert plan, "an empty plan was submitted"
        assert len({item.seq for item in plan}) == len(plan), "a sequence is twice in a plan"
        self.plans.append(plan)
        acts, self.acts = self.acts, []
        assert all(len(item.seq.groups) == len(self.groups) for item in plan), "a sequence lacks blocks of a group"
        tables = [[list(self._refreshed_table(held)) for held in item.seq.groups] for item in plan]
        states = [-1 if item.seq.state is None else item.seq.state.slot for item in plan]
        written = [slot for slot in states if slot >= 0] + [slot for item in plan for _, slot in item.marks]
        assert len(set(written)) == len(written), "a state is shared"
        pending = PendingStep(self, plan, tables, states, acts)
        self.unfinished.append(pending)
        return pending

    def copy_slots(self, group: int, source: int, target: int, num_tokens: int) -> None:
        """Copy the first positions of a block; what the others of the target hold is not to be relied upon."""
        assert 0 < num_tokens < self.block_size, "not a part of a block"
        first_slot = self.groups[group][0]

        def copy(slots: dict[int, int], _: dict[int, int]) -> None:
            copied = [slots[first_slot + source * self.block_size + place] for place in range(num_tokens)]
            copied += [GARBAGE] * (self.block_size - num_tokens)
            slots.update(enumerate(copied, first_slot + target * self.block_size))

        self._do(copy)
        self.num_copied += 0 if group else num_tokens

    def copy_state(self, source: int, target: int) -> None:
        """Copy a state, behind all steps submitted before and ahead of the next one."""
        assert source != target, "a state was copied to itself"
        self.acts.append(lambda _, states: states.update({target: states.get(source, GARBAGE)}))

    def read_state(self, slot: int) -> int:
        """What ``slot`` will hold when all that was asked for has happened; no step may be about to write to it."""
        return self._after_acts()[1].get(slot, GARBAGE)

    def write_state(self, slot: int, content: int) -> None:
        """Like ``copy_state``."""
        self.acts.append(lambda _, states: states.update({slot: content}))

    def read_block(self, block: int) -> list[int]:
        """What ``block`` will hold when all that was asked for has happened; no step may be about to write to it."""
        slots, _ = self._after_acts()
        return [slots[slot] for slot in self._block_slots(block)]

    def _after_acts(self) -> tuple[dict[int, int], dict[int, int]]:
        slots, states = dict(self.slots), dict(self.states)
        for act in [*chain.from_iterable(pending.acts for pending in self.unfinished), *self.acts]:
            act(slots, states)
        return slots, states

    def write_block(self, block: int, content: Iterable[int]) -> None:
        digests = dict(zip(self._block_slots(block), content, strict=True))
        self._do(lambda slots, _: slots.update(digests))

    def _do(self, act: Act) -> None:
        """Before the next step that is submitted; at once, where those submitted earlier may not have begun."""
        if self.reads_live_tables:
            act(self.slots, self.states)
        else:
            self.acts.append(act)

    def _block_slots(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)

    def _refreshed_table(self, held: GroupBlocks) -> list[int]:
        """The runner's own copy of a block table, brought up to date the cheap way."""
        version, table = self.tables.get(held, (-1, []))
        if version != held.table_version:
            table = list(held.block_table)
        else:
            table.extend(held.block_table[len(table) :])
        assert table == held.block_table, "a block table changed without a new version"
        self.tables[held] = (held.table_version, table)
        return table

    def execute(self, pending: PendingStep, masks: Masks) -> list[Sampled]:
        """Do what was asked for between the plan before and this one, then this one."""
        assert self.unfinished.popleft() is pending, "results are asked for out of order"
        plan, tables, states = pending.plan, pending.tables, pending.states
        for act in pending.acts:
            act(self.slots, self.states)
        if self.trouble.strikes(plan):
            self.num_failed_steps += 1
            for item, of_item, slot in zip(plan, tables, states, strict=True):
                self._spill(item, of_item, item.settled_start)
                self.states |= dict.fromkeys((slot, *(of_mark for _, of_mark in item.marks)), GARBAGE)
            raise RunnerError("device fault")
        found = []
        for item, of_item, slot in zip(plan, tables, states, strict=True):
            found.append(self._row(item, of_item, slot, masks))
        return found

    def _row(self, item: Scheduled, tables: Tables, state: int, masks: Masks) -> Sampled:
        assert item.tokens, "an item computes nothing"
        assert not item.drafts or item.samples, "drafts follow a part of what is known"
        assert not item.drafts or len(item.tokens) == 1 or state >= 0, "drafts follow a chunk"
        before, self.states[state] = self.states.get(state), GARBAGE
        self.states |= dict.fromkeys((slot for _, slot in item.marks), GARBAGE)
        if item.is_stale:
            self._spill(item, tables, item.settled_start)
            return Sampled([GARBAGE])
        if self.reads_live_tables:
            tables = [held.block_table for held in item.seq.groups]
        if self.trouble.spoils(item):
            self._spill(item, tables, item.settled_start)
            return Sampled([], error="bad row")
        for group, table in zip(self.groups, tables, strict=True):
            self._read(item.seq, table, item.settled_start, *group)
        if state >= 0 and item.settled_start:
            known = self._known_digests(item.seq, item.settled_start)[item.settled_start]
            assert before == known, f"stale state: sequence {item.seq.id}, position {item.settled_start}"
        self._write(item, tables)
        for position, slot in item.marks:
            assert item.settled_start < position < _end(item), "a mark outside of a chunk"
            self.states[slot] = self._known_digests(item.seq, position)[position]
        result = Sampled([], prompt_logprobs=self._prompt_logprobs(item))
        after = self._known_digests(item.seq, _end(item))[_end(item)]
        if item.samples:
            self._sample(item, tables, masks.get(item.seq.id), result)
        for token in result.tokens[: len(item.drafts)] if len(result.tokens) > len(item.drafts) else ():
            after = digest(after, token)
        self.states[state] = after if len(result.tokens) in (0, 1 + len(item.drafts)) else GARBAGE
        return result

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _put(self, tables: Tables, position: int, content: int) -> None:
        for (first, _), table in zip(self.groups, tables, strict=True):
            self.slots[first + self._slot(table, position)] = content

    def _spill(self, item: Scheduled, tables: Tables, start: int) -> None:
        """Leave garbage where ``item`` would have written, from position ``start`` on."""
        for position in range(start, _end(item) + len(item.drafts)):
            self._put(tables, position, GARBAGE)

    def _known_digests(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Digests of the prefixes of ``seq``: the one at ``i`` covers tokens 0 to i - 1."""
        digests = self.digests.setdefault(seq, [empty_digest(seq.request.cache_salt)])
        for token in seq.tokens[len(digests) - 1 : num_tokens]:
            assert token is not None, "a token is computed before it is known"
            digests.append(digest(digests[-1], token))
        return digests

    def _read(self, seq: Sequence, table: list[int], num_tokens: int, first_slot: int, window: int) -> None:
        digests = self._known_digests(seq, num_tokens)
        first = max(0, num_tokens - window + 1) if window else 0
        for position in range(first, num_tokens):
            found = self.slots.get(first_slot + self._slot(table, position))
            assert found == digests[position + 1], f"stale KV: sequence {seq.id}, position {position}"
        self.num_checked_reads += num_tokens - first

    def _write(self, item: Scheduled, tables: Tables) -> None:
        seq, end = item.seq, _end(item)
        for planned, token in zip(item.tokens, seq.tokens[item.settled_start : end], strict=True):
            assert planned is None or planned == token, "a plan holds another token than its sequence"
        digests = self._known_digests(seq, end)
        for position in range(item.settled_start, end):
            self._put(tables, position, digests[position + 1])
        self.num_computed += len(item.tokens)

    def _prompt_logprobs(self, item: Scheduled) -> list[TokenLogprobs] | None:
        request = item.seq.request
        if request.params.prompt_logprobs is None:
            return None
        last = min(_end(item) + 1, len(request.prompt_tokens))
        digests = self._known_digests(item.seq, last)
        return [logprob_at(digests[p], request.prompt_tokens[p]) for p in range(item.settled_start + 1, last)]

    def _sample(self, item: Scheduled, tables: Tables, masks: list[set[int]] | None, result: Sampled) -> None:
        """Sample one token, and one more for each draft that turns out right."""
        request, end = item.seq.request, _end(item)
        prefix = self._known_digests(item.seq, end)[end]
        logprobs = []
        drafts = self._drafts(item)
        for index in range(len(drafts) + 1):
            token = choose(request, end + index, prefix, masks[index] if masks else None)
            result.tokens.append(token)
            logprobs.append(logprob_at(prefix, token))
            prefix = digest(prefix, token)
            if drafts[index : index + 1] != (token,):
                break
            self._put(tables, end + index, prefix)
            self.num_computed += 1
        num_accepted = len(result.tokens) - 1
        for position in range(end + num_accepted, end + len(item.drafts)):
            self._put(tables, position, GARBAGE)
        if request.params.logprobs is not None:
            result.logprobs = logprobs
        drafted = tuple(guess_tokens(self.trouble.rng, prefix, NUM_DEVICE_DRAFTS))
        self.drafted[item.seq] = drafted
        result.drafts = drafted if masks else ()

    def _drafts(self, item: Scheduled) -> tuple[int, ...]:
        """The drafts of ``item``, those made on the device after the step before included."""
        if ON_DEVICE not in item.drafts:
            return item.drafts
        return self.drafted[item.seq][: len(item.drafts)]


class PendingStep:
    """A submitted step; it is executed when its result is asked for, so that masks can take part."""

    is_started = False

    def __init__(
        self, runner: OracleRunner, plan: Plan, tables: list[Tables], states: list[int], acts: list[Act]
    ) -> None:
        self.runner, self.plan, self.tables, self.states, self.acts = runner, plan, tables, states, acts

    def sample(self, masks: Masks) -> list[Sampled]:
        return self.runner.execute(self, masks)

"""A numbered place for each running sequence, with what every step tells the device about it.

Shapes: C cells, B entries of the longest possible block table.
"""

from __future__ import annotations

import numpy as np

from octavo.runtime.forward_batch import Indices
from octavo.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from octavo.types import GroupBlocks, Plan, Sequence, Status

MAX_BANS = 2 * MAX_STOP_TOKEN_IDS
"""Most ids that the device keeps from ending a text too early."""
MAX_BIASES = MAX_LOGIT_BIAS + 2 * MAX_BAD_WORDS
"""Most ids that the device is told a bias of; a bad word that is a single token is banned by one."""


class Tables:
    """The block tables of the cells in one KV group."""

    def __init__(self, count: int, max_blocks: int) -> None:
        self.tables_CB = np.zeros((count, max_blocks), dtype=np.int32)
        self.lengths = [0] * count
        self.versions = [0] * count

    def update(self, cell: int, held: GroupBlocks) -> None:
        """Copy what has changed of a block table since the last time."""
        length = len(held.block_table)
        known = min(self.lengths[cell] if held.table_version == self.versions[cell] else 0, length)
        self.tables_CB[cell, known:length] = held.block_table[known:]
        self.lengths[cell], self.versions[cell] = length, held.table_version


class Cells:
    """Cells are given to sequences when a step first has them, and taken back when they are needed again.

    There must be as many as sequences can run or be in flight at once. What a cell holds can be made again from its
    sequence at any time, so one that is neither running nor in flight loses nothing when its cell is taken.
    """

    def __init__(self, count: int, max_blocks: int, num_groups: int = 1) -> None:
        self.owners: list[Sequence | None] = [None] * count
        self.tables = [Tables(count, max_blocks) for _ in range(num_groups)]
        """In each KV group."""
        self.top_k = np.zeros(count, dtype=np.int32)
        self.temperature = np.zeros(count, dtype=np.float32)
        self.min_p = np.zeros(count, dtype=np.float32)
        self.top_p = np.ones(count, dtype=np.float32)
        self.seeds = np.zeros(count, dtype=np.int64)
        self.repetition = np.ones(count, dtype=np.float32)
        self.frequency = np.zeros(count, dtype=np.float32)
        self.presence = np.zeros(count, dtype=np.float32)
        self.has_penalties = np.zeros(count, dtype=np.bool_)
        self.has_biases = np.zeros(count, dtype=np.bool_)
        self.wants_logprobs = np.zeros(count, dtype=np.bool_)
        self.num_prompt_tokens = np.zeros(count, dtype=np.int32)
        self.free_to_stop_at = np.zeros(count, dtype=np.int64)
        """A token in front of this position may not end the text."""
        self.has_extras = np.zeros(count, dtype=np.bool_)
        """Whether the sequence wants any of these."""
        self.num_told = [-1] * count
        """Tokens of the sequence that the device knows, in cells with extras; -1: it does not even know the lists."""
        self.by_host = np.zeros(count, dtype=np.bool_)
        """Whether choosing the sequence's tokens takes more than the device does by itself."""
        self._free = list(range(count))

    def of_plan(self, plan: Plan) -> Indices:
        """The cell of each item's sequence, brought up to date."""
        return np.array([self.of(item.seq) for item in plan], dtype=np.int64)

    def of(self, seq: Sequence) -> int:
        """The cell of ``seq``, brought up to date."""
        cell = seq.cell
        if cell < 0 or self.owners[cell] is not seq:
            cell = self._give(seq)
        for tables, held in zip(self.tables, seq.groups, strict=True):
            if len(held.block_table) != tables.lengths[cell] or held.table_version != tables.versions[cell]:
                tables.update(cell, held)
        return cell

    def _give(self, seq: Sequence) -> int:
        if not self._free:
            self._free = [cell for cell, owner in enumerate(self.owners) if owner is None or not _needs_cell(owner)]
            assert self._free, "more sequences are running than there are cells"
        cell = self._free.pop()
        self.owners[cell] = seq
        seq.cell = cell
        for tables in self.tables:
            tables.lengths[cell] = 0
        params, seed = seq.request.params, seq.request.seed
        self.temperature[cell] = params.temperature
        self.top_k[cell] = params.top_k
        self.min_p[cell] = params.min_p
        self.top_p[cell] = params.top_p
        self.seeds[cell] = seed - 2**64 if seed >= 2**63 else seed
        self._give_extras(cell, seq)
        self.by_host[cell] = _is_sampled_by_host(seq)
        return cell

    def _give_extras(self, cell: int, seq: Sequence) -> None:
        params = seq.request.params
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.repetition[cell], self.frequency[cell], self.presence[cell] = penalties
        self.has_penalties[cell] = penalties != (1, 0, 0)
        self.has_biases[cell] = bool(params.logit_bias or seq.request.banned_sequences)
        self.wants_logprobs[cell] = params.logprobs is not None
        self.num_prompt_tokens[cell] = seq.num_prompt_tokens
        has_bans = params.min_tokens > 0 and bool(seq.stop_token_ids)
        self.free_to_stop_at[cell] = seq.num_prompt_tokens + params.min_tokens if has_bans else 0
        self.has_extras[cell] = (
            has_bans or bool(self.has_biases[cell]) or penalties != (1, 0, 0) or params.logprobs is not None
        )
        self.num_told[cell] = -1

    def forget_from(self, cell: int, position: int) -> None:
        """The device does not have the right tokens from this position on."""
        self.num_told[cell] = min(self.num_told[cell], position)


def _needs_cell(seq: Sequence) -> bool:
    return seq.status is Status.RUNNING or seq.num_in_flight > 0


def _is_sampled_by_host(seq: Sequence) -> bool:
    params: SamplingParams = seq.request.params
    return (
        seq.request.task != "generate"
        or params.grammar is not None
        or params.prompt_logprobs is not None
        or params.allowed_token_ids is not None
        or any(len(sequence) > 1 for sequence in seq.request.banned_sequences)
        or (params.min_tokens > 0 and len(seq.stop_token_ids) > MAX_BANS)
    )

"""The persistent batch: sampling parameters and block tables of running sequences, by batch index, to be gathered
into steps.

Shapes: C batch indices, B entries of the longest possible block table.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from octavo.sampling_params import SamplingParams
from octavo.steps.limits import MAX_STOPS
from octavo.types import GroupBlocks, Plan, Sequence, Status

Indices = npt.NDArray[np.int64]


class Needs:
    """Bit flags: what a sequence needs of its steps besides plain sampling."""

    EXTRAS = 1
    """Penalties, biases, bans, masks or log-probabilities."""
    MASKS = 2
    """A mask of allowed tokens for each step: see ``types.Masks``."""
    ROWS = 4
    """Results of rows that are not sampled: embeddings, or log-probabilities of the prompt; or given experts."""
    LOGPROBS = 8
    """Log-probabilities of sampled tokens."""


class BlockTables:
    """The block tables of all batch indices in one KV group."""

    def __init__(self, count: int, max_blocks: int) -> None:
        self.tables_CB = np.zeros((count, max_blocks), dtype=np.int32)
        self.lengths = [0] * count
        self.versions = [0] * count
        self.num_blocks_C = np.zeros(count, dtype=np.int64)
        """``lengths`` as an array, to be gathered."""

    def update(self, index: int, held: GroupBlocks) -> None:
        """Copy the entries of a table that have changed since the last call."""
        length = len(held.block_table)
        if length != self.lengths[index] or held.table_version != self.versions[index]:
            known = self.lengths[index] if held.table_version == self.versions[index] else 0
            known = min(known, length)
            self.tables_CB[index, known:length] = held.block_table[known:]
            self.lengths[index], self.versions[index] = length, held.table_version
            self.num_blocks_C[index] = length


class PersistentBatch:
    """Sequences get a batch index in their first step, and lose it when it is needed for another sequence.

    ``count`` must be the most sequences that can run or be in flight at once. All data under an index can be rebuilt
    from its sequence, so the index of a sequence that is neither running nor in flight can be reused at any time.
    """

    def __init__(self, count: int, max_blocks: int, num_groups: int = 1) -> None:
        self.owners: list[Sequence | None] = [None] * count
        self.tables = [BlockTables(count, max_blocks) for _ in range(num_groups)]
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
        self.min_stop_position = np.zeros(count, dtype=np.int64)
        """Stop tokens are banned before this position (``min_tokens``)."""
        self.needs = np.zeros(count, dtype=np.int8)
        """Flags of ``Needs``."""
        self.num_sent = [-1] * count
        """Tokens that the executor has, for sequences with extras; -1: it does not have the ``TokenLists`` either."""
        self._free = list(range(count))

    def of_plan(self, plan: Plan) -> Indices:
        """The batch index [S] of each item's sequence; their block tables are brought up to date."""
        return np.array([self.of(item.seq) for item in plan], dtype=np.int64)

    def of(self, seq: Sequence) -> int:
        """The batch index of ``seq``; its block tables are brought up to date."""
        index = seq.batch_index
        if index < 0 or self.owners[index] is not seq:
            index = self._give(seq)
        for tables, held in zip(self.tables, seq.groups, strict=True):
            if len(held.block_table) != tables.lengths[index] or held.table_version != tables.versions[index]:
                tables.update(index, held)
        return index

    def _give(self, seq: Sequence) -> int:
        index = self._free_index()
        self.owners[index] = seq
        seq.batch_index = index
        for tables in self.tables:
            tables.lengths[index] = tables.num_blocks_C[index] = 0
        params, seed = seq.request.params, seq.request.seed
        self.temperature[index] = params.temperature
        self.top_k[index] = params.top_k
        self.min_p[index] = params.min_p
        self.top_p[index] = params.top_p
        self.seeds[index] = seed - 2**64 if seed >= 2**63 else seed
        self._set_extras(index, seq)
        return index

    def _free_index(self) -> int:
        """An index that no sequence needs: one that did not may have been preempted then, and runs again."""
        while self._free:
            index = self._free.pop()
            if not _needs_index(self.owners[index]):
                return index
        self._free = [index for index, owner in enumerate(self.owners) if not _needs_index(owner)]
        assert self._free, "more sequences are running than there are batch indices"
        return self._free.pop()

    def _set_extras(self, index: int, seq: Sequence) -> None:
        params = seq.request.params
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self.repetition[index], self.frequency[index], self.presence[index] = penalties
        has_penalties, has_masks, has_logprobs = penalties != (1, 0, 0), is_masked(seq), params.logprobs is not None
        has_biases = bool(params.logit_bias or (seq.request.banned_sequences and not has_masks))
        has_stops = params.min_tokens > 0 and bool(seq.stop_token_ids) and not has_masks
        self.has_penalties[index], self.has_biases[index] = has_penalties, has_biases
        self.wants_logprobs[index] = has_logprobs
        self.num_prompt_tokens[index] = seq.num_prompt_tokens
        self.min_stop_position[index] = seq.num_prompt_tokens + params.min_tokens if has_stops else 0
        has_extras = has_masks or has_stops or has_biases or has_penalties or has_logprobs
        needs_rows = params.prompt_logprobs is not None or seq.request.task != "generate" or bool(seq.request.routes)
        self.needs[index] = (
            Needs.EXTRAS * has_extras
            | Needs.MASKS * has_masks
            | Needs.ROWS * needs_rows
            | Needs.LOGPROBS * has_logprobs
        )
        self.num_sent[index] = -1


def _needs_index(seq: Sequence | None) -> bool:
    return seq is not None and (seq.status is Status.RUNNING or seq.num_in_flight > 0)


def is_masked(seq: Sequence) -> bool:
    """Whether ``seq`` needs masks: its restrictions depend on its tokens, or are too long for ``TokenLists``."""
    params: SamplingParams = seq.request.params
    return (
        params.grammar is not None
        or seq.request.thinking is not None
        or params.allowed_token_ids is not None
        or params.extra_args is not None
        or any(len(sequence) > 1 for sequence in seq.request.banned_sequences)
        or (params.min_tokens > 0 and len(seq.stop_token_ids) > MAX_STOPS)
    )

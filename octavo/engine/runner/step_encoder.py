"""Encodes plans as step messages, and decodes their results: plans refer to sequences, messages to batch indices.

Shapes: T rows, S sequences, R sampled rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf

import numpy as np
import numpy.typing as npt

from octavo.engine.runner.persistent_batch import BlockTables, Indices, Needs, PersistentBatch
from octavo.engine.sequence_images import ImageSettings, span_rows
from octavo.engine.thinking_progress import ThinkingProgress
from octavo.sampling_params import SamplingParams
from octavo.steps.graph_shapes import LONG_SEQS, NO_DRAFTER, ChooseShape, PlanSizes, StepKind, StepShape
from octavo.steps.layout import NO_INDEX, StepArrays, num_bytes
from octavo.steps.messages import (
    NO_ADAPTER,
    NOT_FINITE,
    NOTHING_LEFT,
    OUT_OF_RANGE,
    GivenRoutes,
    History,
    Mask,
    PooledRows,
    PromptRows,
    Step,
    StepResult,
    TokenLists,
)
from octavo.steps.reports import HEAD, as_rows
from octavo.types import Masks, Plan, Sampled, Scheduled, Sequence, TokenLogprobs

# ---- Masks of allowed tokens, from grammars, ``allowed_token_ids``, ``bad_words``, ``min_tokens``, logits
# processors.

TokenMask = npt.NDArray[np.uint8]
"""A bit for each token, and zeros behind the last."""


def masks_of(item: Scheduled, grammar_masks: Masks, vocab_size: int) -> Iterator[TokenMask]:
    """A mask for each position that ``item`` samples: one for each draft, then one for the bonus token.

    All earlier tokens must be known. Where the grammar is complete and allows only tokens that end the text, the other
    restrictions are ignored.
    """
    seq = item.seq
    end, drafts = item.settled_start + len(item.tokens), item.known_drafts
    tokens = [*seq.tokens[seq.num_prompt_tokens : end], *drafts]
    assert None not in tokens, "a token is sampled before those in front of it are known"
    given = grammar_masks.get(seq.id) if seq.request.params.grammar is not None else None
    if seq.thinking is None and seq.request.thinking is not None:
        seq.thinking = ThinkingProgress(seq.request.thinking)
    thinking = None if seq.thinking is None else seq.thinking.at(tokens[: len(tokens) - len(drafts)])
    for i in range(1 + len(drafts)):
        output = tokens[: len(tokens) - len(drafts) + i]
        mask = np.full(-(-vocab_size // 8), 0xFF, np.uint8) if given is None else _of_width(given[i], vocab_size)
        if thinking is not None and (forced := _forced(thinking, output, mask)) is not None:
            yield forced
            continue
        if given is None or not _must_stop(mask, seq.stop_token_ids):
            mask = _restricted(mask, seq, output, [] if thinking is None else thinking.barred(output))
            if seq.processors is not None:
                known = [token for token in output if token is not None]
                mask = mask & np.packbits(seq.processors.allowed(known, vocab_size), bitorder="little")
        yield mask


def _forced(thinking: ThinkingProgress, output: SequenceOf[int | None], mask: TokenMask) -> TokenMask | None:
    """The mask of the one token that ends reasoning whose budget is used up, if ``mask`` allows it: a grammar of UTF-8
    does not inside a character."""
    if (token := thinking.forced(output)) is None:
        return None
    forced = mask & _only((token,), len(mask))
    return forced if forced.any() else None


def _restricted(mask: TokenMask, seq: Sequence, output: SequenceOf[int | None], barred: Iterable[int]) -> TokenMask:
    """``mask`` without ``barred`` and the tokens that the request bans after ``output``."""
    params = seq.request.params
    if params.allowed_token_ids is not None:
        mask = mask & _only(params.allowed_token_ids, len(mask))
    banned = [*barred, *_completing(output, seq.request.banned_sequences)]
    if len(output) < params.min_tokens:
        banned += seq.stop_token_ids
    return mask & ~_only(banned, len(mask))


def _completing(output: SequenceOf[int | None], banned_sequences: Iterable[tuple[int, ...]]) -> Iterator[int]:
    """The tokens that would complete a banned sequence after ``output``."""
    for sequence in banned_sequences:
        start = len(output) - len(sequence) + 1
        if start >= 0 and tuple(output[start:]) == sequence[:-1]:
            yield sequence[-1]


def _must_stop(mask: TokenMask, stop_token_ids: Iterable[int]) -> bool:
    return not (mask & ~_only(stop_token_ids, len(mask))).any()


def _of_width(mask: TokenMask, vocab_size: int) -> TokenMask:
    """``mask`` padded or cut to the vocabulary's size; added tokens are not allowed."""
    width = -(-vocab_size // 8)
    return np.pad(mask, (0, width - len(mask))) if len(mask) < width else mask[:width]


def _only(token_ids: Iterable[int], width: int) -> TokenMask:
    """Bit mask, ``width`` bytes, of these tokens; ids outside it are ignored."""
    bits = np.zeros(8 * width, dtype=np.bool_)
    bits[[token for token in token_ids if 0 <= token < 8 * width]] = True
    return np.packbits(bits, bitorder="little")


NOT_NUMBERS = "the model's logits are not finite numbers"
ERRORS = {
    NOT_FINITE: NOT_NUMBERS,
    NOTHING_LEFT: "no token is allowed here by the grammar, allowed_token_ids, bad_words and min_tokens together",
    OUT_OF_RANGE: "the sampling parameters bring the logits out of range",
}
"""Error messages by the code that an executor returns in place of a token."""
NO_MASKS: Masks = {}
NO_INDICES: Indices = np.zeros(0, dtype=np.int64)
NO_REPORTS = np.zeros((0, HEAD), dtype=np.int32)


class StepEncoder:
    """Makes the messages of steps, with padded shapes from ``choose_shape``.

    ``adapters`` are the numbers of the loaded adapters by name. With ``always_uses_lora`` every step uses LoRA
    kernels, so that a row's result does not depend on whether another row has an adapter.
    """

    def __init__(
        self,
        batch: PersistentBatch,
        block_size: int,
        vocab_size: int,
        choose_shape: ChooseShape,
        adapters: Mapping[str, int] | None = None,
        always_uses_lora: bool = False,
        has_drafter: bool = False,
        images: ImageSettings | None = None,
        has_rope_sets: bool = False,
        route_bytes: int = 0,
        dense_context: int = 0,
    ) -> None:
        self.batch = batch
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.choose_shape = choose_shape
        self.adapters = adapters
        self.always_uses_lora = always_uses_lora
        self.has_drafter = has_drafter
        self.num_axes = int(has_rope_sets) if images is None else images.num_axes or int(has_rope_sets)
        self.has_rope_sets = has_rope_sets
        self.route_bytes = route_bytes
        """Of the experts that are given for a position."""
        self.dense_context = dense_context
        """See ``GraphLimits``."""
        self.takes_images = images is not None
        self.is_bidirectional = images is not None and images.is_bidirectional

    @property
    def max_len(self) -> int:
        """Positions of the longest possible sequence."""
        return self.batch.tables[0].tables_CB.shape[1] * self.block_size

    def waits_for_host(self, of_seq: Indices) -> bool:
        """Whether the step needs masks, embeddings or prompt log-probabilities in addition to its arrays.

        ``of_seq`` [S] are the batch indices of its sequences.
        """
        needs = np.bitwise_or.reduce(self.batch.needs[of_seq])
        return bool(needs & (Needs.MASKS | Needs.ROWS))

    def encode(self, plan: Plan, of_seq: Indices, grammar_masks: Masks = NO_MASKS) -> Step:
        """The message of a plan without stale items; ``of_seq`` [S] are the batch indices of its sequences."""
        batch = self.batch
        counts = [len(item.tokens) for item in plan]
        num_drafts = [len(item.drafts) for item in plan]
        total = sum(num_drafts)
        if total:
            counts = [count + drafts for count, drafts in zip(counts, num_drafts, strict=True)]
        needs = int(np.bitwise_or.reduce(batch.needs[of_seq]))
        has_extras, needs_rows = bool(needs & Needs.EXTRAS), bool(needs & Needs.ROWS)
        num_proposed = NO_DRAFTER
        if self.has_drafter:  # a step that verifies drafts makes as many: there are no graphs of steps that do not
            num_proposed = max([max(item.num_proposed, len(item.drafts) or NO_DRAFTER) for item in plan])
        runs_drafter = num_proposed != NO_DRAFTER
        kind = StepKind(has_extras, self._uses_lora(plan, has_extras), runs_drafter, max(0, num_proposed))
        marks = {} if plan[0].seq.state is None else _marked_rows(plan, counts)
        is_plain = not (needs & (Needs.MASKS | Needs.ROWS) or marks)
        longest = 0
        if len(plan) <= LONG_SEQS or self.dense_context:
            longest = max([item.settled_start + count for item, count in zip(plan, counts, strict=True)], default=0)
        dense = self.dense_context if longest <= self.dense_context else 0
        sizes = PlanSizes(sum(counts), len(plan), max(counts, default=1), total, is_plain, longest, dense)
        shape, uses_graph = self.choose_shape(sizes, kind)
        embedding_slots = _embedding_slots(plan, counts)
        spans = span_rows(plan, counts) if self.is_bidirectional else []
        if embedding_slots is not None:  # decode graphs have none
            uses_graph = uses_graph and shape.max_query_len > 1 and not spans
        shape = self._with_images(shape, uses_graph, embedding_slots is not None)
        masks = list(self._masks(plan, of_seq, grammar_masks)) if needs & Needs.MASKS else []
        histories, lists = self._updates(plan, of_seq.tolist()) if has_extras else ([], [])
        return Step(
            shape,
            uses_graph,
            len(plan),
            len(plan) + total,
            self._pack(plan, counts, num_drafts, of_seq, shape, embedding_slots),
            histories,
            lists,
            is_sampled=any(item.samples and item.seq.request.task == "generate" for item in plan),
            num_top=_num_top(plan, self.vocab_size) if needs & Needs.LOGPROBS else -1,
            masks=masks,
            prompts=list(_prompt_rows(plan, counts)) if needs_rows else [],
            pooled=list(_pooled_rows(plan, counts, of_seq)) if needs_rows else [],
            spans=spans,
            routes=list(self._given_routes(plan, counts)) if needs_rows else [],
            marks=marks,
        )

    def encode_padding(self, shape: StepShape) -> Step:
        """A padding-only step, which compiles the kernels and captures the graph of this shape."""
        shape = self._with_images(shape, uses_graph=True)
        return Step(shape, True, 0, 0, self._pack([], [], [], NO_INDICES, shape))

    def _with_images(self, shape: StepShape, uses_graph: bool, has_images: bool = False) -> StepShape:
        """A shape with what images add to steps: graphs with prefill are the same for text and for images."""
        has_images |= self.takes_images and uses_graph and shape.max_query_len > 1
        return shape._replace(has_images=has_images, num_axes=self.num_axes)

    # ---- the arrays

    def _pack(
        self,
        plan: Plan,
        counts: list[int],
        num_drafts: list[int],
        of_seq: Indices,
        shape: StepShape,
        embedding_slots: Indices | None = None,
    ) -> bytearray:
        batch, num_groups = self.batch, len(self.batch.tables)
        starts = np.array([item.settled_start for item in plan], dtype=np.int64)
        lens = np.array(counts, dtype=np.int64)
        ends = starts + lens
        width = -(-int(ends.max(initial=1)) // self.block_size)
        if shape.has_drafter:
            width = max(width, *(int(tables.num_blocks_C[of_seq].max(initial=1)) for tables in batch.tables))
        arrays = StepArrays(buffer := bytearray(num_bytes(shape, width, num_groups)), shape, width, num_groups)
        first_rows = np.zeros(len(plan) + 1, dtype=np.int64)
        np.cumsum(lens, out=first_rows[1:])
        num_rows = int(first_rows[-1])
        positions, of_row = starts, of_seq
        if num_rows > len(plan):
            seq_of_row = np.repeat(np.arange(len(plan)), lens)
            positions = np.arange(num_rows) - first_rows[seq_of_row] + starts[seq_of_row]
            of_row = of_seq[seq_of_row]
        padding = len(batch.owners)
        arrays.fill("token_ids", _token_ids(plan), 0)
        arrays.fill("positions", positions, 0)
        arrays.fill("batch_indices", of_seq, padding)
        arrays.fill("cu_seqlens", first_rows, num_rows)
        arrays.fill("seq_lens", ends, 0)
        _fill_states(arrays, plan)
        for group, tables in enumerate(batch.tables):
            assert (tables.num_blocks_C[of_seq] * self.block_size >= ends).all(), (
                "a sequence has fewer blocks than tokens"
            )
            slots = _slots(tables, of_row, positions, self.block_size)
            arrays.fill_group(group, slots, tables.tables_CB[of_seq, :width])
        of_sample, sample_positions = of_seq, ends
        if shape.num_drafts:
            of_sample, sample_positions = self._add_drafts(arrays, num_drafts, of_seq, first_rows, ends)
        arrays.fill("sample_positions", sample_positions, 0)
        arrays.fill("seeds", batch.seeds[of_sample], 0)
        arrays.fill("top_k", batch.top_k[of_sample], 0)
        arrays.fill("temperature", batch.temperature[of_sample], 0)
        arrays.fill("min_p", batch.min_p[of_sample], 0)
        arrays.fill("top_p", batch.top_p[of_sample], 1)
        if shape.has_drafter:
            self._pack_for_drafter(arrays, plan, of_seq, ends)
        if shape.has_adapters and self.adapters is not None:
            numbers = [self.adapters.get(item.seq.request.adapter, NO_ADAPTER) for item in plan]
            arrays.fill("adapters", np.repeat(np.array(numbers, dtype=np.int32), lens), NO_ADAPTER)
        if shape.has_images:
            arrays.fill("embedding_slots", NO_INDICES if embedding_slots is None else embedding_slots, -1)
        if shape.num_axes:
            arrays.fill_rows("rope_shifts", self._rope_shifts(plan, counts))
        if shape.has_extras:
            self._pack_extras(arrays, plan, num_drafts, of_row, of_sample)
        arrays.finish()
        return buffer

    def _rope_shifts(self, plan: Plan, counts: list[int]) -> npt.NDArray[np.int64]:
        """Rotary positions less positions for each axis and row [A, T], or the set of each row's frequencies [1, T]."""
        shifts_AT = np.zeros((self.num_axes, sum(counts)), np.int64)
        first_row = 0
        for item, count in zip(plan, counts, strict=True):
            rows, start = slice(first_row, first_row + count), item.settled_start
            if self.has_rope_sets:
                shifts_AT[:, rows] = item.seq.rope_set
            elif item.seq.images is not None:
                shifts_AT[:, rows] = item.seq.images.shifts(start, start + count)
            first_row += count
        return shifts_AT

    def _add_drafts(
        self,
        arrays: StepArrays,
        num_drafts: list[int],
        of_seq: Indices,
        first_rows: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
    ) -> tuple[Indices, npt.NDArray[np.int64]]:
        """Fill the logits indices, one for each draft and the bonus token; returns the batch index [R] of each sampled
        row, and the position [R] of its token."""
        counts = np.array(num_drafts, dtype=np.int64) + 1
        first_samples = np.zeros(len(num_drafts) + 1, dtype=np.int64)
        np.cumsum(counts, out=first_samples[1:])
        num_samples = int(first_samples[-1])
        back = np.repeat(first_samples[1:], counts) - 1 - np.arange(num_samples)
        arrays.fill("cu_samples", first_samples, num_samples)
        arrays.fill("logits_indices", np.repeat(first_rows[1:], counts) - 1 - back, 0)
        if arrays.shape.is_verification:
            arrays.fill("row_seqs", np.repeat(np.arange(len(counts)), counts), -1)
        return np.repeat(of_seq, counts), np.repeat(ends, counts) - back

    def _pack_for_drafter(self, arrays: StepArrays, plan: Plan, of_seq: Indices, ends: npt.NDArray[np.int64]) -> None:
        """Fill the token behind each prompt chunk, and the positions that have a block in every KV group."""
        behind = [-1 if item.samples else item.seq.tokens[end] for item, end in zip(plan, ends.tolist(), strict=True)]
        arrays.fill("next_tokens", np.array([-1 if token is None else token for token in behind], dtype=np.int32), -1)
        num_blocks = np.min([tables.num_blocks_C[of_seq] for tables in self.batch.tables], axis=0)
        arrays.fill("capacities", num_blocks * self.block_size, 0)

    def _pack_extras(
        self,
        arrays: StepArrays,
        plan: Plan,
        num_drafts: list[int],
        of_row: Indices,
        of_sample: Indices,
    ) -> None:
        batch = self.batch
        samples = np.array([item.samples for item in plan], dtype=np.bool_)
        if len(of_sample) > len(plan):
            samples = np.repeat(samples, np.array(num_drafts) + 1)
        has_history = batch.has_penalties[of_sample] & samples
        min_stops = batch.min_stop_position[of_sample]
        arrays.fill("row_indices", np.where(batch.has_penalties[of_row], of_row, NO_INDEX), NO_INDEX)
        arrays.fill("history_indices", np.where(has_history, of_sample, NO_INDEX), NO_INDEX)
        arrays.fill("bias_indices", np.where(batch.has_biases[of_sample], of_sample, NO_INDEX), NO_INDEX)
        arrays.fill("ban_indices", np.where(min_stops > 0, of_sample, NO_INDEX), NO_INDEX)
        arrays.fill("min_stops", min_stops, 0)
        arrays.fill("num_prompt_tokens", batch.num_prompt_tokens[of_sample], 0)
        arrays.fill("repetition", batch.repetition[of_sample], 1)
        arrays.fill("frequency", batch.frequency[of_sample], 0)
        arrays.fill("presence", batch.presence[of_sample], 0)
        arrays.fill("wants_logprobs", batch.wants_logprobs[of_sample] & samples, 0)

    # ---- messages alongside the arrays

    def _uses_lora(self, plan: Plan, has_extras: bool) -> bool:
        if self.adapters is None:
            return False
        return has_extras or self.always_uses_lora or any(item.seq.request.adapter for item in plan)

    def _masks(self, plan: Plan, of_seq: Indices, grammar_masks: Masks) -> Iterator[Mask]:
        row = 0
        for item, needs in zip(plan, self.batch.needs[of_seq], strict=True):
            if needs & Needs.MASKS and item.samples:
                for i, mask in enumerate(masks_of(item, grammar_masks, self.vocab_size)):
                    yield Mask(row + i, mask.tobytes())
            row += 1 + len(item.drafts)

    def _given_routes(self, plan: Plan, counts: list[int]) -> Iterator[GivenRoutes]:
        first_row = 0
        for item, count in zip(plan, counts, strict=True):
            if item.seq.request.routes:
                size = self.route_bytes
                ids = item.seq.request.routes[item.settled_start * size : (item.settled_start + count) * size]
                if ids:
                    yield GivenRoutes(first_row, ids)
            first_row += count

    def _updates(self, plan: Plan, of_seq: list[int]) -> tuple[list[History], list[TokenLists]]:
        """The tokens and token lists of the plan's sequences that the executor does not have yet."""
        batch, histories, lists = self.batch, list[History](), list[TokenLists]()
        for item, index in zip(plan, of_seq, strict=True):
            if not batch.needs[index] & Needs.EXTRAS:
                continue
            num_sent = batch.num_sent[index]
            if num_sent < 0:
                lists.append(self._lists(item.seq, index))
                num_sent = 0
            start = item.settled_start
            if num_sent < start and batch.has_penalties[index]:
                missing = [-1 if token is None else token for token in item.seq.tokens[num_sent:start]]
                histories.append(History(index, num_sent, missing))
            batch.num_sent[index] = start + len(item.tokens) + len(item.drafts)
        return histories, lists

    def _lists(self, seq: Sequence, index: int) -> TokenLists:
        is_masked = bool(self.batch.needs[index] & Needs.MASKS)
        banned = [] if is_masked else [sequence[-1] for sequence in seq.request.banned_sequences]
        stops = [] if is_masked or not seq.request.params.min_tokens else sorted(seq.stop_token_ids)
        return TokenLists(index, dict(seq.request.params.logit_bias), banned, stops)

    # ---- results

    def decode(self, plan: Plan, result: StepResult) -> list[Sampled]:
        """The ``Sampled`` of each item of a step's plan."""
        tokens, accepted = result.tokens, iter(result.num_accepted)
        reports = as_rows(result.reports, len(tokens)) if result.reports else None
        prompts, values, drafts = iter(result.prompts), iter(result.values), map(tuple, result.drafts)
        decoded, row = [], 0
        for item in plan:
            request = item.seq.request
            end = row + 1 + next(accepted, 0)
            sampled = Sampled([])
            if request.task != "generate":
                sampled.values = next(values)
                sampled.error = NOT_NUMBERS if item.samples and sampled.values is None else None
            elif item.samples:
                sampled = _sampled(request.params, tokens[row:end], reports if reports is None else reports[row:end])
            if request.params.prompt_logprobs is not None:
                _add_prompt_logprobs(sampled, item, next(prompts))
            sampled.drafts = next(drafts, ())
            decoded.append(sampled)
            row += 1 + len(item.drafts)
        return decoded


def _fill_states(arrays: StepArrays, plan: Plan) -> None:
    """Fill the slots of recurrent states; for models without any, they are not read."""
    if not plan or plan[0].seq.state is not None:
        arrays.fill("state_slots", [item.seq.state.slot for item in plan if item.seq.state is not None], -1)


def _marked_rows(plan: Plan, counts: list[int]) -> dict[int, int]:
    found, first_row = dict[int, int](), 0
    for item, count in zip(plan, counts, strict=True):
        for position, slot in item.marks:
            found[first_row + position - item.settled_start - 1] = slot
        first_row += count
    return found


def _token_ids(plan: Plan) -> npt.NDArray[np.int64]:
    """Token ids of all rows; -1 for a pending token, which can only be the last of its item."""
    tokens: list[int | None] = []
    for item in plan:
        tokens += item.tokens
        if tokens[-1] is None:
            tokens[-1] = -1
        tokens += item.drafts
    return np.array(tokens, dtype=np.int64)


def _embedding_slots(plan: Plan, counts: list[int]) -> Indices | None:
    """The slot of each row that is an embedding of an image, -1 for tokens; ``None`` if all are tokens."""
    found = None
    first_row = 0
    for item, count in zip(plan, counts, strict=True):
        if item.seq.images is not None:
            slots = item.seq.images.slots(item.settled_start, item.settled_start + count)
            if slots is not None:
                found = np.full(sum(counts), -1, np.int64) if found is None else found
                found[first_row : first_row + count] = slots
        first_row += count
    return found


def _num_top(plan: Plan, vocab_size: int) -> int:
    """Top log-probabilities to report for each row: the most that any request asks for; -1 if none does.

    Of tokens that a request names, all are reported, as sorting has them all, and ``read_reports`` takes those.
    """
    if any(item.seq.request.params.logprob_token_ids for item in plan if item.samples):
        return vocab_size
    counts = [item.seq.request.params.logprobs for item in plan if item.samples]
    return max((count for count in counts if count is not None), default=-1)


def _slots(
    tables: BlockTables, of_row: Indices, positions: npt.NDArray[np.int64], block_size: int
) -> npt.NDArray[np.int64]:
    blocks = tables.tables_CB[of_row, positions // block_size].astype(np.int64)
    slots: npt.NDArray[np.int64] = blocks * block_size + positions % block_size
    return slots


def _prompt_rows(plan: Plan, counts: list[int]) -> Iterator[PromptRows]:
    first_row = 0
    for item, count in zip(plan, counts, strict=True):
        request = item.seq.request
        if request.params.prompt_logprobs is not None:
            tokens = request.prompt_tokens[item.settled_start + 1 :][: len(item.tokens)]
            yield PromptRows(first_row, tokens, request.params.prompt_logprobs, request.params.temperature)
        first_row += count


def _pooled_rows(plan: Plan, counts: list[int], of_seq: Indices) -> Iterator[PooledRows]:
    first_row = 0
    for item, count, index in zip(plan, counts, of_seq.tolist(), strict=True):
        if item.seq.request.task != "generate":
            yield PooledRows(index, item.start, first_row, count, item.samples, item.seq.request.task)
        first_row += count


def _sampled(params: SamplingParams, tokens: list[int], reports_RW: npt.NDArray[np.int32] | None) -> Sampled:
    """Accepted drafts and the bonus token; a negative last token is an error code."""
    if tokens[-1] < 0:
        return Sampled([], error=ERRORS[tokens[-1]])
    if params.logprobs is None or reports_RW is None:
        return Sampled(tokens)
    return Sampled(tokens, read_reports(tokens, reports_RW, params.logprobs, params.logprob_token_ids))


def _add_prompt_logprobs(sampled: Sampled, item: Scheduled, reports: bytes | None) -> None:
    if reports is None:
        sampled.tokens, sampled.logprobs, sampled.prompt_logprobs, sampled.error = [], None, None, NOT_NUMBERS
        return
    request = item.seq.request
    tokens = request.prompt_tokens[item.settled_start + 1 :][: len(item.tokens)]
    reports_RW = as_rows(reports, len(tokens)) if tokens else NO_REPORTS
    sampled.prompt_logprobs = read_reports(tokens, reports_RW, request.params.prompt_logprobs or 0)


def read_reports(
    tokens: list[int], reports_RW: npt.NDArray[np.int32], count: int, ids: tuple[int, ...] = ()
) -> list[TokenLogprobs]:
    """Log-probabilities of the tokens and of the ``count`` most likely ones, or of those named, from reports [R, W]."""
    end = HEAD + (reports_RW.shape[1] - HEAD) // 2
    logprobs_RW = reports_RW.view(np.float32)
    found = []
    for token, report_W, logprobs_W in zip(tokens, reports_RW, logprobs_RW, strict=True):
        top, values = report_W[HEAD:end], logprobs_W[end:]
        at = np.isin(top, ids).nonzero()[0] if ids else np.arange(min(count, len(top)))
        logprob, rank = float(logprobs_W[0]), int(report_W[1])
        found.append(TokenLogprobs(token, logprob, rank, top[at].tolist(), values[at].tolist()))
    return found

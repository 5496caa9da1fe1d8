"""The values that the parts of the engine exchange.

A client's ``Request`` becomes one ``Sequence``. The scheduler turns sequences into a ``Plan``, a list of
``Scheduled``; a ``Runner`` computes it and returns one ``Sampled`` for each; the scheduler turns those into
``Output`` values for the clients.

States of a sequence::

    WAITING --(admitted)--> RUNNING --(stop, length, abort, error)--> FINISHED
       ^                       |
       +-----(preempted)-------+
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from octavo.model_info import KVGroupInfo, PoolingInfo, RoutesInfo
from octavo.sampling_params import MAX_LOGPROBS, RepetitionDetectionParams, SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

REPETITION: Literal["repetition"] = "repetition"
StopReason = int | Literal["repetition"]
"""What ended a text in the engine: the id of a stop token of the client, or a repeated pattern."""
MemoryPart = Literal["weights", "kv_cache"]
"""Part of the memory of an engine that sleeps; its weights come with all else whose content is kept."""
MEMORY_PARTS: tuple[MemoryPart, ...] = ("weights", "kv_cache")

Task = Literal["generate", "embed", "score", "classify", "token_embed", "token_classify"]
"""What a request computes from its prompt: a continuation, an embedding, a relevance score of two texts, or the logits
of a classifier's labels; or the embedding or the logits of each token."""
ON_DEVICE = -1
"""In place of a draft's token id: the draft that the executor's drafter made after the sequence's last step."""


AUDIO_DETAILS = (-1,)  # those of an ``ImageInput`` that is audio


class ImageInput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image in a prompt, or audio: its placeholders, and its pixels or samples as the tower takes them."""

    start: int  # position of the first placeholder
    num_tokens: int
    """Positions from the first placeholder to the last; tokens between them, such as the ends of rows, count."""
    token: int
    """Id of the placeholder; other ids among the positions are tokens."""
    digest: bytes
    """SHA-256 of all that the embeddings depend on: pixels, shape, details and the settings of the tower."""
    shape: tuple[int, int, int]
    """Tiles or frames, and rows and columns of pixels of each; of audio 1, 1 and the number of samples."""
    pixels: bytes  # uint8, RGB; of audio samples of 24 bits, the lowest byte first
    details: tuple[int, ...] = ()  # what else the family's tower has to know
    grid: tuple[int, int] | None = None
    """Rows and columns of its embeddings, for models whose rotary positions have an axis for each."""
    elapsed: int | None = None  # of frames right behind others of their video: rotary positions since the first ones


class KVTransfer(msgspec.Struct, frozen=True, array_like=True):
    """Where the keys and values of a prompt are kept for another server; without an address, that they shall be."""

    address: str = ""
    """HOST:PORT of the server that keeps them."""
    ticket: str = ""
    """Names them there, and shows that the address is one of a server with the same key."""
    num_blocks: int = 0


Order = tuple[float, ...]
"""Sort key of a sequence: smaller goes first."""


Mark = tuple[tuple[int, ...], ...]
"""A mark in tokens: first those that are forced, then others in which a model may write it."""


class ThinkingBudget(msgspec.Struct, frozen=True, array_like=True):
    """Most tokens of reasoning in an output; the tokens that end it are forced then."""

    num_tokens: int
    opens: Mark
    closes: Mark
    then: tuple[int, ...] = ()
    """Tokens that are forced behind ``closes``."""
    gap: tuple[int, ...] = ()
    """Tokens that may stand before ``opens``; behind others, in an answer, it opens nothing."""
    is_inside: bool = False
    """Whether the output begins inside reasoning, because the prompt opens it."""


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One continuation to compute, with all defaults resolved.

    A client's request with ``n=4`` becomes four of these, with ``index`` 0 to 3. A request that an
    engine process left unfinished is sent again with its ``output_tokens`` so far, and continues from there.
    """

    id: int
    prompt_tokens: list[int]
    params: SamplingParams
    max_tokens: int
    """The resolved limit: prompt + max_tokens fits the context."""
    seed: int = 0
    """Random seed of this continuation, already mixed with ``index`` (unsigned 64 bit)."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end the text; empty with ``ignore_eos``."""
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the output must not contain; prompt tokens do not count towards a match."""
    thinking: ThinkingBudget | None = None
    """Bound on the reasoning in the output."""
    output_tokens: list[int] = []
    priority: int = 0
    """Smaller is served first, under the priority policy."""
    arrival: float = 0.0
    """``time.monotonic()`` when the server accepted the request."""
    cache_salt: str = ""
    """Only requests with the same salt share cached blocks."""
    cache_ttl: float = 0.0
    """Seconds during which its cached blocks are pinned: evicted only after those that are not."""
    session: str = ""
    """Conversation that this request is a turn of, for session-aware eviction; scoped by ``cache_salt``."""
    tenant: str = ""
    """Tenant that is charged for this request, under the fair policy."""
    ttft_target: float = 0.0
    """TTFT target in seconds from arrival, under the deadline policy; 0: the server's default."""
    tpot_target: float = 0.0
    """Target for the mean seconds per later token, under the deadline policy; 0: the server's default, if any."""
    task: Task = "generate"
    """Results of other tasks are ``values``, computed with the last prompt token; ``max_tokens`` is then 0."""
    second_start: int | None = None
    """Index of the second text's first token in the prompt of an encoder."""
    adapter: str = ""
    """Name of the LoRA adapter to apply; ``cache_salt`` then differs from that of requests for any other adapter."""
    owner: str = ""
    """Name of the API key that sent it: sessions are its own, and it has a share of what can be pinned."""
    images: list[ImageInput] = []
    """Images of the prompt, in order."""
    transfer: KVTransfer | None = None
    """That another server computed the prompt, or will go on from it."""
    routes: bytes = b""
    """Experts for the routers to take at the first positions: uint16 [positions, L, S]; ``cache_salt`` then differs
    from that of requests with others."""


class KeyedTokens:
    """Tokens by which cached blocks are found. At the positions of an image, they are a negative number that is all of
    its digest: its keys and values depend on the pixels, which the ids of placeholders do not tell."""

    def __init__(self, tokens: list[int | None], images: list[ImageInput]) -> None:
        self._tokens = tokens
        self._spans = [
            (image.start, image.start + image.num_tokens, -1 - int.from_bytes(image.digest)) for image in images
        ]

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, part: slice) -> list[int | None]:
        found = self._tokens[part]
        first = part.start or 0
        for start, end, key in self._spans:
            low, high = max(start, first), min(end, first + len(found))
            if low < high:
                found[low - first : high - first] = [key] * (high - low)
        return found


Tokens = list[int | None] | KeyedTokens


def keyed(tokens: list[int | None], request: Request) -> Tokens:
    """By what the cached blocks of a request's ``tokens`` are found."""
    return KeyedTokens(tokens, request.images) if request.images else tokens


class Status(enum.Enum):
    """State of a sequence; see the diagram at the top of this module."""

    WAITING = "waiting"
    RUNNING = "running"
    YIELDING = "yielding"
    """Running, and to be preempted as soon as it is not in flight."""
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class GroupBlocks:
    """The blocks that one sequence holds in one KV group: a set of layers that share a block table."""

    block_table: list[int] = field(default_factory=list)
    first_block: int = 0
    """Index of the first block still held; entries before it were freed behind the group's sliding window."""
    table_version: int = 0
    """Incremented when an existing entry of ``block_table`` changes, not when one is appended."""
    published: Any = None
    """Private to the prefix cache: how far this sequence is published."""
    matched: dict[int, Any] = field(default_factory=dict)
    """Private to the prefix cache: by rank, the last match found for this sequence while it waits."""

    @property
    def num_held(self) -> int:
        """Number of blocks that the sequence holds."""
        return len(self.block_table) - self.first_block


@dataclass(eq=False, slots=True)
class HeldState:
    """The slots of recurrent state that one sequence holds; see ``cache.state_cache``."""

    slot: int
    """Slot of its current state, which the steps update."""
    spare: int = -1
    """Slot for the state before the drafts of a step in flight; -1 without speculation."""
    known: int = 0
    """Tokens that were known when it was admitted: positions behind them are computed one by one."""
    branch: int = 0
    """Position at which its known tokens leave what the prefix cache has keys and values of, but no state; or 0."""
    pending: list[tuple[int, int]] = field(default_factory=list)
    """Position and slot of each snapshot whose position is not committed yet."""
    rolling: Any = None
    """Private to the cache: the newest snapshot in its output, which the next one replaces."""
    is_lost: bool = False
    """Whether a step failed that may have changed the state."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """The mutable state of a request: its tokens and blocks.

    ``tokens`` holds the prompt and the output; ``None`` stands for a token that a submitted step is still
    sampling, as if it accepted all drafts. ``num_computed_tokens`` counts positions whose keys and values are cached or
    in flight, under the same assumption.
    """

    request: Request
    order: Order = ()
    """Sort key among running sequences, set by the policy; it changes only while the sequence waits."""
    tokens: list[int | None] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when first admitted."""
    groups: list[GroupBlocks] = field(default_factory=lambda: [GroupBlocks()])
    """Its blocks, one entry for each KV group of the cache."""
    state: HeldState | None = None
    """Its recurrent state while it holds blocks, if the model has any."""
    capacity: int = 0
    """Positions that have a block in every KV group; later positions cannot be computed yet."""
    decodes: bool = False
    """Whether its last step that was planned, and has not failed, samples a token: drafts may follow that token."""
    num_drafts: int = 0
    """Drafts verified so far."""
    num_rejected: int = 0
    """Of those, drafts rejected; the length of what is planned was over-estimated by as much."""
    device_drafts: tuple[int, ...] = ()
    """What the executor's drafter proposed after the last committed step, if its result told."""
    num_in_flight: int = 0
    """Submitted steps with this sequence that are not yet committed."""
    epoch: int = 0
    """Incremented when computed positions are discarded or the sequence ends; older steps in flight are stale."""
    num_preemptions: int = 0
    """How often it was preempted."""
    num_overtaken: int = 0
    """Tokens of shorter prompts that were computed before its own, though it came first."""
    num_faults: int = 0
    """Failed forward passes that this sequence was part of."""
    first_scheduled: float = 0.0
    """``time.monotonic()`` when it was first admitted; 0 before."""
    grammar: Any = None
    """Result of ``Grammars.prepare`` if the request has a grammar; its ``error`` says why masks are empty."""
    processors: Any = None
    """``Processors`` of the request's ``extra_args``, if it has some; their ``error`` says why a mask is empty."""
    thinking: Any = None
    """``ThinkingProgress`` of the request's bound on reasoning, if it has one."""
    account: Any = None
    """Private to the policy, such as the tenant that is charged for this sequence."""
    dp_rank: int = 0
    """With data-parallel attention, the rank that has its blocks."""
    batch_index: int = -1
    """Index in the persistent batch; -1 before the first step."""
    images: Any = None
    """``SequenceImages`` of a prompt with images."""
    rope_set: int = 0
    rope_end: int = 1 << 62
    """Which rotary frequencies its keys have, and the most tokens for which they are right: see ``RopeSets``."""
    salt: str = field(init=False)
    """Only sequences with the same one share cached blocks."""
    stop_token_ids: frozenset[int] = field(init=False)
    repetition: RepetitionDetectionParams | None = field(init=False)
    max_computed_tokens: int = field(init=False)
    """Most positions ever computed: prompt and output without the last token, whose keys and values are not needed."""

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = [*request.prompt_tokens, *request.output_tokens]
        self.salt = request.cache_salt
        self.num_prompt_tokens = len(request.prompt_tokens)
        self.max_computed_tokens = self.num_prompt_tokens + max(request.max_tokens, 1) - 1
        self.repetition = request.params.repetition_detection
        self.stop_token_ids = frozenset(request.eos_token_ids).union(request.params.stop_token_ids)

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def keys(self) -> Tokens:
        """What its cached blocks are found by: its tokens, or for images more than these."""
        return keyed(self.tokens, self.request)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step: compute ``tokens``, then ``drafts``, from position ``start``.

    What is planned before the result of an earlier step assumes that this step accepts all its drafts.

    Prefill, a chunk of it, decode, recompute after preemption and verification of drafts are all this
    value with different lengths. The block tables of ``seq`` cover every position computed; while a step is in
    flight they only grow, or have an entry replaced by a block of equal content (see ``table_version``).
    """

    seq: Sequence
    start: int
    tokens: tuple[int | None, ...]
    """``None``: the token that the previous step samples."""
    drafts: tuple[int, ...]
    """``ON_DEVICE``: a draft of the executor's drafter."""
    samples: bool
    """Whether this reaches the end of the sequence, so that the next token is sampled."""
    epoch: int
    num_rejected: int = 0
    """``Sequence.num_rejected`` when this was planned."""
    num_proposed: int = 0
    """Drafts that the executor's drafter, if there is one, makes for the next step, at most; with 0 it only fills its
    cache, and with ``NO_DRAFTER`` it does not run."""
    encodes: tuple[Any, ...] = ()
    """Images whose embeddings have to be computed before this step."""
    marks: tuple[tuple[int, int], ...] = ()
    """Positions within ``tokens`` before which the recurrent state is kept as well, and the slots for it."""

    @property
    def settled_start(self) -> int:
        """``start``, less the drafts rejected since this was planned; final once all older steps are committed."""
        return self.start - (self.seq.num_rejected - self.num_rejected)

    @property
    def known_drafts(self) -> tuple[int, ...]:
        """``drafts``, with those of the executor's drafter as the last committed step told them."""
        return self.seq.device_drafts[: len(self.drafts)] if ON_DEVICE in self.drafts else self.drafts

    @property
    def is_stale(self) -> bool:
        """Whether the sequence was rewound or ended after this was planned; the result is then dropped."""
        return self.epoch != self.seq.epoch


Plan = list[Scheduled]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities at one position, of the model's own distribution.

    They are computed before penalties, bias, temperature and truncation. ``top_ids`` are the requested number
    of most likely tokens, best first; ``rank`` is the rank of ``token_id``, from 1.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Sampled(msgspec.Struct, gc=False):
    """Result of a runner for one ``Scheduled``."""

    tokens: list[int]
    """Accepted drafts and the bonus token; empty when nothing was sampled."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For the prompt positions that this chunk predicts, from ``start + 1`` on."""
    error: str | None = None
    """Error of this sequence alone, such as non-finite logits; the sequence ends."""
    values: bytes | None = None
    """Result of a task other than "generate", in float32: a vector, the logits of the labels, or those of all tokens,
    one after the other."""
    drafts: tuple[int, ...] = ()
    """What the executor's drafter proposes next; told only for sequences with masks."""


class Output(msgspec.Struct, array_like=True, gc=False):
    """Output of one sequence after a step."""

    request_id: int
    tokens: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: StopReason | None = None
    """The id of ``params.stop_token_ids`` that ended the text, or ``REPETITION``; ``None`` for end-of-text."""
    num_cached_tokens: int = 0
    first_scheduled: float = 0.0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs_start: int = 0
    """Prompt position of ``prompt_logprobs[0]``."""
    error: str | None = None
    values: bytes | None = None
    """See ``Sampled.values``."""
    num_drafts: int = 0
    """Drafts verified for these tokens."""
    num_accepted_drafts: int = 0
    """Of those, accepted ones."""
    transfer: KVTransfer | None = None
    """Of an ended request that asked for it: where its prompt's keys and values are kept."""
    routes: bytes | None = None
    """With the last tokens, if asked for: the experts of all computed positions from a prompt position on, [positions,
    L, S] in the type of ``RoutesInfo``."""


class KVGroupStats(msgspec.Struct, frozen=True, gc=False):
    """Blocks of one KV group of the cache."""

    window: int
    """Sliding window of its layers in tokens; 0: full attention."""
    num_blocks: int
    num_used_blocks: int
    """Blocks held by sequences."""
    num_cached_blocks: int
    """Idle blocks that the prefix cache keeps for reuse."""


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """Gauges and monotonic counters of the engine, cheap enough to read every step."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks held by sequences."""
    num_empty_slots: int = 0
    """Empty slots of held blocks: the internal fragmentation."""
    num_cached_blocks: int = 0
    """Idle blocks that the prefix cache keeps for reuse; evicted when they are needed."""
    kv_groups: list[KVGroupStats] = []
    """Blocks of each KV group, where the cache has several; the counts above are of the first."""
    num_steps: int = 0
    num_scheduled_seqs: int = 0
    """Sum of the batch sizes, in sequences, of all steps."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed."""
    num_output_tokens: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Of those, tokens found."""
    num_faults: int = 0  # forward passes that failed
    step_tokens: int = 0
    """Tokens computed by the last step."""
    step_seconds: float = 0.0  # wall time of the last step
    num_speculations: int = 0
    """Shares of sequences in steps that verified drafts."""
    num_drafts: int = 0
    """Draft tokens verified."""
    num_accepted_drafts: int = 0
    """Of those, tokens accepted."""
    accepted_by_position: list[int] = []
    """Of the accepted drafts, those at each position behind a sequence's last token."""
    num_copied_tokens: int = 0
    """Cached tokens, also of preempted sequences, that were copied from a block of which only the start matches."""
    num_offload_saved: int = 0  # these are explained in octavo/telemetry/catalogue.py
    num_offload_dropped: int = 0
    num_offload_prefetched: int = 0
    num_offload_restored: int = 0
    num_offload_bad_files: int = 0
    offload_memory_bytes: int = 0
    offload_disk_bytes: int = 0
    num_transfer_held: int = 0
    transfer_held_bytes: int = 0
    num_transfer_expired: int = 0
    num_transfer_received: int = 0
    num_transfer_failures: int = 0
    num_evictions: int = 0
    num_sessions: int = 0
    num_pinned_blocks: int = 0
    session_queries: int = 0
    session_hits: int = 0
    num_state_slots: int = 0
    num_used_states: int = 0
    num_snapshots: int = 0
    num_snapshot_hits: int = 0
    num_snapshot_evictions: int = 0
    expert_imbalance: float = 0.0
    """Of the rank with the most expert rows, over the mean of all ranks, when experts were last looked at; 0: never."""
    num_moved_experts: int = 0


class EngineInfo(msgspec.Struct, frozen=True):
    """Properties of a built engine, fixed at start."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """Ids that end a text, from the checkpoint's configuration."""
    block_size: int
    num_kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    architecture: str
    num_parameters: int
    dtype: str
    device: str
    memory: dict[str, int]
    """The memory budget, in bytes, by purpose."""
    kernels: dict[str, str]
    """Kernel chosen for each op."""
    weight_bytes: dict[str, int] = {}
    """Bytes of the weights, by the format of their numbers, such as "int4"."""
    kv_groups: tuple[KVGroupInfo, ...] = ()
    """The KV groups of the cache; ``num_kv_blocks`` counts those of the first, which reaches furthest back."""
    tasks: tuple[Task, ...] = ("generate",)
    """Tasks that the model supports."""
    embedding_size: int = 0
    """Dimension of an embedding; 0 without the embed task."""
    pooling: PoolingInfo = PoolingInfo()
    sampling_defaults: dict[str, int | float] = {}
    """Defaults of ``SamplingParams`` fields that a request leaves unset, from the checkpoint's configuration."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    sleeps_in_host_memory: bool = False
    """Whether a sleeping engine can keep its weights in host memory."""
    num_image_slots: int = 0
    """Most tokens of the images of a request; 0: the model takes no images."""
    max_logprobs: int = MAX_LOGPROBS
    """Most log-probabilities at each position."""
    changes_weights: bool = False
    """Whether the engine can take other weights while it lives."""
    routes: RoutesInfo | None = None
    """What it keeps of a mixture's routers, if anything."""


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """Become a process of the group in which a trainer, rank 0, broadcasts weights."""

    address: str
    port: int
    rank: int
    world_size: int
    backend: str
    """That of torch.distributed: "gloo" or "nccl"."""
    name: str = ""
    is_packed: bool = False
    """Whether tensors come as bytes, one behind the other, in buffers; see ``ReceiveTensors``."""


class ReceiveTensors(msgspec.Struct, frozen=True, tag=True):
    """Receive tensors in this order, in the background. They are taken by ``TakeWeights``."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    is_packed: bool | None = None
    """``None``: as the group."""


class DropTensors(msgspec.Struct, frozen=True, tag=True):
    """Forget what was received."""

    leaves_group: bool = False


class AskReceiver(msgspec.Struct, frozen=True, tag=True):
    """Say whether anything is being received."""


class TakeWeights(msgspec.Struct, frozen=True, tag=True):
    """Take the weights of a folder, or with "" what was received, once all requests have ended."""

    folder: str = ""


class ChecksumWeights(msgspec.Struct, frozen=True, tag=True):
    """Tell the checksums of the weights in memory."""


WeightOrder = JoinGroup | ReceiveTensors | DropTensors | AskReceiver | TakeWeights | ChecksumWeights


Masks = Mapping[int, Any]
"""Allowed tokens by sequence id, one bit mask (uint8 array) for each position sampled."""

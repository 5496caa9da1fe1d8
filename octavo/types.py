"""The values that the parts of the engine exchange.

A client's ``Request`` becomes one ``Sequence``. The scheduler turns sequences into a ``Plan``, a list of
``Scheduled``; a ``Runner`` computes it and gives back one ``Sampled`` for each; the scheduler turns those
into ``Output`` values for whoever is listening.

Life of a sequence::

    WAITING --(admitted)--> RUNNING --(stop, length, abort, error)--> FINISHED
       ^                       |
       +-----(preempted)-------+
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec

from octavo.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]

Task = Literal["generate", "embed", "score"]
"""What is wanted of a prompt: what follows it, its vector, or how well its two texts go together."""

Order = tuple[float, ...]
"""A place among others: smaller goes first."""


class Request(msgspec.Struct, frozen=True, omit_defaults=True):
    """One continuation to compute, fully resolved: what the engine needs and nothing else.

    A client's request with ``n=4`` becomes four of these, with ``index`` 0 to 3. A request that an
    engine process left unfinished is sent again with its ``output_tokens`` so far, and goes on from there.
    """

    id: int
    prompt_tokens: list[int]
    params: SamplingParams
    max_tokens: int
    """The resolved limit: never ``None``, and prompt + max_tokens fits the context."""
    seed: int = 0
    """The random key of this continuation, already mixed with ``index`` (unsigned 64 bit)."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids that end the text; empty when the client asked to ignore them."""
    banned_sequences: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens, none of which the output may complete; the prompt is no part of them."""
    output_tokens: list[int] = []
    priority: int = 0
    """Smaller is served first, under the priority policy."""
    arrival: float = 0.0
    """``time.monotonic()`` when the server accepted the request."""
    cache_salt: str = ""
    """Only requests with the same salt share cached blocks."""
    cache_ttl: float = 0.0
    """Seconds for which its cached blocks are given up only after all others; ``inf`` pins them."""
    session: str = ""
    """Conversation that this is a turn of, for the session-aware eviction; within its salt."""
    tenant: str = ""
    """Who is charged for this request, under the fair policy."""
    ttft_target: float = 0.0
    """Seconds from arrival in which the first token should come, under the deadline policy; 0: the server's own."""
    tpot_target: float = 0.0
    """Seconds that each token after it should take on average, under the deadline policy; 0: the server's, if any."""
    task: Task = "generate"
    """Anything else comes with the last token of the prompt, as ``values``, and ``max_tokens`` is 0."""
    second_start: int | None = None
    """Where the second of two texts begins in the prompt of an encoder."""
    adapter: str = ""
    """Name of the adapter that changes the model for this request; ``cache_salt`` is then such that no request of
    another adapter has it."""


class Status(enum.Enum):
    """Where a sequence is; see the picture at the top of this module."""

    WAITING = "waiting"
    RUNNING = "running"
    YIELDING = "yielding"
    """Running, but to be preempted as soon as it is not in flight."""
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class GroupBlocks:
    """The blocks that one sequence holds in one KV group: a set of layers that share a block table."""

    block_table: list[int] = field(default_factory=list)
    first_block: int = 0
    """Entries of ``block_table`` before this are of blocks that were given back, behind the group's sliding window."""
    table_version: int = 0
    """Grows when an existing entry of ``block_table`` changes; appending does not count."""
    published: Any = None
    """The prefix cache's own note of how far this sequence is published."""
    matched: Any = None
    """The prefix cache's own note of what it last found of this sequence while it waits."""

    @property
    def num_held(self) -> int:
        """Blocks that the sequence holds."""
        return len(self.block_table) - self.first_block


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """One growing list of tokens with its blocks: all that is mutable about a request.

    ``tokens`` holds the prompt and the output; ``None`` stands for a token that a submitted step is still
    sampling. ``num_computed_tokens`` counts positions whose keys and values are cached or in flight.
    """

    request: Request
    order: Order = ()
    """Place among those who run, given by the policy; it changes only while the sequence waits."""
    tokens: list[int | None] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache when first admitted."""
    groups: list[GroupBlocks] = field(default_factory=lambda: [GroupBlocks()])
    """Its blocks in each KV group of the cache: as many entries as the cache has groups."""
    capacity: int = 0
    """Positions that have a block in every KV group; nothing beyond them can be computed."""
    draft_tokens: list[int] = field(default_factory=list)
    num_in_flight: int = 0
    """Submitted steps with this sequence that are not yet committed."""
    epoch: int = 0
    """Grows when computed positions are taken back, or at the end; older steps in flight are stale."""
    num_preemptions: int = 0
    """How often its blocks were taken back before it ended."""
    num_faults: int = 0
    """Failed forward passes that this sequence was part of."""
    first_scheduled: float = 0.0
    """``time.monotonic()`` of the first step with this sequence; 0 before."""
    grammar: Any = None
    """What ``Grammars.prepare`` made of the request's grammar, if any; its ``error`` says why masks are empty."""
    account: Any = None
    """The policy's own note of this sequence, such as who is charged for it."""
    batch_index: int = -1
    """Where the persistent batch keeps what steps tell of this sequence."""
    stop_token_ids: frozenset[int] = field(init=False)
    max_computed_tokens: int = field(init=False)
    """Positions that are ever computed: prompt and output, but for the last token, which nothing follows."""

    def __post_init__(self) -> None:
        request = self.request
        self.tokens = [*request.prompt_tokens, *request.output_tokens]
        self.num_prompt_tokens = len(request.prompt_tokens)
        self.max_computed_tokens = self.num_prompt_tokens + max(request.max_tokens, 1) - 1
        self.stop_token_ids = frozenset(request.eos_token_ids).union(request.params.stop_token_ids)

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens


class Scheduled(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step: compute ``tokens``, then ``drafts``, from position ``start``.

    Prefill, a chunk of it, decode, recompute after preemption and verification of drafts are all this
    value with different lengths. The block tables of ``seq`` cover every position computed; while a step is in
    flight they only grow, or has an entry replaced by a block of equal content (see ``table_version``).
    """

    seq: Sequence
    start: int
    tokens: tuple[int | None, ...]
    """``None``: the token that the step before this one samples."""
    drafts: tuple[int, ...]
    samples: bool
    """Whether this reaches the end of the sequence, so that a token is sampled after it."""
    epoch: int

    @property
    def is_stale(self) -> bool:
        """Whether the sequence was rewound or ended after this was planned; its result is dropped."""
        return self.epoch != self.seq.epoch


Plan = list[Scheduled]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probabilities at one position, of the model's own distribution.

    They are taken before penalties, bias, temperature and truncation. ``top_ids`` are the most likely
    tokens, best first, as many as asked for; ``rank`` is the sampled token's own place, from 1.
    """

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class Sampled(msgspec.Struct, gc=False):
    """What a runner gives back for one ``Scheduled``."""

    tokens: list[int]
    """Accepted drafts and one token more; empty when nothing was sampled."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """For prompt positions ``start + 1 ..`` that this chunk predicts; the first is ``start + 1``'s."""
    error: str | None = None
    """Set when this row alone went wrong, say by logits that are not numbers; its sequence ends."""
    values: bytes | None = None
    """The answer to a request whose task is not to generate: a vector or one score, in float32."""


class Output(msgspec.Struct, array_like=True, gc=False):
    """News of one sequence after a step."""

    request_id: int
    tokens: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The id out of ``params.stop_token_ids`` that ended the text; ``None`` for end-of-text."""
    num_cached_tokens: int = 0
    first_scheduled: float = 0.0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs_start: int = 0
    """Prompt position that ``prompt_logprobs[0]`` is about."""
    error: str | None = None
    values: bytes | None = None
    """See ``Sampled.values``."""


class KVGroupStats(msgspec.Struct, frozen=True, gc=False):
    """Blocks of one KV group of the cache."""

    window: int
    """Positions that its layers attend to; 0: all."""
    num_blocks: int
    num_used_blocks: int
    """Blocks that a sequence holds."""
    num_cached_blocks: int
    """Idle blocks that the prefix cache keeps for reuse."""


class EngineStats(msgspec.Struct, array_like=True, gc=False):
    """Gauges and ever-growing counters of the deciding half, cheap enough to take every step."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks that a sequence holds."""
    num_empty_slots: int = 0
    """Token positions of held blocks in which nothing is: the internal fragmentation."""
    num_cached_blocks: int = 0
    """Idle blocks that the prefix cache keeps for reuse; given up as soon as they are needed."""
    kv_groups: list[KVGroupStats] = []
    """Blocks of each KV group, where the cache has several; those above are of the first."""
    num_steps: int = 0
    num_shares: int = 0
    """Sequences in all those steps, one added for each step that it was in."""
    num_prompt_tokens: int = 0
    """Prompt tokens computed."""
    num_output_tokens: int = 0
    num_preemptions: int = 0
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache."""
    prefix_hits: int = 0
    """Of those, found."""
    num_faults: int = 0
    """Forward passes that failed."""
    step_tokens: int = 0
    """Tokens computed by the last step."""
    step_seconds: float = 0.0
    """Wall time of the last step."""
    num_drafts: int = 0
    """Guessed tokens that were verified."""
    num_accepted_drafts: int = 0
    """Of those, right ones."""
    num_copied_tokens: int = 0
    """Of ``prefix_hits``, and of what was preempted, tokens copied out of a block that only begins alike."""
    num_offload_saved: int = 0
    """Blocks that went to slower tiers."""
    num_offload_dropped: int = 0
    """Blocks lost because too many were on their way."""
    num_offload_prefetched: int = 0
    """Blocks read from the disk ahead of their request."""
    num_offload_restored: int = 0
    """Blocks that came back in place of being computed."""
    num_offload_bad_files: int = 0
    """Files of the disk that were missing, damaged, or could not be written or read."""
    offload_memory_bytes: int = 0
    offload_disk_bytes: int = 0
    num_evictions: int = 0
    """Blocks of the prefix cache that were given up to make room."""


class KVGroupInfo(msgspec.Struct, frozen=True):
    """Layers that share one block table of each sequence."""

    window: int
    """Positions that they attend to; 0: all."""
    num_layers: int
    num_blocks: int


class EngineInfo(msgspec.Struct, frozen=True):
    """What a built engine is: settled once at start, the same for its whole life."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """Ids that end a text, as the checkpoint's configuration says."""
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
    """Operation to the kernel chosen for it."""
    kv_groups: tuple[KVGroupInfo, ...] = ()
    """The KV groups of the cache; ``num_kv_blocks`` are those of the first, which reaches furthest back."""
    tasks: tuple[Task, ...] = ("generate",)
    """What requests may ask for."""
    embedding_size: int = 0
    """Numbers in a vector, if there are any."""
    sampling_defaults: dict[str, int | float] = {}
    """Values of ``SamplingParams`` for requests that leave them open, as the checkpoint's configuration says."""


Masks = Mapping[int, Any]
"""Sequence id to its allowed tokens, one bit mask (uint8 array) for each position sampled."""


class Pending(Protocol):
    """A submitted step."""

    @property
    def is_started(self) -> bool:
        """Whether the device computes it now, or next, although nobody has asked for its result yet."""
        ...

    def sample(self, masks: Masks) -> list[Sampled]:
        """Wait for the step and return one ``Sampled`` per ``Scheduled``; raise ``RunnerError`` if it failed."""
        ...


class Runner(Protocol):
    """Computes plans."""

    def submit(self, plan: Plan) -> Pending:
        """Start computing ``plan``; never wait for the device."""
        ...


class Grammars(Protocol):
    """Structured output: which tokens each sequence may take next."""

    def prepare(self, request: Request) -> Future[Any]:
        """Start to make what masks for ``request``, which has a grammar, are made from; do not wait for it."""
        ...

    def masks(self, plan: Plan) -> Masks:
        """Masks for the sequences of ``plan`` that need one, as their tokens so far say; do not wait for them."""
        ...


class Adapters(Protocol):
    """Changes of the model that requests may ask for."""

    def __contains__(self, name: str) -> bool: ...

    def load(self, name: str, path: str) -> None:
        """Read an adapter from a folder; raise ``CheckpointError``."""
        ...

    def unload(self, name: str) -> None:
        """Forget an adapter that no request needs any more."""
        ...


class Proposer(Protocol):
    """Speculation: guesses at the next tokens of a sequence."""

    def propose(self, plan: Plan) -> None:
        """Set ``draft_tokens`` of the sequences in a committed ``plan`` that go on."""
        ...

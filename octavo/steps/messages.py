"""Messages to an executor, and its replies. Every message is frozen, self-contained, and can be sent to another process
as bytes: two executors that receive the same messages do the same.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeVar

import msgspec

from octavo.sampling_params import MAX_LOGPROBS
from octavo.steps.graph_shapes import StepShape
from octavo.types import MemoryPart, Task

NOT_FINITE = -1
"""In place of a token: a logit of the row is not a finite number."""
NOTHING_LEFT = -2
"""In place of a token: all tokens are banned."""
OUT_OF_RANGE = -3
"""In place of a token: penalties or a temperature bring a logit out of the range of float32."""

NO_ADAPTER = -1
"""Adapter number of rows without an adapter."""


class History(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of the sequence at a batch index that no earlier step contained; -1: a token that the executor sampled."""

    index: int
    start: int
    tokens: list[int]


class TokenLists(msgspec.Struct, frozen=True, array_like=True):
    """Logit biases, banned tokens and stop tokens of the sequence at a batch index, from now on."""

    index: int
    bias: dict[int, float]
    banned: list[int]
    """Tokens that are never sampled."""
    stops: list[int]
    """Tokens that are banned in rows with a ban index, which are those before ``min_tokens``."""


class Mask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The allowed tokens of one sampled row: bit ``id % 8`` of byte ``id // 8``."""

    row: int
    bits: bytes


class PromptRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows of a prompt that need log-probabilities of their next tokens, which are known."""

    first_row: int
    tokens: list[int]
    num_top: int
    """Number of most likely tokens to report for each row."""
    temperature: float = 1.0
    """By which processed log-probabilities are divided."""


class PooledRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows of a text for a task other than "generate"."""

    index: int
    start: int
    """Position of the first row."""
    first_row: int
    num_rows: int
    is_last: bool
    """Whether the text ends here."""
    task: Task = "embed"


class GivenRoutes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Experts that the routers of a mixture take for rows of a step, instead of the best."""

    first_row: int
    ids: bytes
    """uint16 [rows, L, S]"""


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A forward pass and what is sampled after it.

    A sequence with drafts has one row for each, behind that of its last token; all of them are sampled, and the drafts
    up to the first that differs from the token sampled before it are accepted. A negative token id stands for a token
    that only the executor knows: in the first row of a sequence, the one that it sampled last, and in the row of a
    draft, what its drafter proposed. Where it is in the first row, the arrays assume that the steps before accepted all
    their drafts, and the executor corrects positions, slots and lengths.
    """

    shape: StepShape
    uses_graph: bool
    """Whether the step runs through the CUDA graph of its shape, which is captured on first use."""
    num_seqs: int
    """Sequences that are not padding."""
    num_samples: int
    """Sampled rows that are not padding: one for each sequence and one for each draft."""
    inputs: bytearray
    """Arrays in the layout of ``steps.layout``."""
    histories: list[History] = []
    lists: list[TokenLists] = []
    is_sampled: bool = True
    """Whether any token is needed; otherwise sampling may be skipped."""
    num_top: int = -1
    """Number of most likely tokens to report for each sampled row with log-probabilities; -1: no row has any."""
    masks: list[Mask] = []
    prompts: list[PromptRows] = []
    pooled: list[PooledRows] = []
    spans: list[SpanRows] = []
    """For models in which the rows of an image attend to each other."""
    routes: list[GivenRoutes] = []
    marks: dict[int, int] = {}
    """Rows after which the recurrent state is kept as well, and the slots for it."""

    @property
    def needs_all_rows(self) -> bool:
        """Whether results of rows that are not sampled are needed."""
        return bool(self.prompts or self.pooled)

    @property
    def is_plain(self) -> bool:
        """Whether the step consists of its arrays alone, so that it may run through a graph."""
        is_wide = self.num_top > MAX_LOGPROBS
        is_plain = not (self.masks or self.prompts or self.pooled or self.routes or self.marks)
        return is_plain and not (self.spans or is_wide)


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens, log-probabilities and embeddings of a step."""

    tokens: list[int]
    """One for each sampled row that is not padding; negative for an error: ``NOT_FINITE`` and others."""
    num_accepted: list[int] = []
    """Number of accepted drafts of each sequence; empty if the step has no drafts."""
    reports: bytes = b""
    """int32 [R, 2 + 2 n]: log-probability and rank of each token, n most likely tokens, their log-probabilities."""
    prompts: list[bytes | None] = []
    """For each of the step's ``prompts``, reports of its rows; ``None`` if its logits are not finite."""
    values: list[bytes | None] = []
    """For each of the step's ``pooled``, the result in float32; ``None`` before the end of the text."""
    drafts: list[list[int]] = []
    """What the drafter proposes next for each sequence; only if the step has masks, which depend on drafts."""


class ImageToEncode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image for the vision tower, and where its embeddings go."""

    slots: bytes
    """int64: the slot of each embedding, in order."""
    shape: tuple[int, int, int]
    """Tiles, and rows and columns of pixels of each."""
    pixels: bytes
    """uint8, RGB: [tiles, rows, columns, 3]."""
    details: tuple[int, ...] = ()
    """What else the family's tower has to know, such as the grid of the tiles."""


class EncodeImages(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compute the embeddings of images, one by one, and write them to the pool of embeddings.

    Fails with a ``RunnerError``, and then the slots' contents are undefined."""

    images: list[ImageToEncode]


class SpanRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows of an image that attend to each other in both directions."""

    first_row: int
    num_rows: int
    seq: int
    """Number of the sequence in the step."""
    start: int
    """Position of the image's first embedding; earlier ones than the first row's may be cached."""
    end: int


class CopySlots(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Copy the first ``num_tokens`` slots of block ``source`` of a KV group to block ``target``, in all its layers."""

    group: int
    source: int
    target: int
    num_tokens: int


class CopyState(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Copy the recurrent state in slot ``source`` to slot ``target``, in all layers that have one."""

    source: int
    target: int


class ReadPlaces(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Return the contents of places, one behind the other, as bytes."""

    pool: Literal["blocks", "states", "routes"]
    """Keys and values of blocks; recurrent states of slots; the experts that were selected for positions of blocks."""
    places: list[int]


class WritePlaces(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Write contents from ``ReadPlaces`` to places, one each; none is named twice."""

    pool: Literal["blocks", "states"]
    places: list[int]
    contents: list[bytes]


CacheCopy = CopySlots | CopyState | ReadPlaces | WritePlaces
"""Messages about what a ``KVStorage`` holds."""


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Load the adapter in the folder ``path`` under ``number``. Fails with a ``CheckpointError``, and then nothing is
    changed."""

    number: int
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Unload an adapter, which no later step uses."""

    number: int


class LoadWeights(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Write other weights over those of the model, where they are, before any later step.

    Fails with a ``CheckpointError``, and then nothing is changed. Any other error is fatal."""

    folder: str
    """A checkpoint; "": that of the weights that are loaded."""
    files: list[str] = []
    """Safetensors files with tensors to take in place of the checkpoint's."""


class ReadChecksums(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Return checksums of the model's tensors by their names, as lines of JSON: one for each rank, and empty ones."""


class ReadExperts(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Return how often the experts of each mixture were chosen since the last time, and where they are."""


class ExpertMove(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A slot of a rank takes another expert, which some rank holds."""

    mixture: int
    rank: int
    slot: int
    expert: int


class ExpertLoads(msgspec.Struct, frozen=True, array_like=True):
    """The experts of a mixture."""

    counts: list[int]
    """How often each was chosen."""
    slots: list[list[int]]
    """The expert in each slot of each rank."""
    num_bytes: int
    """Of an expert."""


class MoveExperts(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Copy experts between ranks, all of them from where they were before the message."""

    moves: list[ExpertMove]


class Compile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compile the kernels of steps of these shapes, while other messages are executed."""

    shapes: list[StepShape]
    num_threads: int = 0
    """Threads that compile; 0: one per CPU core."""
    in_background: bool = False
    """Whether no rank waits for it: a step that lacks a kernel compiles it itself."""


class PrepareTuning(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Compile the kernels that may be the fastest for the model's matrix products of up to ``num_rows`` rows.

    Returns the keys of the products to measure: those that nobody has measured on this GPU, or with ``again`` all; of
    them as many as are compiled in about ``seconds``, those with the largest weights first, and at least one.
    """

    num_rows: int
    again: bool = False
    seconds: float = float("inf")


class MeasureKernels(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Return the fastest of the kernels prepared for the product of this key, as an entry of ``UseKernels``."""

    key: str


class UseKernels(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Use these kernels from now on, and keep them for the next start. Graphs that are captured keep theirs."""

    entries: dict[str, dict[str, Any]]
    """By the product's key: the name of the kernel and the fields of its configuration."""


class EncoderText(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A text for an encoder."""

    tokens: list[int]
    second_start: int | None = None
    """Index of the second text's first token, for a pair of texts."""
    task: Task = "embed"
    adapter: int = NO_ADAPTER


class Encode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Return the result of each text's task, as float32 bytes; ``None`` for one that is not finite."""

    texts: list[EncoderText]


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Free the device's memory until ``Wake``; host memory keeps the weights, blocks lose their content. For executors
    of one CUDA device. Once weights are awake, ``OfWeights`` may follow, before that nothing.

    Fails with a ``RunnerError``, and then nothing is changed, if the host has too little memory."""


class Wake(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Undo ``Sleep`` for some parts of the memory, which are asleep. Every step that uses a graph captures it anew."""

    parts: list[MemoryPart]


OfWeights = LoadAdapter | UnloadAdapter | LoadWeights | ReadChecksums
"""Messages that use weights, and no blocks."""
Tuning = PrepareTuning | MeasureKernels | UseKernels
Power = Sleep | Wake
Message = Step | Encode | EncodeImages | CacheCopy | OfWeights | ReadExperts | MoveExperts | Compile | Tuning | Power

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """Serialize a message."""
    return _encoder.encode(message)


def unpack(data: bytes) -> Message:
    """Deserialize a message."""
    return _decoder.decode(data)


Answer = TypeVar("Answer", covariant=True)


class Reply(Protocol[Answer]):
    """The reply to a message, possibly still pending."""

    def wait(self) -> Answer:
        """Wait for the reply; raises ``RunnerError`` if a step failed, ``CheckpointError`` if an adapter did."""
        ...


class Executor(Protocol):
    """Executes messages in the order in which they are sent; only one thread may send at a time."""

    @property
    def runs_ahead(self) -> bool:
        """Whether steps run asynchronously; otherwise they are finished when ``send`` returns."""
        ...

    def send(self, message: Message) -> Reply[Any]:
        """Execute ``message`` after all earlier ones. The reply to ``Step`` is a ``StepResult``, to ``ReadPlaces``
        and ``ReadChecksums`` bytes, to ``Encode`` a list of bytes or ``None``, to ``PrepareTuning`` a list of keys, to
        ``MeasureKernels`` a dict of fields, to ``ReadExperts`` a list of ``ExpertLoads``, to all others ``None``."""
        ...

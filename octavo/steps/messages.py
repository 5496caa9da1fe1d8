"""What an executor is told, in order, and what it answers. Every message is frozen, holds all that it is about, and can
be sent to another process as bytes: two executors that are given the same messages do the same.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import msgspec

from octavo.steps.shapes import StepShape

NOT_FINITE = -1
"""In place of a token: a logit of the row is not a finite number."""
NOTHING_LEFT = -2
"""In place of a token: all tokens are banned."""
OUT_OF_RANGE = -3
"""In place of a token: penalties or a temperature bring a logit out of the range of float32."""

NO_ADAPTER = -1
"""As an adapter's number: the model as it is."""


class History(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Tokens of the sequence at a batch index that no step has brought there; -1: one that the executor sampled."""

    index: int
    start: int
    tokens: list[int]


class TokenLists(msgspec.Struct, frozen=True, array_like=True):
    """What the sequence at a batch index asks for about single tokens, from now on."""

    index: int
    bias: dict[int, float]
    banned: list[int]
    """Tokens that its logits must not give; they are no part of what may end the text."""
    stops: list[int]
    """Tokens that are banned where a step says so: before ``min_tokens``."""


class Mask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The tokens that may be sampled in one row: bit ``id % 8`` of byte ``id // 8``."""

    row: int
    bits: bytes


class PromptRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows of a prompt whose next tokens are known, and whose log-probabilities are asked for."""

    first_row: int
    tokens: list[int]
    num_top: int
    """Most likely tokens to report for each row."""


class PooledRows(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Rows of a text whose vector is asked for."""

    index: int
    start: int
    """Position of the first row."""
    first_row: int
    num_rows: int
    is_last: bool
    """Whether the text ends here."""


class Step(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A forward pass and what is sampled after it."""

    shape: StepShape
    uses_graph: bool
    """Whether the step runs through the CUDA graph of its shape, which is captured if this is the first time."""
    num_seqs: int
    """Sequences that are not padding."""
    inputs: bytearray
    """Arrays as ``steps.layout`` places them."""
    histories: list[History] = []
    lists: list[TokenLists] = []
    is_sampled: bool = True
    """Whether any token is asked for; without, sampling may be left out."""
    num_top: int = -1
    """Most likely tokens to report for each sampled row that asks; -1: none asks for log-probabilities."""
    drafts: list[list[int]] = []
    """Drafts of each sequence, where there are any; they are among the step's tokens, too."""
    masks: list[Mask] = []
    prompts: list[PromptRows] = []
    pooled: list[PooledRows] = []

    @property
    def needs_all_rows(self) -> bool:
        """Whether more is looked at than the rows that are sampled."""
        return bool(self.prompts or self.pooled)

    @property
    def is_plain(self) -> bool:
        """Whether the step is nothing but its arrays, so that it may run through a graph."""
        return not (self.drafts or self.masks or self.prompts or self.pooled)


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """What a step sampled, computed and reports."""

    tokens: list[int]
    """One for each sampled row that is not padding; negative where there is none: see ``NOT_FINITE`` and others."""
    num_accepted: list[int] = []
    """Drafts of each sequence that were accepted, where there are any."""
    reports: bytes = b""
    """int32 [R, 2 + 2 n]: log-probability and rank of each token, n most likely tokens, their log-probabilities."""
    prompts: list[bytes | None] = []
    """Of each of the step's ``prompts``, reports of its rows; ``None`` where logits are not finite."""
    values: list[bytes | None] = []
    """Of each of the step's ``pooled``, a float32 vector; ``None`` before a text's end."""


class CopySlots(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Copy the first ``num_tokens`` positions of a group's block ``source`` to block ``target``, in all its layers."""

    group: int
    source: int
    target: int
    num_tokens: int


class ReadBlock(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Give the content of a block, as bytes."""

    block: int


class WriteBlock(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Put bytes that ``ReadBlock`` gave into a block."""

    block: int
    content: bytes


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Read the adapter in the folder ``path``, and let rows ask for it by ``number``. Fails with a ``CheckpointError``,
    and then nothing is changed."""

    number: int
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """Forget an adapter, which no step asks for any more."""

    number: int


class Compile(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Compile the kernels of steps of these shapes, while other messages are carried out."""

    shapes: list[StepShape]
    num_threads: int = 0
    """Threads that compile at once; 0: as many as there is work for."""


class Text(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A text for an encoder."""

    tokens: list[int]
    second_start: int | None = None
    """Where the second of two texts begins."""


class Encode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give the vector or score of each text, as float32 bytes; ``None`` for one that is not finite."""

    texts: list[Text]


Message = Step | Encode | CopySlots | ReadBlock | WriteBlock | LoadAdapter | UnloadAdapter | Compile

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


def pack(message: Message) -> bytes:
    """A message as bytes."""
    return _encoder.encode(message)


def unpack(data: bytes) -> Message:
    """The message of these bytes."""
    return _decoder.decode(data)


Answer = TypeVar("Answer", covariant=True)


class Reply(Protocol[Answer]):
    """The answer to a message, now or later."""

    def wait(self) -> Answer:
        """Wait for the answer. Raise ``RunnerError`` if a step failed, ``CheckpointError`` if an adapter did."""
        ...


class Executor(Protocol):
    """Carries messages out in the order in which they are sent; one thread sends at a time."""

    @property
    def runs_ahead(self) -> bool:
        """Whether steps run while the sender goes on; else they are over when ``send`` returns."""
        ...

    def send(self, message: Message) -> Reply[Any]:
        """Carry ``message`` out, after all that were sent before it. ``Step`` is answered by a ``StepResult``,
        ``ReadBlock`` by bytes, ``Encode`` by a list of them, all others by ``None``."""
        ...

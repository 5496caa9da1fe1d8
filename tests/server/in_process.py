"""An engine in the test's own event loop, and a small tokenizer: the HTTP side without a second process.

The tokens of an answer are those of a text given beforehand, so a test knows what must come back. Every pass of the
event loop is a step: all live requests get one token.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.config import ModelSettings
from octavo.errors import QueueFull, RequestError, Unavailable
from octavo.server.adapters import AdapterTable
from octavo.server.engine_client import OutputListener
from octavo.server.timelines import KVEventRing, Timelines
from octavo.telemetry.metrics import Metrics
from octavo.text.token_bytes import byte_level_alphabet
from octavo.text.tokenizer import Tokenizer
from octavo.text.tokenizer_parts import TokenizerParts
from octavo.types import EngineInfo, EngineStats, FinishReason, Output, Request, TokenLogprobs

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 256
IM_END = 258
VOCAB = 300
MAX_MODEL_LEN = 512
ANSWER = "The answer is 4, said the bird. "


def byte_tokenizer(chat_template: str | None = TEMPLATE, more_special: tuple[str, ...] = ()) -> Tokenizer:
    """One token for each byte, so that characters of several bytes are always split, and some special tokens."""
    backend = tokenizers.Tokenizer(models.BPE(vocab=byte_level_alphabet(), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in (*SPECIAL, *more_special)])
    names = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2]}
    return Tokenizer(TokenizerParts(Path("test"), backend, names, (IM_END,), chat_template))


@dataclass
class Live:
    request: Request
    listener: OutputListener
    num_tokens: int = 0


@dataclass
class InProcessEngine:
    """An ``EngineClient`` whose answers are known.

    ``answer`` gives the tokens for a request; they repeat until ``max_tokens``. With ``runs`` false, steps happen
    only when a test calls ``step``.
    """

    answer: Callable[[Request], list[int]] = lambda request: list(ANSWER.encode())
    runs: bool = True
    is_ready: bool = True
    is_draining: bool = False
    failure: str | None = None
    max_num_seqs: int = 16
    num_restarts: int = 0
    pid: int | None = 4711
    seconds_since_progress: float = 0.0
    max_live: int = 0
    aborted: list[int] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    """Every request ever added."""
    errors: dict[int, RequestError] = field(default_factory=dict)
    """Number of tokens after which every request fails with this."""
    metrics: Metrics = field(default_factory=lambda: Metrics("test"))
    adapters: AdapterTable = field(default_factory=lambda: AdapterTable(ModelSettings()))
    timelines: Timelines = field(default_factory=Timelines)
    kv_events: KVEventRing = field(default_factory=KVEventRing)
    sampling_defaults: dict[str, int | float] = field(default_factory=dict)
    counters: EngineStats = field(default_factory=EngineStats)

    def __post_init__(self) -> None:
        self.live: dict[int, Live] = {}
        self._ids = itertools.count(1)
        self._is_scheduled = False

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            block_size=16,
            num_kv_blocks=64,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=512,
            architecture="test",
            num_parameters=0,
            dtype="float32",
            device="cpu",
            memory={},
            kernels={},
            sampling_defaults=self.sampling_defaults,
        )

    @property
    def stats(self) -> EngineStats:
        return msgspec.structs.replace(self.counters, num_running=len(self.live), num_blocks=64)

    @property
    def num_live(self) -> int:
        return len(self.live)

    def next_id(self) -> int:
        return next(self._ids)

    def add(self, request: Request, listener: OutputListener) -> None:
        if self.is_draining:
            raise Unavailable("The server takes no requests now.", retry_after=5)
        if request.id in self.live:
            raise QueueFull("twice")
        self.live[request.id] = Live(request, listener)
        self.requests.append(request)
        self.max_live = max(self.max_live, len(self.live))
        self._schedule()

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        if self.live.pop(request_id, None) is not None:
            self.aborted.append(request_id)

    def _schedule(self) -> None:
        if self.runs and self.live and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        self.step()
        self._schedule()

    def step(self) -> None:
        """Give every live request its next token."""
        for live in list(self.live.values()):
            error = self.errors.get(live.num_tokens)
            if error is not None:
                del self.live[live.request.id]
                live.listener.on_error(error)
            elif live.request.id in self.live:
                live.listener.on_output(self._output(live))

    def _output(self, live: Live) -> Output:
        request, params = live.request, live.request.params
        first = live.num_tokens == 0
        output = Output(request.id, [], num_cached_tokens=3 if first else 0)
        if first and params.prompt_logprobs is not None:
            output.prompt_logprobs_start = 1
            output.prompt_logprobs = [logprobs_of(t, params.prompt_logprobs) for t in request.prompt_tokens[1:]]
        if live.num_tokens < request.max_tokens:
            answer = self.answer(request)
            token = answer[live.num_tokens % len(answer)]
            output.tokens = [token]
            live.num_tokens += 1
            if params.logprobs is not None:
                output.logprobs = [logprobs_of(token, params.logprobs)]
            if token in (*request.eos_token_ids, *params.stop_token_ids):
                output.finish_reason = "stop"
                output.stop_token_id = token if token in params.stop_token_ids else None
        if output.finish_reason is None and live.num_tokens == request.max_tokens:
            output.finish_reason = "length"
        if output.finish_reason is not None:
            del self.live[request.id]
        return output


def logprobs_of(token: int, num_top: int) -> TokenLogprobs:
    """The token's rank is 1 for even ids and 3 for odd ones; its number tells which token it is."""
    own = -(token + 1) / 1024
    if token % 2 == 0:
        ids = [token, *range(num_top)][:num_top]
        return TokenLogprobs(token, own, 1, ids, [own - i for i in range(num_top)])
    ids = [i for i in range(VOCAB) if i != token][:num_top]
    return TokenLogprobs(token, -50.0, 3, ids, [-1.0 - i for i in range(num_top)])

"""``FakeEngine`` in the test's own event loop, and a small tokenizer: the HTTP side without a second process.

The tokens of an answer are those of a text given beforehand, so a test knows what must come back. Every pass of the
event loop is a step: all live requests get one token.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import msgspec

from octavo.config import ModelSettings
from octavo.errors import QueueFull, RequestError, Unavailable
from octavo.telemetry.cache_view import CacheView, SessionOrder, SessionReport
from octavo.telemetry.metrics import Metrics
from octavo.types import (
    MEMORY_PARTS,
    DropTensors,
    EngineInfo,
    EngineStats,
    FinishReason,
    JoinGroup,
    MemoryPart,
    ReceiveTensors,
    Request,
)
from octavo_fleet.backends.vocabulary import SPECIAL, TEMPLATE, byte_tokenizer  # noqa: F401 (for the tests)
from octavo_server.engines.engine_client import FIRST_WEIGHTS, LiveProgress, OutputListener, SleepMode
from octavo_server.engines.lora_adapters import AdapterTable
from octavo_server.observe.step_log import StepLog
from octavo_server.observe.timelines import KVEventRing, Timelines
from tests.server.fake_engine import FakeEngine, make_info

EOS = 256
IM_START = 257
IM_END = 258
VOCAB = 300
MAX_MODEL_LEN = 512
NUM_BLOCKS = 64
ANSWER = "The answer is 4, said the bird. "


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
    max_model_len: int = MAX_MODEL_LEN
    num_restarts: int = 0
    sleep_level: int = 0
    asleep: set[MemoryPart] = field(default_factory=set)
    sleep_modes: list[SleepMode] = field(default_factory=list)
    """Of every call of ``sleep`` and of ``pause``."""
    is_paused: bool = False
    weight_version: str = FIRST_WEIGHTS
    weights: list[str] = field(default_factory=list)
    """Folders of all updates."""
    num_clears: int = 0
    session_orders: list[SessionOrder] = field(default_factory=list)
    session_report: SessionReport = field(default_factory=SessionReport)
    orders: list[JoinGroup | ReceiveTensors | DropTensors] = field(default_factory=list)
    """Of trainers, since weights were last taken."""
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
    steps: StepLog = field(default_factory=StepLog)
    paces: list[int | None] = field(default_factory=list)
    """Of every call of ``set_pace``."""
    architecture: str = "test"
    kv_events: KVEventRing = field(default_factory=KVEventRing)
    sampling_defaults: dict[str, int | float] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    """Fields of ``EngineStats`` that the engine itself does not count."""
    views: list[CacheView] = field(default_factory=list)
    """What ``cache_views`` gives."""

    def __post_init__(self) -> None:
        self.engine = FakeEngine(self._next_token, num_blocks=NUM_BLOCKS)
        self.live: dict[int, Live] = {}
        self._ids = itertools.count(1)
        self._is_scheduled = False

    @property
    def info(self) -> EngineInfo:
        return make_info(
            max_model_len=self.max_model_len,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            num_kv_blocks=NUM_BLOCKS,
            max_num_seqs=self.max_num_seqs,
            architecture=self.architecture,
            sampling_defaults=self.sampling_defaults,
        )

    @property
    def stats(self) -> EngineStats:
        return msgspec.structs.replace(self.engine.stats(), **self.counters)

    @property
    def num_live(self) -> int:
        return len(self.live)

    @property
    def live_owners(self) -> Counter[str]:
        return Counter(live.request.owner for live in self.live.values())

    def progress(self) -> Iterator[LiveProgress]:
        for number, live in self.live.items():
            num_prompt = len(live.request.prompt_tokens)
            counts = num_prompt, num_prompt, live.num_tokens, live.request.max_tokens
            yield LiveProgress(number, *counts, True, live.request.owner)

    def cache_views(self) -> list[CacheView]:
        return self.views

    def set_pace(self, steps: int | None) -> None:
        self.paces.append(steps)

    async def sleep(self, level: int = 1, mode: SleepMode = "wait") -> None:
        self.sleep_level, self.asleep = level, {*MEMORY_PARTS}
        self.sleep_modes.append(mode)

    async def wake_up(self, parts: Collection[MemoryPart] = MEMORY_PARTS) -> None:
        self.asleep -= {*parts}
        self.sleep_level = self.sleep_level if self.asleep else 0

    async def pause(self, mode: SleepMode = "abort") -> None:
        self.is_paused = True
        self.sleep_modes.append(mode)

    def resume(self) -> None:
        self.is_paused = False

    async def update_weights(self, model: str, version: str, mode: SleepMode = "keep") -> None:
        self.weights.append(model)
        self.weight_version = version

    @property
    def has_received(self) -> bool:
        return bool(self.orders) and isinstance(self.orders[-1], ReceiveTensors)

    async def order_weights(self, order: JoinGroup | ReceiveTensors | DropTensors) -> None:
        self.orders.append(order)

    async def weight_checksums(self) -> dict[str, str]:
        return {"tp=0:a": self.weight_version, "tp=0:b": "same"}

    async def take_weights(self, version: str | None, mode: SleepMode = "keep") -> str:
        self.weight_version = version or "1"
        self.orders.clear()
        return self.weight_version

    async def order_sessions(self, order: SessionOrder) -> SessionReport:
        self.session_orders.append(order)
        return self.session_report

    async def clear_prefix_cache(self) -> None:
        self.num_clears += 1

    async def load_adapter(self, name: str, path: str, content: str, replaces: bool = False) -> None:
        assert replaces or name not in self.adapters.paths
        self.adapters.add(name, path, content)

    async def unload_adapter(self, name: str) -> None:
        self.adapters.remove(name)

    def next_id(self) -> int:
        return next(self._ids)

    def add(self, request: Request, listener: OutputListener) -> None:
        if self.is_draining:
            raise Unavailable("The server takes no requests now.", retry_after=5)
        if request.id in self.live:
            raise QueueFull("twice")
        self.engine.add(request)
        self.requests.append(request)  # tests, which are other threads, wait for what is in ``live``
        self.max_live = max(self.max_live, len(self.live) + 1)
        self.live[request.id] = Live(request, listener)
        self._schedule()

    def abort(self, request_id: int, reason: FinishReason = "abort") -> None:
        if request_id in self.live:
            self.engine.abort(request_id)
            self.aborted.append(request_id)
            del self.live[request_id]

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
            if (error := self.errors.get(live.num_tokens)) is not None:
                del self.live[live.request.id]
                self.engine.abort(live.request.id)
                live.listener.on_error(error)
        for output in self.engine.step():
            if (live := self.live.get(output.request_id)) is None:
                continue  # aborted by what came before it in this step
            live.num_tokens += len(output.tokens)
            if output.finish_reason is not None:
                del self.live[output.request_id]
            live.listener.on_output(output)

    def _next_token(self, request: Request, position: int) -> int:
        answer = self.answer(request)
        return answer[position % len(answer)]

"""An engine without a model: in the test's process (``in_process``), or as an engine process (``child_engine``).

In a process of its own each token is a digest of the prompt and the position, so what a stream must be is known
beforehand. The model name in its config is a JSON object of what shall go wrong; see ``Knobs``.
"""

from __future__ import annotations

import hashlib
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from octavo import errors
from octavo.config import EngineConfig
from octavo.types import (
    AskReceiver,
    EngineInfo,
    EngineStats,
    JoinGroup,
    MemoryPart,
    Output,
    ReceiveTensors,
    Request,
    TakeWeights,
    TokenLogprobs,
    WeightOrder,
)
from octavo_fleet.backends.instant import InstantEngine, NextToken, Running

VOCAB = 50_000

NUM_CACHED_TOKENS = 3
"""Of every prompt."""


def make_info(**changes: Any) -> EngineInfo:
    """What an engine without a model says of itself."""
    figures = {
        "max_model_len": 4096,
        "vocab_size": VOCAB,
        "eos_token_ids": (0,),
        "block_size": 16,
        "num_kv_blocks": 1024,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 512,
        "architecture": "digest",
        "num_parameters": 0,
        "dtype": "float32",
        "device": "cpu",
        "memory": {},
        "kernels": {},
    }
    return EngineInfo(**{**figures, **changes})


INFO = make_info()


class Knobs(msgspec.Struct, forbid_unknown_fields=True):
    """What goes wrong, and how slow everything is. Token values mark the prompts that are meant."""

    step_seconds: float = 0.0
    max_num_seqs: int = 64
    weights: int = 0
    """Added to each token."""
    changes_weights: bool = False
    """Whether weights can be changed while the process lives."""
    memory: int = 0
    """Bytes that the engine says it takes."""
    start_error: str = ""
    """Name of the error class that building raises."""
    start_crash_after: str = ""
    """A file; building exits when it exists, and creates it."""
    start_kill: bool = False
    """The process is killed whenever it starts."""
    start_seconds: float = 0.0
    is_start_busy: bool = False
    """Whether the process uses processor time meanwhile."""
    poison: int = -1
    """The process dies instead of sampling output token ``poison_at`` of a prompt that begins with this."""
    poison_at: int = 0
    poison_how: str = "SIGSEGV"
    """The signal by which it dies, or "exception"."""
    poison_lives: str = ""
    """A file with the number of processes that die of it, from which each takes one; without it, all do."""
    vmstat: str = ""
    """A file in which a process that dies of it says that the kernel killed one more for want of memory."""
    refuse: int = -1
    faulty: int = -1
    """The engine ends a prompt that begins with this with an error after 3 tokens."""
    stuck: int = -1
    """The engine has work and never does it while a prompt that begins with this is there."""
    garbage: int = -1
    """Bytes that are no message are sent when a prompt begins with this."""
    slow_step: int = -1
    """A step takes ``slow_seconds`` when it first sees a prompt that begins with this."""
    slow_seconds: float = 0.0
    takes_adapters: bool = False
    sleeps: bool = False
    """A sleeping engine keeps its process."""
    sleep_error: str = ""
    wake_error: str = ""
    """What goes wrong when it falls asleep or wakes."""
    writes: str = ""
    """A file that closing the engine writes, which takes half a second; and beside it a thread that does not end."""


def token_at(prompt: list[int], position: int) -> int:
    packed = struct.pack(f"<{len(prompt) + 1}q", *prompt, position)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=4).digest(), "little") % VOCAB


def expected(request: Request) -> list[int]:
    return [token_at(request.prompt_tokens, i) for i in range(request.max_tokens)]


def logprobs_of(token: int, num_top: int) -> TokenLogprobs:
    """The token's rank is 1 for even ids and 3 for odd ones; its number tells which token it is."""
    own = -(token + 1) / 1024
    if token % 2 == 0:
        ids = [token, *range(num_top)][:num_top]
        return TokenLogprobs(token, own, 1, ids, [own - i for i in range(num_top)])
    ids = [i for i in range(num_top + 1) if i != token][:num_top]
    return TokenLogprobs(token, -50.0, 3, ids, [-1.0 - i for i in range(num_top)])


class FakeAdapters:
    """Adapters without weights, which cannot be changed while the engine sleeps."""

    def __init__(self) -> None:
        self.is_asleep = False
        self._names = set[str]()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def load(self, name: str, path: str) -> None:
        self._check(name not in self)
        self._names.add(name)

    def unload(self, name: str) -> None:
        self._check(name in self)
        self._names.remove(name)

    def _check(self, is_known: bool) -> None:
        if self.is_asleep or not is_known:
            raise errors.CheckpointError("the weights sleep" if self.is_asleep else "it is loaded, or not, already")


class FakeEngine(InstantEngine):
    """``InstantEngine`` with tokens that are known beforehand, and with what goes wrong.

    ``next_token`` says which token is next, given the request and the number of its output tokens so far.
    """

    def __init__(self, next_token: NextToken | None = None, knobs: Knobs | None = None, num_blocks: int = 1024) -> None:
        self.knobs = knobs or Knobs()
        tokens = next_token or (
            lambda request, position: (token_at(request.prompt_tokens, position) + self.knobs.weights) % VOCAB
        )
        super().__init__(tokens, self.knobs.max_num_seqs)
        self.num_blocks = num_blocks
        self.fake_adapters = FakeAdapters()
        if self.knobs.takes_adapters:
            self.adapters = self.fake_adapters
        self.slowed: set[int] = set()
        self.num_received = 0

    def add(self, request: Request) -> None:
        if request.prompt_tokens[0] == self.knobs.refuse:
            raise errors.ContextLengthExceeded("too long for the pool", param="prompt")
        if request.prompt_tokens[0] == self.knobs.garbage:
            os.write(int(sys.argv[-1]), b"\xff" * 64)
        if request.output_tokens and len(request.output_tokens) >= request.max_tokens:
            raise errors.InvalidParameter("output_tokens", "nothing is left to generate")
        self.requests[request.id] = Running(request, len(request.output_tokens))

    def step(self) -> list[Output]:
        knobs = self.knobs
        running = list(self.requests.values())[: knobs.max_num_seqs]
        marks = {item.request.prompt_tokens[0] for item in running}
        if knobs.stuck in marks:
            return []
        if knobs.slow_step in marks - self.slowed:
            self.slowed.add(knobs.slow_step)
            time.sleep(knobs.slow_seconds)
        if knobs.step_seconds:
            time.sleep(knobs.step_seconds)
        return super().step()

    def advance(self, item: Running) -> Output:
        request, params, position = item.request, item.request.params, item.num_tokens
        mark = request.prompt_tokens[0]
        if mark == self.knobs.poison and position == self.knobs.poison_at:
            self._die()
        if mark == self.knobs.faulty and position == 3:
            return Output(request.id, [], "error", error="its logits are not numbers")
        output = super().advance(item)
        output.first_scheduled = time.monotonic()
        if position == 0:
            output.num_cached_tokens = NUM_CACHED_TOKENS
            if params.prompt_logprobs is not None:
                output.prompt_logprobs_start = 1
                output.prompt_logprobs = [logprobs_of(t, params.prompt_logprobs) for t in request.prompt_tokens[1:]]
        return output

    def logprobs(self, token: int, num_top: int) -> TokenLogprobs:
        return logprobs_of(token, num_top)

    def _die(self) -> None:
        knobs = self.knobs
        if knobs.poison_lives:
            lives = Path(knobs.poison_lives)
            num_left = int(lives.read_text())
            if not num_left:
                return
            lives.write_text(str(num_left - 1))
        if knobs.vmstat:
            vmstat = Path(knobs.vmstat)
            vmstat.write_text(f"nr_free_pages 5\noom_kill {int(vmstat.read_text().split()[-1]) + 1}\n")
        if knobs.poison_how == "exception":
            raise ZeroDivisionError
        os.kill(os.getpid(), signal.Signals[knobs.poison_how])

    def clear_cache(self) -> None:
        pass

    def checksums(self) -> dict[str, str]:
        return {"tp=0:knobs": str(self.knobs.weights)}

    def order_weights(self, order: WeightOrder) -> bool:
        """Received are weights of which each token is one more; it takes a while."""
        match order:
            case JoinGroup(port=0):
                raise errors.CheckpointError("nobody listens")
            case JoinGroup(port=2):
                self.num_received = 10**9
                return True
            case ReceiveTensors(names=["missing"]):
                raise errors.CheckpointError("the trainer is gone")
            case ReceiveTensors():
                self.num_received = 2
            case AskReceiver():
                self.num_received -= 1
                return self.num_received > 0
            case TakeWeights(folder=""):
                self.knobs.weights += 1
            case TakeWeights(folder=folder):
                knobs = msgspec.json.decode(folder, type=Knobs)
                if knobs.start_error == "KeyError":
                    os._exit(1)
                if knobs.start_error:
                    raise errors.CheckpointError("layer 3 is missing")
                assert not self.requests
                self.knobs.weights = knobs.weights
        return isinstance(order, ReceiveTensors)

    def sleep(self) -> None:
        assert not self.requests
        if self.knobs.sleep_error:
            raise errors.RunnerError(self.knobs.sleep_error)
        self.fake_adapters.is_asleep = True

    def wake(self, parts: Collection[MemoryPart]) -> None:
        if self.knobs.wake_error:
            raise MemoryError(self.knobs.wake_error)
        self.fake_adapters.is_asleep &= "weights" not in parts

    def close(self) -> None:
        if self.knobs.writes:
            time.sleep(0.5)
            open(self.knobs.writes, "w").close()

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self.requests),
            num_blocks=self.num_blocks,
            num_used_blocks=len(self.requests),
            num_steps=self.num_steps,
            step_tokens=len(self.requests),
        )


def build(config: EngineConfig) -> tuple[FakeEngine, EngineInfo]:
    knobs = msgspec.json.decode(config.model.model, type=Knobs)
    if knobs.start_error:
        raise getattr(errors, knobs.start_error, ZeroDivisionError)("layer 3 is missing")
    until = time.monotonic() + knobs.start_seconds
    while time.monotonic() < until:
        time.sleep(0 if knobs.is_start_busy else 0.01)
    if knobs.start_kill:
        os.kill(os.getpid(), signal.SIGKILL)
    if knobs.start_crash_after:
        if os.path.exists(knobs.start_crash_after):
            os._exit(7)
        open(knobs.start_crash_after, "w").close()
    if knobs.writes:
        threading.Thread(target=time.sleep, args=(3600,)).start()
    memory = {"weights": knobs.memory} if knobs.memory else {}
    changes = {"sleeps_in_host_memory": knobs.sleeps, "changes_weights": knobs.changes_weights}
    return FakeEngine(knobs=knobs), make_info(memory=memory, **changes)

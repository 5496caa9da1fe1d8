"""The engine process at the other end of a socket, without the front process."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from octavo.backend_settings import BACKENDS
from octavo.cache.kv_events import KVEvent
from octavo.config import FULL, QUICK, EngineConfig, ModelSettings, to_flat
from octavo.sampling_params import SamplingParams
from octavo.telemetry.request_events import Event
from octavo.types import EngineStats, ImageInput, Output, Request
from octavo_fleet.backends import toy
from octavo_server.engines import engine_process, wire
from tests.server import fake_engine
from tests.server.forked_engine import fork_engine

ROOT = Path(__file__).parents[2]


class Child:
    """An engine process with a fake engine, and our end of its socket."""

    def __init__(self, code: str = "") -> None:
        """``code`` is a program for a new interpreter, in place of a process that is forked."""
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(20)
        with theirs:
            fd = theirs.fileno()
            self.process = (
                subprocess.Popen([sys.executable, "-c", code, str(fd)], pass_fds=[fd], cwd=ROOT)
                if code
                else fork_engine("fake_engine", str(fd), {})
            )
        self.reader = wire.FrameReader()
        self.pending: list[wire.FromEngine] = []

    def send(self, *messages: wire.ToEngine) -> None:
        self.socket.sendall(b"".join(map(wire.pack, messages)))

    def receive(self) -> wire.FromEngine:
        while not self.pending:
            data = self.socket.recv(1 << 16)
            assert data, "the child closed the socket"
            self.pending = [wire.unpack_from_engine(payload) for payload in self.reader.feed(data)]
        return self.pending.pop(0)

    def receive_step(self) -> wire.StepDone:
        message = self.receive()
        assert isinstance(message, wire.StepDone)
        return message


@pytest.fixture
def children() -> Iterator[list[Child]]:
    started: list[Child] = []
    yield started
    for child in started:
        child.socket.close()
        child.process.kill()
        child.process.wait()


def start(children: list[Child], **knobs: Any) -> Child:
    child = Child()
    children.append(child)
    child.send(wire.Start(3, to_flat(EngineConfig(model=ModelSettings(model=json.dumps(knobs))))))
    return child


def make_request(request_id: int, max_tokens: int, mark: int = 1) -> Request:
    return Request(request_id, [mark, request_id], SamplingParams(), max_tokens)


def test_ready_then_one_message_a_step_then_silence(children: list[Child]) -> None:
    child = start(children)
    assert child.receive() == wire.Ready(3, fake_engine.INFO)
    requests = [make_request(1, 3), make_request(2, 3)]
    child.send(*(wire.Submit(3, request) for request in requests))
    steps = [child.receive_step() for _ in range(3)]
    assert [step.stats.num_steps for step in steps] == [1, 2, 3]
    for request in requests:
        outputs = [output for step in steps for output in step.outputs if output.request_id == request.id]
        assert [output.tokens[0] for output in outputs] == fake_engine.expected(request)
        assert [output.finish_reason for output in outputs] == [None, None, "length"]
    child.socket.settimeout(0.2)
    with pytest.raises(TimeoutError):
        child.receive()


def test_messages_of_another_generation_are_dropped(children: list[Child]) -> None:
    child = start(children)
    child.receive()
    child.send(wire.Submit(2, make_request(1, 5)), wire.Ping(3))
    step = child.receive_step()
    assert (step.generation, step.outputs, step.stats.num_running) == (3, [], 0)


def test_an_abort_while_idle_is_reported_in_the_figures(children: list[Child]) -> None:
    child = start(children, step_seconds=0.05)
    child.receive()
    child.send(wire.Submit(3, make_request(1, 1000)))
    assert child.receive_step().stats.num_running == 1
    child.send(wire.Abort(3, 1))
    while (step := child.receive_step()).outputs:
        pass
    assert step.stats.num_running == 0


def test_a_refusal_reaches_the_front_and_others_go_on(children: list[Child]) -> None:
    child = start(children, refuse=5)
    child.receive()
    child.send(wire.Submit(3, make_request(1, 2, mark=5)), wire.Submit(3, make_request(2, 2)))
    step = child.receive_step()
    assert step.refusals == [wire.Refusal(1, "ContextLengthExceeded", "too long for the pool", "prompt")]
    assert [output.request_id for output in step.outputs] == [2]


def test_a_failing_build_is_reported_and_ends_the_process(children: list[Child]) -> None:
    child = start(children, start_error="ConfigError")
    assert child.receive() == wire.BuildFailed(3, "ConfigError", "layer 3 is missing")
    assert child.process.wait(30) == 1


def test_the_first_process_alone_measures_kernels_and_warms_up_in_full() -> None:
    settings = to_flat(EngineConfig(model=ModelSettings(kernel_tuning_seconds=5.0, warmup=FULL)))
    configs = [engine_process._config(wire.Start(generation, settings)) for generation in (1, 2)]
    assert [config.model.kernel_tuning_seconds for config in configs] == [5.0, 0.0]
    assert [config.model.warmup for config in configs] == [FULL, QUICK]
    assert to_flat(configs[0]) == settings


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["stop", "close", "SIGTERM"])
def test_it_ends_in_order(children: list[Child], ending: str) -> None:
    child = start(children)
    child.receive()
    if ending == "stop":
        child.send(wire.Stop(3))
    elif ending == "close":
        child.socket.close()
    else:
        child.process.send_signal(signal.SIGTERM)
    assert child.process.wait(30) == (-signal.SIGTERM if ending == "SIGTERM" else 0)


@pytest.mark.parametrize("ending", ["stop", "close"])
def test_it_ends_when_its_engine_is_closed_whatever_other_threads_do(
    children: list[Child], ending: str, tmp_path: Path
) -> None:
    child = start(children, writes=str(tmp_path / "written"))
    child.receive()
    if ending == "stop":
        child.send(wire.Stop(3))
    else:
        child.socket.close()
    assert child.process.wait(30) == 0
    assert (tmp_path / "written").exists()


BESIDE_COMPILING = """
import threading
from octavo_server.engines import engine_process
from tests.server import fake_engine
def build(config):
    def compute():
        while True:
            sum(range(1000))
    for _ in range(2):
        threading.Thread(target=compute, daemon=True).start()
    return fake_engine.build(config)
engine_process.main(build=build)
"""


@pytest.mark.timing
def test_steps_go_on_while_threads_compute_in_python(children: list[Child]) -> None:
    """With Python's own interval, each of several locks of a step is waited for by 5 ms for each of the threads."""
    child = Child(BESIDE_COMPILING)
    children.append(child)
    child.send(wire.Start(3, to_flat(EngineConfig(model=ModelSettings(model=json.dumps({"step_seconds": 0.001}))))))
    child.receive()
    child.send(wire.Submit(3, make_request(1, 100_000)))
    times = []
    for _ in range(200):
        child.receive_step()
        times.append(time.perf_counter())
    gaps = sorted(b - a for a, b in pairwise(times))
    assert gaps[len(gaps) // 2] < 0.008


def test_it_ends_in_the_middle_of_work_when_the_socket_closes(children: list[Child]) -> None:
    child = start(children, step_seconds=0.01)
    child.receive()
    child.send(wire.Submit(3, make_request(1, 100_000)))
    child.receive()
    child.socket.close()
    assert child.process.wait(30) == 0


def test_an_interrupt_is_left_to_the_parent(children: list[Child]) -> None:
    child = start(children)
    child.receive()
    child.process.send_signal(signal.SIGINT)
    child.send(wire.Ping(3))
    assert child.receive_step().outputs == []


class IdleEngine:
    """Has work and never does any."""

    def __init__(self) -> None:
        self.calls = 0
        self.requests: set[int] = set()

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def add(self, request: Request) -> None:
        self.requests.add(request.id)

    def abort(self, request_id: int) -> None:
        self.requests.discard(request_id)

    def spare_seconds(self) -> float:
        return 0.0

    def save_idle(self) -> bool:
        return False

    def step(self) -> list[Output]:
        self.calls += 1
        return []

    def stats(self) -> EngineStats:
        return EngineStats()

    def take_events(self) -> list[Event]:
        return []

    def take_kv_events(self) -> list[KVEvent]:
        return []

    def close(self) -> None:
        pass


def test_steps_that_do_nothing_are_not_reported_and_do_not_spin() -> None:
    ours, theirs = socket.socketpair()
    engine = IdleEngine()
    loop = engine_process.EngineLoop(engine, engine_process.EngineChannel(theirs), generation=1)
    thread = threading.Thread(target=loop.run)
    ours.sendall(wire.pack(wire.Submit(1, make_request(1, 5))))
    began = time.monotonic()
    thread.start()
    while engine.calls < 100:
        time.sleep(0.001)
    assert engine.calls <= (time.monotonic() - began) / engine_process.IDLE_WAIT + 1
    ours.setblocking(False)
    with pytest.raises(BlockingIOError):
        ours.recv(1)
    ours.sendall(wire.pack(wire.Stop(1)))
    thread.join(30)
    assert not thread.is_alive()
    ours.close()
    theirs.close()


class BusyEngine(IdleEngine):
    """Has a device that is busy until two requests are there, or for ever so short after one is."""

    def __init__(self, spare: float) -> None:
        super().__init__()
        self.spare = spare
        self.asked: list[int] = []
        """Requests that were there at each step."""

    def spare_seconds(self) -> float:
        return self.spare if len(self.requests) == 1 else 0.0

    def step(self) -> list[Output]:
        self.asked.append(len(self.requests))
        self.requests.clear()
        return []


@pytest.mark.parametrize(("spare", "asked"), [(300.0, [[], [2]]), (0.01, [[1], [1, 1]]), (-1.0, [[1], [1, 1]])])
def test_a_step_waits_for_requests_while_the_device_is_busy(spare: float, asked: list[list[int]]) -> None:
    ours, theirs = socket.socketpair()
    engine = BusyEngine(spare)
    loop = engine_process.EngineLoop(engine, engine_process.EngineChannel(theirs), generation=1)
    thread = threading.Thread(target=loop.run)
    thread.start()
    for number, steps in enumerate(asked, 1):
        ours.sendall(wire.pack(wire.Submit(1, make_request(number, 5))))
        time.sleep(0.1 if not steps else 0)  # in which a step would begin
        while engine.asked != steps:
            time.sleep(0.001)
    ours.sendall(wire.pack(wire.Stop(1)))
    thread.join(30)
    assert not thread.is_alive()
    ours.close()
    theirs.close()


def test_a_message_larger_than_the_buffer_is_received_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """While steps run: an image of 3 MB would else take a dozen of them."""
    monkeypatch.setattr(engine_process, "REST_WAIT", 20.0)  # the thread that sends may be held up
    ours, theirs = socket.socketpair()
    image = ImageInput(0, 1, 5, b"digest", (1, 1024, 1024), bytes(3 << 20), ())
    request = Request(3, [5], SamplingParams(), 1, images=(image,))
    with ours, theirs:
        channel = engine_process.EngineChannel(theirs)
        assert channel.receive(wait=False) == []
        sender = threading.Thread(target=ours.sendall, args=(wire.pack(wire.Submit(1, request)),))
        sender.start()
        assert channel.wait_readable(20)
        (message,) = channel.receive(wait=False)
        sender.join()
    assert isinstance(message, wire.Submit)
    assert message.request.images[0].pixels == image.pixels


class ScriptedChannel(engine_process.EngineChannel):
    """Receives batches of messages given beforehand, and keeps what is sent."""

    def __init__(self, *batches: list[wire.ToEngine]) -> None:
        self._batches = iter(batches)
        self.sent: list[wire.FromEngine] = []

    def receive(self, wait: bool) -> list[wire.ToEngine]:
        return next(self._batches)

    def send(self, message: wire.FromEngine) -> None:
        self.sent.append(wire.unpack_from_engine(wire.pack(message)[wire.HEADER.size :]))


def test_a_view_of_the_cache_comes_once_for_each_ping_that_wants_it() -> None:
    engine, info = toy.build(EngineConfig.from_flat({"model": "toy", "backend": "toy"}))
    asks, plain = wire.Ping(1, wants_view=True), wire.Ping(1)
    channel = ScriptedChannel([asks], [plain], [asks, asks], [wire.Stop(1)])
    engine_process.EngineLoop(engine, channel, 1).run()
    views = [message.cache_view for message in channel.sent if isinstance(message, wire.StepDone)]
    assert [view is not None for view in views] == [True, False, True, False]
    assert views[0] is not None
    assert sum(views[0].owners[1::2]) * views[0].blocks_per_cell == info.num_kv_blocks


def test_a_held_engine_computes_as_many_steps_as_it_is_told() -> None:
    engine, _ = toy.build(EngineConfig.from_flat({"model": "toy", "backend": "toy"}))
    request = Request(1, [65, 66], SamplingParams(ignore_eos=True), max_tokens=8)
    batches = [[wire.Submit(1, request), wire.Pace(1, 0)], [wire.Ping(1)], [wire.Pace(1, 3)], [], [], [wire.Ping(1)]]
    channel = ScriptedChannel(*batches, [wire.Pace(1, None)], *[[]] * 4, [wire.Stop(1)])
    engine_process.EngineLoop(engine, channel, 1).run()
    lengths = [sum(len(o.tokens) for o in each.outputs) for each in channel.sent if isinstance(each, wire.StepDone)]
    assert lengths == [0, 0, 1, 1, 1, 0, 1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("backend", sorted(set(BACKENDS) - {"openai"}))
def test_an_engine_of_any_backend_can_be_restarted(backend: str) -> None:
    """Settings of a restart are not refused as some that the backend does not honour."""
    address = "127.0.0.1:1" if backend == "grpc" else None
    settings = to_flat(EngineConfig.from_flat({"backend": backend, "grpc_worker": address}))
    assert engine_process._config(wire.Start(2, settings)).model.backend == backend

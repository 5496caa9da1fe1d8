"""The link between two hosts: who may join, what is carried, and how a loss is noticed."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from octavo.build import build_engine, serve_stages
from octavo.build.serve_stages import OWN, _compute
from octavo.cache.build_offload import content_fingerprint
from octavo.config import EngineConfig, ModelSettings, to_flat
from octavo.errors import CheckpointError, ConfigError, RanksLost
from octavo.models.registry import read_config
from octavo.runtime.memory_budget import Limits
from octavo.runtime.ranks import node_link, rank_group
from octavo.runtime.ranks.node_link import NodeLink, NodeListener, NodeLost, Order, StageOutput, StartNode, join
from octavo.runtime.ranks.rank_processes import RankProcesses
from octavo.runtime.ranks.start_messages import RankFailed, RankLoaded, RankReady, RankSettled, StartMessage
from octavo.system import process_exit
from octavo.system.channel import ChannelError, RefusedError
from tests.llm.tiny import write_checkpoint
from tests.ops.cpu_cases import needs_float_kernels
from tests.runtime.thread_ranks import connected
from tests.server.test_keys import certificate


@pytest.fixture
def ends() -> Iterator[tuple[NodeLink, NodeLink]]:
    """That of the first host, and that of another."""
    down, up = connected(2)
    yield down[0], up[0]
    for link in (*down, *up):
        link.close()


@pytest.fixture
def settings() -> ModelSettings:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    return ModelSettings(nnodes=2, node_rank=1, node_key="a key", master_port=port)


@contextlib.contextmanager
def listening(settings: ModelSettings) -> Iterator[None]:
    """A first host, for which one that may join is there at last."""
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(NodeListener(settings).wait)
        yield
        ends = [join(settings), *found.result()]
    for link in ends:
        link.close()


def losses(link: NodeLink) -> queue.SimpleQueue[tuple[str, int]]:
    found: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
    link.on_lost = lambda problem, status: found.put((problem, status))
    return found


def test_messages_arrive_in_order_and_outputs_beside_them(ends: tuple[NodeLink, NodeLink]) -> None:
    first, other = ends
    outputs: queue.SimpleQueue[StageOutput] = queue.SimpleQueue()
    other.on_output = outputs.put
    large = bytes(range(256)) * 20_000
    first.tell(Order(b"a step", [(0, 7), (1, -3)]))
    first.tell(StageOutput((0, 1), large))
    first.tell(Order(b"the next", []))
    assert other.hear(Order) == Order(b"a step", [(0, 7), (1, -3)])
    assert other.hear(Order).message == b"the next"
    assert outputs.get(timeout=30) == StageOutput((0, 1), large)


class ScriptedProcesses(RankProcesses):
    """Ranks that run a few lines, with ``connection``, instead of a model."""

    lines = ""

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            head = f"from multiprocessing.connection import Connection; connection = Connection({theirs.fileno()})"
            command = [sys.executable, "-S", "-c", f"{head}\nconnection.recv_bytes()\n{self.lines}"]
            self.processes.append(subprocess.Popen(command, pass_fds=[theirs.fileno()]))
        self.connections.append(Connection(ours.detach()))


Computes = Callable[[str], "Future[None]"]


@pytest.fixture
def computes(ends: tuple[NodeLink, NodeLink], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Computes]:
    """Has the other host compute for the first, with a rank that runs the given lines."""
    first, other = ends
    folder, hosts = write_checkpoint(tmp_path), {"pipeline_parallel_size": 2, "nnodes": 2, "node_key": "a key"}
    flat = to_flat(EngineConfig.from_flat({**hosts, "model": str(folder), "device": "cpu"}), EngineConfig)
    own = {**{name: flat[name] for name in OWN}, "node_rank": 1}
    with ThreadPoolExecutor(1) as threads:

        def start(lines: str) -> Future[None]:
            monkeypatch.setattr(ScriptedProcesses, "lines", lines)
            monkeypatch.setattr(serve_stages, "RankProcesses", ScriptedProcesses)
            first.tell(StartNode(flat, content_fingerprint(folder)))
            return threads.submit(_compute, other, own)

        yield start
        first.close()


KILL = "import os; os.kill(os.getpid(), 9)"


def sends(message: StartMessage) -> str:
    return f"connection.send_bytes({msgspec.msgpack.encode(message)!r})"


@needs_float_kernels
@pytest.mark.parametrize(
    ("lines", "error", "words"),
    [
        (sends(RankFailed("CheckpointError", "a tensor is missing")), CheckpointError, "^host 1: a tensor is missing"),
        (KILL, RanksLost, r"host 1: rank 1 of the engine ended \(killed by signal 9\)"),
    ],
)
def test_a_host_that_cannot_load_its_part_says_why(
    lines: str, error: type[Exception], words: str, ends: tuple[NodeLink, NodeLink], computes: Computes
) -> None:
    first, _ = ends
    found, end = losses(first), computes(lines)
    with pytest.raises(error, match=words):
        first.hear(RankLoaded)
    assert re.search(words, found.get(timeout=30)[0]), "whoever notices the end of the link first knows it, too"
    with pytest.raises(error):
        end.result(timeout=30)


@needs_float_kernels
@pytest.mark.parametrize(("kills", "status"), [(3, -signal.SIGKILL), (4, 1)])
def test_a_rank_killed_as_memory_ran_out_is_itself_at_fault(
    kills: int,
    status: int,
    ends: tuple[NodeLink, NodeLink],
    computes: Computes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, _ = ends
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("oom_kill 3\n")
    monkeypatch.setattr(process_exit, "VMSTAT", vmstat)
    found, told = losses(first), f"{sends(RankLoaded(5))}\nconnection.recv_bytes()\n{sends(RankReady())}\n"
    end = computes(
        f"{told}import os, time\nwhile not os.path.exists({str(tmp_path / 'now')!r}): time.sleep(0.01)\n{KILL}"
    )
    assert first.hear(RankLoaded) == RankLoaded(5)
    first.tell(RankSettled(Limits(9, 9, (), (), 1, 9)))
    first.hear(RankReady)
    vmstat.write_text(f"oom_kill {kills}\n")
    (tmp_path / "now").touch()
    assert found.get(timeout=30) == ("host 1: rank 1 of the engine ended (killed by signal 9)", status)
    with pytest.raises(RanksLost):
        end.result(timeout=30)


@needs_float_kernels
def test_a_start_that_fails_ends_links_and_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, hosts = write_checkpoint(tmp_path), {"nnodes": 3, "node_key": "a key", "pipeline_parallel_size": 3}
    config = EngineConfig.from_flat({**hosts, "model": str(folder), "device": "cpu"})
    model = read_config(json.loads((folder / "config.json").read_text()))
    down, up = connected(3)
    monkeypatch.setattr(build_engine, "NodeListener", lambda settings: SimpleNamespace(wait=lambda check: down))
    monkeypatch.setattr(build_engine, "check_divides", lambda *of_model: None)
    monkeypatch.setattr(ScriptedProcesses, "lines", "")
    processes = ScriptedProcesses(1)
    lost = losses(up[1])
    down[0].close()
    with (
        pytest.raises(RanksLost, match="host 1"),
        build_engine._started_ranks(config, folder, model, torch.device("cpu"), processes),
    ):
        pytest.fail("it began")
    assert lost.get(timeout=30)
    assert processes.processes[0].poll() == -signal.SIGKILL
    for link in up:
        link.close()


def test_waiting_for_a_host_that_loads_uses_processor_time(ends: tuple[NodeLink, NodeLink]) -> None:
    """Without any, the supervisor would take the engine for stuck."""
    first, other = ends
    thread = threading.Thread(target=first.hear, args=(RankLoaded, 1e-4))
    thread.start()
    assert thread.ident is not None
    clock, deadline = time.pthread_getcpuclockid(thread.ident), time.monotonic() + 30
    while time.clock_gettime(clock) < 0.02:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    other.tell(RankLoaded(5))
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_a_rank_that_has_ended_is_told_with_its_status(ends: tuple[NodeLink, NodeLink]) -> None:
    first, other = ends
    found = losses(first)
    other.tell(NodeLost("rank 1 of the engine ended", 3))
    assert found.get(timeout=30) == ("host 1: rank 1 of the engine ended", 3)
    with pytest.raises(RanksLost, match="host 1: rank 1 of the engine ended"):
        first.hear(RankReady)


def test_why_a_host_cannot_start_is_raised_wherever_it_is_noticed(ends: tuple[NodeLink, NodeLink]) -> None:
    """By its own class, as it says whether to start again: by who listens, who sends, and who waits for another."""
    first, other = ends
    processes: Any = SimpleNamespace(connections=[], processes=[])
    watch = rank_group._Watch(cast(Any, SimpleNamespace(abort=lambda: None)), processes, [], [first])
    other.tell(RankFailed("ConfigError", "model: there is none"))
    other.close()
    assert watch.lost.wait(30)
    for notice in (watch.check, lambda: first.hear(RankReady), lambda: first.tell(RankReady())):
        with pytest.raises(ConfigError, match=r"^host 1: model: there is none$"):
            notice()


def test_why_a_rank_has_ended_is_read_while_others_send() -> None:
    """A send that fails, as the other end has closed, waits for what that said before."""
    for pause in (0.0, 0.0005, 0.01):
        for _ in range(5):
            (first,), (other,) = connected(2)
            found, is_over = losses(first), threading.Event()

            def send(first: NodeLink = first, is_over: threading.Event = is_over, pause: float = pause) -> None:
                with contextlib.suppress(RanksLost):
                    while not is_over.wait(pause):
                        first.tell(StageOutput((0, 1), bytes(2000)))

            with ThreadPoolExecutor(1) as pool:
                pool.submit(send)
                other.tell(NodeLost("memory ran out", 1))
                other.close()
                assert found.get(timeout=30) == ("host 1: memory ran out", 1)
                is_over.set()
            first.close()


def test_a_wait_for_another_host_sees_that_a_rank_of_its_own_has_ended(ends: tuple[NodeLink, NodeLink]) -> None:
    def check() -> None:
        raise RanksLost("rank 1 ended")

    with pytest.raises(RanksLost, match="rank 1 ended"):
        ends[0].hear(RankLoaded, 0.002, check)


def test_a_host_that_says_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a signal has stopped: its connections stay open."""
    monkeypatch.setattr(node_link, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(node_link, "ALIVE_SECONDS", 60.0)
    [first], [other] = connected(2)
    with contextlib.closing(first), contextlib.closing(other):
        with pytest.raises(RanksLost) as of_first:
            first.hear(RankReady)
        with pytest.raises(RanksLost) as of_other:
            other.hear(RankReady)
    assert "timed out" in str(of_first.value) + str(of_other.value)  # whichever finds out first closes the link


def test_a_closed_link_is_no_loss(ends: tuple[NodeLink, NodeLink]) -> None:
    first, other = ends
    of_first, of_other = losses(first), losses(other)
    first.close()
    assert of_other.get(timeout=30)[1] == -signal.SIGKILL
    assert of_first.empty()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"node_key": "another"}, "the keys differ"), ({"nnodes": 3}, "the fingerprints differ, in nnodes")],
)
def test_a_host_with_another_key_or_number_of_hosts_is_refused(
    changes: dict[str, object], words: str, settings: ModelSettings
) -> None:
    with listening(settings), pytest.raises(RefusedError, match=words):
        join(replace(settings, **changes))  # type: ignore[arg-type]


def test_strangers_hold_up_nobody(settings: ModelSettings) -> None:
    with listening(settings), contextlib.ExitStack() as strangers:
        for sent in (b"", b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n"):
            stranger = strangers.enter_context(
                socket.create_connection((settings.master_addr, settings.master_port), 30)
            )
            stranger.sendall(sent)


def test_hosts_of_other_machines_need_a_certificate(settings: ModelSettings, tmp_path: Path) -> None:
    elsewhere = replace(settings, master_addr="10.0.0.7")
    with pytest.raises(ConfigError, match=r"master_addr: .*10.0.0.7.*needs node_ssl_certfile"):
        NodeListener(elsewhere)
    with pytest.raises(ChannelError, match="node_ssl_ca_certs"):
        join(elsewhere)
    certificates = []
    for name in ("own", "another"):
        (tmp_path / name).mkdir()
        certificates.append(certificate(tmp_path / name))
    (own, key), (another, _) = certificates
    secured = replace(settings, node_ssl_certfile=str(own), node_ssl_keyfile=str(key), node_ssl_ca_certs=str(own))
    with listening(secured), pytest.raises(ChannelError, match="certificate verify failed"):
        join(replace(secured, node_ssl_ca_certs=str(another)))


def test_a_host_with_another_checkpoint_refuses_to_compute(ends: tuple[NodeLink, NodeLink], tmp_path: Path) -> None:
    first, other = ends
    hosts = {"pipeline_parallel_size": 2, "nnodes": 2, "node_key": "a key", "load_format": "dummy", "device": "cpu"}
    own = EngineConfig.from_flat({**hosts, "model": str(write_checkpoint(tmp_path)), "node_rank": 1})
    theirs = EngineConfig.from_flat({**hosts, "model": "/a folder of the first host"})
    flat = to_flat(own, EngineConfig)
    first.tell(StartNode(to_flat(theirs, EngineConfig), "another fingerprint"))
    with pytest.raises(ConfigError, match=f"the checkpoint {tmp_path} is not that of the host with node_rank 0"):
        _compute(other, {name: flat[name] for name in OWN})

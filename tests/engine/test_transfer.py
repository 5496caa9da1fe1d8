"""Prompts computed by one engine, answers by another: blocks over a real connection, read by an oracle."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.cache import kv_channel, offload
from octavo.cache.held_blocks import BlockToHold, HeldBlocks
from octavo.cache.kv_cache import KVCache
from octavo.cache.kv_channel import Fetcher, HoldingServer
from octavo.cache.offload import Identity, Offload
from octavo.cache.offload_tiers import HostTier
from octavo.config import CacheSettings
from octavo.engine.engine import Engine
from octavo.engine.scheduler import Scheduler
from octavo.errors import ConfigError, RunnerError
from octavo.sampling_params import SamplingParams
from octavo.steps.limits import StateSize
from octavo.system import channel
from octavo.system.addresses import split_address
from octavo.system.channel import Channel, ChannelError, Credentials
from octavo.types import KVTransfer, Output, Request, Sequence
from tests.engine.tiers import OracleStore
from tests.engine.workload import Features, Run
from tests.oracle import OracleRunner, ToyGrammars, expected_output
from tests.server.test_keys import certificate
from tests.tiers import nightly

KEY = "a key"
IDENTITY = Identity("oracle", "")
SETTINGS = CacheSettings(role="prefill", kv_transfer_key=KEY, kv_transfer_timeout=30.0)
PROMPT = list(range(40))


class Half:
    """An engine of one role over the oracle."""

    def __init__(self, cache: KVCache, runner: OracleRunner, engine: Engine) -> None:
        self.cache, self.runner, self.engine = cache, runner, engine
        self.store = OracleStore(runner)
        self.offload = Offload(self.store, cache.block_size, IDENTITY, HostTier(1 << 20), keeps_evicted=False)
        cache.use_offload(self.offload)

    def hold(self, settings: CacheSettings = SETTINGS, clock: Callable[[], float] = time.monotonic) -> HoldingServer:
        held = HeldBlocks(1 << 20, 600.0, clock)
        server = HoldingServer(settings, held, self.offload.fingerprint)
        self.offload.held = held, server
        return server

    def fetch(self, settings: CacheSettings = SETTINGS) -> Fetcher:
        self.offload.fetcher = Fetcher(settings, self.offload.fingerprint)
        return self.offload.fetcher

    def compute(self, request: Request) -> Output:
        """The last output."""
        self.engine.add(request)
        outputs: list[Output] = []
        while self.engine.has_work:
            outputs += self.engine.step()
            self.engine.check()
        tokens = [token for output in outputs for token in output.tokens]
        assert outputs[-1].error is None
        assert tokens == expected_output(request)[0][len(request.output_tokens) :]
        return outputs[-1]

    def held(self) -> int:
        return self.engine.stats().num_transfer_held


def make_half(block_size: int = 4, states: StateSize | None = None, num_blocks: int = 200) -> Half:
    runner = OracleRunner(block_size)
    cache = KVCache(num_blocks, block_size, states=states)
    if cache.states is not None:
        cache.states.copy = runner.copy_state
    return Half(cache, runner, Engine(Scheduler(cache, max_num_seqs=4, max_num_batched_tokens=64), runner))


@pytest.fixture(params=["memory", "frames"])
def prefill(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Half]:
    monkeypatch.setattr(HoldingServer, "shares_memory", request.param == "memory")
    half = make_half()
    half.hold()
    yield half
    half.engine.close()


@pytest.fixture
def decode() -> Iterator[Half]:
    half = make_half()
    half.fetch()
    yield half
    half.engine.close()


def ask(transfer: KVTransfer | None, request_id: int = 1, max_tokens: int = 6, salt: str = "") -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id, PROMPT, params, max_tokens, transfer=transfer, cache_salt=salt)


def handed_over(prefill: Half, request: Request) -> Request:
    """The request as a decode server gets it, after a prefill server has computed its prompt."""
    first = msgspec.structs.replace(request, id=request.id + 1000, max_tokens=1, transfer=KVTransfer())
    transfer = prefill.compute(first).transfer
    assert transfer is not None
    return msgspec.structs.replace(request, transfer=transfer)


def test_a_prompt_is_computed_once_and_nothing_is_held_after_it_was_fetched(prefill: Half, decode: Half) -> None:
    request = handed_over(prefill, ask(None))
    assert prefill.held() == 9 == request.transfer.num_blocks  # type: ignore[union-attr]
    assert decode.compute(request).num_cached_tokens == 36
    assert decode.offload.stats.num_received == 9
    wait_for_none(prefill)
    assert decode.engine.stats().num_transfer_failures == 0 == prefill.engine.stats().num_transfer_expired
    again = decode.compute(handed_over(prefill, ask(None, 2)))  # it has the blocks already, and only lets them go
    assert again.num_cached_tokens == 36
    assert decode.offload.stats.num_received == 9
    wait_for_none(prefill)


def test_a_prompt_that_is_fetched_displaces_others_and_not_its_own_beginning(prefill: Half, decode: Half) -> None:
    """Room for the nine blocks of the prompt, of which four are there, and five newer ones of others."""
    host, size = decode.offload.host, decode.store.num_bytes
    host.capacity = 9 * size
    seq = Sequence(handed_over(prefill, ask(None)))
    keys = list(decode.offload._keys(seq.keys, seq.salt))
    decode.offload.prefetch(seq, 0).result(30)  # type: ignore[union-attr]
    for other in range(5):
        host.put(b"%d" % other, bytes(size))
    assert [key in host for key in keys] == [True] * 4 + [False] * 5
    decode.offload.prefetch(Sequence(handed_over(prefill, ask(None, 2))), 0).result(30)  # type: ignore[union-attr]
    assert all(key in host for key in keys)
    host.put(b"", bytes(size))
    assert [key in host for key in keys] == [True] * 8 + [False], "the end is given up first"


@pytest.mark.parametrize("num_blocks", [1, 4, 100])
def test_blocks_are_copied_in_batches(
    num_blocks: int, prefill: Half, decode: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "BATCH_BYTES", num_blocks * prefill.store.num_bytes)
    batches: list[list[int]] = []
    read, write = prefill.store.read, decode.store.write
    monkeypatch.setattr(prefill.store, "read", lambda blocks: (batches.append(blocks), read(blocks))[1])
    monkeypatch.setattr(decode.store, "write", lambda blocks, some: (batches.append(blocks), write(blocks, some))[1])
    assert decode.compute(handed_over(prefill, ask(None))).num_cached_tokens == 36
    sizes = [min(num_blocks, 9 - first) for first in range(0, 9, num_blocks)]
    assert [len(blocks) for blocks in batches] == 2 * sizes


def test_who_waits_for_blocks_that_cannot_be_read_is_told(prefill: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(blocks: list[int]) -> Any:
        raise RunnerError("no memory")

    monkeypatch.setattr(prefill.store, "read", fail)
    reads = offload.BlockReads(prefill.store)
    waiting = reads.add(1)
    with pytest.raises(RunnerError, match="no memory"):
        reads.send()
    with pytest.raises(CancelledError):
        waiting()


def test_a_request_with_a_grammar_waits_for_its_prompt_too(prefill: Half, decode: Half) -> None:
    compiled: Future[None] = Future()
    compiled.set_result(None)
    decode.engine.grammars = ToyGrammars({1})
    decode.engine.grammars.prepare = lambda request: compiled  # type: ignore[method-assign]
    request = handed_over(prefill, ask(None))
    request = msgspec.structs.replace(request, params=msgspec.structs.replace(request.params, grammar="toy"))
    decode.engine.add(request)
    outputs: list[Output] = []
    while decode.engine.has_work:
        outputs += decode.engine.step()
    assert outputs[-1].error is None
    assert outputs[-1].num_cached_tokens == 36


def wait_for_none(prefill: Half) -> None:
    deadline = time.monotonic() + 30
    while prefill.held():
        assert time.monotonic() < deadline, "blocks are held that were fetched"
        time.sleep(0.001)


def test_what_no_one_fetches_is_held_until_its_deadline(prefill: Half, decode: Half) -> None:
    now = 0.0
    prefill.hold(clock=lambda: now)
    request = handed_over(prefill, ask(None))
    now = 599.0
    assert prefill.held() == 9
    now = 601.0
    assert prefill.held() == 0 == prefill.engine.stats().transfer_held_bytes
    assert prefill.engine.stats().num_transfer_expired == 1
    assert decode.compute(request).num_cached_tokens == 0
    assert decode.engine.stats().num_transfer_failures == 1


def test_prompts_share_what_is_held_and_no_more_than_the_bound_is(decode: Half) -> None:
    held = HeldBlocks(3 * 8, 60.0)
    blocks = [BlockToHold(bytes([i]), 8, lambda i=i: lambda: bytes([i]) * 8) for i in range(4)]  # type: ignore[misc]
    assert held.hold("a", blocks[:2]) == 2
    assert held.hold("b", blocks) == 3 == len(held)
    assert held.num_bytes == 24
    assert held.available("a", [bytes([i]) for i in range(4)]) == [b"\0", b"\1"]
    assert held.content("a", b"\2") is None, "a ticket gives what another one has"
    held.release("b")
    held.release("b")
    assert len(held) == 2
    found = held.content("a", b"\1")
    assert found is not None
    assert found.view == b"\1" * 8
    held.release("a")
    assert len(held) == 0 == held.num_bytes


def test_a_ticket_is_of_no_use_to_another_salt(prefill: Half, decode: Half) -> None:
    request = handed_over(prefill, ask(None, salt="alice"))
    assert decode.compute(msgspec.structs.replace(request, cache_salt="bob")).num_cached_tokens == 0
    assert decode.offload.stats.num_received == 0


@pytest.mark.parametrize("prefill", ["memory"], indirect=True)
@pytest.mark.parametrize("trouble", ["key", "weights", "settings", "ticket", "address", "gone", "restarted"])
def test_what_cannot_be_fetched_is_computed_and_the_reason_is_named(
    trouble: str, prefill: Half, decode: Half, caplog: pytest.LogCaptureFixture
) -> None:
    if trouble == "weights":
        decode.offload.identify(Identity("others", ""))
    elif trouble == "settings":
        decode.offload.identify(Identity("oracle", "bfloat16"))
    request = handed_over(prefill, ask(None))
    assert request.transfer is not None
    server = prefill.offload.held[1]  # type: ignore[index]
    if trouble == "key":
        decode.fetch(dataclasses.replace(SETTINGS, kv_transfer_key="another"))
        address = request.transfer.address
        forged = KVTransfer(address, kv_channel._signed("another", "1", address))
        request = msgspec.structs.replace(request, transfer=forged)
    elif trouble == "ticket":
        request = msgspec.structs.replace(request, transfer=KVTransfer(request.transfer.address, "0" * 32 + ".1"))
    elif trouble == "address":
        request = msgspec.structs.replace(request, transfer=KVTransfer("10.0.0.1:1", request.transfer.ticket))
    elif trouble == "gone":
        server.close()
    elif trouble == "restarted":
        server.close()
        prefill.hold(settings=dataclasses.replace(SETTINGS, kv_transfer_address=server.address))
    assert decode.compute(request).num_cached_tokens == 0
    assert decode.engine.stats().num_transfer_failures == 1
    reason = {
        "key": "it refuses: the keys differ",
        "weights": "fingerprints differ, in weights",
        "settings": "fingerprints differ, in settings",
        "ticket": "the ticket is not of a server with the same key",
        "address": "the ticket is not of a server with the same key",
        "gone": "no connection",
        "restarted": "holds nothing of a prompt any more",
    }
    assert reason[trouble] in caplog.text


def test_a_prompt_is_computed_where_there_is_no_memory_for_its_blocks(
    prefill: Half, decode: Half, caplog: pytest.LogCaptureFixture
) -> None:
    def allocate(size: int) -> memoryview:
        raise RuntimeError("it cannot be pinned")

    decode.offload.fetcher = Fetcher(SETTINGS, decode.offload.fingerprint, allocate)
    assert decode.compute(handed_over(prefill, ask(None))).num_cached_tokens == 0
    assert decode.engine.stats().num_transfer_failures == 1
    assert "there is no memory for them here: it cannot be pinned" in caplog.text


@pytest.mark.parametrize("failing", ["fetch", "put"])
def test_a_failure_of_another_kind_is_logged_once_and_the_prompts_are_computed(
    failing: str, prefill: Half, decode: Half, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: Any) -> Any:
        raise ArithmeticError("of a connector")

    owner = decode.offload.fetcher if failing == "fetch" else decode.offload.host
    monkeypatch.setattr(owner, failing, fail)
    for number in (1, 2):
        prefill.cache.clear()
        assert decode.compute(handed_over(prefill, ask(None, number, salt=f"{number}"))).num_cached_tokens == 0
        assert decode.engine.stats().num_transfer_failures == number
    assert caplog.text.count("ArithmeticError: of a connector") == 1


@pytest.mark.parametrize("trust", ["its own", "none", "another's"])
def test_a_certificate_must_be_of_one_of_the_cas(
    trust: str, prefill: Half, decode: Half, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificates = []
    for name in ("its own", "another's"):
        (tmp_path / name).mkdir()
        certificates.append(certificate(tmp_path / name))
    (own, key), (another, _) = certificates
    prefill.hold(settings=dataclasses.replace(SETTINGS, kv_transfer_ssl_certfile=own, kv_transfer_ssl_keyfile=key))
    cas = {"its own": own, "none": None, "another's": another}[trust]
    seconds = SETTINGS.kv_transfer_timeout if trust == "its own" else 1.0
    decode.fetch(dataclasses.replace(SETTINGS, kv_transfer_ssl_ca_certs=cas, kv_transfer_timeout=seconds))
    found = decode.compute(handed_over(prefill, ask(None)))
    assert found.num_cached_tokens == (36 if trust == "its own" else 0)
    words = {"its own": "", "none": "a prompt is computed here", "another's": "certificate verify failed"}
    assert words[trust] in caplog.text


class Damage:
    """Changes some of the bytes that are sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
        self.chance, self.rng, self.count = 0.0, rng, 0
        send_all = Channel._send_all

        def damaged(channel: Channel, data: bytes) -> None:
            if data and self.rng.random() < self.chance:
                self.count += 1
                changed = bytearray(data)
                changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
                data = bytes(changed)
            send_all(channel, data)

        monkeypatch.setattr(Channel, "_send_all", damaged)


@pytest.mark.parametrize("prefill", ["frames"], indirect=True)
def test_bytes_that_change_on_the_way_are_computed(
    prefill: Half, decode: Half, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_channel, "REST_SECONDS", 0.0)
    request = handed_over(prefill, ask(None))
    send_all, contents = Channel._send_all, list[bytes]()

    def damaged(channel: Channel, data: bytes) -> None:
        if channel._is_server and len(data) == 4 * 8:
            contents.append(data)
            if len(contents) == 4:
                data = bytes([*data[:-1], data[-1] ^ 1])
        send_all(channel, data)

    monkeypatch.setattr(Channel, "_send_all", damaged)
    found = decode.compute(request)
    assert "a frame was damaged" in caplog.text
    assert found.num_cached_tokens == 12  # those before it are used
    assert decode.engine.stats().num_transfer_failures == 1


@pytest.mark.parametrize("prefill", ["frames"], indirect=True)
def test_a_silent_server_is_waited_for_once(
    prefill: Half, decode: Half, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_channel, "REST_SECONDS", 600.0)
    decode.fetch(dataclasses.replace(SETTINGS, kv_transfer_timeout=0.2))
    with socket.create_server(("127.0.0.1", 0)) as listening:  # accepts, and says nothing
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        for number in range(3):
            transfer = KVTransfer(address, kv_channel._signed(KEY, str(number), address))
            assert decode.compute(ask(transfer, number)).num_cached_tokens == (0 if not number else 36)
        listening.accept()[0].close()
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert caplog.text.count("timed out") == 3


def test_a_login_that_takes_its_time_keeps_no_place(prefill: Half, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "LOGIN_SECONDS", 0.2)
    assert prefill.offload.held is not None
    host, port = split_address(prefill.offload.held[1].address)
    with socket.create_connection((host, port), 5) as slow:
        slow.sendall((60_000).to_bytes(4, "little"))
        began = time.monotonic()
        with contextlib.suppress(OSError):
            while time.monotonic() - began < 30:
                slow.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 30


def test_a_connection_that_cannot_be_accepted_is_not_the_last(prefill: Half, decode: Half) -> None:
    """Such as for want of file descriptors."""
    assert prefill.offload.held is not None
    listener = prefill.offload.held[1]
    inner, failures = listener._socket, [OSError("too many open files")]

    class Failing:
        def accept(self) -> Any:
            if failures:
                raise failures.pop()
            return inner.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

    listener._socket = Failing()  # type: ignore[assignment]
    with socket.create_connection(split_address(listener.address), 5):  # ends the accept that waits
        pass
    while failures:
        time.sleep(0.01)
    decode.compute(handed_over(prefill, ask(None)))
    assert decode.engine.stats().num_transfer_received


def test_one_that_does_not_read_holds_up_no_other(prefill: Half, decode: Half) -> None:
    request = handed_over(prefill, ask(None))
    assert request.transfer is not None
    address = split_address(request.transfer.address)
    others = [socket.create_connection(address) for _ in range(20)]
    others[0].sendall(b"\xff" * 100)
    others[1].sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert decode.compute(request).num_cached_tokens == 36
    for other in others:
        other.close()


@pytest.mark.parametrize("has_tls", [False, True])
def test_strangers_do_not_take_the_places_of_who_has_the_key(
    has_tls: bool, prefill: Half, decode: Half, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kv_channel, "MAX_CONNECTIONS", 4)
    if has_tls:
        own, key = certificate(tmp_path)
        prefill.hold(dataclasses.replace(SETTINGS, kv_transfer_ssl_certfile=own, kv_transfer_ssl_keyfile=key))
        decode.fetch(dataclasses.replace(SETTINGS, kv_transfer_ssl_ca_certs=own))
    request = handed_over(prefill, ask(None))
    assert request.transfer is not None
    address = split_address(request.transfer.address)
    strangers = [socket.create_connection(address) for _ in range(20)]
    for number in range(3):
        assert decode.compute(request).num_cached_tokens == 36
        strangers += [socket.create_connection(address) for _ in range(20)]
        request = handed_over(prefill, ask(None, number + 2))
    assert decode.engine.stats().num_transfer_failures == 0
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("prefill", ["memory"], indirect=True)
def test_connections_that_are_closed_at_once_hold_up_no_other(
    prefill: Half, decode: Half, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    request, accepted, closed = handed_over(prefill, ask(None)), kv_channel.accepted, list[socket.socket]()
    assert request.transfer is not None

    def fail_often(sock: socket.socket, tls: Any) -> Channel:
        if len(closed) < 40:
            closed.append(sock)
            raise ConnectionResetError
        return accepted(sock, tls)

    monkeypatch.setattr(kv_channel, "accepted", fail_often)
    for _ in range(40):
        socket.create_connection(split_address(request.transfer.address)).close()
    assert decode.compute(request).num_cached_tokens == 36
    assert all(sock.fileno() == -1 for sock in closed)
    assert "for a moment" not in caplog.text


def test_a_connection_that_makes_place_keeps_its_descriptor_as_long_as_it_is_used(
    prefill: Half, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is still sent over it, such as the end of TLS, would go to the next one."""
    monkeypatch.setattr(kv_channel, "MAX_CONNECTIONS", 1)
    used, may_end = list[Channel](), threading.Event()

    def admit(credentials: Credentials, channel: Channel) -> None:
        used.append(channel)
        may_end.wait(30)

    monkeypatch.setattr(Credentials, "admit", admit)
    assert prefill.offload.held is not None
    address = split_address(prefill.offload.held[1].address)
    first = socket.create_connection(address, 30)
    while not used:
        time.sleep(0.001)
    second = socket.create_connection(address, 30)
    assert first.recv(1) == b"", "it has made place"
    while len(used) < 2:
        time.sleep(0.001)
    assert used[0]._socket.fileno() >= 0
    may_end.set()
    while used[0]._socket.fileno() >= 0:
        time.sleep(0.001)
    first.close()
    second.close()


@pytest.mark.parametrize("prefill", ["frames"], indirect=True)
@pytest.mark.parametrize("place", ["hello", "content"])
def test_a_server_that_sends_a_byte_now_and_then_is_not_waited_for(
    place: str, prefill: Half, decode: Half, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(channel, "LOGIN_SECONDS", 0.5)
    decode.fetch(dataclasses.replace(SETTINGS, kv_transfer_timeout=0.5))
    request = handed_over(prefill, ask(None))
    is_over = threading.Event()

    def trickle(self: Channel, data: bytes | memoryview) -> None:
        for byte in bytes(data):
            if not is_over.wait(0.1):
                self._socket.send(bytes([byte]))

    if place == "hello":
        hello = channel.HEADER.pack(1000) + bytes(1000)
        monkeypatch.setattr(Credentials, "admit", lambda self, channel: trickle(channel, hello))
    else:

        def send(self: Channel, payload: bytes | memoryview) -> None:
            self._send_all(channel.HEADER.pack(len(payload)))  # else the first bytes are taken for it
            trickle(self, payload)

        monkeypatch.setattr(Channel, "send", send)
    started = time.monotonic()
    assert decode.compute(request).num_cached_tokens == 0
    assert time.monotonic() - started < 20, "it is over after half a second of a minute and more"
    assert "too slow" in caplog.text or "timed out" in caplog.text
    is_over.set()


def test_addresses_that_others_reach_need_tls() -> None:
    held = HeldBlocks(1, 1.0)
    for address, words in (("0.0.0.0:0", "kv_transfer_ssl_certfile"), ("127.0.0.1", "not HOST:PORT")):
        settings = dataclasses.replace(SETTINGS, kv_transfer_address=address)
        with pytest.raises(ConfigError, match=f"kv_transfer_address.*{words}"):
            HoldingServer(settings, held, dict)
    fetcher = Fetcher(SETTINGS, dict)
    elsewhere = KVTransfer("10.0.0.7:1", kv_channel._signed(KEY, "1", "10.0.0.7:1"))
    with pytest.raises(ChannelError, match="needs TLS"):
        next(fetcher.fetch(elsewhere, [], list, 1))


VARIANTS = {
    "plain": Features(depth=2),
    "tight and aborts": Features(tight=True, aborts=True),
    "faults": Features(tight=True, fault_rate=0.1, poison=True, bad_rows=True),
    "drafts": Features(tight=True, drafts=True, grammar=True, depth=2),
    "states": Features(states=True, depth=2),
    "states, tight and aborts": Features(tight=True, states=True, aborts=True),
    "window": Features(windows=1, full_attention=False, depth=2),
}


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, nightly(40)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_workloads_from_prompts_that_another_engine_computed(
    variant: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With bytes that change on the way, deadlines that pass, and prefill engines that are gone."""
    monkeypatch.setattr(kv_channel, "REST_SECONDS", 0.01)
    num_received = 0
    damage = Damage(monkeypatch, random.Random(1))
    for seed in range(count):
        rng = random.Random(seed)
        run = Run(seed, VARIANTS[variant])
        run.cache.must_find = False
        states = run.workload.states
        first = make_half(run.workload.block_size, states and states._replace(has_drafts=False))
        first.hold().shares_memory = rng.random() < 0.5
        half = Half(run.cache, run.runner, run.engine)  # type: ignore[arg-type]
        half.fetch(dataclasses.replace(SETTINGS, kv_transfer_timeout=0.1))
        for index, request in enumerate(run.workload.requests):
            if rng.random() < 0.8 and request.max_tokens and not request.output_tokens:
                whole = msgspec.structs.replace(request, params=SamplingParams(ignore_eos=True))
                transfer = handed_over(first, whole).transfer
                run.workload.requests[index] = msgspec.structs.replace(request, transfer=transfer)
        damage.chance = rng.choice([0.0, 0.0, 0.02])
        if rng.random() < 0.2:
            threading.Timer(0.002, first.engine.close).start()
        run.serve()
        damage.chance = 0.0
        num_received += half.offload.stats.num_received
        half.engine.close()
        first.engine.close()
    few = variant == "window" or (VARIANTS[variant].aborts and count < 40)  # of these some dozens of seeds receive any
    assert num_received > 0 or few

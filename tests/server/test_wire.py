from __future__ import annotations

import contextlib
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo import errors
from octavo.sampling_params import SamplingParams
from octavo.telemetry.cache_view import SessionOrder, SessionReport, SessionView
from octavo.types import EngineStats, Output, Request, TokenLogprobs
from octavo_server.engines import wire
from tests.server.fake_engine import INFO

PARAMS = SamplingParams(temperature=0.5, stop=("a",), seed=3, bad_words=("b",), allowed_token_ids=(3, 4))
REQUEST = Request(7, [1, 2], PARAMS, max_tokens=4, seed=2**64 - 1, banned_sequences=((5,), (6, 5)))
LOGPROBS = [TokenLogprobs(5, -0.5, 1, [5, 6], [-0.5, -1.0])]
OUTPUT = Output(7, [5], "stop", 5, 2, 1.5, LOGPROBS, LOGPROBS, 1)
TO_ENGINE: list[wire.ToEngine] = [
    wire.Start(1, {"model": "m", "max_num_seqs": None, "gpu_memory_utilization": 0.9}),
    wire.Submit(2, REQUEST),
    wire.Abort(2, 7),
    wire.Ping(2),
    wire.Stop(2),
    wire.Sleep(2),
    wire.Wake(2, ["weights"]),
    wire.OrderSessions(2, SessionOrder("list", None)),
]
FROM_ENGINE: list[wire.FromEngine] = [
    wire.Ready(1, INFO),
    wire.BuildFailed(1, "ConfigError", "no"),
    wire.StepDone(1, [OUTPUT], EngineStats(num_steps=4), [wire.Refusal(3, "InvalidParameter", "bad", "id")]),
    wire.SleepDone(1, True, "no memory"),
    wire.SessionsDone(1, SessionReport([SessionView("s", "key", 1, 16, 0, 0, 0, 1.5, 0.0)], True)),
]


def test_messages_survive_the_wire() -> None:
    reader = wire.FrameReader()
    for message in TO_ENGINE:
        (payload,) = reader.feed(wire.pack(message))
        assert wire.unpack_to_engine(payload) == message
    for answer in FROM_ENGINE:
        (payload,) = reader.feed(wire.pack(answer))
        assert wire.unpack_from_engine(payload) == answer


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_frames_are_found_however_the_bytes_are_cut(cuts: list[int]) -> None:
    stream = b"".join(wire.pack(message) for message in TO_ENGINE * 3)
    reader, found, start = wire.FrameReader(), [], 0
    for size in [*cuts, len(stream)]:
        found += reader.feed(stream[start : start + size])
        start += size
    assert [wire.unpack_to_engine(payload) for payload in found] == TO_ENGINE * 3


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    with pytest.raises(wire.FrameError, match="allowed"):
        wire.FrameReader().feed(wire.HEADER.pack(wire.MAX_FRAME_BYTES + 1))


def test_a_message_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 10)
    with pytest.raises(wire.FrameError, match="Submit message"):
        wire.pack(wire.Submit(1, REQUEST))


def test_what_msgpack_cannot_hold_is_refused() -> None:
    for bad in (msgspec.structs.replace(REQUEST, seed=2**70), msgspec.structs.replace(REQUEST, cache_salt="\ud800")):
        with pytest.raises(wire.FrameError):
            wire.pack(wire.Submit(1, bad))


def test_wrong_bytes_raise_only_frame_errors() -> None:
    rng = random.Random(0)
    whole = [wire.pack(message) for message in [*TO_ENGINE, *FROM_ENGINE]]
    for _ in range(20_000):
        data = bytearray(rng.choice(whole)) if rng.random() < 0.8 else bytearray(rng.randbytes(rng.randint(0, 80)))
        for _ in range(rng.randint(0, 4)):
            if data:
                data[rng.randrange(len(data))] = rng.randrange(256)
        with contextlib.suppress(wire.FrameError):
            for payload in wire.FrameReader().feed(bytes(data)):
                wire.unpack_from_engine(payload)
        with contextlib.suppress(wire.FrameError):
            wire.unpack_to_engine(bytes(data[4:]))


def test_deep_nesting_is_a_frame_error() -> None:
    with pytest.raises(wire.FrameError):
        wire.unpack_from_engine(b"\x92\xa5ready" + b"\x91" * 100_000)


def test_bad_params_do_not_pass_the_wire() -> None:
    payload = wire.pack(wire.Submit(1, REQUEST))[4:]
    assert b"\xcb\x3f\xe0" in payload
    with pytest.raises(wire.FrameError, match="temperature"):
        wire.unpack_to_engine(payload.replace(b"\xcb\x3f\xe0", b"\xcb\x7f\xf8", 1))


@pytest.mark.parametrize(
    ("refusal", "kind", "status"),
    [
        (wire.Refusal(1, "InvalidParameter", "bad", "id"), errors.InvalidParameter, 400),
        (wire.Refusal(1, "ContextLengthExceeded", "long", "prompt"), errors.ContextLengthExceeded, 400),
        (wire.Refusal(1, "SomethingElse", "what"), errors.RequestFailed, 500),
    ],
)
def test_a_refusal_keeps_its_kind(refusal: wire.Refusal, kind: type[errors.RequestError], status: int) -> None:
    error = refusal.as_error()
    assert type(error) is kind
    assert (error.message, error.param, error.status) == (refusal.message, refusal.param, status)


def test_a_failed_start_keeps_its_kind() -> None:
    assert type(wire.BuildFailed(1, "CheckpointError", "x").as_error()) is errors.CheckpointError
    assert type(wire.BuildFailed(1, "ZeroDivisionError", "x").as_error()) is errors.OctavoError

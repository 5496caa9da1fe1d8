"""Records: what was written is read, in every order and with gaps; what was something else is left out."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.sampling_params import SamplingParams
from octavo.types import Output, Request, TokenLogprobs
from octavo_server.durable import recovery
from octavo_server.durable.records import (
    UNREADABLE,
    Begin,
    Begun,
    Forgotten,
    Note,
    Noted,
    Outputs,
    RecordBatch,
    RequestHead,
    TokenRows,
    Whole,
    decode,
    decode_begin,
    encode,
    encode_ended,
    encode_request,
    merged,
    pack,
    unpack,
)
from octavo_server.durable.recovery import Restored, read_logs
from octavo_server.durable.synced_log import Damage, LogFile
from tests.server.durable.test_durable import serving

FIRST = 1 << 32
"""Number of the first request of a server."""
HEAD = RequestHead(FIRST, "", "key", "digest", "fingerprint", "", "", 2)
BEGIN = Begin(
    "unique",
    1,
    requests=[Request(1, [1, 2], SamplingParams(), 9), Request(2, [3], SamplingParams(), 9)],
    prompt_of=[0, 1],
    prompt_texts=["a", None],
    shown_ids=[1, 2],
)
LOGPROBS = TokenLogprobs(5, -1.0, 1, [5], [-1.0])
LEAVES = (None, -1, 0, 1, 2**40, "", "x", b"", [], [9], {})
NOT_UTF8 = msgspec.msgpack.encode([[4, "text"]]).replace(b"text", b"te\xfft")


def head(number: int) -> RequestHead:
    return msgspec.structs.replace(HEAD, number=number, key=f"key{number}")


def read(folder: Path, payloads: list[bytes]) -> tuple[list[Restored], Damage]:
    """What a log of these records has."""
    file, damage = LogFile.next(folder, 1), Damage()
    file.path.write_bytes(b"".join(map(file.frame, payloads)))
    try:
        return read_logs([file], damage), damage
    finally:
        file.path.unlink()


def content(found: Restored) -> tuple[Begin, Outputs]:
    return unpack(found.packed()) if found.is_ended else found.content(Damage())


def tokens_of(outputs: Outputs, index: int) -> list[int]:
    return [token for at, output in outputs if at == index for token in output.tokens]


def changed(value: Any, rng: random.Random) -> Any:
    """A copy in which one part, somewhere, is another one; also in what is encoded once more."""
    if isinstance(value, bytes) and value and rng.random() < 0.9:
        try:
            return msgspec.msgpack.encode(changed(msgspec.msgpack.decode(value), rng))
        except msgspec.DecodeError:
            return value[1:]
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        rest = [*value]
        rest[place] = changed(value[place], rng)
        return rest if rng.random() < 0.9 else rest[:place]
    return rng.choice(LEAVES)


def test_records_of_other_content_do_not_keep_a_server_from_starting(tmp_path: Path) -> None:
    rng = random.Random(1)
    last = Output(1, [7], finish_reason="stop")
    records = [
        encode([(HEAD, BEGIN), Noted(FIRST, 0, 0, Output(1, [5, 6])), Noted(FIRST, 2, 1, last)]),
        encode_ended(pack(HEAD, BEGIN, [(0, last), (1, last)])),
    ]
    wholes = [msgspec.msgpack.decode(record) for record in records]
    file = LogFile.next(tmp_path, 1)
    frames = [file.frame(msgspec.msgpack.encode(changed(rng.choice(wholes), rng))) for _ in range(500)]
    file.path.write_bytes(b"".join([file.frame(NOT_UTF8), *frames]))
    with serving(tmp_path, runs=False) as served:
        assert served.app.state.services.first.journal._counts["damage"] > 100


def test_what_cannot_be_read_of_a_request_is_left_out(tmp_path: Path) -> None:
    """Its head can: a server starts, and counts what is missing."""
    no_begin = encode([(HEAD, BEGIN)]).replace(b"\xa1a", b"\xa1\xff")
    no_output = encode([(head(FIRST + 1), BEGIN), Noted(FIRST + 1, 0, 0, Output(1, [5], error="why"))])
    file = LogFile.next(tmp_path, 1)
    file.path.write_bytes(b"".join(map(file.frame, (no_begin, no_output.replace(b"why", b"w\xffy")))))
    with serving(tmp_path, runs=False) as served:
        journal = served.app.state.services.first.journal
        assert journal._counts["damage"] == 2
        (request,) = journal._requests.values()
        assert (request.head.number, request._live.outputs) == (FIRST + 1, [])


def test_a_request_of_a_journal_without_versions_has_the_first_weights(tmp_path: Path) -> None:
    [begun] = msgspec.msgpack.decode(encode([(HEAD, BEGIN)]))
    assert begun[1].pop() == "default"
    (found,), damage = read(tmp_path, [msgspec.msgpack.encode([begun])])
    assert (found.head, damage.records) == (HEAD, 0)


def test_prompts_that_are_not_there_make_a_record_unreadable() -> None:
    record = msgspec.msgpack.decode(msgspec.msgpack.encode(BEGIN))
    record[record.index([0, 1])] = [0, 2]
    with pytest.raises(msgspec.ValidationError, match="choices and prompts"):
        decode_begin(HEAD, msgspec.msgpack.encode(record))
    with pytest.raises(UNREADABLE, match="head and content"):
        decode_begin(msgspec.structs.replace(HEAD, num_choices=3), msgspec.msgpack.encode(BEGIN))


@pytest.mark.parametrize("block_bytes", [1, 400, 1 << 20])
@pytest.mark.parametrize("damage", [0, 1, 5, 30])
def test_any_order_of_requests_gives_their_outputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int, damage: int
) -> None:
    """Records that are lost or come twice: tokens up to the gap, and then only of choices that have none missing."""
    monkeypatch.setattr(recovery, "BLOCK_BYTES", block_bytes)
    for seed in range(20):
        rng = random.Random(seed)
        numbers = [FIRST + number for number in range(6)] + [1, 7 << 32]
        notes, answers = _random_notes(numbers, rng)
        payloads = []
        while notes:
            count = rng.randrange(1, 9)
            payloads.append(encode(notes[:count]))
            notes = notes[count:]
        for _ in range(damage):
            place = rng.randrange(len(payloads))
            payloads[place : place + 1] = rng.choice([[], [payloads[place]] * 2])
        for found in read(tmp_path, payloads)[0]:
            begin, outputs = content(found)
            assert begin == BEGIN
            for index, right in enumerate(answers[found.head.number]):
                tokens = tokens_of(outputs, index)
                assert tokens == right[: len(tokens)]
                assert damage or tokens == right


def _random_notes(numbers: list[int], rng: random.Random) -> tuple[list[Note], dict[int, list[list[int]]]]:
    """Items of these requests in turn, and the tokens of their choices."""
    notes: list[Note] = [(head(number), BEGIN) for number in numbers]
    answers: dict[int, list[list[int]]] = {number: [[], []] for number in numbers}
    ends = dict.fromkeys(numbers, 0)
    places = dict.fromkeys(numbers, 0)
    while len(notes) < 150:
        number, index = rng.choice(numbers), rng.randrange(2)
        if ends[number] & 1 << index:
            continue
        tokens = [rng.randrange(2**17) for _ in range(rng.choice([1, 1, 1, 3]))]
        output = Output(1, tokens, logprobs=[LOGPROBS] * len(tokens) if rng.random() < 0.2 else None)
        if rng.random() < 0.05:
            output.finish_reason = "stop"
            ends[number] |= 1 << index
        notes.append(Noted(number, places[number], index, output))
        places[number] += len(tokens)
        answers[number][index] += tokens
    return notes, answers


def test_a_batch_is_one_record_of_all_notes_in_their_order() -> None:
    batch = RecordBatch()
    batch.add((HEAD, BEGIN))
    batch.add_tokens(FIRST, 0, 0, [5, 6])
    batch.add_tokens(FIRST, 2, 1, [7])
    batch.add(Noted(FIRST, 3, 0, Output(1, [8], finish_reason="stop")))
    batch.add(Noted(FIRST, 4, 1, Output(1, [9])))  # a plain one becomes a row, too
    items = decode(batch.encode())
    assert [type(item) for item in items] == [Begun, TokenRows, Whole, TokenRows]
    numbers = [list(array("I", item.rows)) for item in items if isinstance(item, TokenRows)]
    assert numbers == [[0, 1, 0, 0, 5, 0, 1, 1, 0, 6, 0, 1, 2, 1, 7], [0, 1, 4, 1, 9]]


def test_ended_and_forgotten_requests(tmp_path: Path) -> None:
    last = Output(1, [7], finish_reason="stop", logprobs=[LOGPROBS])
    outputs: Outputs = [(0, Output(0, [5, 6])), (0, last), (1, last)]
    notes: list[Note] = [(head(FIRST + 1), BEGIN)]
    notes += [Noted(FIRST + 1, place, index, output) for place, (index, output) in zip((0, 2, 3), outputs, strict=True)]
    found, damage = read(
        tmp_path,
        [
            encode_ended(pack(HEAD, BEGIN, merged(outputs))),
            encode(notes),
            encode_request(head(FIRST + 2), BEGIN, outputs[:1]),
            encode_ended(pack(head(FIRST + 3), BEGIN, outputs)),
            encode([Forgotten(FIRST + 3), Forgotten(FIRST + 9)]),
        ],
    )
    assert not damage.records
    assert [(one.head.number - FIRST, one.is_ended) for one in found] == [(0, True), (1, True), (2, False)]
    assert [one.packed() is one.packed() for one in found[:2]] == [True, True]  # no arrays are left of an ended one
    assert [content(one) for one in found] == [(BEGIN, outputs), (BEGIN, outputs), (BEGIN, outputs[:1])]

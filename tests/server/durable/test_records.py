"""Records that were written as something else than they are read."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from octavo.sampling_params import SamplingParams
from octavo.server.durable.log import LogFile
from octavo.server.durable.records import Begin, Tokens, decode, encode
from octavo.types import Request
from tests.server.durable.test_durable import serving

BEGIN = Begin(
    *(1, "", "key", "digest", "fingerprint", "unique", 1),
    requests=[Request(1, [1, 2], SamplingParams(), 9), Request(2, [3], SamplingParams(), 9)],
    prompt_of=[0, 1],
    prompt_texts=["a", None],
    shown_ids=[1, 2],
)
LEAVES = (None, -1, 0, 1, 2**40, "", "x", [], [9], {})
NOT_UTF8 = msgspec.msgpack.encode([[4, "text"]]).replace(b"text", b"te\xfft")


def changed(value: Any, rng: random.Random) -> Any:
    """A copy in which one part, somewhere, is another one."""
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        rest = [*value]
        rest[place] = changed(value[place], rng)
        return rest if rng.random() < 0.9 else rest[:place]
    return rng.choice(LEAVES)


def test_records_of_other_content_do_not_keep_a_server_from_starting(tmp_path: Path) -> None:
    rng = random.Random(1)
    whole = msgspec.msgpack.decode(encode([BEGIN, Tokens(1, 0, 0, [5, 6]), Tokens(1, 2, 1, [7])]))
    file = LogFile.next(tmp_path, 1)
    frames = [file.frame(msgspec.msgpack.encode(changed(whole, rng))) for _ in range(500)]
    file.path.write_bytes(b"".join([file.frame(NOT_UTF8), *frames]))
    with serving(tmp_path, runs=False) as served:
        assert served.app.state.services.journal._counts["damage"] > 100


def test_prompts_that_are_not_there_make_a_record_unreadable() -> None:
    record = msgspec.msgpack.decode(encode([BEGIN]))
    record[0][record[0].index([0, 1])] = [0, 2]
    with pytest.raises(msgspec.ValidationError, match="choices and prompts"):
        decode(msgspec.msgpack.encode(record))

"""The server's decoding beside the engine's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.config import EngineConfig
from octavo_bench.served import decode_rate, measure
from octavo_bench.stream_reader import Ask, Streamed
from tests.llm.tiny import write_checkpoint


def streamed(times: list[float]) -> Streamed:
    one = Streamed(Ask(0.0, b""), 0.0)
    one.times = times
    return one


def test_only_tokens_while_all_sequences_decode_count() -> None:
    """One stream is alone for two seconds, another after the others have ended; a third hides every second token."""
    early, late = streamed([float(i) for i in range(9)]), streamed([2.0 + i for i in range(9)])
    sparse = streamed([2.0, 4.0, 6.0])
    assert decode_rate([early, late], 9) == pytest.approx(2.0)
    assert decode_rate([early, late, sparse], 9) == pytest.approx((4 + 4 + 2 * 9 / 3) / 4)


@pytest.mark.nightly
def test_a_server_compared_with_the_engine(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)
    config = EngineConfig.from_flat({"model": model, "load_format": "dummy", "max_model_len": 64})
    rows = measure(config, [2], prompt=8, decode=40, rounds=1)["rows"]
    assert [row["sequences"] for row in rows] == [2]
    assert rows[0]["ratio"] == pytest.approx(rows[0]["served_tok_s"] / rows[0]["in_process_tok_s"], rel=0.01)

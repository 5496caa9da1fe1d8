"""Which way each figure is better: what is three times worse never passes its gate, in any record that is shipped."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo_bench.records.figure_table import MEANINGS, Better, meaning, title
from octavo_bench.records.gate import compare, read_record
from octavo_bench.records.record_figures import Figure, figures

RESULTS = Path(__file__).parents[2] / "benchmarks/results"
_MORE = """
    output_tok_s total_tok_s prefill_tok_s decode_tok_s served_tok_s in_process_tok_s plain_tok_s drafts_tok_s
    tok_s cached_tok_s recomputed_tok_s tokens_per_second output_tokens_per_second total_tokens_per_second
    quiet_tokens_per_second all_tokens_per_second first_10_s_output_tok_s
    later_output_tok_s throughput_tok_s batch_tok_s continuous_tok_s pressure_tok_s http_tok_s requests_s
    requests_per_second goodput_requests_s goodput_per_second read_tb_s tb_s link_gb_s gb_s
    mb_per_s matmul_tflop_s fp8_tflop_s int8_tflop_s gflop_s prefill_gflop_s decode_gflop_s mfu_percent
    prefill_mfu_percent decode_mfu_percent cached_percent ratio times_better times_less speedup
    tokens_per_speculation memory_ratio ratio_of_first_10_s same_top_token
    same_tokens passed goodput_share good_share prefix_hit_rate
    vocabulary_coverage of_read of_matmul of_floor held_agreement context_tokens longest_context
    prefix_hits right completed within within_predicted within_replayed caught cosine
    needle_share after_result_percent after_several_percent after_question_percent second_helper_percent
"""
BETTER_WITH_MORE = _MORE.split()
"""Written by hand once more: all other figures are times, memory, distances, failures and what is counted of work."""
_NEITHER = """
    most_used_blocks busy_share first_failed_requests_s gib budget_gib all_models_gib paged_mib whole_mib
    floor_microseconds watts mhz
"""
NEITHER = _NEITHER.split()


def direction(name: str) -> Better:
    return "more" if name in BETTER_WITH_MORE else "neither" if name in NEITHER else "less"


def test_the_table_is_what_a_second_hand_writes() -> None:
    assert {name: found.better for name, found in MEANINGS.items()} == {name: direction(name) for name in MEANINGS}
    assert {*BETTER_WITH_MORE, *NEITHER} <= MEANINGS.keys()
    assert [meaning(name).better for name in ("p99_latency_ms", "ttft_p99.9_ms", "http tok/s")] == [
        "less",
        "less",
        "more",
    ]


@pytest.mark.parametrize("name", sorted(MEANINGS))
def test_three_times_worse_fails_its_gate(name: str) -> None:
    if direction(name) == "neither":
        with pytest.raises(ConfigError, match="no figure of the baseline that can be better"):
            compare(row_of(name, 6.0), row_of(name, 6.0), [name])
        return
    worse = 2.0 if direction(name) == "more" else 18.0
    if name in ("ratio", "times_better", "speedup"):
        assert [one.is_good(0.91) for one in compare(row_of(name, 1 / 3), None, [name])] == [False]
        assert [one.is_good(0.91) for one in compare(row_of(name, 3.0), None, [name])] == [True]
        return
    (one,) = compare(row_of(name, worse), row_of(name, 6.0), [name])
    assert one.share == pytest.approx(1 / 3)
    assert not one.is_good(0.91)
    (one,) = compare(row_of(name, 36.0 / worse), row_of(name, 6.0), [name])
    assert one.share == pytest.approx(3)


def row_of(name: str, value: float) -> dict[str, Any]:
    return {"benchmark": "any", "machine": {}, "result": {"rows": [{"sequences": 1, name: value}]}}


def shipped() -> list[Path]:
    """Records of the commands: files that were made otherwise have no result."""
    return [path for path in sorted(RESULTS.glob("**/*.json")) if '"result": {' in path.read_text()]


def test_every_shipped_record_fails_when_three_times_worse() -> None:
    count = 0
    for path in shipped():
        record = read_record(path)
        found = figures(record)
        own = [one for one in found if one.engine in ("", "octavo") and not one.is_ratio and one.value > 0]
        own = [one for one in own if meaning(one.name).better != "neither"]
        names = sorted({one.name for one in own})
        if not names:
            continue
        gate = compare(_worse(record, own), record, names)
        told = {str(one) for one in own}
        missed = [one.name for one in gate if one.name in told and one.is_good(0.91)]
        assert not missed, (path.name, missed)
        count += len(own)
    assert count > 5000


def _worse(record: dict[str, Any], own: list[Figure]) -> dict[str, Any]:
    """The record with each of its own figures three times worse, by the list of this file."""
    changed = copy.deepcopy(record)
    names = {one.name: 1 / 3 if meaning(one.name).better == "more" else 3.0 for one in own}

    def scale(value: Any, factor: float) -> Any:
        if isinstance(value, dict):
            return {
                key: scale(part, factor) if key not in ("runs", "published", "peer", "vllm") else part
                for key, part in value.items()
            }
        if isinstance(value, list):
            return [scale(part, factor) for part in value]
        return value * factor if isinstance(value, int | float) else value

    def visit(node: Any) -> None:
        if isinstance(node, list):
            for part in node:
                visit(part)
        if not isinstance(node, dict):
            return
        named = node.get("suite") or node.get("figure")
        for key, value in node.items():
            name = named if key in ("value", "octavo") and named else key
            factor = names.get(name) or next(
                (f for n, f in names.items() if n.startswith(f"{name}_p") or n.endswith(f" {name}")), None
            )
            if factor is not None:
                node[key] = scale(value, factor)
            else:
                visit(value)

    visit(changed["result"])
    return changed


def test_a_figure_that_is_not_in_the_table_is_an_error() -> None:
    for row in ({"tok": 1.0}, {"tok": {"median": 1.0}}, {"tok": {"octavo": 1.0, "vllm": 2.0}}):
        with pytest.raises(ConfigError, match="'tok': its unit and direction are not in"):
            figures({"result": {"rows": [{"sequences": 1, **row}]}})


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("output_tok_s", "output tokens/s"),
        ("ttft_p99_ms", "TTFT p99 (ms)"),
        ("http tok/s", "http tokens/s"),
        ("memory ratio", "memory ratio"),
        ("times_better decode_tok_s", "decode tokens/s: times better"),
        ("first_answer_s", "first answer (s)"),
        ("empty_slots_percent", "empty slots (%)"),
        ("microseconds", "µs"),
    ],
)
def test_titles(name: str, shown: str) -> None:
    assert title(name) == shown


def test_all_shipped_records_are_read() -> None:
    assert len(shipped()) > 150
    for path in shipped():
        assert isinstance(figures(json.loads(path.read_text())), list)

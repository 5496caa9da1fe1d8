"""What each figure of a record means: its unit, and whether more or less of it is better.

Gates, reports and plots ask here. A figure that is not in the table is an error: with a guess at its direction, a
slower server could pass.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from octavo.config import EngineConfig, settings
from octavo.errors import ConfigError

Better = Literal["more", "less", "neither"]


class Meaning(NamedTuple):
    """Of a figure. What is neither better with more of it nor with less is drawn, but is of no gate."""

    unit: str
    better: Better


TABLE: Mapping[tuple[str, Better], str] = {
    ("tokens/s", "more"): """
        output_tok_s total_tok_s prefill_tok_s decode_tok_s served_tok_s in_process_tok_s plain_tok_s drafts_tok_s tok_s
        cached_tok_s recomputed_tok_s tokens_per_second output_tokens_per_second total_tokens_per_second
        quiet_tokens_per_second all_tokens_per_second first_10_s_output_tok_s later_output_tok_s throughput_tok_s
        batch_tok_s continuous_tok_s pressure_tok_s http_tok_s""",
    ("requests/s", "more"): "requests_s requests_per_second goodput_requests_s goodput_per_second",
    ("TB/s", "more"): "read_tb_s tb_s",
    ("GB/s", "more"): "link_gb_s gb_s",
    ("MB/s", "more"): "mb_per_s",
    ("TFLOP/s", "more"): "matmul_tflop_s fp8_tflop_s int8_tflop_s",
    ("GFLOP/s", "more"): "gflop_s prefill_gflop_s decode_gflop_s",
    ("%", "more"): """
        mfu_percent prefill_mfu_percent decode_mfu_percent cached_percent after_result_percent after_several_percent
        after_question_percent second_helper_percent""",
    ("times", "more"): "ratio times_better times_less speedup tokens_per_speculation memory_ratio ratio_of_first_10_s",
    ("share", "more"): """
        same_top_token same_tokens passed goodput_share good_share prefix_hit_rate vocabulary_coverage of_read
        of_matmul of_floor held_agreement cosine needle_share""",
    ("tokens", "more"): "context_tokens longest_context prefix_hits",
    ("requests", "more"): "right completed",
    ("figures", "more"): "within within_predicted within_replayed",
    ("faults", "more"): "caught",
    ("ms", "less"): """
        ttft_ms itl_ms tpot_ms e2el_ms step_ms least_ms quiet_ttft_ms cached_ms recomputed_ms latency_ms http_latency_ms
        gap_ms profiled_step_ms first_10_s_itl_ms minute_itl_ms later_itl_ms ttft_first_ms alone_ms
        with_a_prompt_to_rows_ms prompt_of_1024_beside_62_by_most_rows_ms""",
    ("s", "less"): """
        ttft itl tpot e2el latency_s ready_s ready_after_s first_answer_s slowest_answer_s median_s answer_asleep
        answer_awake fall_asleep recovery_s finish_s cpu_s octavo_processor_seconds original_processor_seconds""",
    ("µs", "less"): """
        us microseconds idle_kernel_us us_a_layer us_by_class busy_us chunks_microseconds rows_microseconds
        front_cpu_us_per_token seen_us_each
        chain_without_us cublas_and_kernels_us cublas_products_us octavo octavo_without_peer_access nccl torch_one_shot
        torch_two_shot octavo_small octavo_one_shot octavo_two_shot""",
    ("mJ", "less"): "mj mj_a_layer mj_per_token",
    ("%", "less"): "empty_slots_percent idle_percent idle_inside_percent idle_between_percent",
    ("share", "less"): "front_cpu_share median_error_of_fit",
    ("times", "less"): "times_slower gap_to_alone times_floor",
    ("MiB", "less"): "peak_memory_mib front_mib engine_mib mib_per_100000 mib_first mib_last mib_most",
    ("GiB", "less"): "most_reserved_gib most_resident_gib",
    ("bytes", "less"): "peak_memory_bytes weights_bytes most_bytes",
    ("", "less"): """
        perplexity kl largest_kl needle_nats error difference state_difference
        largest_difference_of_sampling_and_scoring""",
    ("each token", "less"): "events_per_token",
    ("each step", "less"): "kernels_per_step",
    ("requests", "less"): "failed failed_requests refused preemptions num_preemptions counts",
    ("steps", "less"): "num_steps",
    ("device hours", "less"): "device_hours device_hours_per_million_output_tokens",
    ("price", "less"): "cost_per_million_output_tokens",
    ("blocks", "neither"): "most_used_blocks",
    ("share", "neither"): "busy_share",
    ("requests/s", "neither"): "first_failed_requests_s",
    ("GiB", "neither"): "gib budget_gib all_models_gib",
    ("MiB", "neither"): "paged_mib whole_mib",
    ("µs", "neither"): "floor_microseconds",
    ("W", "neither"): "watts",
    ("MHz", "neither"): "mhz",
}
"""Names by unit and direction, without their statistics (``p99``, ``mean``). A slower step of another measurement has
a row of its own here, however alike the names are."""

_COUNTS = """
    prompt_tokens output_tokens num_tokens tokens num_speculations num_drafts num_accepted_drafts
    num_copied_tokens judged backlog bytes flops written_bytes read_bytes ended unfinished switches figures steps
    steps_timed num_parameters num_texts inputs coverage breakages tried findings server_starts seconds duration_s
    generation_seconds devices requests blocks scored_tokens answers cached_tokens bad_files
"""
COUNTS = frozenset(_COUNTS.split())
"""Numbers that tables show; they are not drawn, and of no gate."""

_CASES = """
    sequences prompt decode batch context load rate concurrency policy running waiting seen model kind kernel format
    T rows width shape stage suite workload engine streams adapters device ranks rank clients seed num_prompts input_len
    output_len shared_len gap rounds window endpoint memory at_once max_tokens temperature num_rounds num_answers
    answer_tokens draft_vocab_size text_length batch_size learning_rate max_steps max_seconds max_generation_seconds
    ffn_size peak_tflops sequences_at_a_time decoding prompts shortest longest tile warps splits min_tiles stages
    vocab_size num_requests step_tokens num_contexts num_needles num_decoys
    number case idle pace version num_sequences cache flood fleet command
"""
CASES = frozenset(_CASES.split())
"""What was measured, and how: equal in two records that can be compared. So are the settings of an engine."""

STATISTIC = re.compile(r"_(?:mean|median|p\d+(?:\.\d+)?|min|max)(?=_|$)|^(?:mean|p\d+)_")
UNIT_ENDING = re.compile(
    r"(?:^|_)(?:tok_s|requests_s|[tg]flop_s|tb_s|gb_s|mb_per_s|(?:(?:tokens|requests)_)?per_second|ms|us|s|percent"
    r"|mib|gib|bytes|mj|microseconds)$"
)
ACRONYMS = {"ttft": "TTFT", "itl": "ITL", "tpot": "TPOT", "e2el": "E2EL", "mfu": "MFU", "kl": "KL", "cpu": "CPU"}
MEANINGS = {name: Meaning(*key) for key, names in TABLE.items() for name in names.split()}


@functools.cache
def case_names() -> frozenset[str]:
    """All names that say what was measured."""
    return CASES | {item.name for item in settings(EngineConfig)}


def is_figure(name: str) -> bool:
    return _base(name) in MEANINGS


def meaning(name: str) -> Meaning:
    """Of a figure; "ratio NAME" and "times_better NAME" are quotients of two engines, which are better above 1.

    Raises ``ConfigError`` for a name that is not in the table.
    """
    if name.startswith(("ratio ", "times_better ")):
        return Meaning("times", "more")
    try:
        return MEANINGS[_base(name)]
    except KeyError:
        raise unknown(name) from None


def unknown(name: str) -> ConfigError:
    return ConfigError(f"figure {name!r}: its unit and direction are not in octavo_bench/records/figure_table.py")


def title(name: str) -> str:
    """For people, with the unit: "output tokens/s", "TTFT p99 (ms)"."""
    kind, _, rest = name.partition(" ")
    if kind in ("ratio", "times_better") and rest:
        return f"{title(rest)}: times better"
    unit = meaning(name).unit
    named = UNIT_ENDING.sub("", name.replace("tok/s", "tok_s").replace(" ", "_")).removeprefix("num_")
    words = " ".join(ACRONYMS.get(word, word) for word in named.split("_") if word)
    if not words or not unit or unit == "times" or words.endswith(unit):
        return words or unit
    return f"{words} {unit}" if "/s" in unit else f"{words} ({unit})"


@functools.cache
def _base(name: str) -> str:
    """The name in the table: without a statistic, and words of a suite's title joined."""
    name = name.replace(" ", "_").replace("/", "_")
    return name if name in MEANINGS else STATISTIC.sub("", name)

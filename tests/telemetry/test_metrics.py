from __future__ import annotations

import re
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.config import EngineConfig
from octavo.telemetry.catalogue import COUNTERS, GAUGES, HISTOGRAMS
from octavo.telemetry.counts import MAX_HANDLERS, Condition, Timing
from octavo.telemetry.metrics import CONTENT_TYPE, FleetMetrics, Metrics
from octavo.types import EngineStats, KVGroupStats
from tests.server.fake_engine import INFO

# What the Gateway API inference extension, KEDA rules and vLLM's Grafana dashboard ask for.
REQUIRED = set(
    """
vllm:num_requests_running vllm:num_requests_waiting vllm:kv_cache_usage_perc vllm:cache_config_info
vllm:e2e_request_latency_seconds_bucket vllm:prompt_tokens_total vllm:generation_tokens_total
vllm:inter_token_latency_seconds_bucket vllm:request_time_per_output_token_seconds_sum
vllm:time_to_first_token_seconds_count vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_success_total vllm:request_queue_time_seconds_sum vllm:request_prefill_time_seconds_sum
vllm:request_decode_time_seconds_sum vllm:request_max_num_generation_tokens_bucket
vllm:request_params_max_tokens_bucket vllm:num_preemptions_total vllm:prefix_cache_queries_total
vllm:prefix_cache_hits_total vllm:prompt_tokens_cached_total vllm:request_inference_time_seconds_sum
vllm:iteration_tokens_total_bucket vllm:admission_rejections_total vllm:engine_sleep_state
vllm:request_params_n_bucket vllm:request_prefill_kv_computed_tokens_bucket vllm:gpu_cache_usage_perc
vllm:gpu_prefix_cache_queries_total vllm:gpu_prefix_cache_hits_total vllm:time_per_output_token_seconds_bucket
octavo_engine_restarts_total octavo_requests_replayed_total octavo_poison_requests_total octavo_faults_total
octavo_front_cpu_seconds_total octavo_seconds_since_progress octavo_engine_ready
""".split()  # noqa: SIM905
)


def read(metrics: Metrics) -> dict[tuple[str, ...], float]:
    """(sample name, label values other than the model's) to value."""
    text = metrics.render().decode()
    return {
        (sample.name, *(v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "engine"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_required_names_are_there_with_the_labels_that_dashboards_select_by() -> None:
    metrics = Metrics("tiny")
    metrics.info = INFO
    samples = [s for family in text_string_to_metric_families(metrics.render().decode()) for s in family.samples]
    assert {sample.name for sample in samples} >= REQUIRED
    for sample in samples:
        if sample.name.startswith("vllm:") and "admission" not in sample.name:
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
    assert CONTENT_TYPE.startswith("text/plain; version=0.0.4")


def test_every_metric_says_what_it_is_and_has_one_name() -> None:
    entries = [(name, text) for name, text, _ in [*GAUGES, *COUNTERS, *HISTOGRAMS]]
    assert len({name for name, _ in entries}) == len(entries)
    for name, text in entries:
        assert re.fullmatch(r"(vllm:|octavo_|inferengine_)[a-z0-9_]+", name)
        assert len(text) > 15
        assert text.endswith(".")


def test_latencies_follow_their_definitions() -> None:
    metrics = Metrics("tiny")
    timing = Timing(arrival=100.0, first_scheduled=100.5)
    metrics.observe_first_tokens(timing, 1, 101.0, prompt_tokens=7, cached_tokens=4)
    metrics.observe_tokens(timing, 2, 101.5)
    metrics.observe_tokens(timing, 2, 103.0)
    metrics.observe_end(timing, "stop", prompt_tokens=7, output_tokens=5, max_tokens=9)
    values = read(metrics)
    sums = {
        "time_to_first_token_seconds": 1.0,
        "inter_token_latency_seconds": 2.0,
        "request_time_per_output_token_seconds": 0.5,
        "e2e_request_latency_seconds": 3.0,
        "request_queue_time_seconds": 0.5,
        "request_prefill_time_seconds": 0.5,
        "request_decode_time_seconds": 2.0,
        "request_inference_time_seconds": 2.5,
        "request_prompt_tokens": 7.0,
        "request_generation_tokens": 5.0,
        "request_params_max_tokens": 9.0,
    }
    for name, total in sums.items():
        assert values[f"vllm:{name}_sum",] == pytest.approx(total), name
    assert values["vllm:inter_token_latency_seconds_count",] == 2
    assert values["vllm:generation_tokens_total",] == 5
    assert values["vllm:prompt_tokens_total",] == 7
    assert values["vllm:prompt_tokens_cached_total",] == 4
    assert values["vllm:request_success_total", "stop"] == 1
    assert values["vllm:request_success_total", "error"] == 0


def test_a_request_that_did_not_end_by_itself_has_no_latency() -> None:
    metrics = Metrics("tiny")
    metrics.observe_end(Timing(1.0), "abort", prompt_tokens=7, output_tokens=0, max_tokens=9)
    values = read(metrics)
    assert values["vllm:request_success_total", "abort"] == 1
    assert values["vllm:e2e_request_latency_seconds_count",] == 0
    assert values["vllm:request_prompt_tokens_count",] == 0


def test_engine_figures_are_read_when_scraped() -> None:
    metrics = Metrics("tiny")
    metrics.condition = lambda: Condition(num_live=9, is_ready=True, seconds_since_progress=0.25)
    metrics.observe_step(EngineStats(num_running=3, num_blocks=100, num_used_blocks=25, num_steps=1, step_tokens=40))
    metrics.observe_step(EngineStats(num_running=4, num_blocks=100, num_used_blocks=50, num_steps=1))
    values = read(metrics)
    assert values["vllm:num_requests_running",] == 4
    assert values["vllm:num_requests_waiting",] == 5
    assert values["vllm:kv_cache_usage_perc",] == 0.5
    assert values["octavo_engine_ready",] == 1
    assert values["octavo_seconds_since_progress",] == 0.25
    assert values["vllm:iteration_tokens_total_count",] == 1, "the same step reported twice counts once"
    assert values["vllm:iteration_tokens_total_sum",] == 40


def test_what_clients_send_never_makes_new_series() -> None:
    metrics = Metrics("tiny")
    for i in range(10_000):
        metrics.observe_http(f"/made/up/{i}", f"METHOD{i}", 100 + i % 500, 0.01)
        metrics.observe_rejection(f"reason {i}")
    values = read(metrics)
    handlers = {key[1] for key in values if key[0] == "http_requests_total"}
    assert len(handlers) == MAX_HANDLERS + 1
    assert {key[2] for key in values if key[0] == "http_requests_total"} == {"other"}
    assert values["vllm:admission_rejections_total", "other"] == 10_000
    assert len(metrics.render()) < 300_000


def test_metrics_of_the_cache_its_tiers_and_drafts() -> None:
    metrics = Metrics("tiny")
    metrics.info = INFO
    stats = EngineStats(
        num_blocks=100,
        num_used_blocks=10,
        num_empty_slots=4 * INFO.block_size,
        num_steps=1,
        num_copied_tokens=2,
        num_drafts=3,
        num_accepted_drafts=1,
        num_offload_saved=4,
        num_offload_dropped=5,
        num_offload_prefetched=6,
        num_offload_restored=7,
        num_offload_bad_files=8,
        offload_memory_bytes=9,
        offload_disk_bytes=10,
        num_evictions=11,
        num_preemptions=12,
    )
    assert read(metrics)["octavo_kv_cache_fragmentation",] == 0
    metrics.observe_step(stats)
    values = read(metrics)
    assert values["octavo_kv_cache_fragmentation",] == 0.4
    assert values["octavo_prefix_tokens_copied_total",] == 2
    assert values["octavo_prefix_cache_evictions_total",] == 11
    assert values["vllm:num_preemptions_total",] == 12
    assert values["vllm:spec_decode_num_draft_tokens_total",] == 3
    assert values["vllm:spec_decode_num_accepted_tokens_total",] == 1
    found = [values[f"octavo_kv_offload_{name}_total",] for name in ("saved_blocks", "dropped_blocks")]
    found += [values[f"octavo_kv_offload_{name}_total",] for name in ("prefetched_blocks", "restored_blocks")]
    found += [values["octavo_kv_offload_bad_files_total",]]
    found += [values[f"octavo_kv_offload_{name}_bytes",] for name in ("memory", "disk")]
    assert found == [4, 5, 6, 7, 8, 9, 10]


def test_recurrent_states_are_counted() -> None:
    metrics = Metrics("tiny")
    counts = {"num_state_slots": 9, "num_used_states": 4, "num_snapshots": 3}
    metrics.observe_step(EngineStats(**counts, num_snapshot_hits=6, num_snapshot_evictions=2, num_steps=1))
    names = ("slots", "used_slots", "snapshots", "hits_total", "evictions_total")
    assert [read(metrics)[f"octavo_recurrent_state_{name}",] for name in names] == [9, 4, 3, 6, 2]


def test_blocks_of_groups_with_windows_have_a_share_of_their_own() -> None:
    metrics = Metrics("tiny")
    assert read(metrics)["octavo_kv_cache_window_usage_perc",] == 0
    groups = [KVGroupStats(0, 100, 50, 0), KVGroupStats(64, 30, 10, 0), KVGroupStats(8, 10, 2, 5)]
    metrics.observe_step(EngineStats(num_blocks=100, num_used_blocks=50, kv_groups=groups, num_steps=1))
    assert read(metrics)["octavo_kv_cache_window_usage_perc",] == 0.3
    assert read(metrics)["vllm:kv_cache_usage_perc",] == 0.5


def test_routers_read_adapters_and_the_cache_from_labels() -> None:
    config = EngineConfig.from_flat({"model": "m", "enable_lora": True, "max_loras": 5, "num_kv_blocks": 77})
    metrics = Metrics("tiny", config)
    metrics.info = INFO
    metrics.condition = lambda: Condition(3, True, 0.0, frozenset({"b", "a"}), frozenset({"c"}))
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}
    adapters = families["vllm:lora_requests_info"].samples[0]
    assert adapters.labels == {"max_lora": "5", "running_lora_adapters": "a,b", "waiting_lora_adapters": "c"}
    assert adapters.value == pytest.approx(time.time(), abs=60)
    cache = families["vllm:cache_config_info"].samples[0].labels
    assert cache["block_size"] == str(INFO.block_size)
    assert cache["num_gpu_blocks"] == str(INFO.num_kv_blocks)
    assert cache["num_gpu_blocks_override"] == "77"
    assert cache["enable_prefix_caching"] == "True"
    assert cache["sliding_window"] == "None"
    assert "vllm:lora_requests_info{" not in Metrics("tiny").render().decode()


def test_several_engines_have_one_family_with_a_label_each() -> None:
    engines = [Metrics("tiny", rank=rank) for rank in range(3)]
    for number, engine in enumerate(engines):
        engine.finished["stop"] = number
        engine.time_to_first_token.observe(0.5)
    fleet = FleetMetrics("tiny", engines)
    fleet.observe_http("/v1/completions", "POST", 200, 0.1)
    text = fleet.render().decode()
    for rank in range(3):
        labels = f'engine="{rank}",finished_reason="stop",model_name="tiny"'
        assert f"vllm:request_success_total{{{labels}}} {rank}.0" in text
        assert f'vllm:time_to_first_token_seconds_count{{engine="{rank}",model_name="tiny"}} 1.0' in text
    assert text.count("# TYPE vllm:time_to_first_token_seconds histogram") == 1
    assert text.count("http_requests_total{") == 1
    list(text_string_to_metric_families(text))

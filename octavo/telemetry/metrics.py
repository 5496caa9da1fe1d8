"""The server's metrics in the Prometheus text format, version 0.0.4."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.config import EngineConfig
from octavo.telemetry.catalogue import COUNTERS, GAUGES, HISTOGRAMS
from octavo.telemetry.counts import Counts, Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Counts, Collector):
    """The counters of one engine and of the HTTP server, rendered for Prometheus."""

    def __init__(self, model_name: str, config: EngineConfig | None = None, rank: int = 0) -> None:
        super().__init__()
        self.model_name = model_name
        self._names, self._values = ["model_name", "engine"], [model_name, str(rank)]
        self._config = config or EngineConfig()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    @property
    def engines(self) -> Sequence[Metrics]:
        """The metrics of each engine: these."""
        return [self]

    def render(self) -> bytes:
        """All metrics, in the format ``CONTENT_TYPE``."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; ``prometheus_client`` calls it at each scrape."""
        for families in zip(*(engine.collect_engine() for engine in self.engines), strict=True):
            family = families[0]
            for other in families[1:]:
                family.samples.extend(other.samples)
            yield family
        yield from self._collect_front()

    def collect_engine(self) -> Iterator[Metric]:
        """Yield the metrics of the engine; each engine yields the same families in the same order."""
        names, values = self._names, self._values
        for name, text, read in GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(values, float(read(self)))
            yield gauge
        for name, text, read in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, float(read(self)))
            yield counter
        for name, text, attribute in HISTOGRAMS:
            yield _family(name, text, names, [(values, getattr(self, attribute))])
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=[*names, "finished_reason"]
        )
        for reason, count in self.finished.items():
            finished.add_metric([*values, reason], count)
        yield finished
        yield self._accepted_drafts()
        yield self._cache_config()
        yield self._sleep_state()
        yield self._adapters()

    def _accepted_drafts(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Of vllm:spec_decode_num_accepted_tokens, those at each position of a draft.",
            labels=[*self._names, "position"],
        )
        for position, count in enumerate(self.stats.accepted_by_position):
            family.add_metric([*self._values, str(position)], count)
        return family

    def _cache_config(self) -> Metric:
        cache, info = self._config.cache, self.info
        labels = {
            "block_size": info.block_size if info is not None else cache.block_size,
            "cache_dtype": cache.kv_cache_dtype,
            "enable_prefix_caching": cache.enable_prefix_caching,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "num_gpu_blocks": info.num_kv_blocks if info is not None else None,
            "num_gpu_blocks_override": cache.num_kv_blocks,
            "prefix_caching_hash_algo": "sha256",
            "sliding_window": max((group.window for group in info.kv_groups), default=0) or None if info else None,
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Always 1; the labels describe the KV cache.", labels=[*self._names, *labels]
        )
        if info is not None:
            family.add_metric([*self._values, *map(str, labels.values())], 1.0)
        return family

    def _sleep_state(self) -> Metric:
        family = GaugeMetricFamily(
            "vllm:engine_sleep_state", "1 for the state that the engine is in.", labels=[*self._names, "sleep_state"]
        )
        for level, state in enumerate(("awake", "weights_offloaded", "discard_all")):
            family.add_metric([*self._values, state], float(level == self.condition().sleep_level))
        return family

    def _adapters(self) -> Metric:
        """Without the labels of the other metrics, as in vLLM, whose readers take the newest series."""
        condition, settings = self.condition(), self._config.model
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Unix time; the labels list the LoRA adapters of running and waiting requests.",
            labels=["max_lora", "waiting_lora_adapters", "running_lora_adapters"],
        )
        if settings.enable_lora:
            names = [",".join(sorted(each)) for each in (condition.waiting_adapters, condition.running_adapters)]
            family.add_metric([str(settings.max_loras), *names], time.time())
        return family

    def _collect_front(self) -> Iterator[Metric]:
        """Yield the metrics of the process that serves HTTP."""
        rejected = CounterMetricFamily(
            "vllm:admission_rejections", "HTTP requests refused before they were queued, by reason.", labels=["reason"]
        )
        for reason, count in self.rejected.items():
            rejected.add_metric([reason], count)
        yield rejected
        journal = CounterMetricFamily(
            "octavo_journal",
            "Requests that continued after a restart, gaps found in the journal, and failed writes to it.",
            labels=["event"],
        )
        for event, count in self.journal.items():
            journal.add_metric([event], count)
        yield journal
        ended = CounterMetricFamily(
            "inferengine_requests", "Requests that ended without an error, and refused ones.", labels=["status"]
        )
        ended.add_metric(["ok"], sum(engine.num_completed for engine in self.engines))
        ended.add_metric(["rejected"], sum(self.rejected.values()))
        yield ended
        choices = "Continuations per request, the parameter 'n'."
        yield _family("vllm:request_params_n", choices, self._names, self._choices())
        cpu = CounterMetricFamily(
            "octavo_front_cpu_seconds", "CPU time of the front process, user and system.", labels=self._names
        )
        cpu.add_metric(self._values, time.process_time())
        yield cpu
        requests = CounterMetricFamily(
            "http_requests", "HTTP requests answered.", labels=["handler", "method", "status"]
        )
        for key, count in self.http_requests.items():
            requests.add_metric(list(key), count)
        yield requests
        yield _family(
            "http_request_duration_seconds",
            "HTTP request received to response completely sent.",
            ["handler"],
            [([handler], seconds) for handler, seconds in self.http_seconds.items()],
        )

    def _choices(self) -> list[tuple[list[str], Histogram]]:
        """Labels and continuations per request of each model."""
        return [(self._values, self.request_n)]


class FleetMetrics(Metrics):
    """The metrics of an HTTP server before several engines."""

    def __init__(self, model_name: str, engines: Sequence[Metrics]) -> None:
        super().__init__(model_name)
        self._engines = engines

    @property
    def engines(self) -> Sequence[Metrics]:
        """The metrics of each engine."""
        return self._engines


class ModelsMetrics(FleetMetrics):
    """The metrics of an HTTP server of several models, which have labels of their own."""

    def __init__(self, engines: Sequence[Metrics]) -> None:
        super().__init__(",".join(engine.model_name for engine in engines), engines)
        for engine in engines:
            engine.journal = self.journal

    def _choices(self) -> list[tuple[list[str], Histogram]]:
        return [row for engine in self.engines for row in engine._choices()]


def _family(
    name: str, text: str, labels: list[str], rows: Sequence[tuple[list[str], Histogram]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, row in rows:
        family.add_metric(values, buckets=row.buckets(), sum_value=row.total)
    return family

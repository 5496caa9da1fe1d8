"""The server's metrics in the Prometheus text format, version 0.0.4."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.telemetry.catalogue import COUNTERS, GAUGES, HISTOGRAMS
from octavo.telemetry.counts import Counts
from octavo.telemetry.histogram import Histogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Metrics(Counts, Collector):
    """The server's counters, rendered for Prometheus."""

    def __init__(self, model_name: str) -> None:
        super().__init__()
        self.model_name = model_name
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """All metrics, in the format ``CONTENT_TYPE``."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; ``prometheus_client`` calls it at each scrape."""
        names, values = ["model_name", "engine"], [self.model_name, "0"]
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
        yield from self._collect_labelled(names, values)
        yield from self._collect_http()

    def _collect_labelled(self, names: list[str], values: list[str]) -> Iterator[Metric]:
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=[*names, "finished_reason"]
        )
        for reason, count in self.finished.items():
            finished.add_metric([*values, reason], count)
        yield finished
        rejected = CounterMetricFamily(
            "vllm:admission_rejections", "HTTP requests refused before they were queued, by reason.", labels=["reason"]
        )
        for reason, count in self.rejected.items():
            rejected.add_metric([reason], count)
        yield rejected
        accepted = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Of vllm:spec_decode_num_accepted_tokens, those at each position of a draft.",
            labels=[*names, "position"],
        )
        for position, count in enumerate(self.stats.accepted_by_position):
            accepted.add_metric([*values, str(position)], count)
        yield accepted
        if self.info is not None:
            config = GaugeMetricFamily(
                "vllm:cache_config_info",
                "Always 1; the labels describe the KV cache.",
                labels=[*names, "block_size", "num_gpu_blocks"],
            )
            config.add_metric([*values, str(self.info.block_size), str(self.info.num_kv_blocks)], 1.0)
            yield config

    def _collect_http(self) -> Iterator[Metric]:
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


def _family(
    name: str, text: str, labels: list[str], rows: Sequence[tuple[list[str], Histogram]]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, row in rows:
        family.add_metric(values, buckets=row.buckets(), sum_value=row.total)
    return family

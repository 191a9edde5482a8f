"""Prometheus metrics of a server; named as in vLLM where they agree, so its dashboards work."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvant.engine import Engine

LATENCY_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
MEMORY_STATES = ("held", "shared", "free", "states")  # the nbytes_* keys of Engine.stats()


class ServerMetrics:
    """Latencies and response counts of a server, with the counters of its engine."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model))
        self.time_to_first_token = self._make_histogram(
            "time_to_first_token", "Seconds from a request to its first token", model
        )
        self.inter_token_latency = self._make_histogram(
            "inter_token_latency", "Seconds between two tokens", model
        )
        self.request_latency = self._make_histogram(
            "e2e_request_latency", "Seconds from a request to its last token", model
        )
        self.responses = Counter(
            "kvant_http_responses", "Responses by status", ["status"], registry=self._registry
        )

    def _make_histogram(self, name: str, description: str, model: str) -> Histogram:
        labels = ["model_name"]
        options: Any = {"registry": self._registry, "buckets": LATENCY_BUCKETS_S}
        return Histogram(f"vllm:{name}_seconds", description, labels, **options).labels(model)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        max_bytes = stats["max_bytes"]
        gauges = {
            "vllm:num_requests_running": ("Running requests", stats["running"]),
            "vllm:num_requests_waiting": ("Waiting requests", stats["waiting"]),
            "vllm:kv_cache_usage_perc": (
                "Fraction of max_bytes in use",
                stats["nbytes_held"] / max_bytes if max_bytes else 0.0,
            ),
        }
        counters = {
            "vllm:prompt_tokens": ("Tokens of prompts", stats["prompt_tokens"]),
            "vllm:generation_tokens": ("Generated tokens", stats["completion_tokens"]),
            "vllm:prefix_cache_queries": ("Prompt tokens looked up", stats["prompt_tokens"]),
            "vllm:prefix_cache_hits": ("Prompt tokens in the prefix cache", stats["cached_tokens"]),
            "kvant_restored_tokens": ("Prompt tokens from a store", stats["restored_tokens"]),
            "kvant_requests_failed": ("Failed requests", stats["failed"]),
            "kvant_requests_cancelled": ("Requests cancelled by the client", stats["cancelled"]),
            "kvant_put_aside": ("Requests swapped out to a file", stats["put_aside"]),
        }
        labels = ["model_name"]
        for name, (description, value) in gauges.items():
            yield self._fill_family(GaugeMetricFamily(name, description, labels=labels), value)
        for name, (description, value) in counters.items():
            yield self._fill_family(CounterMetricFamily(name, description, labels=labels), value)
        memory = GaugeMetricFamily("kvant_cache_bytes", "Cache bytes by state", labels=["state"])
        for state in MEMORY_STATES:
            memory.add_metric([state], stats[f"nbytes_{state}"])
        yield memory

    def _fill_family(self, family: CounterMetricFamily | GaugeMetricFamily, value: float) -> Metric:
        family.add_metric([self._model], value)
        return family

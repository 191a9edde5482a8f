"""Figures for Prometheus: under vLLM's names where the meaning is the same, so that what draws
those draws these."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvant.engine import Engine

LATENCY_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
MEMORY_STATES = ("held", "shared", "free", "states")  # of the bytes of an engine


class ServerMetrics:
    """What a server counts, beside what its engine does."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(engine, model))
        self.time_to_first_token = self._make_histogram(
            "time_to_first_token", "From a request to its first token", model
        )
        self.inter_token_latency = self._make_histogram(
            "inter_token_latency", "Between two tokens", model
        )
        self.request_latency = self._make_histogram(
            "e2e_request_latency", "All of a request", model
        )
        self.responses = Counter(
            "kvant_http_responses", "Answers by status", ["status"], registry=self._registry
        )

    def _make_histogram(self, name: str, description: str, model: str) -> Histogram:
        labels = ["model_name"]
        more: Any = {"registry": self._registry, "buckets": LATENCY_BUCKETS_S}
        return Histogram(f"vllm:{name}_seconds", description, labels, **more).labels(model)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    def collect(self) -> Iterator[Metric]:
        told = self._engine.stats()
        most = told["max_bytes"]
        gauges = {
            "vllm:num_requests_running": ("Requests that are served", told["running"]),
            "vllm:num_requests_waiting": ("Requests that wait", told["waiting"]),
            "vllm:kv_cache_usage_perc": (
                "Bytes that are held, of max_bytes",
                told["nbytes_held"] / most if most else 0.0,
            ),
        }
        counters = {
            "vllm:prompt_tokens": ("Tokens of prompts", told["prompt_tokens"]),
            "vllm:generation_tokens": ("Tokens of replies", told["completion_tokens"]),
            "vllm:prefix_cache_queries": ("Tokens that were looked for", told["prompt_tokens"]),
            "vllm:prefix_cache_hits": ("Those that were there", told["cached_tokens"]),
            "kvant_restored_tokens": ("Those that a store had", told["restored_tokens"]),
            "kvant_requests_failed": ("Requests that failed", told["failed"]),
            "kvant_requests_cancelled": ("Requests whose client went", told["cancelled"]),
            "kvant_put_aside": ("Requests whose pages went to a file", told["put_aside"]),
        }
        for name, (about, value) in gauges.items():
            yield self._fill_family(GaugeMetricFamily(name, about, labels=["model_name"]), value)
        for name, (about, value) in counters.items():
            yield self._fill_family(CounterMetricFamily(name, about, labels=["model_name"]), value)
        pages = GaugeMetricFamily("kvant_cache_bytes", "Bytes by their state", labels=["state"])
        for state in MEMORY_STATES:
            pages.add_metric([state], told[f"nbytes_{state}"])
        yield pages

    def _fill_family(self, family: Any, value: float) -> Metric:
        family.add_metric([self._model], value)
        found: Metric = family
        return found

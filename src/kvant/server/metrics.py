"""Counts of a server, for Prometheus and by tenant.

Metrics are named as in vLLM where they agree, so its dashboards work.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvant.engine import Engine, RequestFuture

LATENCY_BUCKETS_S = (0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
ENGINE_COUNTERS = (  # key of Engine.stats(), name, description
    ("prompt_tokens", "vllm:prompt_tokens", "Tokens of prompts"),
    ("completion_tokens", "vllm:generation_tokens", "Generated tokens"),
    ("prompt_tokens", "vllm:prefix_cache_queries", "Prompt tokens looked up"),
    ("cached_tokens", "vllm:prefix_cache_hits", "Prompt tokens in the prefix cache"),
    ("restored_tokens", "kvant_restored_tokens", "Prompt tokens from a store"),
    ("drafts", "vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified"),
    ("drafts_accepted", "vllm:spec_decode_num_accepted_tokens", "Draft tokens that were accepted"),
    ("failed", "kvant_requests_failed", "Failed requests"),
    ("cancelled", "kvant_requests_cancelled", "Requests cancelled by the client"),
    ("put_aside", "kvant_put_aside", "Requests swapped out to a file"),
)
MEMORY_STATES = ("held", "shared", "free", "states")  # the nbytes_* keys of Engine.stats()
OUTCOMES = ("finished", "cancelled", "failed")
TOKENS = ("prompt_tokens", "cached_tokens", "restored_tokens", "completion_tokens")


class ServerMetrics(Collector):
    """Latencies and response counts of a server, with the counters of its engine."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.time_to_first_token = self._make_histogram(
            "time_to_first_token", "Seconds from a request to its first token"
        )
        self.inter_token_latency = self._make_histogram(
            "inter_token_latency", "Seconds between two tokens"
        )
        self.request_latency = self._make_histogram(
            "e2e_request_latency", "Seconds from a request to its last token"
        )
        self.responses = Counter(
            "kvant_http_responses", "Responses by status", ["status"], registry=self._registry
        )

    def _make_histogram(self, name: str, description: str) -> Histogram:
        labels = ["model_name"]
        options: Any = {"registry": self._registry, "buckets": LATENCY_BUCKETS_S}
        return Histogram(f"vllm:{name}_seconds", description, labels, **options).labels(self._model)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the counters of the engine."""
        stats = self._engine.stats()
        max_bytes = stats["max_bytes"]
        usage = (stats["nbytes_held"] + stats["nbytes_drafts"]) / max_bytes if max_bytes else 0.0
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        for family_type, name, description, value in (
            (gauge, "vllm:num_requests_running", "Running requests", stats["running"]),
            (gauge, "vllm:num_requests_waiting", "Waiting requests", stats["waiting"]),
            (gauge, "vllm:kv_cache_usage_perc", "Fraction of max_bytes in use", usage),
            *((counter, *names, stats[key]) for key, *names in ENGINE_COUNTERS),
        ):
            family = family_type(name, description, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        memory = GaugeMetricFamily("kvant_cache_bytes", "Cache bytes by state", labels=["state"])
        for state in MEMORY_STATES:
            memory.add_metric([state], stats[f"nbytes_{state}"])
        yield memory


class TenantStats:
    """Request and token counts under the names of `Engine.stats()`.

    The counts of all tenants add up to those of the engine.
    """

    def __init__(self) -> None:
        self._ended: collections.Counter[str] = collections.Counter()  # counts of ended requests
        self._futures: set[RequestFuture[Any]] = set()  # of running requests

    def begin(self, future: RequestFuture[Any]) -> None:
        self._futures.add(future)

    def end(self, future: RequestFuture[Any]) -> None:
        self._futures.discard(future)
        self._ended.update(_count_requests([future]))

    def counts(self) -> dict[str, int]:
        """Counts of ended requests plus those of running ones so far."""
        totals = self._ended + _count_requests(self._futures)
        return {name: totals[name] for name in ("requests", *OUTCOMES, *TOKENS)}


def _count_requests(futures: Iterable[RequestFuture[Any]]) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for future in futures:
        usage = future.usage
        counts["requests"] += 1
        if future.outcome is not None:
            counts[future.outcome] += 1
        counts.update({name: getattr(usage, name) for name in TOKENS})
    return counts

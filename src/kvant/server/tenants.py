"""Request and token counts of one tenant, summed over its streams."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvant.engine import Stream

OUTCOMES = ("finished", "cancelled", "failed")
TOKENS = ("prompt_tokens", "cached_tokens", "restored_tokens", "completion_tokens")


class TenantStats:
    """Request and token counts under the names of `Engine.stats()`.

    The counts of all tenants add up to those of the engine.
    """

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()  # counts of ended requests
        self._streams: set[Stream] = set()  # of running requests

    def begin(self, stream: Stream) -> None:
        self._streams.add(stream)

    def end(self, stream: Stream) -> None:
        self._streams.discard(stream)
        self._ended.update(_count_streams([stream]))

    def counts(self) -> dict[str, int]:
        """Counts of ended requests plus those of running ones so far."""
        totals = self._ended + _count_streams(self._streams)
        return {name: totals[name] for name in ("requests", *OUTCOMES, *TOKENS)}


def _count_streams(streams: Iterable[Stream]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for stream in streams:
        usage = stream.usage
        counts["requests"] += 1
        if stream.outcome is not None:
            counts[stream.outcome] += 1
        for name in TOKENS:
            counts[name] += getattr(usage, name)
    return counts

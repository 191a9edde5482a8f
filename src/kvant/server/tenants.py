"""Figures of one tenant: what its requests took, by the streams of their replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvant.engine import Stream

OUTCOMES = ("finished", "cancelled", "failed")
TOKENS = ("prompt_tokens", "cached_tokens", "restored_tokens", "completion_tokens")


class TenantFigures:
    """Counts of requests and tokens, with the names of `Engine.stats()`.

    The counts of all tenants add up to those of the engine.
    """

    def __init__(self) -> None:
        self._ended: Counter[str] = Counter()  # of requests that are over
        self._streams: set[Stream] = set()  # of those under way

    def begin(self, stream: Stream) -> None:
        self._streams.add(stream)

    def end(self, stream: Stream) -> None:
        self._streams.discard(stream)
        self._ended.update(_counts([stream]))

    def counts(self) -> dict[str, int]:
        """Count what is over, and what is under way so far."""
        found = self._ended + _counts(self._streams)
        return {name: found[name] for name in ("requests", *OUTCOMES, *TOKENS)}


def _counts(streams: Iterable[Stream]) -> Counter[str]:
    found: Counter[str] = Counter()
    for stream in streams:
        usage = stream.usage
        found["requests"] += 1
        if stream.outcome is not None:
            found[stream.outcome] += 1
        for name in TOKENS:
            found[name] += getattr(usage, name)
    return found

"""What an engine tells of itself: counts, and how long people waited."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

from kvant.engine.scheduler import ScheduledRequest
from kvant.engine.stream import Usage

MAX_RECENT_WAITS = 1000  # waits that are remembered


@dataclass
class EngineMetrics:
    """Counts since the engine began, and the waits of late, in seconds."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    put_aside: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of prompts, that were not read again,
    restored_tokens: int = 0  # and of those, that a store had
    completion_tokens: int = 0
    first_token_waits: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_WAITS))
    between_token_waits: deque[float] = field(
        default_factory=lambda: deque(maxlen=MAX_RECENT_WAITS)
    )

    def count_request(self, request: ScheduledRequest) -> None:
        self.requests += 1
        self.prompt_tokens += request.num_prompt_tokens

    def count_prefix_hits(self, usage: Usage) -> None:
        """What was there of a prompt when it began."""
        self.cached_tokens += usage.cached_tokens
        self.restored_tokens += usage.restored_tokens

    def count_token(self, since: float, now: float, *, first: bool) -> None:
        """A token came; what it waited for came before."""
        self.completion_tokens += 1
        (self.first_token_waits if first else self.between_token_waits).append(now - since)

    def stats(self) -> dict[str, Any]:
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return counts | {
            "first_token_seconds": _summarize_waits(self.first_token_waits),
            "between_tokens_seconds": _summarize_waits(self.between_token_waits),
        }


def _summarize_waits(waits: deque[float]) -> dict[str, float]:
    """The median, and what one wait of twenty passes; nothing before there are any."""
    some = list(waits)
    if not some:
        return {}
    if len(some) == 1:
        return {"median": some[0], "p95": some[0]}
    cuts = quantiles(some, n=20, method="inclusive")
    return {"median": cuts[9], "p95": cuts[18]}

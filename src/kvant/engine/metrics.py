"""Counts of an engine: requests, tokens, and how long clients wait for them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvant.engine.future import Usage

MAX_RECENT_WAITS = 1000  # latest waits, for the percentiles


@dataclass
class EngineMetrics:
    """Counts since the engine started, and recent waits in seconds."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    put_aside: int = 0  # times that a request was swapped out
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of prompts, not prefilled again
    restored_tokens: int = 0  # of the cached ones, restored from a store
    completion_tokens: int = 0
    drafts: int = 0  # verified draft tokens
    drafts_accepted: int = 0  # of these, completion tokens
    first_token_waits: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_WAITS))
    between_token_waits: deque[float] = field(
        default_factory=lambda: deque(maxlen=MAX_RECENT_WAITS)
    )

    def count_prefix_hits(self, usage: Usage) -> None:
        """Add the cached and restored tokens of a prompt, once its prefill starts."""
        self.cached_tokens += usage.cached_tokens
        self.restored_tokens += usage.restored_tokens

    def count_token(self, since: float, now: float, *, first: bool) -> None:
        """Count a token at `now`; `since` is the time of the previous one, or of the arrival."""
        self.completion_tokens += 1
        (self.first_token_waits if first else self.between_token_waits).append(now - since)

    def stats(self) -> dict[str, Any]:
        counts = {name: value for name, value in vars(self).items() if isinstance(value, int)}
        return counts | {
            "first_token_seconds": _summarize_waits(self.first_token_waits),
            "between_tokens_seconds": _summarize_waits(self.between_token_waits),
        }


def _summarize_waits(waits: deque[float]) -> dict[str, float]:
    """Return the median and the 95th percentile; {} without waits."""
    seconds = list(waits)
    if not seconds:
        return {}
    return {"median": float(np.median(seconds)), "p95": float(np.percentile(seconds, 95))}

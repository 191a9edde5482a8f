"""What replaces measured times in tests of drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvant.generation.speculation import DraftSizer, Proposal


class GreedySizer(DraftSizer):
    """Verifies all drafts, whatever that takes."""

    def choose_num_drafts(
        self,
        proposals: Sequence[Proposal],
        limit: int,
        *,
        recomputes: bool = False,
        draft_seconds: float = 0.0,
    ) -> int:
        return min(limit, max((num_drafts for num_drafts, _ in proposals), default=0))


class EvenClock:
    """In place of the module `time`: all forwards take equally long."""

    monotonic = staticmethod(time.monotonic)

    def __init__(self) -> None:
        self._ticks = 0

    def perf_counter(self) -> int:
        self._ticks += 1
        return self._ticks

"""A sizer that does not measure."""

from __future__ import annotations

from collections.abc import Sequence

from kvant.generation.speculation import DraftSizer, Proposal


class GreedySizer(DraftSizer):
    """Verifies all drafts, whatever that takes."""

    def choose_size(
        self, proposals: Sequence[Proposal], limit: int, *, recomputes: bool = False
    ) -> int:
        return min(limit, max((len(drafts) for drafts, _ in proposals), default=0))

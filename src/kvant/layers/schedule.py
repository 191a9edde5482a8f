"""What a layer holds: integers alone, no tensors.

`length` is the number of tokens seen; the newest query is at column `length - 1`. Everything here
grows with `length` and never falls.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from kvant.recipes import LayerSpec


@dataclass(frozen=True)
class Schedule:
    """Which pages and rows stay once `length` tokens were seen, and how many that can be."""

    spec: LayerSpec

    def keep(self, length: int) -> int:
        """The first column (sinks aside) that must stay, a rewind of `slack` included."""
        return self.spec.retention.keep(max(0, length - self.spec.slack))

    def first_page(self, length: int) -> int:
        """The first page that must stay sealed."""
        return self.keep(length) // self.spec.page

    def first_dense(self, length: int) -> int:
        """The first column that must stay dense, so that a rewind of `slack` is exact."""
        if not self.spec.seals:
            return self.keep(length)
        due = self.spec.paging.due(max(0, length - self.spec.slack))
        return max(due, self.first_page(length)) * self.spec.page

    @cached_property
    def dense_bound(self) -> int | None:
        """Dense rows that steady use never passes; None where all rows stay dense."""
        spec, tail = self.spec, self.spec.paging.tail
        window = spec.retention.window
        bounds = []
        if tail is not None:
            bounds.append(spec.slack + max(tail + spec.page, spec.dense_until))
        if window is not None:
            # Room spares moving the window for every token. The sinks, which lie apart, come out of
            # it, so that all rows together stay below window + slack + page; but never all of it.
            room = spec.page
            if not spec.seals:
                room = max(spec.page // 2, spec.page - spec.retention.sinks, 1)
            bounds.append(window + spec.slack + room)
        return min(bounds, default=None)

    @cached_property
    def page_bound(self) -> int | None:
        """Sealed pages that steady use never passes; None where all of them stay."""
        window, tail = self.spec.retention.window, self.spec.paging.tail
        if window is None or tail is None:
            return None
        return max(0, -(-(window + self.spec.slack - tail + 1) // self.spec.page))

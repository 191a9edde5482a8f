"""When pages are sealed and which rows must stay: integers alone, no tensors.

`length` is the number of tokens seen; the newest query is at column `length - 1`. Everything here
grows with `length` and never falls.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvant.recipes import LayerSpec


@dataclass(frozen=True)
class Schedule:
    """What a layer holds once `length` tokens were seen."""

    spec: LayerSpec

    def due(self, length: int) -> int:
        """How many pages the newest query sees sealed."""
        spec = self.spec
        if not spec.seals or length < spec.start:
            return 0
        return max(0, length - spec.resolved_tail) // spec.page

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
        due = self.due(max(0, length - self.spec.slack))
        return max(due, self.first_page(length)) * self.spec.page

    @property
    def dense_bound(self) -> int | None:
        """Dense rows that steady use never passes; None where all rows stay dense."""
        spec = self.spec
        window = spec.retention.window
        bounds = []
        if spec.seals:
            bounds.append(spec.slack + max(spec.resolved_tail + spec.page, spec.start))
        if window is not None:
            # One page of room spares moving the window for every token; the sinks come out of it.
            room = spec.page if spec.seals else max(1, spec.page - spec.retention.sinks)
            bounds.append(window + spec.slack + room)
        return min(bounds, default=None)

    @property
    def page_bound(self) -> int | None:
        """Sealed pages that steady use never passes; None where all of them stay."""
        spec = self.spec
        if spec.retention.window is None:
            return None
        rows = spec.retention.window + spec.slack - spec.resolved_tail + 1
        return max(0, -(-rows // spec.page))

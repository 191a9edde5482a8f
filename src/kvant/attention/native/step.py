"""One token after the other in memory that stays where it is, so that requests stay what they are.

Where sequences are, and where their pages lie, are records that are written to between two tokens.
So what a layer asked for one token is asked for the next one by the same bytes. As of the steps
that a CUDA graph holds (triton/step.py), a cache is asked to `expect` a token, and told when it has
arrived.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kvant.attention.native import Native, records
from kvant.contracts import Mask, Request, Stored, View
from kvant.errors import UnsupportedView
from kvant.extent import LENGTH, PADDING, Change, Extent, Ints

ROW = 2  # of a write
NATIVE = Native()


class Place:
    """The integers of a kind, where the row of the next token goes, and what it lets fall due."""

    def __init__(self, change: Change, device: torch.device) -> None:
        extent = change.during
        kind = extent.kind
        self.tokens = kind.capacity or 2 * int(extent.rows.max(initial=0)) + kind.page
        numbers = np.zeros_like(extent.numbers)
        self._record = np.zeros(records.EXTENT.size // 8, np.int64)
        self._steps = np.zeros(records.STEPS.size // 8, np.int64)
        self.extent = Extent(kind, numbers, extent.sealed, extent.open, extent.heads)
        self.extent.memo[records.KEY] = records.memory(self._record), self._record
        self.change = Change(self.extent, self.extent, self.extent, 1)
        self.change.memo[records.KEY] = records.memory(self._steps), self._steps
        self.lengths: Tensor = torch.from_numpy(numbers)[:, LENGTH]
        self._padding = torch.from_numpy(numbers)[:, PADDING]
        self._writes: Ints
        self._held: tuple[Ints, ...]  # what the records lead to, beside these
        followed = self.follow(change)
        assert followed

    @property
    def columns(self) -> Tensor:
        """Tokens of the longest sequence, its padding included."""
        return (self.lengths + self._padding).amax()

    def advance(self) -> None:
        """One more token of each, which changes nothing else."""
        self.extent.numbers[:, LENGTH] += 1
        self._writes[:, ROW] += 1
        self._steps[[records.COPIES, records.SEALS]] = 0

    def follow(self, change: Change) -> bool:
        """Be where these sequences are, their next row included; False: they are others."""
        extent, numbers = change.during, self.extent.numbers
        if extent.tables != len(numbers) or extent.kind != self.extent.kind:
            return False
        assert len(change.writes) == np.count_nonzero(extent.lengths > 0), "rows that go nowhere"
        numbers[:] = extent.numbers
        self._record[:] = records.extent_memory(extent)
        self._record[records.NUMBERS] = records.memory(numbers)
        self._writes = change.writes.copy()
        copies, seals = (np.ascontiguousarray(part) for part in (change.copies, change.seals))
        self._steps[:] = records.steps_record(copies, self._writes, seals)
        self._held = extent.sealed, extent.open, copies, seals
        return True


@dataclass(eq=False)
class Step:
    """Appends the rows of a token of every sequence to a layer and attends over all of them."""

    pages: View  # over records that stay where they are
    place: Place
    mask: Mask
    memory: View  # which those lead to
    backend: str = NATIVE.name

    @classmethod
    def of(cls, pages: View, place: Place) -> Step:
        """From what a layer shows of a token that is expected."""
        if (reason := NATIVE.supports(pages)) is not None:
            raise UnsupportedView(f"no steps behind this view: {reason}")
        if pages.selecting is not None:
            raise UnsupportedView("no steps behind this view: each token selects pages")
        sides = _standing(pages.keys, "keys"), _standing(pages.values, "values")
        standing = pages._replace(keys=sides[0], values=sides[1], extent=place.extent)
        return cls(standing, place, pages.mask, pages)

    def follow(self, pages: View) -> bool:
        """Go on from a later view of the same layer; False where its rows are of another kind."""
        here, there = self.pages, pages
        if (here.mask, here.extent.kind) != (there.mask, there.extent.kind):
            return False
        sides = (here.keys, there.keys, "keys"), (here.values, there.values, "values")
        if not all(_moved(*side) for side in sides):
            return False
        self.memory = pages
        return True

    def __call__(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float | None = None,
        softcap: float | None = None,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """Outputs [B, heads, 1, Dv], as `append` and then `attend` give them."""
        pages = self.pages
        of_keys, of_values = pages.keys.codec.frame, pages.values.codec.frame
        rows = {"keys": of_keys.rows(keys), "values": of_values.rows(values)}
        sides = {"keys": pages.keys, "values": pages.values}
        if not NATIVE.store(self.place.change, rows, sides):
            raise UnsupportedView(
                f"rows {list(keys.shape)} of {keys.dtype} are not stored natively"
            )
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        dtype = q.dtype if of_values.trivial else torch.float32
        asked = Request(
            of_keys.queries(q), scale, self.mask, softcap, sink_logits, lse=False, dtype=dtype
        )
        if (reason := NATIVE.supports(pages, asked)) is not None:
            raise UnsupportedView(reason)
        out = NATIVE.attend(asked, pages)[0]
        return of_values.outputs(out).to(q.dtype)


def _standing(stored: Stored, name: str) -> Stored:
    """What is known of a side, without its memory, behind a record that may be written to."""
    side = records.side(stored, name)
    assert side.memory is not None
    record = side.memory.copy()
    held = side._replace(place=records.memory(record), memory=record)
    opened = stored.open.new_empty(0, *stored.open.shape[1:])
    memo = {(records.KEY, name): held}
    return replace(stored, open=opened, sealed={}, summary=None, memo=memo)


def _moved(here: Stored, there: Stored, name: str) -> bool:
    """Let the record of a side say where it is now, if nothing else changed."""
    own, now = (records.side(side, name) for side in (here, there))
    if own.memory is None or now.memory is None:
        return False
    told = "unread", "unstored", "heads", "page", "dim", "dtype"
    if here.codec != there.codec or any(getattr(own, x) != getattr(now, x) for x in told):
        return False
    own.memory[:] = now.memory
    return True

"""The rows of one attention layer: open pages, sealed pages, sinks.

Rows are stored in the frame of their codec. An append replaces one immutable record by the next;
the one before it stays readable until `commit`, so `rollback` is exact. Rows are let go by
`commit`, never by `append`: the view that `append` returns stays valid until the next one. This
module knows no transformer, no format and no mask rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvant.contracts import (
    Fields,
    Follower,
    LayerState,
    Ledger,
    Order,
    Snapshot,
    Tally,
    Tiles,
    View,
)
from kvant.lasting import check_lasts
from kvant.layers.admission import admitting
from kvant.layers.ledger import Alone
from kvant.layers.reach import check_reach
from kvant.layers.reading import Held, between, unframed, view_of
from kvant.layers.recoding import nbytes_after, recoded
from kvant.layers.record import Record
from kvant.layers.reopening import reopened
from kvant.layers.rows import check_order, incoming
from kvant.layers.snapshots import exposed, restored
from kvant.recipes import LayerSpec, Prefill


class Attention:
    """One attention layer; a `LayerState`."""

    def __init__(self, spec: LayerSpec, tiles: Tiles | None = None) -> None:
        self.spec = spec
        self.tiles = tiles
        self.ledger: Ledger = Alone()
        self.tally = Tally()
        self._record: Record | None = None
        self._committed: Record | None = None
        self._committed_spec = spec
        self._coming: Record | None = None

    def leaves(self) -> list[LayerState]:
        return [self]

    def followers(self) -> list[Follower]:
        return []

    @property
    def length(self) -> int:
        return 0 if (record := self._record) is None else record.length

    @property
    def batch(self) -> int:
        return self._record.memory.geometry.batch if self._record and self.length else 0

    @property
    def held(self) -> int:
        """How many rows `read()` returns; the slack behind a window is memory, not content."""
        return 0 if (record := self._record) is None else len(Held.of(record))

    @property
    def max_held(self) -> int | None:
        return self.spec.max_held

    @property
    def capacity(self) -> int | None:
        return self.spec.capacity

    @property
    def nbytes(self) -> int:
        return 0 if (record := self._record) is None else record.nbytes

    @property
    def nbytes_used(self) -> int:
        return 0 if (record := self._record) is None else record.nbytes_used

    def nbytes_after(self, length: int, recipe: LayerSpec) -> int:
        """Before the first rows nobody knows how large they are: 0."""
        return 0 if self._record is None else nbytes_after(self._record, length, recipe)

    def nbytes_with(
        self,
        keys: Tensor,
        values: Tensor | None = None,
        *,
        start: Sequence[int] | Tensor | None = None,
        order: Order = "BHTD",
        prefill: Prefill | None = None,
    ) -> int:
        rows, fitting = self._entering(keys, values, order, prefill)
        return self._begin(rows, start, fitting).nbytes_with(rows["keys"].shape[2])

    def append(
        self,
        keys: Tensor,
        values: Tensor | None = None,
        *,
        start: Sequence[int] | Tensor | None = None,
        order: Order = "BHTD",
        prefill: Prefill | None = None,
    ) -> View:
        """Add the rows of T new tokens; what attention may read for them.

        `start` says, with the first rows, how many columns of left padding each sequence has. The
        view stays valid until the next append. In a cache, rows whose forward never reached the
        other layers are taken back first.
        """
        check_lasts("append")
        rows, fitting = self._entering(keys, values, order, prefill)
        self.ledger.opening(self)
        before = self._begin(rows, start, fitting)
        count = rows["keys"].shape[2]
        before.check_room(count)
        framed = {n: codec.frame.rows(rows[n]) for n, codec in self.spec.sides.items()}
        after, dense = before.extended(framed)
        rule = "stored" if self.ledger.speculating else prefill or self.spec.prefill
        own = count > 1 and rule == "dense"
        view = view_of(after, count, before.length if own else after.length, dense)
        self._record = after
        self.tally.appends += 1
        self.ledger.closing(self)
        return view

    def expect(self) -> View:
        """Make room for the row of a token; the view that it will have.

        Whoever asked writes the row to where that view has its newest one, and says `arrive`. An
        append in two halves: the first changes no row, but older views may be read no more.
        """
        check_lasts("expect")
        self._coming = coming = self._filled().expecting()
        return view_of(coming, 1, coming.length, coming.dense_rows())

    def arrive(self) -> None:
        """The row is there. The next is `expect`ed already, if there is room and no page is due."""
        self.ledger.opening(self)
        self._record = self._coming or self._filled().expecting()
        self.tally.appends += 1
        self.ledger.closing(self)

    def view(self, queries: int = 1) -> View:
        """What the newest tokens see by the rule, without an append.

        A view for many of them needs rows that are dense no more: the one that `append` returned
        has them.
        """
        record = self._filled()
        if not 0 < queries <= self.length:
            raise ValueError(f"a view for {queries} of {self.length} tokens: 1 to {self.length}")
        view = view_of(record, queries, self.length, record.dense_rows())
        if not view.serves(self.length - queries, view.mask):
            raise ValueError(
                f"a view for {queries} tokens: rows that the oldest of them saw are sealed or gone;"
                " ask for fewer, or use the view that append returned"
            )
        return view

    def read(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        order: Order = "BHTD",
        committed: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Dense keys and values in position order, as the newest token sees them.

        Without a range: all rows held, sinks first (`positions` tells which); a range counts
        columns. `committed`: without the forward under way. May be memory of the cache: clone it.
        """
        check_order(order)
        record = self._committed if committed else self._record
        if record is None:  # no rows, and no shapes yet
            return torch.empty(0, 0, 0, 0), torch.empty(0, 0, 0, 0)
        whole = start == 0 and stop is None
        rows = unframed(record, Held.of(record).rows() if whole else between(record, start, stop))
        keys = rows["keys"]
        values = rows.get("values", keys[..., : self.spec.value_dim])
        swap = order == "BTHD"
        return (keys.transpose(1, 2), values.transpose(1, 2)) if swap else (keys, values)

    def positions(self) -> Tensor:
        """The position of each row that `read()` returns, [B, n]; -1 is padding or a repeat."""
        if self._record is None:
            return torch.empty(0, 0, dtype=torch.int64)
        return Held.of(self._record).positions()

    def reachable(self, to: int) -> int:
        if to >= self.length or to <= 0 or self._record is None:
            return min(max(to, 0), self.length)
        kept = self._record.memory.schedule.keep(self.length)
        return self.spec.retention.reachable(to, max(self._record.first_given, kept))

    def rewind(self, to: int) -> None:
        """Go back to length `to`: exact within `slack`, from decoded rows beyond it."""
        check_reach(self, to)
        if to == 0:
            self.reset()
        elif self._record is None or to == self.length:
            self._settle(self._record)  # a rewind that was interrupted may have come so far
        else:
            record, exact = reopened(self._record, to)
            self._settle(record)
            self.tally.rewinds_exact += exact
            self.tally.rewinds_decoded += not exact

    def checkpoint(self) -> None:
        """Nothing to do: rows stay until retention lets them go."""

    def commit(self) -> None:
        self._settle(None if self._record is None else self._record.committed())

    def rollback(self) -> None:
        self._record, self.spec = self._committed, self._committed_spec
        self.commit()  # the chunk that is undone may have taken room

    def snapshot(self) -> Snapshot:
        return self.exposed().copied()

    def exposed(self) -> Snapshot:
        return exposed(self._record)

    def restore(self, snapshot: Snapshot) -> None:
        self._record = restored(self.spec, snapshot, self.tiles, self.tally)

    def fork(self) -> Attention:
        twin = Attention(self.spec, self.tiles)
        if self._record is not None:
            twin._settle(self._record.shared(twin.tally))
        return twin

    def select(self, index: Tensor) -> None:
        """Keep the sequences `index` of the batch, in that order, with repeats if it has any."""
        self._settle(None if self._record is None else self._record.selected(index))

    def move(self, device: torch.device) -> None:
        now, before, self._coming = self._record, self._committed, None
        self._committed = before and before.moved(device, self.tiles)
        self._record = self._committed if now is before else now and now.moved(device, self.tiles)

    def widen(self, slack: int) -> None:
        if slack <= self._committed_spec.slack:
            return
        self.spec = replace(self.spec, slack=slack)
        self._settle(restored(self.spec, exposed(self._record), self.tiles, self.tally))

    def recode(self, recipe: LayerSpec) -> None:
        if recipe != self.spec:
            self._record = recoded(self._record, recipe)
            self.spec = recipe

    def reset(self) -> None:
        """Forget the tokens, keep the memory."""
        self._settle(None if self._record is None else self._record.emptied())

    def clear(self) -> None:
        """Forget the tokens and free the memory."""
        self._settle(None)

    def _filled(self) -> Record:
        if self._record is None:
            raise ValueError("an empty layer has no shapes yet: append first")
        return self._record

    def _settle(self, record: Record | None) -> None:
        self._record = self._committed = record
        self._committed_spec = self.spec
        self._coming = None

    def _entering(
        self, keys: Tensor, values: Tensor | None, order: Order, prefill: Prefill | None
    ) -> tuple[Fields, Record | None]:
        """Rows as they are stored, and the record where they are known to fit it."""
        if prefill not in (None, "dense", "stored"):
            raise ValueError(f"prefill {prefill!r}: 'dense' or 'stored' is needed")
        held = self._record
        known = held.memory.geometry if held else None
        rows, familiar = incoming(self.spec, keys, values, order, known)
        return rows, held if familiar else None

    def _begin(
        self, rows: Fields, start: Sequence[int] | Tensor | None, fitting: Record | None
    ) -> Record:
        """The record to append to."""
        old = self._record
        if old is not None and old is fitting and old.length and start is None:
            return old
        return admitting(old, rows, start, self.spec, self.tiles, self.tally)

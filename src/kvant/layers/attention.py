"""The rows of one attention layer: open pages, sealed pages, sinks.

Rows are stored in the frame of their codec. An append replaces one immutable record by the next;
the one before it stays readable until `commit`, so `rollback` is exact. Rows are let go by
`commit`, never by `append`: the view that `append` returns stays valid until the next one. This
module knows no transformer, no format and no mask rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvant.contracts import (
    Fields,
    Ledger,
    Order,
    Snapshot,
    Tally,
    Tiles,
    View,
)
from kvant.errors import CapacityError, RewindError
from kvant.layers import reading, record, snapshots
from kvant.layers.geometry import Geometry, check_order, incoming, sides
from kvant.layers.ledger import Alone
from kvant.layers.record import Record
from kvant.recipes import LayerSpec, Prefill


class Attention:
    """One attention layer; a `LayerState`."""

    def __init__(self, spec: LayerSpec, tiles: Tiles | None = None) -> None:
        self.spec = spec
        self.tiles = tiles
        self.ledger: Ledger = Alone()
        self.tally = Tally()
        self._record: Record | None = None
        self._undo: tuple[Record | None, ...] = ()  # at most one

    @property
    def length(self) -> int:
        return 0 if self._record is None else self._record.length

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first rows."""
        return 0 if self._record is None else self._record.memory.geometry.batch

    @property
    def held(self) -> int:
        """How many rows `read()` returns; the slack behind a window is memory, not content."""
        if self._record is None:
            return 0
        sinks = reading.kept_sinks(self.spec, self._record)
        return sinks + self.length - reading.body(self.spec, self._record)

    @property
    def max_held(self) -> int | None:
        """What `held` never passes; None where only memory is the limit."""
        retention = self.spec.retention
        limits = [] if self.spec.capacity is None else [self.spec.capacity]
        if retention.window is not None:
            limits.append(retention.window + retention.sinks)
        return min(limits, default=None)

    @property
    def nbytes(self) -> int:
        """Bytes allocated for rows."""
        return 0 if self._record is None else self._record.nbytes

    @property
    def nbytes_used(self) -> int:
        """Bytes of rows that are there."""
        return 0 if self._record is None else self._record.nbytes_used

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
        rows = incoming(self.spec, keys, values, order)
        self.ledger.opening(self)
        before = self._ready(rows, start)
        count = rows["keys"].shape[2]
        self._check_capacity(before.length + count)
        framed = {n: codec.frame.rows(rows[n]) for n, codec in sides(self.spec).items()}
        after, dense, dense_from = record.extended(self.spec, before, framed, self.tally)
        own = count > 1 and (prefill or self.spec.prefill) == "dense"
        own_from = before.length if own else after.length
        view = reading.view(self.spec, after, count, own_from, self.tally, dense, dense_from)
        self._undo, self._record = (before,), after
        self.tally.appends += 1
        self.ledger.closing(self)
        return view

    def view(self, queries: int = 1) -> View:
        """What the newest tokens see by the rule, without an append."""
        if self._record is None:
            raise ValueError("an empty layer has no shapes yet: append first")
        if not 0 < queries <= self.length:
            raise ValueError(f"a view for {queries} of {self.length} tokens: 1 to {self.length}")
        self._check_reach(self.length - queries + 1)
        exact, _ = reading.reopened(self.spec, self._record, self.length)
        return reading.view(self.spec, exact, queries, self.length, self.tally)

    def read(
        self, start: int = 0, stop: int | None = None, *, order: Order = "BHTD"
    ) -> tuple[Tensor, Tensor]:
        """Dense keys and values in position order, as the newest token sees them.

        Without a range: all rows held, sinks first (`positions` tells which). With left padding,
        a range counts columns.
        """
        check_order(order)
        if self._record is None:  # no rows, and no shapes yet
            return torch.empty(0, 0, 0, 0), torch.empty(0, 0, 0, 0)
        whole = start == 0 and stop is None
        rows = reading.everything(self.spec, self._record) if whole else self._range(start, stop)
        rows = reading.unframed(self.spec, rows)
        keys = rows["keys"]
        values = rows.get("values", keys[..., : self.spec.value_dim])
        swap = order == "BTHD"
        return (keys.transpose(1, 2), values.transpose(1, 2)) if swap else (keys, values)

    def positions(self) -> Tensor:
        """The position of each row that `read()` returns, [B, n]; -1 is padding or a repeat."""
        if self._record is None:
            return torch.empty(0, 0, dtype=torch.int64)
        return reading.positions(self.spec, self._record)

    def reachable(self, to: int) -> int:
        if to >= self.length or self._record is None:
            return min(max(to, 0), self.length)
        first = reading.first_kept(self.spec, self._record)
        return 0 if to <= 0 else self.spec.retention.reachable(to, first)

    def rewind(self, to: int) -> None:
        """Go back to length `to`: exact within `slack`, from decoded rows beyond it."""
        self._check_reach(to)
        if self._record is None or to == self.length:
            return
        if to == 0:
            self.reset()
            return
        self._record, exact = reading.reopened(self.spec, self._record, to)
        self._undo = ()
        if exact:
            self.tally.rewinds_exact += 1
        else:
            self.tally.rewinds_decoded += 1

    def checkpoint(self) -> None:
        """Nothing to do: rows stay until retention lets them go."""

    def commit(self) -> None:
        if self._record is not None:
            self._record = record.committed(self.spec, self._record)
        self._undo = ()

    def rollback(self) -> None:
        for before in self._undo:
            self._record = before
        self._undo = ()

    def snapshot(self) -> Snapshot:
        exposed = self.exposed()
        copies = {name: tensor.clone() for name, tensor in exposed.tensors.items()}
        return Snapshot(copies, exposed.numbers)

    def exposed(self) -> Snapshot:
        """A snapshot that may share memory: for who reads it before the next append."""
        return snapshots.exposed(self._record)

    def restore(self, snapshot: Snapshot) -> None:
        restored = snapshots.restored(self.spec, snapshot, self.tiles)
        self._undo, self._record = (self._record,), restored

    def fork(self) -> Attention:
        twin = Attention(self.spec, self.tiles)
        twin._record = None if self._record is None else record.shared(self._record)
        return twin

    def select(self, index: Tensor) -> None:
        """Keep the sequences `index` of the batch, in that order, with repeats if it has any."""
        if self._record is not None:
            self._record = record.selected(self._record, index)
        self._undo = ()

    def reset(self) -> None:
        """Forget the tokens, keep the memory."""
        if self._record is not None:
            self._record = record.emptied(self._record)
        self._undo = ()

    def clear(self) -> None:
        """Forget the tokens and free the memory."""
        self._record, self._undo = None, ()

    def _ready(self, rows: Fields, start: Sequence[int] | Tensor | None) -> Record:
        """The record to append to; one without tokens takes any shape."""
        geometry, old = Geometry.of(rows), self._record
        given = None if start is None else tuple(int(s) for s in start)
        if old is not None and old.length:
            if old.memory.geometry != geometry:
                raise ValueError(f"rows of {geometry} for a layer of {old.memory.geometry}")
            if given not in (None, old.memory.start):
                raise ValueError(f"start {given} for sequences that began at {old.memory.start}")
            return old
        padding = given or (0,) * geometry.batch
        if len(padding) != geometry.batch or min(padding) < 0:
            raise ValueError(f"start {padding}: one number >= 0 for each of {geometry.batch}")
        if old is not None and (old.memory.geometry, old.memory.start) == (geometry, padding):
            return old
        return record.fresh(self.spec, geometry, padding, self.tiles)

    def _check_capacity(self, length: int) -> None:
        capacity = self.spec.capacity
        if capacity is not None and length > capacity:
            raise CapacityError(
                f"{length} tokens for a capacity of {capacity}: rewind, reset, or give the spec "
                f"capacity={length} or none"
            )

    def _check_reach(self, to: int) -> None:
        if not 0 <= to <= self.length or self.reachable(to) != to:
            raise RewindError(
                f"length {to} cannot be reached from {self.length}: the longest that can is "
                f"{self.reachable(to)} (a window keeps `slack` more rows to go back to)"
            )

    def _range(self, start: int, stop: int | None) -> Fields:
        assert self._record is not None
        stop = self.length if stop is None else stop
        first = reading.first_held(self.spec, self._record)
        if not 0 <= start <= stop <= self.length:
            raise ValueError(f"rows [{start}, {stop}) of {self.length}")
        if start >= first:
            return reading.columns(self.spec, self._record, start, stop)
        sinks = self.spec.retention.sinks
        if stop <= sinks and max(self._record.memory.start) == 0:
            return {n: t[:, :, start:stop] for n, t in self._record.memory.sinks.items()}
        raise ValueError(f"rows [{start}, {stop}): the layer holds [{first}, {self.length})")

"""One attention layer of a cache: it writes rows where an extent says, and shows pages.

It has no integers of its own: the ledger makes those of a forward, once for all layers of a kind.
Rows are stored in the frame of their codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kvant.attention.reference import serves
from kvant.attention.storing import count_sealed, no_rows, store
from kvant.cache.book import Asked
from kvant.cache.changes import FEW, most_slots
from kvant.cache.ledger import Ledger
from kvant.cache.pruning import Kept, chosen, fill
from kvant.cache.reading import Held
from kvant.cache.rows import check_order, incoming
from kvant.cache.storage import Geometry, Storage
from kvant.contracts import Fields, Order, Selecting, Tally, Tiles, View
from kvant.extent import Bools, Change, Extent, Kind
from kvant.modes import refuse_transforms
from kvant.recipes import LayerSpec, Prefill

RULES = (None, "dense", "stored")


def kind_of(spec: LayerSpec, leaf: int | None = None) -> Kind:
    """What this layer has in common with others whose integers are the same.

    A layer whose heads share what they keep of a prompt has a kind of its own.
    """
    retention, own = spec.retention, leaf if lies_apart(spec) else None
    numbers = retention.window, retention.sinks, spec.slack, spec.step, spec.capacity
    return Kind(spec.paging, *numbers, spec.prune, own)


def lies_apart(spec: LayerSpec) -> bool:
    """Has each key head pages of its own? They do where heads keep different numbers of rows."""
    return spec.prune is not None and spec.prune.adaptive


def pages_nbytes(geometry: Geometry, spec: LayerSpec, kind: Kind, lengths: Sequence[int]) -> int:
    """Bytes that sequences have taken once they are so long."""
    opened, sealed = most_slots(kind, lengths)
    return int(opened * geometry.open_nbytes(spec) + sealed * geometry.sealed_nbytes(spec))


class Attention:
    """The rows of one attention layer."""

    def __init__(
        self, spec: LayerSpec, ledger: Ledger, kind: int, leaf: int, tiles: Tiles | None = None
    ) -> None:
        self.spec = spec
        self.ledger = ledger
        self.kind = kind
        self.leaf = leaf
        self.tiles = tiles
        self.tally = Tally()
        self.framed = not all(codec.frame.trivial for codec in spec.sides.values())
        self.pruning, self.apart = spec.prune, lies_apart(spec)

    @property
    def storage(self) -> Storage | None:
        """None before the first rows."""
        return self.ledger.book.storages.get(self.leaf)

    @property
    def extent(self) -> Extent | None:
        """Where this layer is: what a forward under way brought it counts."""
        return self.ledger.extent(self.kind, self.leaf)

    @property
    def length(self) -> int:
        """Tokens seen, by the longest sequence, its padding included."""
        return 0 if (extent := self.extent) is None else extent.columns

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first rows."""
        return 0 if (extent := self.extent) is None else extent.batch

    @property
    def held(self) -> int:
        """How many rows `read()` returns; the slack behind a window is memory, not content."""
        return 0 if (extent := self.extent) is None else len(Held.of(extent))

    @property
    def max_held(self) -> int | None:
        """What `held` never passes; None where only memory is the limit."""
        return self.spec.max_held

    @property
    def capacity(self) -> int | None:
        """The length that no append passes; None where only memory is the limit."""
        return self.spec.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that this cache holds, and of those that nobody does."""
        storage, pools = self.storage, self.ledger.pools[self.kind]
        if storage is None:
            return 0
        opened, sealed = self.ledger.weight(self.kind)
        opened -= pools.open.size - storage.used[0]  # for which another layer has memory so far
        sealed -= pools.sealed.size - storage.used[1]
        return opened * storage.open_nbytes + sealed * storage.sealed_nbytes

    @property
    def nbytes_used(self) -> int:
        """Bytes of rows that are there."""
        extent, storage = self.extent, self.storage
        if extent is None or storage is None:
            return 0
        which, number = extent.open_pages()
        rows = np.minimum(extent.rows[which] - number * extent.kind.page, extent.kind.page)
        sealed = len(extent.sealed_pages()[0])
        row = storage.open_nbytes // self.spec.page
        return int(rows.sum()) * row + sealed * storage.sealed_nbytes

    def nbytes_after(self, coming: int, recipe: LayerSpec) -> int:
        """The most bytes that are allocated once so many more tokens were seen, by a recipe.

        They may come at once or one by one; what a forward needs beyond that while it runs is not
        counted. Before the first rows nobody knows how large they are: 0.
        """
        storage, extent = self.storage, self.extent
        if storage is None or extent is None:
            return 0
        if recipe == self.spec:
            opened, sealed = self.ledger.weight_after(self.kind, extent, coming)
            return opened * storage.open_nbytes + sealed * storage.sealed_nbytes
        geometry, lengths = storage.geometry.of_dtype(recipe.dtype), extent.lengths + coming
        return pages_nbytes(geometry, recipe, kind_of(recipe), lengths.clip(0).tolist())

    def nbytes_with(
        self,
        keys: Tensor,
        values: Tensor | None = None,
        *,
        start: Sequence[int] | Tensor | None = None,
        order: Order = "BHTD",
        prefill: Prefill | None = None,
    ) -> int:
        """Bytes allocated once the same was appended."""
        rows, _ = incoming(self.spec, keys, values, order, None)
        batch, count = rows["keys"].shape[:3:2]
        rows, heads = self._laid(rows)
        geometry = Geometry.of(rows)
        self._check_geometry(rows)
        dense = count > 1 and self._dense(prefill)
        with self.ledger.lock:  # others may grow the same pools
            opened, sealed = self.ledger.foresee(
                self.kind, batch, count, start, dense=dense, heads=heads
            )
            held = self.ledger.weight(self.kind)
        opened, sealed = opened + held[0], sealed + held[1]
        spec = self.spec
        return opened * geometry.open_nbytes(spec) + sealed * geometry.sealed_nbytes(spec)

    def append(
        self,
        keys: Tensor,
        values: Tensor | None = None,
        *,
        start: Sequence[int] | Tensor | None = None,
        order: Order = "BHTD",
        prefill: Prefill | None = None,
    ) -> View:
        """Add the rows of T new tokens to every sequence; what attention may read for them.

        `start` says, with the first rows, how many columns of left padding each sequence has:
        those are not stored. The view stays valid until the next append, as long as the cache is
        kept. Rows whose forward never reached the other layers are taken back first.
        """
        refuse_transforms("append")
        ledger = self.ledger
        storage = ledger.book.storages.get(self.leaf)
        known = None if storage is None or self.apart else storage.geometry
        rows, familiar = incoming(self.spec, keys, values, order, known)
        batch, count = rows["keys"].shape[:3:2]
        rows, heads = self._laid(rows)
        with ledger.lock:
            ledger.enter(self.leaf, count)
            storage = ledger.book.storages.get(self.leaf)  # a prune may have moved it
            if not familiar:
                self._check_geometry(rows)
            dense = count > 1 and self._dense(prefill)
            change = ledger.begin(self.kind, batch, count, start, dense=dense, heads=heads)
            if change.room is not None:
                storage = self._fitting(rows, change.room)
            assert storage is not None
            if self.framed:
                rows = {n: codec.frame.rows(rows[n]) for n, codec in self.spec.sides.items()}
            store(change, rows, storage.sides, self.tally)
            own = rows if change.own else None
            pages = self._pages(storage, change.during, own, change.own and change.dense)
            if dense:  # a prompt reads all
                pages = pages._replace(selecting=None)
            if self.watches(count):
                pages = pages._replace(watch=partial(self._see, change.after.columns, pages.heads))
            self.tally.appends += 1
            ledger.arrive(self.leaf)
        return pages

    def watches(self, count: int) -> bool:
        """Is a prune to know what so many tokens ask?"""
        if self.pruning is None or not (score := self.pruning.score).queries:
            return False
        return score.decodes or self.ledger.is_prompt(count)

    def _see(self, columns: int, heads: int, q: Tensor, scale: float) -> None:
        """Note what the newest tokens ask, the last of so many columns; layers that share rows ask
        for themselves, and are not heard."""
        assert self.pruning is not None
        seen, most = self.ledger.seen, self.pruning.score.queries + FEW
        if self.leaf not in seen or seen[self.leaf].columns != columns:
            batch, every, _, dim = q.shape
            newest = q.detach()[:, :, -most:].reshape(batch, heads, every // heads, -1, dim)
            seen[self.leaf] = Asked(newest.clone(), columns, scale, most)

    def chosen(self, which: Bools) -> Kept:
        """The rows of these sequences that stay."""
        extent, storage = self.ledger.committed(self.kind), self.storage
        assert extent is not None and storage is not None
        asked = self.ledger.book.asked.get(self.leaf)
        return chosen(self.spec, self._pages(storage, extent), asked, which)

    def refill(self, kept: Kept, extent: Extent) -> None:
        """Write the rows that stay where they are to lie."""
        assert self.storage is not None
        self.make_room()
        fill(kept, self._pages(self.storage, extent), self.tally)

    def make_room(self) -> None:
        """Have memory for all slots that there are."""
        assert self.storage is not None
        pools = self.ledger.pools[self.kind]
        self.storage.fit(pools.open.size, pools.sealed.size)

    def seal(self, change: Change) -> None:
        """Copy and seal what falls due before such a row comes."""
        assert self.storage is not None
        store(change, no_rows(change, self.storage.sides), self.storage.sides, self.tally)

    def sealed(self, change: Change, backend: str) -> None:
        """What a change seals was sealed by somebody else, from rows in open pages."""
        if len(change.seals):
            assert self.storage is not None
            sides = self.storage.sides
            count_sealed(change, no_rows(change, sides), sides, self.tally, backend)

    def expected(self, change: Change) -> View:
        """What the query of a token sees that is expected."""
        assert self.storage is not None
        return self._pages(self.storage, change.during)

    def view(self, queries: int = 1) -> View:
        """What the newest tokens see by the rule, without an append.

        A view for many of them needs rows that are dense no more: the one that `append` returned
        has them.
        """
        extent, storage = self.extent, self.storage
        if extent is None or storage is None:
            raise ValueError("an empty layer has no shapes yet: append first")
        if not 0 < queries <= self.length:
            raise ValueError(f"a view for {queries} of {self.length} tokens: 1 to {self.length}")
        pages = self._pages(storage, extent)
        if not serves(pages, queries, pages.mask):
            raise ValueError(
                f"a view for {queries} tokens: rows that the oldest of them saw are sealed or gone;"
                " ask for fewer, or use the view that append returned"
            )
        return pages

    def read(
        self,
        start: int = 0,
        stop: int | None = None,
        *,
        order: Order = "BHTD",
        committed: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Copies of the dense keys and values in position order, as the newest token sees them.

        Without a range: all rows held, sinks first (`positions` tells which); a range counts
        columns: sequences end side by side, and what is padding reads as zeros. `committed`:
        without the forward under way.
        """
        check_order(order)
        extent, storage = self.extent, self.storage
        if committed:
            extent = self.ledger.committed(self.kind)
        if storage is None or extent is None:  # no rows, and no shapes yet
            return torch.empty(0, 0, 0, 0), torch.empty(0, 0, 0, 0)
        held, pages = Held.of(extent), self._pages(storage, extent)
        whole = start == 0 and stop is None
        framed = held.read(pages) if whole else held.between(pages, start, stop)
        rows = {n: self.spec.sides[n].frame.outputs(tensor) for n, tensor in framed.items()}
        keys = rows["keys"]
        found = rows.get("values", keys[..., : self.spec.value_dim])
        swap = order == "BTHD"
        return (keys.transpose(1, 2), found.transpose(1, 2)) if swap else (keys, found)

    def positions(self) -> Tensor:
        """The position of each row that `read()` returns, [B, n]; -1 is padding or a repeat."""
        extent = self.extent
        return (
            torch.empty(0, 0, dtype=torch.int64) if extent is None else Held.of(extent).positions()
        )

    def move(self, device: torch.device) -> None:
        """Lie in the memory of another device, while the other layers stay where they are."""
        storage = self.storage
        if storage is not None:
            with self.ledger.lock:
                moved = storage.moved(device, self.tiles)
                self.ledger.book.storages[self.leaf] = moved

    def twin(self, ledger: Ledger) -> Attention:
        """The same layer of a cache that shares pages with this one."""
        return Attention(self.spec, ledger, self.kind, self.leaf, self.tiles)

    def _dense(self, prefill: Prefill | None) -> bool:
        """Do rows of a chunk see each other as they came?"""
        if prefill not in RULES:
            raise ValueError(f"prefill {prefill!r}: 'dense' or 'stored' is needed")
        rule = "stored" if self.ledger.speculating else prefill or self.spec.prefill
        return rule == "dense"

    def _laid(self, rows: Fields) -> tuple[Fields, int]:
        """Rows as they are stored, and the tables of a sequence: where its key heads lie apart,
        each is stored as the only one of a sequence, [B * H, 1, T, D]."""
        if not self.apart:
            return rows, 1
        heads = rows["keys"].shape[1]
        return {name: one.flatten(0, 1).unsqueeze(1) for name, one in rows.items()}, heads

    def _fitting(self, rows: Fields, room: tuple[int, int]) -> Storage:
        """The storage, with room for all slots; a layer without tokens takes any shape."""
        storage = self.storage
        if storage is None or not storage.geometry.fits(rows):
            storage = Storage(self.spec, Geometry.of(rows), self.tiles)
            self.ledger.book.storages[self.leaf] = storage
        storage.fit(*room)
        return storage

    def _check_geometry(self, rows: Fields) -> None:
        storage = self.storage
        if storage is not None and not storage.geometry.fits(rows) and not self.ledger.blank:
            raise ValueError(f"rows of {Geometry.of(rows)} for a layer of {storage.geometry}")

    def _pages(
        self, storage: Storage, extent: Extent, own: Fields | None = None, dense: bool = False
    ) -> View:
        keys = storage.sides["keys"]
        values = storage.sides.get("values", keys)
        width = self.spec.value_dim or values.dim
        mask, backend, select = self.spec.mask, self.ledger.backend, None
        if self.spec.select is not None:
            select = Selecting(self.spec.select, self.ledger.pools[self.kind].sealed.takes)
        return View(keys, values, own, extent, dense, mask, width, self.tally, backend, select)

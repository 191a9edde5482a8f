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

from kvant.attention.reference import has_visible_rows
from kvant.attention.store_rows import count_sealed_pages, make_empty_rows, store_rows
from kvant.cache.advance import MAX_DRAFT_COLUMNS, bound_slots
from kvant.cache.checks import check_order, prepare_rows
from kvant.cache.pruning import RetainedRows, select_retained_rows, write_retained_rows
from kvant.cache.readable_rows import ReadableRows
from kvant.cache.state import PruningQueries
from kvant.cache.storage import Geometry, Storage
from kvant.cache.tracker import StateTracker
from kvant.contracts import Fields, LayerStats, Order, Tiles, View, ViewSelection
from kvant.page_table import AppendPlan, Bools, LayerGroup, PageTable
from kvant.recipes import LayerSpec, Prefill
from kvant.torch_modes import refuse_transforms

PREFILL_MODES = (None, "dense", "stored")


def make_layer_group(spec: LayerSpec, leaf: int | None = None) -> LayerGroup:
    """What this layer has in common with others whose integers are the same.

    A layer whose heads share what they keep of a prompt has a kind of its own.
    """
    retention, own = spec.retention, leaf if has_per_head_tables(spec) else None
    numbers = retention.window, retention.sinks, spec.slack, spec.step, spec.capacity
    return LayerGroup(spec.paging, *numbers, spec.prune, own)


def has_per_head_tables(spec: LayerSpec) -> bool:
    """Has each key head pages of its own? They do where heads keep different numbers of rows."""
    return spec.prune is not None and spec.prune.adaptive


def pages_nbytes(
    geometry: Geometry, spec: LayerSpec, layer_group: LayerGroup, lengths: Sequence[int]
) -> int:
    """Bytes that sequences have taken once they are so long."""
    opened, sealed = bound_slots(layer_group, lengths)
    return int(opened * geometry.open_nbytes(spec) + sealed * geometry.sealed_nbytes(spec))


class PagedLayer:
    """The rows of one attention layer."""

    def __init__(
        self,
        spec: LayerSpec,
        tracker: StateTracker,
        group: int,
        leaf: int,
        tiles: Tiles | None = None,
    ) -> None:
        self.spec = spec
        self.tracker = tracker
        self.group = group
        self.leaf = leaf
        self.tiles = tiles
        self.stats = LayerStats()
        self.has_frame = not all(codec.frame.is_identity for codec in spec.sides.values())
        self.pruning, self.has_per_head_tables = spec.prune, has_per_head_tables(spec)

    @property
    def storage(self) -> Storage | None:
        """None before the first rows."""
        return self.tracker.state.storages.get(self.leaf)

    @property
    def page_table(self) -> PageTable | None:
        """Where this layer is: what a forward under way brought it counts."""
        return self.tracker.get_page_table(self.group, self.leaf)

    @property
    def length(self) -> int:
        """Tokens seen, by the longest sequence, its padding included."""
        return 0 if (extent := self.page_table) is None else extent.num_columns

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first rows."""
        return 0 if (extent := self.page_table) is None else extent.batch

    @property
    def num_rows(self) -> int:
        """How many rows `read()` returns; the slack behind a window is memory, not content."""
        return (
            0 if (extent := self.page_table) is None else len(ReadableRows.from_page_table(extent))
        )

    held = num_rows  # the public name

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
        storage, pools = self.storage, self.tracker.pools[self.group]
        if storage is None:
            return 0
        opened, sealed = self.tracker.count_slots(self.group)
        opened -= (
            pools.open.size - storage.used_slots[0]
        )  # for which another layer has memory so far
        sealed -= pools.sealed.size - storage.used_slots[1]
        return opened * storage.open_nbytes + sealed * storage.sealed_nbytes

    @property
    def nbytes_used(self) -> int:
        """Bytes of rows that are there."""
        extent, storage = self.page_table, self.storage
        if extent is None or storage is None:
            return 0
        which, number = extent.list_open_pages()
        rows = np.minimum(
            extent.seq_lens[which] - number * extent.layer_group.page, extent.layer_group.page
        )
        sealed = len(extent.list_sealed_pages()[0])
        row = storage.open_nbytes // self.spec.page
        return int(rows.sum()) * row + sealed * storage.sealed_nbytes

    def nbytes_after(self, coming: int, recipe: LayerSpec) -> int:
        """The most bytes that are allocated once so many more tokens were seen, by a recipe.

        They may come at once or one by one; what a forward needs beyond that while it runs is not
        counted. Before the first rows nobody knows how large they are: 0.
        """
        storage, extent = self.storage, self.page_table
        if storage is None or extent is None:
            return 0
        if recipe == self.spec:
            opened, sealed = self.tracker.bound_slots_after(self.group, extent, coming)
            return opened * storage.open_nbytes + sealed * storage.sealed_nbytes
        geometry, lengths = storage.geometry.with_dtype(recipe.dtype), extent.lengths + coming
        return pages_nbytes(geometry, recipe, make_layer_group(recipe), lengths.clip(0).tolist())

    def nbytes_after_append(
        self,
        keys: Tensor,
        values: Tensor | None = None,
        *,
        start: Sequence[int] | Tensor | None = None,
        order: Order = "BHTD",
        prefill: Prefill | None = None,
    ) -> int:
        """Bytes allocated once the same was appended."""
        rows, _ = prepare_rows(self.spec, keys, values, order, None)
        batch, count = rows["keys"].shape[:3:2]
        rows, heads = self._split_heads(rows)
        geometry = Geometry.from_rows(rows)
        self._check_geometry(rows)
        dense = count > 1 and self._sees_prompt_dense(prefill)
        with self.tracker.lock:  # others may grow the same pools
            opened, sealed = self.tracker.predict_growth(
                self.group, batch, count, start, new_rows_dense=dense, tables_per_sequence=heads
            )
            held = self.tracker.count_slots(self.group)
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
        ledger = self.tracker
        storage = ledger.state.storages.get(self.leaf)
        known = None if storage is None or self.has_per_head_tables else storage.geometry
        rows, familiar = prepare_rows(self.spec, keys, values, order, known)
        batch, count = rows["keys"].shape[:3:2]
        rows, heads = self._split_heads(rows)
        with ledger.lock:
            ledger.begin_append(self.leaf, count)
            storage = ledger.state.storages.get(self.leaf)  # a prune may have moved it
            if not familiar:
                self._check_geometry(rows)
            dense = count > 1 and self._sees_prompt_dense(prefill)
            change = ledger.plan_append(
                self.group, batch, count, start, new_rows_dense=dense, tables_per_sequence=heads
            )
            if change.pool_sizes is not None:
                storage = self._get_storage(rows, change.pool_sizes)
            assert storage is not None
            if self.has_frame:
                rows = {
                    n: codec.frame.transform_rows(rows[n]) for n, codec in self.spec.sides.items()
                }
            store_rows(change, rows, storage.sides, self.stats)
            own = rows if change.reads_new_rows else None
            pages = self._make_view(
                storage, change.read_table, own, change.reads_new_rows and change.new_rows_dense
            )
            if dense:  # a prompt reads all
                pages = pages._replace(selection=None)
            if self.needs_queries(count):
                pages = pages._replace(
                    query_listener=partial(
                        self._record_queries, change.new_table.num_columns, pages.heads
                    )
                )
            self.stats.appends += 1
            ledger.commit_layer(self.leaf)
        return pages

    def needs_queries(self, count: int) -> bool:
        """Is a prune to know what so many tokens ask?"""
        if self.pruning is None or not (score := self.pruning.score).num_queries:
            return False
        return score.prunes_during_decode or self.tracker.is_prompt(count)

    def _record_queries(self, num_columns: int, num_heads: int, q: Tensor, scale: float) -> None:
        """Note what the newest tokens ask, the last of so many columns; layers that share rows ask
        for themselves, and are not heard."""
        assert self.pruning is not None
        seen, most = (
            self.tracker.forward_queries,
            self.pruning.score.num_queries + MAX_DRAFT_COLUMNS,
        )
        if self.leaf not in seen or seen[self.leaf].num_columns != num_columns:
            batch, every, _, dim = q.shape
            newest = q.detach()[:, :, -most:].reshape(batch, num_heads, every // num_heads, -1, dim)
            seen[self.leaf] = PruningQueries(newest.clone(), num_columns, scale, most)

    def select_retained_rows(self, sequence_mask: Bools) -> RetainedRows:
        """The rows of these sequences that stay."""
        extent, storage = self.tracker.get_committed_table(self.group), self.storage
        assert extent is not None and storage is not None
        asked = self.tracker.state.pruning_queries.get(self.leaf)
        return select_retained_rows(
            self.spec, self._make_view(storage, extent), asked, sequence_mask
        )

    def write_retained_rows(self, retained: RetainedRows, page_table: PageTable) -> None:
        """Write the rows that stay where they are to lie."""
        assert self.storage is not None
        self.grow_storage()
        write_retained_rows(retained, self._make_view(self.storage, page_table), self.stats)

    def grow_storage(self) -> None:
        """Have memory for all slots that there are."""
        assert self.storage is not None
        pools = self.tracker.pools[self.group]
        self.storage.ensure_slots(pools.open.size, pools.sealed.size)

    def seal_due_pages(self, plan: AppendPlan) -> None:
        """Copy and seal what falls due before such a row comes."""
        assert self.storage is not None
        store_rows(plan, make_empty_rows(plan, self.storage.sides), self.storage.sides, self.stats)

    def record_sealed_pages(self, plan: AppendPlan, backend: str) -> None:
        """What a change seals was sealed by somebody else, from rows in open pages."""
        if len(plan.seals):
            assert self.storage is not None
            sides = self.storage.sides
            count_sealed_pages(plan, make_empty_rows(plan, sides), sides, self.stats, backend)

    def make_view(self, plan: AppendPlan) -> View:
        """What the query of a token sees that is expected."""
        assert self.storage is not None
        return self._make_view(self.storage, plan.read_table)

    def view(self, queries: int = 1) -> View:
        """What the newest tokens see by the rule, without an append.

        A view for many of them needs rows that are dense no more: the one that `append` returned
        has them.
        """
        extent, storage = self.page_table, self.storage
        if extent is None or storage is None:
            raise ValueError("an empty layer has no shapes yet: append first")
        if not 0 < queries <= self.length:
            raise ValueError(f"a view for {queries} of {self.length} tokens: 1 to {self.length}")
        pages = self._make_view(storage, extent)
        if not has_visible_rows(pages, queries, pages.mask):
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
        extent, storage = self.page_table, self.storage
        if committed:
            extent = self.tracker.get_committed_table(self.group)
        if storage is None or extent is None:  # no rows, and no shapes yet
            return torch.empty(0, 0, 0, 0), torch.empty(0, 0, 0, 0)
        held, pages = ReadableRows.from_page_table(extent), self._make_view(storage, extent)
        whole = start == 0 and stop is None
        framed = held.read_all(pages) if whole else held.read_range(pages, start, stop)
        rows = {n: self.spec.sides[n].frame.restore_outputs(tensor) for n, tensor in framed.items()}
        keys = rows["keys"]
        found = rows.get("values", keys[..., : self.spec.value_dim])
        swap = order == "BTHD"
        return (keys.transpose(1, 2), found.transpose(1, 2)) if swap else (keys, found)

    def positions(self) -> Tensor:
        """The position of each row that `read()` returns, [B, n]; -1 is padding or a repeat."""
        extent = self.page_table
        return (
            torch.empty(0, 0, dtype=torch.int64)
            if extent is None
            else ReadableRows.from_page_table(extent).compute_positions()
        )

    def move(self, device: torch.device) -> None:
        """Lie in the memory of another device, while the other layers stay where they are."""
        storage = self.storage
        if storage is not None:
            with self.tracker.lock:
                moved = storage.copy_to_device(device, self.tiles)
                self.tracker.state.storages[self.leaf] = moved

    def make_sibling(self, tracker: StateTracker) -> PagedLayer:
        """The same layer of a cache that shares pages with this one."""
        return PagedLayer(self.spec, tracker, self.group, self.leaf, self.tiles)

    def _sees_prompt_dense(self, prefill: Prefill | None) -> bool:
        """Do rows of a chunk see each other as they came?"""
        if prefill not in PREFILL_MODES:
            raise ValueError(f"prefill {prefill!r}: 'dense' or 'stored' is needed")
        rule = "stored" if self.tracker.in_speculation else prefill or self.spec.prefill
        return rule == "dense"

    def _split_heads(self, rows: Fields) -> tuple[Fields, int]:
        """Rows as they are stored, and the tables of a sequence: where its key heads lie apart,
        each is stored as the only one of a sequence, [B * H, 1, T, D]."""
        if not self.has_per_head_tables:
            return rows, 1
        heads = rows["keys"].shape[1]
        return {name: one.flatten(0, 1).unsqueeze(1) for name, one in rows.items()}, heads

    def _get_storage(self, rows: Fields, pool_sizes: tuple[int, int]) -> Storage:
        """The storage, with room for all slots; a layer without tokens takes any shape."""
        storage = self.storage
        if storage is None or not storage.geometry.matches(rows):
            storage = Storage(self.spec, Geometry.from_rows(rows), self.tiles)
            self.tracker.state.storages[self.leaf] = storage
        storage.ensure_slots(*pool_sizes)
        return storage

    def _check_geometry(self, rows: Fields) -> None:
        storage = self.storage
        if storage is not None and not storage.geometry.matches(rows) and not self.tracker.is_empty:
            raise ValueError(
                f"rows of {Geometry.from_rows(rows)} for a layer of {storage.geometry}"
            )

    def _make_view(
        self,
        storage: Storage,
        page_table: PageTable,
        new_rows: Fields | None = None,
        new_rows_dense: bool = False,
    ) -> View:
        keys = storage.sides["keys"]
        values = storage.sides.get("values", keys)
        width = self.spec.value_dim or values.dim
        mask, backend, select = self.spec.mask, self.tracker.backend, None
        if self.spec.select is not None:
            select = ViewSelection(
                self.spec.select, self.tracker.pools[self.group].sealed.slot_versions
            )
        return View(
            keys,
            values,
            new_rows,
            page_table,
            new_rows_dense,
            mask,
            width,
            self.stats,
            backend,
            select,
        )

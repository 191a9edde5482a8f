"""One attention layer of a cache: it stores rows in pages and returns views of them.

It has no integers of its own: the state tracker plans an append once for all layers of a group.
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
from kvant.cache.advance import MAX_DRAFT_COLUMNS
from kvant.cache.checks import check_order, prepare_rows
from kvant.cache.pool_sizing import bound_slots
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
    """Return the group of a layer: the parameters that layers with one page table share.

    A layer with a page table per head has a group of its own.
    """
    retention, per_head_layer = spec.retention, leaf if has_per_head_tables(spec) else None
    numbers = retention.window, retention.sinks, spec.slack, spec.step, spec.capacity
    return LayerGroup(spec.paging, *numbers, spec.prune, per_head_layer)


def has_per_head_tables(spec: LayerSpec) -> bool:
    """Return whether each key head has pages of its own: heads retain different rows."""
    return spec.prune is not None and spec.prune.adaptive


def pages_nbytes(
    geometry: Geometry, spec: LayerSpec, layer_group: LayerGroup, lengths: Sequence[int]
) -> int:
    """Return the bytes of the pages of sequences of these lengths."""
    max_open, max_sealed = bound_slots(layer_group, lengths)
    return int(max_open * geometry.open_nbytes(spec) + max_sealed * geometry.sealed_nbytes(spec))


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
        """The tensors; None before the first rows."""
        return self.tracker.state.storages.get(self.leaf)

    @property
    def page_table(self) -> PageTable | None:
        """The table of this layer, with the rows of an open forward included."""
        return self.tracker.get_page_table(self.group, self.leaf)

    @property
    def length(self) -> int:
        """Tokens of the longest sequence, padding included."""
        return 0 if (page_table := self.page_table) is None else page_table.num_columns

    @property
    def batch(self) -> int:
        """The number of sequences; 0 before the first rows."""
        return 0 if (page_table := self.page_table) is None else page_table.batch

    @property
    def num_rows(self) -> int:
        """Number of rows that `read()` returns: without the slack rows before a window."""
        page_table = self.page_table
        return 0 if page_table is None else len(ReadableRows.from_page_table(page_table))

    held = num_rows  # the public name

    @property
    def max_held(self) -> int | None:
        """Upper bound of `held`; None: unbounded."""
        return self.spec.max_held

    @property
    def capacity(self) -> int | None:
        """The maximum length; None: unbounded."""
        return self.spec.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that this cache holds, and of the free pages of its pools."""
        storage, pools = self.storage, self.tracker.pools[self.group]
        if storage is None:
            return 0
        num_open, num_sealed = self.tracker.count_slots(self.group)
        # Slots that only other layers of the group have memory for so far do not count.
        num_open -= pools.open.size - storage.used_slots[0]
        num_sealed -= pools.sealed.size - storage.used_slots[1]
        return num_open * storage.open_nbytes + num_sealed * storage.sealed_nbytes

    @property
    def nbytes_used(self) -> int:
        """Bytes of stored rows."""
        page_table, storage = self.page_table, self.storage
        if page_table is None or storage is None:
            return 0
        tables, page_numbers = page_table.list_open_pages()
        num_rows = np.minimum(
            page_table.seq_lens[tables] - page_numbers * page_table.layer_group.page,
            page_table.layer_group.page,
        )
        num_sealed = len(page_table.list_sealed_pages()[0])
        row_nbytes = storage.open_nbytes // self.spec.page
        return int(num_rows.sum()) * row_nbytes + num_sealed * storage.sealed_nbytes

    def nbytes_after(self, num_new_tokens: int, recipe: LayerSpec) -> int:
        """Return the maximum of bytes after `num_new_tokens` more tokens, stored by `recipe`.

        The tokens may come in chunks or one at a time. Temporary memory of a forward is not
        counted. The result is 0 before the first rows, because their size is unknown.
        """
        storage, page_table = self.storage, self.page_table
        if storage is None or page_table is None:
            return 0
        if recipe == self.spec:
            max_open, max_sealed = self.tracker.bound_slots_after(
                self.group, page_table, num_new_tokens
            )
            return max_open * storage.open_nbytes + max_sealed * storage.sealed_nbytes
        geometry, lengths = (
            storage.geometry.with_dtype(recipe.dtype),
            page_table.lengths + num_new_tokens,
        )
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
        """Return the bytes allocated after an append of the same arguments."""
        rows, _ = prepare_rows(self.spec, keys, values, order, None)
        batch, count = rows["keys"].shape[:3:2]
        rows, heads = self._split_heads(rows)
        geometry = Geometry.from_rows(rows)
        self._check_geometry(rows)
        dense = count > 1 and self._sees_prompt_dense(prefill)
        with self.tracker.lock:  # other threads may grow the same pools
            num_open, num_sealed = self.tracker.predict_growth(
                self.group, batch, count, start, new_rows_dense=dense, tables_per_sequence=heads
            )
            present = self.tracker.count_slots(self.group)
        num_open += present[0]
        num_sealed += present[1]
        spec = self.spec
        return num_open * geometry.open_nbytes(spec) + num_sealed * geometry.sealed_nbytes(spec)

    def append(
        self,
        keys: Tensor,
        values: Tensor | None = None,
        *,
        start: Sequence[int] | Tensor | None = None,
        order: Order = "BHTD",
        prefill: Prefill | None = None,
    ) -> View:
        """Append the rows of T tokens to every sequence; return the view for attention.

        `start` gives the columns of left padding of each sequence, with its first rows; padding is
        not stored. The view is valid until the next append, while the cache is alive. An incomplete
        forward is rolled back first.
        """
        refuse_transforms("append")
        tracker = self.tracker
        storage = tracker.state.storages.get(self.leaf)
        geometry = None if storage is None or self.has_per_head_tables else storage.geometry
        rows, is_checked = prepare_rows(self.spec, keys, values, order, geometry)
        batch, count = rows["keys"].shape[:3:2]
        rows, heads = self._split_heads(rows)
        with tracker.lock:
            tracker.begin_append(self.leaf, count)
            storage = tracker.state.storages.get(self.leaf)  # a prune may have replaced it
            if not is_checked:
                self._check_geometry(rows)
            dense = count > 1 and self._sees_prompt_dense(prefill)
            plan = tracker.plan_append(
                self.group, batch, count, start, new_rows_dense=dense, tables_per_sequence=heads
            )
            if plan.pool_sizes is not None:
                storage = self._get_storage(rows, plan.pool_sizes)
            assert storage is not None
            if self.has_frame:
                rows = {
                    n: codec.frame.transform_rows(rows[n]) for n, codec in self.spec.sides.items()
                }
            store_rows(plan, rows, storage.sides, self.stats)
            new_rows = rows if plan.reads_new_rows else None
            view = self._make_view(
                storage, plan.read_table, new_rows, plan.reads_new_rows and plan.new_rows_dense
            )
            if dense:  # prompts read all pages
                view = view._replace(selection=None)
            if self.needs_queries(count):
                view = view._replace(
                    query_listener=partial(
                        self._record_queries, plan.new_table.num_columns, view.heads
                    )
                )
            self.stats.appends += 1
            tracker.commit_layer(self.leaf)
        return view

    def needs_queries(self, count: int) -> bool:
        """Return whether the queries of a forward of `count` tokens are needed for pruning."""
        if self.pruning is None or not (score := self.pruning.score).num_queries:
            return False
        return score.prunes_during_decode or self.tracker.is_prompt(count)

    def _record_queries(self, num_columns: int, num_heads: int, q: Tensor, scale: float) -> None:
        """Record the newest queries of a forward that ends at column `num_columns`.

        Only the first call of a forward counts: layers that share these rows call it later.
        """
        assert self.pruning is not None
        recorded = self.tracker.forward_queries
        max_queries = self.pruning.score.num_queries + MAX_DRAFT_COLUMNS
        if self.leaf not in recorded or recorded[self.leaf].num_columns != num_columns:
            batch, num_query_heads, _, dim = q.shape
            newest = q.detach()[:, :, -max_queries:].reshape(
                batch, num_heads, num_query_heads // num_heads, -1, dim
            )
            recorded[self.leaf] = PruningQueries(newest.clone(), num_columns, scale, max_queries)

    def select_retained_rows(self, sequence_mask: Bools) -> RetainedRows:
        """Return the rows of these sequences that a prune retains."""
        page_table, storage = self.tracker.get_committed_table(self.group), self.storage
        assert page_table is not None and storage is not None
        queries = self.tracker.state.pruning_queries.get(self.leaf)
        return select_retained_rows(
            self.spec, self._make_view(storage, page_table), queries, sequence_mask
        )

    def write_retained_rows(self, retained: RetainedRows, page_table: PageTable) -> None:
        """Write the retained rows into the pages of `page_table`."""
        assert self.storage is not None
        self.grow_storage()
        write_retained_rows(retained, self._make_view(self.storage, page_table), self.stats)

    def grow_storage(self) -> None:
        """Allocate memory for all slots of the pools."""
        assert self.storage is not None
        pools = self.tracker.pools[self.group]
        self.storage.ensure_slots(pools.open.size, pools.sealed.size)

    def seal_due_pages(self, plan: AppendPlan) -> None:
        """Apply the copies and seals of a plan whose rows are still to be written."""
        assert self.storage is not None
        store_rows(plan, make_empty_rows(plan, self.storage.sides), self.storage.sides, self.stats)

    def record_sealed_pages(self, plan: AppendPlan, backend: str) -> None:
        """Count the pages of a plan that an external kernel has sealed from open pages."""
        if len(plan.seals):
            assert self.storage is not None
            sides = self.storage.sides
            count_sealed_pages(plan, make_empty_rows(plan, sides), sides, self.stats, backend)

    def make_view(self, plan: AppendPlan) -> View:
        """Return the view of the token of `Cache.expect`."""
        assert self.storage is not None
        return self._make_view(self.storage, plan.read_table)

    def view(self, queries: int = 1) -> View:
        """Return the view of the `queries` newest tokens, without an append.

        Several queries may need dense rows that are gone; the view that `append` returned has them.
        """
        page_table, storage = self.page_table, self.storage
        if page_table is None or storage is None:
            raise ValueError("an empty layer has no shapes yet: append first")
        if not 0 < queries <= self.length:
            raise ValueError(f"a view for {queries} of {self.length} tokens: 1 to {self.length}")
        view = self._make_view(storage, page_table)
        if not has_visible_rows(view, queries, view.mask):
            raise ValueError(
                f"a view for {queries} tokens: dense rows that the oldest of them needs are sealed "
                "or released; use fewer, or the view that append returned"
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
        """Return dense copies of keys and values by position, as the newest token reads them.

        Without a range: all rows, sinks first (`positions` gives their positions). A range counts
        columns: sequences are aligned at the newest token, and padding reads as zeros. `committed`
        excludes an open forward.
        """
        check_order(order)
        page_table, storage = self.page_table, self.storage
        if committed:
            page_table = self.tracker.get_committed_table(self.group)
        if storage is None or page_table is None:  # no rows, so no shapes yet
            return torch.empty(0, 0, 0, 0), torch.empty(0, 0, 0, 0)
        readable = ReadableRows.from_page_table(page_table)
        view = self._make_view(storage, page_table)
        whole = start == 0 and stop is None
        framed = readable.read_all(view) if whole else readable.read_range(view, start, stop)
        rows = {n: self.spec.sides[n].frame.restore_outputs(tensor) for n, tensor in framed.items()}
        keys = rows["keys"]
        values = rows.get("values", keys[..., : self.spec.value_dim])
        swap = order == "BTHD"
        return (keys.transpose(1, 2), values.transpose(1, 2)) if swap else (keys, values)

    def positions(self) -> Tensor:
        """Return the position of each row of `read()`, [B, n]; -1: padding, or a repeated row."""
        page_table = self.page_table
        return (
            torch.empty(0, 0, dtype=torch.int64)
            if page_table is None
            else ReadableRows.from_page_table(page_table).compute_positions()
        )

    def move(self, device: torch.device) -> None:
        """Move the tensors of this layer to another device; other layers stay."""
        storage = self.storage
        if storage is not None:
            with self.tracker.lock:
                storage_copy = storage.copy_to_device(device, self.tiles)
                self.tracker.state.storages[self.leaf] = storage_copy

    def make_sibling(self, tracker: StateTracker) -> PagedLayer:
        """Return this layer for a cache over the same pools."""
        return PagedLayer(self.spec, tracker, self.group, self.leaf, self.tiles)

    def _sees_prompt_dense(self, prefill: Prefill | None) -> bool:
        """Return whether a chunk reads its own rows dense."""
        if prefill not in PREFILL_MODES:
            raise ValueError(f"prefill {prefill!r}: 'dense' or 'stored' is needed")
        rule = "stored" if self.tracker.in_speculation else prefill or self.spec.prefill
        return rule == "dense"

    def _split_heads(self, rows: Fields) -> tuple[Fields, int]:
        """Return the rows to store, and the number of tables per sequence.

        With a table per head, each head is stored as a sequence of one head: [B * H, 1, T, D].
        """
        if not self.has_per_head_tables:
            return rows, 1
        heads = rows["keys"].shape[1]
        return {name: tensor.flatten(0, 1).unsqueeze(1) for name, tensor in rows.items()}, heads

    def _get_storage(self, rows: Fields, pool_sizes: tuple[int, int]) -> Storage:
        """Return the storage with all slots allocated; an empty layer accepts new shapes."""
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

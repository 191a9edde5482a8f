"""The public layers of a cache: each appends its rows of a forward pass, and reads them back.

A layer has no data of its own: its recipe and its rows are in the state of the holder, so it stays
valid when a recode or a restore replaces them. Before rows are stored, the frame of their codec is
applied: an invertible linear map, such as a rotation.

The way of a token: `PagedLayer.append` -> `StateHolder.begin_append` (holder.py) ->
`Forward.plan_append` (forward.py) -> `advance` (pages/advance.py), then `store_rows`
(attention/store_rows.py), and at the last layer `Forward.commit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention.length_groups import has_visible_rows
from kvant.attention.store_rows import store_rows
from kvant.cache.checks import check_order, prepare_rows
from kvant.cache.forward import Forward
from kvant.cache.holder import StateHolder
from kvant.cache.layout import AttentionLeaf, make_layer_group
from kvant.cache.readable_rows import ReadableRows
from kvant.cache.recurrent_layer import RecurrentLayer
from kvant.contracts import AttentionRequest, Fields, LayerStats, Order, View
from kvant.page_table import AppendPlan, PageTable
from kvant.pages.storage import Geometry, Storage, pages_nbytes
from kvant.platform.torch_runtime import get_transform, make_transform_error
from kvant.recipes import (
    CacheSpec,
    EmptySpec,
    GroupSpec,
    LayerSpec,
    Prefill,
    SharedSpec,
)

PREFILL_MODES = (None, "dense", "stored")


class PagedLayer:
    """The rows of one attention layer."""

    def __init__(self, holder: StateHolder, name: str) -> None:
        self.holder = holder
        self.name = name

    @property
    def leaf(self) -> AttentionLeaf:
        """Its recipe and its place in the state."""
        return self.holder.state.layout.attention_by_name[self.name]

    @property
    def spec(self) -> LayerSpec:
        return self.leaf.spec

    @property
    def stats(self) -> LayerStats:
        return self.holder.stats[self.name]

    @property
    def storage(self) -> Storage | None:
        """The tensors; None before the first rows."""
        return self.holder.get_storage(self.leaf.index)

    @property
    def page_table(self) -> PageTable | None:
        """The table of this layer, with the rows of an open forward included."""
        return self.holder.get_page_table(self.leaf)

    @property
    def has_appended(self) -> bool:
        """Whether it has appended to the open forward: if so, its next append begins another."""
        forward = self.holder.read()[1]
        return forward is not None and self.leaf.index in forward.appended

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
        leaf, storage = self.leaf, self.storage
        if storage is None:
            return 0
        num_open, num_sealed = self.holder.count_slots(leaf.group)
        pools = self.holder.state.pools[leaf.group]
        # Do not count slots for which this layer, unlike others of its group, has no memory yet.
        num_open -= pools.open.size - storage.used_slots[0]
        num_sealed -= pools.sealed.size - storage.used_slots[1]
        return num_open * storage.open_nbytes + num_sealed * storage.sealed_nbytes

    def count_raw_nbytes(self, window: int | None = None) -> int:
        """Return the bytes of the rows of all tokens, or of the last `window`, if uncompressed."""
        page_table, storage = self.page_table, self.storage
        if page_table is None or storage is None:
            return 0
        lengths = page_table.seq_lens
        num_rows = int((lengths if window is None else np.minimum(lengths, window)).sum())
        return num_rows * storage.open_nbytes // self.spec.page

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
            max_open, max_sealed = self.holder.bound_slots_after(
                self.leaf.group, page_table, num_new_tokens
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
        leaf, holder = self.leaf, self.holder
        rows = prepare_rows(leaf.spec, keys, values, order)
        batch, count = rows["keys"].shape[:3:2]
        if leaf.has_per_head_tables:
            rows = _split_heads(rows)
        geometry = Geometry.from_rows(rows)
        self._check_geometry(rows)
        with holder.lock:  # other threads may grow the same pools
            forward = holder.open_forward or Forward(holder.state)
            num_open, num_sealed = forward.predict_growth(
                leaf.group,
                batch,
                count,
                start,
                new_rows_dense=count > 1 and self._reads_new_rows_dense(prefill),
                tables_per_sequence=len(rows["keys"]) // batch,
            )
            present = holder.count_slots(leaf.group)
        open_nbytes, sealed_nbytes = (
            geometry.open_nbytes(leaf.spec),
            geometry.sealed_nbytes(leaf.spec),
        )
        return (num_open + present[0]) * open_nbytes + (num_sealed + present[1]) * sealed_nbytes

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

        `start` is the number of columns of left padding of each sequence, which are not stored; it
        goes with the first append. The view is valid until the next append, while the cache is
        alive. An incomplete forward is rolled back first.
        """
        if get_transform() is not None:
            raise make_transform_error("append")
        holder = self.holder
        leaf = holder.state.layout.attention_by_name[self.name]
        storage, heads = holder.state.storages.get(leaf.index), 1
        rows: Fields = {"keys": keys} if values is None else {"keys": keys, "values": values}
        # Rows that match the stored geometry, as most do, need no other check.
        matches = order == "BHTD" and storage is not None and storage.geometry.matches(rows)
        if not matches or leaf.has_per_head_tables:
            rows, matches = prepare_rows(leaf.spec, keys, values, order), False
        batch, count = rows["keys"].shape[:3:2]
        if leaf.has_per_head_tables:
            heads = rows["keys"].shape[1]
            rows = _split_heads(rows)
        with holder.state.pools.lock:
            forward = holder.begin_append(leaf.index, count)
            if not matches:
                storage = holder.get_storage(leaf.index)
                self._check_geometry(rows)
            dense = count > 1 and self._reads_new_rows_dense(prefill)
            plan = forward.plan_append(
                leaf.group, batch, count, start, new_rows_dense=dense, tables_per_sequence=heads
            )
            if plan.pool_sizes is not None:
                storage = self._grow_storage(forward, leaf, rows, plan.pool_sizes)
            assert storage is not None
            if leaf.has_frame:
                rows = {
                    n: codec.frame.transform_rows(rows[n]) for n, codec in leaf.spec.sides.items()
                }
            stats = holder.stats[self.name]
            store_rows(plan, rows, storage.sides, stats)
            # A long chunk, or one with rows that are sealed at once, is read from `new_rows`, not
            # from pages. With `new_rows_dense`, all queries read all `new_rows` dense. Otherwise
            # each query reads its due pages as sealed.
            view = leaf.make_view(
                holder.state.pools,
                storage,
                plan.read_table,
                stats,
                holder.backend,
                new_rows=rows if plan.reads_new_rows else None,
                new_rows_dense=plan.reads_new_rows and plan.new_rows_dense,
            )
            if dense:  # prompts read all pages
                view = view._replace(selection=None)
            if leaf.spec.prune is not None:
                listener = _make_query_listener(holder, forward, leaf, view)
                view = view._replace(query_listener=listener)
            stats.appends += 1
            holder.commit_layer(forward, leaf.index)
        return view

    def make_view(self, plan: AppendPlan) -> View:
        """Return the view for the token that `plan` has planned."""
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
            page_table = self.holder.state.get_page_table(self.leaf.group)
        if storage is None or page_table is None:  # no rows, so no shapes yet
            return torch.empty(0, 0, 0, 0), torch.empty(0, 0, 0, 0)
        readable = ReadableRows.from_page_table(page_table)
        view = self._make_view(storage, page_table)
        whole = start == 0 and stop is None
        transformed = readable.read_all(view) if whole else readable.read_range(view, start, stop)
        rows = {
            n: self.spec.sides[n].frame.restore_outputs(tensor) for n, tensor in transformed.items()
        }
        keys = rows["keys"]
        values = rows.get("values", keys[..., : self.spec.value_dim])
        swap = order == "BTHD"
        return (keys.transpose(1, 2), values.transpose(1, 2)) if swap else (keys, values)

    def positions(self) -> Tensor:
        """Return the position of each row of `read()`, [B, n].

        -1: padding, a pruned row, or a second copy of a sink (in columns of a shorter sequence).
        """
        page_table = self.page_table
        return (
            torch.empty(0, 0, dtype=torch.int64)
            if page_table is None
            else ReadableRows.from_page_table(page_table).compute_positions()
        )

    def move(self, device: torch.device) -> None:
        """Move the tensors of this layer to another device; other layers stay."""
        holder, index = self.holder, self.leaf.index
        with holder.lock:
            if (storage := holder.state.storages.get(index)) is not None:
                storages = {**holder.state.storages, index: storage.copy_to_device(device)}
                holder.replace_state(storages=storages)

    def _reads_new_rows_dense(self, prefill: Prefill | None) -> bool:
        """Return whether the tokens of a chunk read the rows of that chunk dense."""
        if prefill not in PREFILL_MODES:
            raise ValueError(f"prefill {prefill!r}: 'dense' or 'stored' is needed")
        rule = "stored" if self.holder.in_speculation else prefill or self.spec.prefill
        return rule == "dense"

    def _grow_storage(
        self, forward: Forward, leaf: AttentionLeaf, rows: Fields, pool_sizes: tuple[int, int]
    ) -> Storage:
        """Return the storage with all slots allocated; an empty layer accepts new shapes."""
        storage = self.holder.get_storage(leaf.index)  # a prune may have replaced it
        if storage is None or not storage.geometry.matches(rows):
            storage = forward.storages[leaf.index] = leaf.make_storage(Geometry.from_rows(rows))
        storage.ensure_slots(*pool_sizes)
        return storage

    def _check_geometry(self, rows: Fields) -> None:
        storage, is_empty = self.storage, self.holder.state.is_empty
        if storage is not None and not storage.geometry.matches(rows) and not is_empty:
            raise ValueError(
                f"rows of {Geometry.from_rows(rows)} for a layer of {storage.geometry}"
            )

    def _make_view(self, storage: Storage, page_table: PageTable) -> View:
        holder = self.holder
        return self.leaf.make_view(
            holder.state.pools, storage, page_table, self.stats, holder.backend
        )


def _make_query_listener(
    holder: StateHolder, forward: Forward, leaf: AttentionLeaf, view: View
) -> Callable[[AttentionRequest], None] | None:
    """Return what records the queries of a forward for a prune; None: no prune needs them.

    A score that `repeats_prompt` is computed by a second pass over the prompt: its queries are
    recorded by `RowAttention`, those of other scores by the forward.
    """
    assert leaf.spec.prune is not None
    score = leaf.spec.prune.score
    if holder.row_attention is not None and score.repeats_prompt:
        return partial(holder.row_attention.record, leaf.index, view)
    if score.num_queries and (forward.is_prompt or score.prunes_during_decode):
        return partial(forward.record_queries, leaf, view.heads)
    return None


def _split_heads(rows: Fields) -> Fields:
    """Return each head as a sequence of one head, [B * H, 1, T, D]: heads have own tables."""
    return {name: tensor.flatten(0, 1).unsqueeze(1) for name, tensor in rows.items()}


AnyLayer = Any  # a PagedLayer, a RecurrentLayer or an ExternalState


class GroupLayer(dict[str, AnyLayer]):
    """A layer with several caches, by name; each is appended to on its own."""

    @property
    def length(self) -> int:
        return min(int(part.length) for part in self.values())

    def read(self) -> dict[str, Any]:
        """Return the contents of every part, by name."""
        return {name: part.read() for name, part in self.items()}

    def append(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"this layer has several caches: append to its parts {', '.join(self)}")


def make_layers(holder: StateHolder, spec: CacheSpec) -> tuple[dict[str, AnyLayer], dict[int, Any]]:
    """Return the layers of a cache by leaf name, and by layer number."""
    leaves: dict[str, AnyLayer] = dict.fromkeys(holder.state.layout.names)
    leaves |= holder.external_states
    for name, leaf in holder.state.layout.leaves.items():
        layer_class = PagedLayer if isinstance(leaf, AttentionLeaf) else RecurrentLayer
        leaves[name] = layer_class(holder, name)
    layers: dict[int, Any] = {}
    for index, recipe in enumerate(spec.layers):
        if isinstance(recipe, SharedSpec):
            layers[index] = layers[recipe.layer]
        elif isinstance(recipe, GroupSpec):
            layers[index] = GroupLayer(
                (name, leaves[f"{index}/{name}"]) for name, _ in recipe.parts
            )
        elif not isinstance(recipe, EmptySpec):
            layers[index] = leaves[str(index)]
    return leaves, layers

"""Pages to and from prefix stores: a cache of one sequence as immutable pages plus a tail state.

A page holds P positions of all layers of a group. It is a sealed page, or a full open page if the
group never seals. The tail state is everything else: the numbers of page tables, recurrent states,
and rows of the other open pages. Pages and tail state together are a snapshot:

    cache ─► PageSet ─► pages, tail state ─► store ─► RestoreBuffer ─► cache

What a store returns is untrusted: RestoreBuffer validates it, and writes each page directly to its
slot. The pages of a long prompt have hundreds of MiB, so an extra copy of them would take as long
as reading them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Condition

import numpy as np
import torch
from torch import Tensor

from kvant.cache.cache import Cache, make_sibling
from kvant.cache.layout import AttentionLeaf
from kvant.cache.reports import count_state_nbytes, get_slot_nbytes
from kvant.cache.snapshot import (
    NUMBERS_KEY,
    ParsedSnapshot,
    parse_snapshot,
    snapshot_layer,
    take_snapshot,
)
from kvant.cache.state import CacheState
from kvant.cache.transitions import Transition
from kvant.contracts import Fields, Snapshot, Tiles
from kvant.errors import SnapshotMismatch
from kvant.page_table import (
    FIRST_OPEN,
    FIRST_SEALED,
    LENGTH,
    PADDING,
    PRUNED_AT,
    STOP_SEALED,
    Ints,
    LayerGroup,
)
from kvant.pages.advance import allocate_table, list_allocated_slots
from kvant.pages.storage import SideTensors, Storage, copy_sides, find_runs, retile

PageId = tuple[int, int]  # layer group, page number
TensorShapes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]  # the tensors of a page


class PageSet:
    """The pages of a cache of one sequence; the cache must not change while it is in use."""

    def __init__(self, cache: Cache) -> None:
        if cache.batch != 1 or not cache.length:
            raise ValueError(f"a page set of {cache.batch} sequences: one with tokens is needed")
        cache.rollback()
        self.cache = cache
        self._state = cache.state
        self._page_tables = cache.state.page_tables
        self.layer_groups = cache.state.layout.layer_groups
        self.page_ranges = tuple(
            _find_full_pages(table.layer_group, table.numbers[0]) for table in self._page_tables
        )

    def nbytes(self, page_id: PageId | None) -> int:
        """Return the bytes of a page; for None, the approximate bytes of the tail state."""
        if page_id is not None:
            group = page_id[0]
            return get_slot_nbytes(self._state, group)[self.layer_groups[group].seals]
        total = count_state_nbytes(self.cache)
        for group, page_table in enumerate(self._page_tables):
            num_open = len(page_table.list_open_pages()[0])
            num_full = 0 if page_table.layer_group.seals else len(self.page_ranges[group])
            total += (num_open - num_full) * get_slot_nbytes(self._state, group)[0]
        return total

    def copy_pages(self, group: int, page_numbers: Sequence[int], into: Fields) -> None:
        """Copy pages of a group into the tensors `into`, one page per entry."""
        page_table = self._page_tables[group]
        slots = (
            page_table.sealed_table if page_table.layer_group.seals else page_table.open_table
        )[0, list(page_numbers)]
        layers = get_layer_sides(self._state, group)
        runs = find_runs(slots, np.arange(len(slots)))
        for name, field, pages, tiles in iterate_page_fields(layers, page_table.layer_group):
            for source, target in runs:
                retile(field, pages[source], tiles, None, into[f"{name}/{field}"][target])

    def snapshot_tail_state(self) -> Snapshot:
        """Return the state that is in none of the pages."""
        external_states = self.cache.holder.external_states
        return take_snapshot(self._state, external_states, self._snapshot_open_rows)

    def _snapshot_open_rows(self, leaf: AttentionLeaf) -> Snapshot:
        page_table, full_pages = self._page_tables[leaf.group], self.page_ranges[leaf.group]
        page_numbers = page_table.list_open_pages()[1]
        in_tail = (page_numbers < full_pages.start) | (page_numbers >= full_pages.stop)
        in_tail |= page_table.layer_group.seals
        storage = self._state.storages.get(leaf.index)
        return snapshot_layer(storage, page_table, in_tail, include_sealed=False)


def list_page_sizes(cache: Cache) -> tuple[int, ...]:
    """Return the number of positions in a page, by layer group."""
    return tuple(group.page for group in cache.state.layout.layer_groups)


def list_required_pages(cache: Cache, length: int, tail_state: Snapshot) -> dict[int, range]:
    """Return the pages, by group, that complete a tail state of `length` tokens to a snapshot.

    Any `cache` with these layers will do. Raise SnapshotMismatch if the tail state does not fit.
    """
    required: dict[int, range] = {}
    for leaf in cache.state.layout.attention:
        group = cache.state.layout.layer_groups[leaf.group]
        numbers = tail_state.tensors.get(f"{leaf.name}/{NUMBERS_KEY}")
        if numbers is None or numbers.shape != (1, PRUNED_AT) or numbers.dtype != torch.int64:
            raise SnapshotMismatch(
                f"layer {leaf.name}: {NUMBERS_KEY} is missing, or not of one sequence"
            )
        row = numbers[0].numpy()
        in_range = (row[1:] >= 0).all() and (row[1:] <= length).all()
        if int(row[LENGTH]) != length or row[PADDING] or not in_range:
            raise SnapshotMismatch(f"layer {leaf.name}: numbers {row.tolist()} of {length} tokens")
        pages = _find_full_pages(group, row)
        if pages.stop * group.page > length:
            raise SnapshotMismatch(
                f"layer {leaf.name}: pages up to {pages.stop} of {length} tokens"
            )
        if required.setdefault(leaf.group, pages) != pages:
            raise SnapshotMismatch(f"layer {leaf.name}: other pages than a layer of the same kind")
    return required


def make_empty_tail_state(
    cache: Cache, length: int, page_shapes: Mapping[int, TensorShapes]
) -> Snapshot:
    """Return the tail state of a cache that consists of full pages only.

    `page_shapes` gives the tensors of a page, by group.
    """
    tensors: dict[str, Tensor] = {}
    for leaf in cache.state.layout.attention:
        group = cache.state.layout.layer_groups[leaf.group]
        pages = length // group.page
        numbers = [length, 0, 0, pages, pages, 0] if group.seals else [length, 0, 0, 0, 0, 0]
        tensors[f"{leaf.name}/{NUMBERS_KEY}"] = torch.tensor([numbers])
    for shapes in page_shapes.values():
        for key, (dtype, shape) in shapes.items():
            row_shape = shape[1:] if key.endswith(".open") else shape
            tensors[key] = torch.empty(0, *row_shape, dtype=dtype)
    return Snapshot(tensors, {})


def check_tail_shapes(tail_state: Snapshot, page_shapes: Mapping[int, TensorShapes]) -> None:
    """Refuse a tail state whose tensors differ from those of pages.

    A tensor without rows could otherwise have any shape.
    """
    for shapes in page_shapes.values():
        for key, (dtype, shape) in shapes.items():
            tensor = tail_state.tensors.get(key)
            row_shape = shape[1:] if key.endswith(".open") else shape
            if tensor is None or (tensor.dtype, tuple(tensor.shape[1:])) != (dtype, row_shape):
                raise SnapshotMismatch(f"{key} is not {dtype} {list(row_shape)}, as in the pages")


def get_layer_sides(state: CacheState, group: int) -> dict[str, SideTensors]:
    """Return the tensors of each layer of a group that has a storage, by name."""
    return {
        leaf.name: state.storages[leaf.index].sides
        for leaf in state.layout.attention
        if leaf.group == group and leaf.index in state.storages
    }


def iterate_page_fields(
    layers: Mapping[str, SideTensors], group: LayerGroup
) -> Iterator[tuple[str, str, Tensor, Tiles | None]]:
    """Yield the layer, the field, the pages by slot and their tiles, of each tensor of a page."""
    for name, sides in layers.items():
        for side, stored in sides.items():
            if not group.seals:
                yield name, f"{side}.open", stored.open.transpose(1, 2), None
            for field, tensor in stored.sealed.items():
                yield name, f"{side}.{field}", tensor, stored.tiles


def get_page_shapes(cache: Cache, group: int) -> TensorShapes:
    """Return dtype and shape of the tensors of a page, over all layers of a group."""
    shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    layer_group = cache.state.layout.layer_groups[group]
    num_rows = 0 if layer_group.seals else layer_group.page
    for name, sides in get_layer_sides(cache.state, group).items():
        for side, stored in sides.items():
            shapes[f"{name}/{side}.open"] = stored.open.dtype, (num_rows, stored.heads, stored.dim)
            for field, tensor in stored.sealed.items():
                shapes[f"{name}/{side}.{field}"] = tensor.dtype, tuple(tensor.shape[1:])
    return shapes


def _find_full_pages(layer_group: LayerGroup, numbers: Ints) -> range:
    """Return the full pages of a sequence, which are never written again."""
    if layer_group.seals:
        first, stop = int(numbers[FIRST_SEALED]), int(numbers[STOP_SEALED])
    else:
        first, stop = int(numbers[FIRST_OPEN]), int(numbers[LENGTH]) // layer_group.page
    return range(first, stop) if first < stop else range(0)


def check_tail_state(template: Cache, length: int, tail_state: Snapshot) -> None:
    """Refuse a tail state that does not fit the layers of `template`.

    `template` is a cache of the model whose layers have storages, so that shapes are known.
    """
    layout = template.state.layout
    shapes = {i: get_page_shapes(template, i) for i in range(len(layout.layer_groups))}
    check_tail_shapes(tail_state, shapes)
    _parse_tail_state(template, length, tail_state)
    recurrent_names = [leaf.name for leaf in layout.recurrent]
    for name in (*recurrent_names, *template.holder.external_states):
        if tail_state.numbers.get(f"{name}/now") != length:
            raise SnapshotMismatch(f"layer {name}: a state at another length than {length}")
        state = [
            tensor for key, tensor in tail_state.tensors.items() if key.startswith(f"{name}/now.")
        ]
        if any(len(tensor) != 1 for tensor in state):
            raise SnapshotMismatch(f"layer {name}: states of other than one sequence")


def _parse_tail_state(
    template: Cache, length: int, tail_state: Snapshot
) -> tuple[dict[int, range], ParsedSnapshot]:
    """Return the pages that complete a tail state, by group, and its validated contents."""
    ranges = list_required_pages(template, length, tail_state)
    counts = {group: len(pages) for group, pages in ranges.items()}
    state, external_states = template.state, template.holder.external_states
    parsed = parse_snapshot(state.layout, external_states, tail_state, counts)
    for leaf in state.layout.attention:
        geometry, storage = parsed.leaves[leaf.name].geometry, state.storages.get(leaf.index)
        if storage is not None and storage.geometry != geometry:
            raise SnapshotMismatch(
                f"layer {leaf.name}: rows of {geometry}, the layer has {storage.geometry}"
            )
    return ranges, parsed


class RestoreBuffer:
    """A cache of one sequence, over the pools of another, that is filled page by page.

    Its slots are allocated at once. Until `finish` or `clear`, any thread may write pages, and
    nothing reads them; the other cache may change meanwhile. Full pages that the other cache
    already has are shared with it, and not written.
    """

    def __init__(self, template: Cache, length: int, tail_state: Snapshot) -> None:
        """Allocate a cache of `length` tokens; `template` has the first of them, or none."""
        if template.length and template.batch != 1:
            raise ValueError(f"a cache of {template.batch} sequences: one, or none, is needed")
        ranges, parsed = _parse_tail_state(template, length, tail_state)
        self._allocate(template, length, parsed)
        # The tensors that pages are written to, by group and layer.
        self._targets = {group: get_layer_sides(self._cache.state, group) for group in ranges}
        self._page_shapes = {group: get_page_shapes(self._cache, group) for group in ranges}
        # The slots of the pages still to write, by group and number.
        self.missing_slots = {
            group: self._find_missing_slots(group, pages) for group, pages in ranges.items()
        }
        for group, layers in self._targets.items():
            for name, sides in layers.items():
                self._fill_open_pages(group, sides, parsed.layer_snapshots[name], ranges[group])
        self._condition = Condition()
        self._num_writers = 0  # threads inside `write_pages`
        self._is_closed = self._is_finished = False

    def _allocate(self, template: Cache, length: int, parsed: ParsedSnapshot) -> None:
        """Allocate memory, then the slots."""
        state, layout = template.state, template.state.layout
        prefixes = state.page_tables if template.length else (None,) * len(layout.layer_groups)
        storages: dict[int, Storage] = {}
        with state.pools.guard_counts():
            for leaf in layout.attention:
                parsed_layer, pools = parsed.leaves[leaf.name], state.pools[leaf.group]
                storage = state.storages.get(leaf.index)
                storage = storage or leaf.make_storage(parsed_layer.geometry)
                storage.ensure_slots(
                    pools.open.predict_size(len(parsed_layer.open_page_rows)),
                    pools.sealed.predict_size(parsed_layer.num_sealed),
                )
                storages[leaf.index] = storage
            self._page_tables = tuple(
                allocate_table(
                    layer_group,
                    parsed.layer_groups[group].numbers,
                    state.pools[group],
                    prefixes[group],
                )
                for group, layer_group in enumerate(layout.layer_groups)
            )
            pairs = zip(self._page_tables, prefixes, strict=True)
            self._allocated_slots = [
                list_allocated_slots(page_table, prefix) for page_table, prefix in pairs
            ]
            restored = CacheState(
                layout, state.pools, self._page_tables, tuple(parsed.histories), storages
            )
            transition = Transition(restored, list(enumerate(self._allocated_slots)))
            self._cache = make_sibling(template, transition, parsed.external_histories)
        lengths = self._cache.state.lengths | {
            external_state.length for external_state in self._cache.holder.external_states.values()
        }
        if self._cache.batch != 1 or lengths != {length}:
            raise SnapshotMismatch(
                f"{self._cache.batch} sequences of {sorted(lengths)} tokens: one of {length} "
                "is needed"
            )

    def __enter__(self) -> RestoreBuffer:
        return self

    def __exit__(self, *error: object) -> None:
        """Free the slots, unless `finish` was called."""
        if not self._is_finished:
            self.clear()

    def clear(self) -> None:
        """Free the slots, also those of a finished cache."""
        with self._exclude_writers():
            self._targets.clear()  # threads that read a store may keep this object alive for long
            self._cache.clear()

    def write_pages(self, group: int, page_numbers: range, pages: Fields) -> None:
        """Write missing pages, one per entry of every tensor; ignored after `finish` or `clear`."""
        signature = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in pages.items()}
        for key, (dtype, shape) in (shapes := self._page_shapes[group]).items():
            if signature.get(key) != (dtype, (len(page_numbers), *shape)):
                raise SnapshotMismatch(
                    f"{key} is {signature.get(key)} of {len(page_numbers)} pages of {dtype} {shape}"
                )
        if extra := signature.keys() - shapes.keys():
            raise SnapshotMismatch(f"unknown tensors {sorted(extra)}")
        with self._condition:
            if self._is_closed:
                return
            self._num_writers += 1
        try:
            self._copy_to_slots(group, page_numbers, pages)
        finally:
            with self._condition:
                self._num_writers -= 1
                self._condition.notify_all()

    def finish(self, length: int) -> Cache:
        """Return the cache, shortened to the first `length` tokens that were written.

        `length` is all tokens, or a multiple of the page size of every group.
        """
        with (
            self._exclude_writers(),
            self._cache.holder.lock,
        ):  # no thread may reallocate tensors meanwhile
            for group, layers in self._targets.items():
                for name, sides in get_layer_sides(self._cache.state, group).items():
                    if sides is not layers[name]:
                        pairs = [(slots, slots) for slots in self._allocated_slots[group]]
                        copy_sides(layers[name], sides, *pairs)
            if length < self._cache.length:
                self._cache.rewind(length)
            self._targets.clear()
            self._is_finished = True
        return self._cache

    @contextmanager
    def _exclude_writers(self) -> Iterator[None]:
        """Refuse further writes, and wait for those in progress."""
        with self._condition:
            self._is_closed = True
            while self._num_writers:
                self._condition.wait()
            yield

    def _copy_to_slots(self, group: int, page_numbers: range, pages: Fields) -> None:
        """Copy pages into their slots, in runs of consecutive slots."""
        slots = np.array([self.missing_slots[group][number] for number in page_numbers], np.int64)
        runs = find_runs(np.arange(len(slots)), slots)
        layers, layer_group = self._targets[group], self._page_tables[group].layer_group
        for name, field, target_pages, tiles in iterate_page_fields(layers, layer_group):
            for source, target in runs:
                retile(field, pages[f"{name}/{field}"][source], None, tiles, target_pages[target])

    def _find_missing_slots(self, group: int, page_range: range) -> dict[int, int]:
        """Return the slots of these pages, by page number, without the shared pages."""
        page_table, (open_slots, sealed_slots) = (
            self._page_tables[group],
            self._allocated_slots[group],
        )
        if page_table.layer_group.seals:
            table, allocated = page_table.sealed_table, sealed_slots
        else:
            table, allocated = page_table.open_table, open_slots
        slots = table[0, page_range.start : page_range.stop]
        pages = zip(page_range, slots.tolist(), np.isin(slots, allocated).tolist(), strict=True)
        return {number: slot for number, slot, is_allocated in pages if is_allocated}

    def _fill_open_pages(
        self, group: int, sides: SideTensors, layer_snapshot: Snapshot, required_pages: range
    ) -> None:
        """Write the rows of open pages, except shared pages and pages still to come."""
        page_table, row = self._page_tables[group], 0
        page, seals = page_table.layer_group.page, page_table.layer_group.seals
        for number in page_table.list_open_pages()[1].tolist():
            if number in required_pages and not seals:
                continue
            count = min(int(page_table.seq_lens[0]) - number * page, page)
            slot = int(page_table.open_table[0, number])
            if slot in self._allocated_slots[group][0]:
                for side, stored in sides.items():
                    rows = layer_snapshot.tensors[f"{side}.open"][row : row + count]
                    stored.open[slot, :, :count] = rows.transpose(0, 1)
            row += count

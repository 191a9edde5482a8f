"""A cache of one sequence that is restored page by page.

Each page is written directly to its slot. The pages of a long prompt have hundreds of MiB, so an
extra copy of them would take as long as reading them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Condition

import numpy as np

from kvant.cache.cache import Cache
from kvant.cache.page_set import (
    check_tail_shapes,
    get_page_shapes,
    iterate_storages,
    list_required_pages,
)
from kvant.cache.snapshot import ParsedSnapshot, parse_snapshot
from kvant.cache.state import CacheState
from kvant.cache.transitions import Transition
from kvant.contracts import Fields, PagedTensors, Snapshot
from kvant.errors import SnapshotMismatch
from kvant.pages.advance import allocate_table, list_allocated_slots
from kvant.pages.storage import Storage, copy_pages, find_runs, retile

SideTensors = Mapping[str, PagedTensors]


def check_tail_state(template: Cache, length: int, tail_state: Snapshot) -> None:
    """Refuse a tail state that does not fit the layers of `template`.

    `template` is a cache of the model whose layers have storages, so that shapes are known.
    """
    layout, external_states = template.state.layout, template.holder.external_states
    shapes = {i: get_page_shapes(template, i) for i in range(len(layout.layer_groups))}
    check_tail_shapes(tail_state, shapes)
    counts = {
        group: len(pages)
        for group, pages in list_required_pages(template, length, tail_state).items()
    }
    parsed = parse_snapshot(layout, external_states, tail_state, counts)
    _check_geometries(template.state, parsed)
    for name in (*(leaf.name for leaf in layout.recurrent), *external_states):
        if tail_state.numbers.get(f"{name}/now") != length:
            raise SnapshotMismatch(f"layer {name}: a state at another length than {length}")
        state = [
            tensor for key, tensor in tail_state.tensors.items() if key.startswith(f"{name}/now.")
        ]
        if any(len(tensor) != 1 for tensor in state):
            raise SnapshotMismatch(f"layer {name}: states of other than one sequence")


def _check_geometries(state: CacheState, parsed: ParsedSnapshot) -> None:
    """Refuse rows of other shapes than those that a layer has."""
    for leaf in state.layout.attention:
        geometry, storage = parsed.leaves[leaf.name].geometry, state.storages.get(leaf.index)
        if storage is not None and storage.geometry != geometry:
            raise SnapshotMismatch(
                f"layer {leaf.name}: rows of {geometry}, the layer has {storage.geometry}"
            )


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
        ranges = list_required_pages(template, length, tail_state)
        counts = {group: len(pages) for group, pages in ranges.items()}
        state, external_states = template.state, template.holder.external_states
        parsed = parse_snapshot(state.layout, external_states, tail_state, counts)
        self._allocate(template, length, parsed)
        # The tensors that pages are written to, by group and layer.
        self._targets: dict[int, dict[str, SideTensors]] = {
            group: {n: storage.sides for n, storage in iterate_storages(self._cache.state, group)}
            for group in ranges
        }
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
        _check_geometries(state, parsed)
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
            self._cache = template.make_sibling(transition, parsed.external_histories)
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
                for name, storage in iterate_storages(self._cache.state, group):
                    if storage.sides is not layers[name]:
                        self._copy_moved_pages(group, layers[name], storage.sides)
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
        seals = self._page_tables[group].layer_group.seals
        for source, target in find_runs(np.arange(len(slots)), slots):
            for name, sides in self._targets[group].items():
                for side, stored in sides.items():
                    if not seals:
                        rows = pages[f"{name}/{side}.open"][source]
                        stored.open[target].copy_(rows.transpose(1, 2))
                    for field, tensor in stored.sealed.items():
                        key = f"{side}.{field}"
                        buffer = pages[f"{name}/{key}"][source]
                        retile(key, buffer, None, stored.tiles, tensor[target])

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

    def _copy_moved_pages(self, group: int, old: SideTensors, new: SideTensors) -> None:
        """Copy the pages written so far from the old tensors to those that replaced them."""
        open_slots, sealed_slots = self._allocated_slots[group]
        for side, stored in new.items():
            copy_pages({"open": old[side].open}, {"open": stored.open}, open_slots, open_slots)
            copy_pages(old[side].sealed, stored.sealed, sealed_slots, sealed_slots)

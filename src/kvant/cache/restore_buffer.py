"""A cache of one sequence that comes in pieces, each put where it is to stay.

A long prompt is hundreds of MiB: each copy on its way takes as long as all that has to be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Condition

import numpy as np

from kvant.cache.advance import allocate_table, list_allocated_slots
from kvant.cache.cache import Cache
from kvant.cache.contents import ParsedSnapshot, parse_snapshot
from kvant.cache.layer import PagedLayer
from kvant.cache.page_set import (
    check_tail_shapes,
    get_page_shapes,
    iterate_storages,
    list_required_pages,
)
from kvant.cache.storage import Storage, copy_pages, find_runs, retile
from kvant.contracts import Fields, PagedTensors, Snapshot
from kvant.errors import SnapshotMismatch

SideTensors = Mapping[str, PagedTensors]


def check_rest(like: Cache, length: int, rest: Snapshot) -> None:
    """Refuse what does not fit the layers of a cache that has the model's own tensors."""
    contents = like.contents
    shapes = {kind: get_page_shapes(like, kind) for kind in range(len(like._tracker.layer_groups))}
    check_tail_shapes(rest, shapes)
    counts = {kind: len(pages) for kind, pages in list_required_pages(like, length, rest).items()}
    told = parse_snapshot(contents, rest, counts)
    for name, leaf in contents.list_attention():
        _check_geometry(name, leaf, told)
    for name in (*dict(contents.list_recurrent()), *contents.collect_external_states()):
        if rest.numbers.get(f"{name}/now") != length:
            raise SnapshotMismatch(f"layer {name}: a state at another length than {length}")
        now = [x for key, x in rest.tensors.items() if key.startswith(f"{name}/now.")]
        if any(len(x) != 1 for x in now):
            raise SnapshotMismatch(f"layer {name}: states of other than one sequence")


def _check_geometry(name: str, leaf: PagedLayer, told: ParsedSnapshot) -> None:
    rows, there = told.leaves[name].geometry, leaf.storage
    if there is not None and there.geometry != rows:
        raise SnapshotMismatch(f"layer {name}: rows of {rows}, {there.geometry} are here")


class RestoreBuffer:
    """A cache of one sequence in the pools of another, whose pages come one by one.

    Its slots are taken at once, and nobody reads them before it is `settled`: until then, or until
    it is ended, any thread may put pages there, whatever becomes of the other cache. Whole pages of
    tokens that the other cache has are shared, and do not come.
    """

    def __init__(self, template: Cache, length: int, tail_state: Snapshot) -> None:
        """Of so many tokens, of which `like` has the first ones, or none."""
        if template.length and template.batch != 1:
            raise ValueError(f"a cache of {template.batch} sequences: one, or none, is needed")
        ranges = list_required_pages(template, length, tail_state)
        counts = {kind: len(pages) for kind, pages in ranges.items()}
        told = parse_snapshot(template.contents, tail_state, counts)
        self._allocate(template, length, told)
        self._targets: dict[
            int, dict[str, SideTensors]
        ] = {  # where pages are put, by kind and layer
            kind: {name: one.sides for name, one in iterate_storages(self._cache, kind)}
            for kind in ranges
        }
        self._page_shapes = {kind: get_page_shapes(self._cache, kind) for kind in ranges}
        # The slots of the pages that are to come, by kind and number.
        self.missing_slots = {
            kind: self._find_missing_slots(kind, pages) for kind, pages in ranges.items()
        }
        for kind, layers in self._targets.items():
            for name, sides in layers.items():
                self._fill_open_pages(kind, sides, told.layer_snapshots[name], ranges[kind])
        self._condition = Condition()
        self._num_writers = 0  # threads that put pages now
        self._is_closed = self._is_finished = False

    def _allocate(self, template: Cache, length: int, parsed: ParsedSnapshot) -> None:
        """Take the slots, once there is memory for them."""
        ledger, contents = template._tracker, template.contents
        for name, leaf in contents.list_attention():
            _check_geometry(name, leaf, parsed)
        followers = {name: one.fork() for name, one in contents.collect_external_states().items()}
        for name, follower in followers.items():
            follower.prepare_restore(parsed.external_histories[name])()
        begun = ledger.state.page_tables if template.length else (None,) * len(ledger.layer_groups)
        storages: dict[int, Storage] = {}
        with ledger.guard_counts():
            for name, leaf in contents.list_attention():
                one, pools = parsed.leaves[name], ledger.pools[leaf.group]
                storage = leaf.storage or Storage(leaf.spec, one.geometry, leaf.tiles)
                storage.ensure_slots(
                    pools.open.predict_size(len(one.open_page_rows)),
                    pools.sealed.predict_size(one.num_sealed),
                )
                storages[leaf.leaf] = storage
            self._page_tables = [
                allocate_table(
                    one, parsed.layer_groups[kind].numbers, ledger.pools[kind], begun[kind]
                )
                for kind, one in enumerate(ledger.layer_groups)
            ]
            pairs = zip(self._page_tables, begun, strict=True)
            self._allocated_slots = [list_allocated_slots(extent, had) for extent, had in pairs]
            taken = list(enumerate(self._allocated_slots))
            self._cache = template._make_sibling(
                self._page_tables, tuple(parsed.histories), followers, taken
            )
            self._cache._tracker.state.storages.update(storages)
            lengths = self._cache._tracker.state.lengths | {
                one.length for one in followers.values()
            }
            if self._cache.batch != 1 or lengths != {length}:
                raise SnapshotMismatch(
                    f"{self._cache.batch} sequences at {sorted(lengths)} tokens: one at {length}"
                )

    def __enter__(self) -> RestoreBuffer:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the slots, unless it was settled."""
        if not self._is_finished:
            self.clear()

    def clear(self) -> None:
        """Leave the slots, also those of the cache that was settled."""
        with self._exclude_writers():
            self._targets.clear()  # a thread that reads may keep us for long
            self._cache.clear()

    def write_pages(self, group: int, page_numbers: range, pages: Fields) -> None:
        """Pages that are missing, one an entry of every tensor; once it is over, nothing."""
        told = {key: (x.dtype, tuple(x.shape)) for key, x in pages.items()}
        for key, (dtype, shape) in (shapes := self._page_shapes[group]).items():
            if told.get(key) != (dtype, (len(page_numbers), *shape)):
                raise SnapshotMismatch(
                    f"{key} is {told.get(key)} of {len(page_numbers)} pages of {dtype} {shape}"
                )
        if extra := told.keys() - shapes.keys():
            raise SnapshotMismatch(f"unknown tensors {sorted(extra)}")
        with self._condition:
            if self._is_closed:
                return
            self._num_writers += 1
        try:
            self._copy_pages(group, page_numbers, pages)
        finally:
            with self._condition:
                self._num_writers -= 1
                self._condition.notify_all()

    def finish(self, length: int) -> Cache:
        """The cache, once so many of its tokens came, all or whole pages of each kind."""
        ledger = self._cache._tracker
        with self._exclude_writers(), ledger.lock:  # nobody moves it meanwhile
            for kind, layers in self._targets.items():
                for name, storage in iterate_storages(self._cache, kind):
                    if storage.sides is not layers[name]:
                        self._copy_moved_pages(kind, layers[name], storage.sides)
            if length < self._cache.length:
                self._cache.rewind(length)
            self._targets.clear()
            self._is_finished = True
        return self._cache

    @contextmanager
    def _exclude_writers(self) -> Iterator[None]:
        """Nobody puts a page any more."""
        with self._condition:
            self._is_closed = True
            while self._num_writers:
                self._condition.wait()
            yield

    def _copy_pages(self, group: int, page_numbers: range, pages: Fields) -> None:
        slots = np.array([self.missing_slots[group][number] for number in page_numbers], np.int64)
        seals = self._page_tables[group].layer_group.seals
        for here, there in find_runs(np.arange(len(slots)), slots):
            for name, sides in self._targets[group].items():
                for side, stored in sides.items():
                    if not seals:
                        rows = pages[f"{name}/{side}.open"][here]
                        stored.open[there].copy_(rows.transpose(1, 2))
                    for field, tensor in stored.sealed.items():
                        key = f"{side}.{field}"
                        some = pages[f"{name}/{key}"][here]
                        retile(key, some, None, stored.tiles, tensor[there])

    def _find_missing_slots(self, group: int, page_range: range) -> dict[int, int]:
        """Where these pages are put, but for those that are shared."""
        extent, (opened, sealed) = self._page_tables[group], self._allocated_slots[group]
        table, mine = (
            (extent.sealed_table, sealed)
            if extent.layer_group.seals
            else (extent.open_table, opened)
        )
        slots = table[0, page_range.start : page_range.stop]
        found = zip(page_range, slots.tolist(), np.isin(slots, mine).tolist(), strict=True)
        return {number: slot for number, slot, own in found if own}

    def _fill_open_pages(
        self, group: int, sides: SideTensors, layer_snapshot: Snapshot, separate_pages: range
    ) -> None:
        """Write the rows of open pages, but of those that are shared or come apart."""
        extent, place = self._page_tables[group], 0
        page, seals = extent.layer_group.page, extent.layer_group.seals
        for number in extent.list_open_pages()[1].tolist():
            if number in separate_pages and not seals:
                continue
            count = min(int(extent.seq_lens[0]) - number * page, page)
            slot = int(extent.open_table[0, number])
            if slot in self._allocated_slots[group][0]:
                for side, stored in sides.items():
                    rows = layer_snapshot.tensors[f"{side}.open"][place : place + count]
                    stored.open[slot, :, :count] = rows.transpose(0, 1)
            place += count

    def _copy_moved_pages(self, group: int, old: SideTensors, new: SideTensors) -> None:
        """The other cache moved: what was put where it lay goes where it lies."""
        opened, sealed = self._allocated_slots[group]
        for side, stored in new.items():
            copy_pages({"open": old[side].open}, {"open": stored.open}, opened, opened)
            copy_pages(old[side].sealed, stored.sealed, sealed, sealed)

"""A cache of one sequence that comes in pieces, each put where it is to stay.

A long prompt is hundreds of MiB: each copy on its way takes as long as all that has to be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Condition

import numpy as np

from kvant.cache.cache import Cache
from kvant.cache.changes import placed, taken_for
from kvant.cache.contents import Told, told_by
from kvant.cache.layer import Attention
from kvant.cache.pieces import check_alike, layers_of, pages_of, shapes_of
from kvant.cache.storage import Storage, copy_pages, in_runs, retiled
from kvant.contracts import Fields, Snapshot, Stored
from kvant.errors import SnapshotMismatch

Sides = Mapping[str, Stored]


def check_rest(like: Cache, length: int, rest: Snapshot) -> None:
    """Refuse what does not fit the layers of a cache that has the model's own tensors."""
    contents = like.contents
    shapes = {kind: shapes_of(like, kind) for kind in range(len(like._ledger.kinds))}
    check_alike(rest, shapes)
    counts = {kind: len(pages) for kind, pages in pages_of(like, length, rest).items()}
    told = told_by(contents, rest, counts)
    for name, leaf in contents.attention():
        _check_geometry(name, leaf, told)
    for name in (*dict(contents.recurrent()), *contents.host_states()):
        if rest.numbers.get(f"{name}/now") != length:
            raise SnapshotMismatch(f"layer {name}: a state at another length than {length}")
        now = [x for key, x in rest.tensors.items() if key.startswith(f"{name}/now.")]
        if any(len(x) != 1 for x in now):
            raise SnapshotMismatch(f"layer {name}: states of other than one sequence")


def _check_geometry(name: str, leaf: Attention, told: Told) -> None:
    rows, there = told.leaves[name].geometry, leaf.storage
    if there is not None and there.geometry != rows:
        raise SnapshotMismatch(f"layer {name}: rows of {rows}, {there.geometry} are here")


class Arrival:
    """A cache of one sequence in the pools of another, whose pages come one by one.

    Its slots are taken at once, and nobody reads them before it is `settled`: until then, or until
    it is ended, any thread may put pages there, whatever becomes of the other cache. Whole pages of
    tokens that the other cache has are shared, and do not come.
    """

    def __init__(self, like: Cache, length: int, rest: Snapshot) -> None:
        """Of so many tokens, of which `like` has the first ones, or none."""
        if like.length and like.batch != 1:
            raise ValueError(f"a cache of {like.batch} sequences: one, or none, is needed")
        ranges = pages_of(like, length, rest)
        counts = {kind: len(pages) for kind, pages in ranges.items()}
        told = told_by(like.contents, rest, counts)
        self._take(like, length, told)
        self._sides: dict[int, dict[str, Sides]] = {  # where pages are put, by kind and layer
            kind: {name: one.sides for name, one in layers_of(self._cache, kind)} for kind in ranges
        }
        self._shapes = {kind: shapes_of(self._cache, kind) for kind in ranges}
        # The slots of the pages that are to come, by kind and number.
        self.missing = {kind: self._slots(kind, pages) for kind, pages in ranges.items()}
        for kind, layers in self._sides.items():
            for name, sides in layers.items():
                self._fill(kind, sides, told.pieces[name], ranges[kind])
        self._turn = Condition()
        self._putting = 0  # threads that put pages now
        self._over = self._settled = False

    def _take(self, like: Cache, length: int, told: Told) -> None:
        """Take the slots, once there is memory for them."""
        ledger, contents = like._ledger, like.contents
        for name, leaf in contents.attention():
            _check_geometry(name, leaf, told)
        followers = {name: one.fork() for name, one in contents.host_states().items()}
        for name, follower in followers.items():
            follower.becoming(told.followed[name])()
        begun = ledger.book.extents if like.length else (None,) * len(ledger.kinds)
        storages: dict[int, Storage] = {}
        with ledger.counting():
            for name, leaf in contents.attention():
                one, pools = told.leaves[name], ledger.pools[leaf.kind]
                storage = leaf.storage or Storage(leaf.spec, one.geometry, leaf.tiles)
                storage.fit(pools.open.sized(len(one.opened)), pools.sealed.sized(one.sealed))
                storages[leaf.leaf] = storage
            self._extents = [
                placed(one, told.kinds[kind].numbers, ledger.pools[kind], begun[kind])
                for kind, one in enumerate(ledger.kinds)
            ]
            pairs = zip(self._extents, begun, strict=True)
            self._taken = [taken_for(extent, had) for extent, had in pairs]
            taken = list(enumerate(self._taken))
            self._cache = like._twin(self._extents, tuple(told.pasts), followers, taken)
            self._cache._ledger.book.storages.update(storages)
            lengths = self._cache._ledger.book.lengths | {one.length for one in followers.values()}
            if self._cache.batch != 1 or lengths != {length}:
                raise SnapshotMismatch(
                    f"{self._cache.batch} sequences at {sorted(lengths)} tokens: one at {length}"
                )

    def __enter__(self) -> Arrival:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave the slots, unless it was settled."""
        if not self._settled:
            self.clear()

    def clear(self) -> None:
        """Leave the slots, also those of the cache that was settled."""
        with self._alone():
            self._sides.clear()  # a thread that reads may keep us for long
            self._cache.clear()

    def put(self, kind: int, numbers: range, pages: Fields) -> None:
        """Pages that are missing, one an entry of every tensor; once it is over, nothing."""
        told = {key: (x.dtype, tuple(x.shape)) for key, x in pages.items()}
        for key, (dtype, shape) in (shapes := self._shapes[kind]).items():
            if told.get(key) != (dtype, (len(numbers), *shape)):
                raise SnapshotMismatch(
                    f"{key} is {told.get(key)} of {len(numbers)} pages of {dtype} {shape}"
                )
        if extra := told.keys() - shapes.keys():
            raise SnapshotMismatch(f"unknown tensors {sorted(extra)}")
        with self._turn:
            if self._over:
                return
            self._putting += 1
        try:
            self._copy(kind, numbers, pages)
        finally:
            with self._turn:
                self._putting -= 1
                self._turn.notify_all()

    def settled(self, length: int) -> Cache:
        """The cache, once so many of its tokens came, all or whole pages of each kind."""
        ledger = self._cache._ledger
        with self._alone(), ledger.lock:  # nobody moves it meanwhile
            for kind, layers in self._sides.items():
                for name, storage in layers_of(self._cache, kind):
                    if storage.sides is not layers[name]:
                        self._follow(kind, layers[name], storage.sides)
            if length < self._cache.length:
                self._cache.rewind(length)
            self._sides.clear()
            self._settled = True
        return self._cache

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody puts a page any more."""
        with self._turn:
            self._over = True
            while self._putting:
                self._turn.wait()
            yield

    def _copy(self, kind: int, numbers: range, pages: Fields) -> None:
        slots = np.array([self.missing[kind][number] for number in numbers], np.int64)
        seals = self._extents[kind].kind.seals
        for here, there in in_runs(np.arange(len(slots)), slots):
            for name, sides in self._sides[kind].items():
                for side, stored in sides.items():
                    if not seals:
                        rows = pages[f"{name}/{side}.open"][here]
                        stored.open[there].copy_(rows.transpose(1, 2))
                    for field, tensor in stored.sealed.items():
                        key = f"{side}.{field}"
                        some = pages[f"{name}/{key}"][here]
                        retiled(key, some, None, stored.tiles, tensor[there])

    def _slots(self, kind: int, pages: range) -> dict[int, int]:
        """Where these pages are put, but for those that are shared."""
        extent, (opened, sealed) = self._extents[kind], self._taken[kind]
        table, mine = (extent.sealed, sealed) if extent.kind.seals else (extent.open, opened)
        slots = table[0, pages.start : pages.stop]
        found = zip(pages, slots.tolist(), np.isin(slots, mine).tolist(), strict=True)
        return {number: slot for number, slot, own in found if own}

    def _fill(self, kind: int, sides: Sides, piece: Snapshot, apart: range) -> None:
        """Write the rows of open pages, but of those that are shared or come apart."""
        extent, place = self._extents[kind], 0
        page, seals = extent.kind.page, extent.kind.seals
        for number in extent.open_pages()[1].tolist():
            if number in apart and not seals:
                continue
            count = min(int(extent.rows[0]) - number * page, page)
            slot = int(extent.open[0, number])
            if slot in self._taken[kind][0]:
                for side, stored in sides.items():
                    rows = piece.tensors[f"{side}.open"][place : place + count]
                    stored.open[slot, :, :count] = rows.transpose(0, 1)
            place += count

    def _follow(self, kind: int, old: Sides, new: Sides) -> None:
        """The other cache moved: what was put where it lay goes where it lies."""
        opened, sealed = self._taken[kind]
        for side, stored in new.items():
            copy_pages({"open": old[side].open}, {"open": stored.open}, opened, opened)
            copy_pages(old[side].sealed, stored.sealed, sealed, sealed)

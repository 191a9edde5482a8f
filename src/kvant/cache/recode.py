"""The rows of an attention layer under another recipe, and which recipe that is.

What is no attention stays as it is, and so does whatever follows from the model: values inside the
keys, and the dtype that rows are stored in unless another is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention.reference import Alike, seen_rows
from kvant.attention.storing import seal_into
from kvant.attention.writing import SEAL_AT_ONCE
from kvant.cache.changes import Pools, placed
from kvant.cache.storage import Storage, copy_pages
from kvant.contracts import Mask, Tally, View
from kvant.errors import CapacityError, SpecError
from kvant.extent import BEGINS, FIRST_OPEN, FIRST_SEALED, STOP_SEALED, Extent, Ints, Kind
from kvant.recipes import CacheSpec, GroupSpec, LayerSpec, Recipe, attention_in

Meet = Callable[[LayerSpec, LayerSpec], LayerSpec]  # (present, asked) -> the one after


def attending(spec: CacheSpec) -> list[int]:
    """The layers that a recode concerns."""
    return [index for index, recipe in enumerate(spec.layers) if any(attention_in(recipe))]


def spec_after(present: CacheSpec, asked: CacheSpec) -> CacheSpec:
    """Every attention layer as it is asked for, or an error."""
    return _met(present, asked, _exactly)


def within(present: CacheSpec, asked: CacheSpec) -> CacheSpec:
    """What one recipe for all layers comes to: as a rule, a narrower window that is there stays.

    Where no window is asked for, each layer keeps its own retention, and its prune. Where layers
    differ in a window, those narrower than the widest have that from the model, and keep it too.
    """
    widest = max((layer.width for layer in attention_in(*present.layers)), default=0.0)

    def meet(old: LayerSpec, new: LayerSpec) -> LayerSpec:
        window = old.retention.window
        from_model = old.width < widest and old.width <= new.width
        if window is not None and (new.retention.window is None or from_model):
            new = replace(new, retention=old.retention)
        if new.prune is None and new.retention.window is None:
            new = replace(new, prune=old.prune)
        return replace(new, chunk=old.chunk, value_dim=old.value_dim)

    return _met(present, asked, meet)


def _exactly(old: LayerSpec, new: LayerSpec) -> LayerSpec:
    if old.value_dim != new.value_dim:
        raise SpecError(
            f"value_dim={new.value_dim} for rows that were stored with value_dim={old.value_dim}: "
            "a recode keeps the rows, so it has to stay"
        )
    return replace(new, dtype=new.dtype or old.dtype)


def _met(present: CacheSpec, asked: CacheSpec, meet: Meet) -> CacheSpec:
    layers = []
    for index, (old, new) in enumerate(zip(present.layers, asked.layers, strict=True)):
        try:
            layers.append(_one(old, new, meet))
        except SpecError as error:
            raise SpecError(f"layer {index}: {error}") from None
    return CacheSpec(tuple(layers))


def _one(old: Recipe, new: Recipe, meet: Meet) -> Any:
    if isinstance(old, LayerSpec) and isinstance(new, LayerSpec):
        return meet(old, new)
    if isinstance(old, GroupSpec) and isinstance(new, LayerSpec):
        new = GroupSpec(tuple((n, new if any(attention_in(p)) else p) for n, p in old.parts))
    if type(old) is not type(new):
        raise SpecError(f"{new} for a layer of {old}: a recode keeps the kind of a layer")
    if not (isinstance(old, GroupSpec) and isinstance(new, GroupSpec)):
        return old
    told = dict(new.parts)
    if told.keys() != dict(old.parts).keys():
        raise SpecError(f"parts {sorted(told)} for a layer of {sorted(dict(old.parts))}")
    return GroupSpec(tuple((name, _one(part, told[name], meet)) for name, part in old.parts))


def check_rows(old: Extent, kind: Kind) -> None:
    """Refuse to bring back what was let go, and more tokens than a capacity has room for."""
    if old.kind.own != kind.own:
        raise SpecError(
            "key heads lie apart where they share what they keep (prune=...:adaptive), and "
            "together elsewhere: reset the cache, and read the prompt by the other spec"
        )
    if old.pruned.any() and kind.prune is None:
        raise SpecError(
            "all rows, where some were pruned: what is gone does not come back; ask for a spec "
            "with a prune, or reset first"
        )
    longest = int(old.rows.max(initial=0))
    if kind.capacity is not None and longest > kind.capacity:
        raise CapacityError(
            f"{longest} tokens for a capacity of {kind.capacity}: rewind first, or give the spec "
            f"capacity={longest} or none"
        )
    held, asked = _held(old), np.maximum(_low(kind, old.rows), old.missing)
    worst = int((held - asked).argmax())
    if held[worst] > asked[worst]:
        length, there = int(old.rows[worst]), int(old.rows[worst] - held[worst])
        said = "all rows" if kind.window is None else f"window={kind.window}"
        raise SpecError(
            f"{said} of {length} tokens, but the last {there} are held: what a window let go does "
            f"not come back; ask for at most window={there}, or reset first"
        )
    if kind.sinks > old.kind.sinks and (old.kind.sinks < np.minimum(held, old.rows)).any():
        raise SpecError(
            f"sinks={kind.sinks}, but of the first rows {old.kind.sinks} are held: what a window "
            f"let go does not come back; ask for at most sinks={old.kind.sinks}, or reset first"
        )


def first_rows(old: Extent) -> Ints:
    """The first positions that there are rows of."""
    first: Ints = np.minimum(_reaching(old, old.first_row), old.rows)
    return first


def recoded(old: Extent, begins: Ints, kind: Kind, pools: Pools) -> Extent:
    """Where the same sequences lie in pages of another kind, from their first rows on."""
    numbers = old.numbers.copy()
    first = np.maximum(kind.first_sealed(old.lengths), begins // kind.page)
    due = kind.paging.all_due(old.rows)
    numbers[:, BEGINS] = begins
    numbers[:, FIRST_SEALED] = first
    numbers[:, STOP_SEALED] = np.maximum(first, due)
    numbers[:, FIRST_OPEN] = np.maximum(kind.first_open(old.lengths), begins // kind.page)
    return placed(kind, numbers, pools, heads=old.heads)


def refill(old: Storage, was: Extent, new: Storage, now: Extent, tally: Tally) -> None:
    """Store what one layer reads in the slots of another."""
    for which in range(was.tables):
        recoding = Recoding(old, was, new, now, which, tally)
        for name in new.sides:
            recoding.open(name)
            recoding.seal(name)


@dataclass(frozen=True)
class Recoding:
    """One sequence in two storages, the second still without it."""

    old: Storage
    was: Extent
    new: Storage
    now: Extent
    which: int
    tally: Tally

    @cached_property
    def group(self) -> Alike:
        keys = self.old.sides["keys"]
        values = self.old.sides.get("values", keys)
        pages = View(keys, values, None, self.was, False, Mask(), 0, self.tally)
        return Alike(pages, np.array([self.which]))

    def kept(self, name: str) -> bool:
        """Are the pages and rows of this side taken over as they are?"""
        old, new = self.old, self.new
        same = old.spec.page == new.spec.page and old.spec.seals == new.spec.seals
        same = same and old.spec.sides[name] == new.spec.sides[name]
        return same and old.geometry.dtypes[name] == new.geometry.dtypes[name]

    def open(self, name: str) -> None:
        """Fill the open pages."""
        page, stored = self.now.kind.page, self.new.sides[name]
        which, numbers = self.now.open_pages()
        for number in numbers[which == self.which].tolist():
            slot = int(self.now.open[self.which, number])
            start, stop = number * page, min((number + 1) * page, int(self.was.rows[self.which]))
            opened = number >= self.was.first_open[self.which] or number < self.was.kind.sink_pages
            if self.kept(name) and opened:
                there = int(self.was.open[self.which, number])
                rows = self.old.sides[name].open[there : there + 1, :, : stop - start]
            else:
                rows = self.rows(name, start, stop)
            stored.open[slot, :, : stop - start] = rows[0]

    def seal(self, name: str) -> None:
        """Fill the sealed pages, a few at a time."""
        page, stored = self.now.kind.page, self.new.sides[name]
        which, numbers = self.now.sealed_pages()
        numbers = numbers[which == self.which]
        if self.kept(name):
            there = numbers >= self.was.first_sealed[self.which]
            there &= numbers < self.was.stop_sealed[self.which]
            self._copy(name, numbers[there])
            numbers = numbers[~there]
        for first in range(0, len(numbers), SEAL_AT_ONCE):
            some = numbers[first : first + SEAL_AT_ONCE]
            pages = [self.rows(name, n * page, (n + 1) * page) for n in some.tolist()]
            slots = self.now.sealed[self.which, some]
            sinks = self.now.kind.sinks
            seal_into(stored, name, torch.cat(pages), slots, some * page, sinks, self.tally)

    def _copy(self, name: str, numbers: Ints) -> None:
        old, new = (s.sides[name].sealed for s in (self.old, self.new))
        slots = (e.sealed[self.which, numbers] for e in (self.was, self.now))
        copy_pages(old, new, *slots)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Positions [start, stop) in the frame and dtype of the new layer, [1, H, n, D]."""
        rows = seen_rows(self.group, name, start, stop)  # type: ignore[arg-type]
        frames = [side.spec.sides[name].frame for side in (self.old, self.new)]
        dtype = self.new.geometry.dtypes[name]
        if frames[0] == frames[1]:
            return rows.to(dtype)
        return frames[1].rows(frames[0].outputs(rows).to(dtype))


def storage_for(old: Storage, spec: LayerSpec) -> Storage:
    """An empty storage for the rows of another."""
    return Storage(spec, old.geometry.of_dtype(spec.dtype), old.tiles)


def _low(kind: Kind, rows: Ints) -> Ints:
    """The first positions that the newest tokens see, sinks aside."""
    return np.zeros_like(rows) if kind.window is None else np.maximum(rows - kind.window, 0)


def _held(extent: Extent) -> Ints:
    """The first positions that were promised to stay, and did."""
    return _reaching(extent, np.maximum(extent.first_row, _low(extent.kind, extent.rows)))


def _reaching(extent: Extent, first: Ints) -> Ints:
    """The first positions there are: sinks count where they touch the others."""
    return np.where(first <= extent.kind.sinks, 0, first)

"""What a cache holds: its layers, their storages and the ledger of their integers.

It is replaced as a whole: a restore or a recode fills an empty one, and the cache then takes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from reprlib import repr as short
from typing import Any

import numpy as np
from torch import Tensor

from kvant.cache import pruning, recode, snapshot
from kvant.cache.book import Retired
from kvant.cache.changes import Pools, placed, sharing, taken_for
from kvant.cache.layer import Attention, kind_of
from kvant.cache.ledger import Ledger
from kvant.cache.recurrent import Past, Recurrent
from kvant.cache.recurrent import restored as restored_past
from kvant.cache.recurrent import shared_snapshot as past_snapshot
from kvant.contracts import HostState, Pruning, Snapshot, Tiles
from kvant.errors import CacheError, SnapshotMismatch
from kvant.extent import Bools, Extent, Ints
from kvant.recipes import CacheSpec, EmptySpec, GroupSpec, LayerSpec, RecurrentSpec, SharedSpec

Layer = Any  # an Attention, a Recurrent, or a HostState


class Group(dict[str, Layer]):
    """The memories of a layer that has several, by name; each is appended to by itself."""

    @property
    def length(self) -> int:
        return min(int(part.length) for part in self.values())

    def read(self) -> dict[str, Any]:
        """What every part reads as, by name."""
        return {name: part.read() for name, part in self.items()}

    def append(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            f"a layer of several memories is appended to by its parts: {', '.join(self)}"
        )


@dataclass(frozen=True, eq=False)
class Layers:
    """What a cache holds: it is replaced as a whole."""

    spec: CacheSpec
    ledger: Ledger
    leaves: Mapping[str, Layer]  # by the number of the layer, and the name of a part
    by_layer: Mapping[int, Any]  # those that remember something

    @cached_property
    def capacity(self) -> int | None:
        limits = [leaf.capacity for leaf in self.leaves.values()]
        return min((limit for limit in limits if limit is not None), default=None)

    @classmethod
    def of(
        cls,
        spec: CacheSpec,
        tiles: Tiles | None,
        host_states: Mapping[str, HostState],
        old: Layers | None = None,
    ) -> Layers:
        """Empty ones, in pools of their own; states of the host are as they are."""
        every = dict(leaves_of(spec))
        recipes = {name: recipe for name, recipe in every.items() if name not in host_states}
        told = [
            kind_of(recipe, leaf) if isinstance(recipe, LayerSpec) else None
            for leaf, recipe in enumerate(recipes.values())
        ]
        kinds = [kind for kind in dict.fromkeys(told) if kind is not None]
        states = tuple(Past() for r in recipes.values() if isinstance(r, RecurrentSpec))
        own = [None if kind is None else kinds.index(kind) for kind in told]
        ledger = Ledger(kinds, [Pools.of(kind) for kind in kinds], own, states)
        ledger.host_states = tuple(host_states.values())
        leaves: dict[str, Layer] = dict(host_states)
        place = 0
        for leaf, ((name, recipe), kind) in enumerate(zip(recipes.items(), own, strict=True)):
            if isinstance(recipe, LayerSpec):
                assert kind is not None
                leaves[name] = Attention(recipe, ledger, kind, leaf, tiles)
            else:
                leaves[name] = Recurrent(recipe, ledger, place, leaf)
                place += 1
        for one in leaves.values():
            one.tally.told = next(iter(leaves.values())).tally.told  # it is said once a cache
        leaves = {name: leaves[name] for name in every}
        layers = cls(spec, ledger, leaves, _by_layer(spec, leaves))
        if old is not None:
            layers.succeed(old)
        return layers

    def __post_init__(self) -> None:
        own = weakref.ref(self)  # the ledger is ours
        self.ledger.prune = lambda: None if (layers := own()) is None else layers.prune()

    def prune(self) -> int:
        """Let rows go that recipes do not keep; how many a head, in the mean of what was pruned.

        All layers or none: pages that stay lie in new slots before the old ones go.
        """
        ledger, book = self.ledger, self.ledger.book
        due = dict(enumerate(map(self._due, range(len(book.extents)))))
        leaves = [leaf for _, leaf in self.attention() if due.get(leaf.kind) is not None]
        extents, taken, gone, heads = dict(enumerate(book.extents)), list[Retired](), 0, 0
        if leaves:
            with ledger.counting():
                for leaf in leaves:
                    which, before = due[leaf.kind], book.extents[leaf.kind]
                    assert which is not None
                    kept = leaf.chosen(which)
                    if extents[leaf.kind] is before:
                        pools = ledger.pools[leaf.kind]
                        extents[leaf.kind], slots = pruning.packed(before, kept, pools)
                        taken.append((leaf.kind, slots))
                    leaf.refill(kept, extents[leaf.kind])
                    gone, heads = gone + kept.gone, heads + len(kept.counts)
                late = {leaf.leaf for leaf in leaves if leaf.pruning and leaf.pruning.score.decodes}
                asked = {leaf: one for leaf, one in book.asked.items() if leaf in late}
                ledger.swap(extents.values(), book.states, taken, asked)
            ledger.compact(pruned=True)
        elif book.prompted:
            ledger.ask({}, prompted=False)
        return round(gone / heads) if heads else 0

    def _due(self, kind: int) -> Bools | None:
        """The sequences of which rows are to go now; None: none is.

        While tokens are decoded, those go that a score can tell, where enough of them came.
        """
        ledger, book = self.ledger, self.ledger.book
        rule: Pruning | None = ledger.kinds[kind].prune
        if rule is None or not (book.prompted or rule.score.decodes):
            return None
        which = pruning.over(rule, book.extents[kind], 0 if book.prompted else pruning.LATE)
        mine = [leaf for leaf, own in enumerate(ledger.leaves) if own == kind]
        told = not rule.score.queries or book.asked.keys() >= set(mine)
        return which if which.any() and (book.prompted or told) else None

    @property
    def room(self) -> int | None:
        """So many tokens may come before rows are pruned again; None: any number."""
        book, found = self.ledger.book, list[float]()
        for extent in book.extents:
            rule: Pruning | None = extent.kind.prune
            if rule is not None and rule.score.decodes:
                left = pruning.room(rule, extent)
                left = np.maximum(left, 0) if book.prompted else left
                found.append(pruning.LATE + 1 + float(left.min(initial=0)))
        return max(0, int(min(found))) if found else None

    def succeed(self, old: Layers) -> None:
        """Be read by the backend that was asked for, and go on counting what happens."""
        self.ledger.abandoned, self.ledger.changes = old.ledger.abandoned, old.ledger.changes
        self.ledger.backend = old.ledger.backend
        self.ledger.speculating = old.ledger.speculating
        self.ledger.recording, self.ledger.prompting = old.ledger.recording, old.ledger.prompting
        self.ledger.ask(dict(old.ledger.book.asked), prompted=old.ledger.book.prompted)
        leaves: list[tuple[str, Layer]] = [*self.attention(), *self.recurrent()]
        for name, leaf in leaves:
            leaf.tally = old.leaves[name].tally

    def twin(self, host_states: Mapping[str, HostState]) -> Layers:
        """The same over the same pools, without any sequences."""
        old = self.ledger
        states = tuple(Past() for _ in old.book.states)
        ledger = Ledger(old.kinds, old.pools, old.leaves, states, old.book.storages, old.lock)
        ledger.host_states, ledger.backend = tuple(host_states.values()), old.backend
        leaves = {
            name: host_states[name] if name in host_states else leaf.twin(ledger)
            for name, leaf in self.leaves.items()
        }
        return Layers(self.spec, ledger, leaves, _by_layer(self.spec, leaves))

    def attention(self) -> list[tuple[str, Attention]]:
        return [(name, leaf) for name, leaf in self.leaves.items() if isinstance(leaf, Attention)]

    def recurrent(self) -> list[tuple[str, Recurrent]]:
        return [(name, leaf) for name, leaf in self.leaves.items() if isinstance(leaf, Recurrent)]

    def gathered(self, rows_of: Callable[[Attention], Snapshot]) -> Snapshot:
        """A snapshot of all layers, with what attention layers give."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, int] = {}
        for name, leaf in self.leaves.items():
            if isinstance(leaf, Attention):
                piece = rows_of(leaf)
            elif isinstance(leaf, Recurrent):
                piece = past_snapshot(leaf.past)
            else:
                piece = leaf.shared_snapshot()
            tensors |= {f"{name}/{key}": tensor for key, tensor in piece.tensors.items()}
            numbers |= {f"{name}/{key}": number for key, number in piece.numbers.items()}
        return Snapshot(tensors, numbers)

    def host_states(self) -> dict[str, HostState]:
        ours = (Attention, Recurrent)
        return {name: leaf for name, leaf in self.leaves.items() if not isinstance(leaf, ours)}


def leaves_of(spec: CacheSpec) -> Iterator[tuple[str, LayerSpec | RecurrentSpec]]:
    """The recipes of all memories, by the names that files know them by."""
    for index, recipe in enumerate(spec.layers):
        if isinstance(recipe, GroupSpec):
            yield from ((f"{index}/{name}", part) for name, part in recipe.parts)
        elif isinstance(recipe, LayerSpec | RecurrentSpec):
            yield str(index), recipe


def _by_layer(spec: CacheSpec, leaves: Mapping[str, Layer]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for index, recipe in enumerate(spec.layers):
        if isinstance(recipe, SharedSpec):
            found[index] = found[recipe.layer]
        elif isinstance(recipe, GroupSpec):
            found[index] = Group((name, leaves[f"{index}/{name}"]) for name, _ in recipe.parts)
        elif not isinstance(recipe, EmptySpec):
            found[index] = leaves[str(index)]
    return found


def _pieces(snapshot: Snapshot, names: list[str]) -> dict[str, Snapshot]:
    """A snapshot by layer."""
    parts: dict[str, tuple[dict[str, Tensor], dict[str, int]]] = {n: ({}, {}) for n in names}
    for which, entries in enumerate((snapshot.tensors, snapshot.numbers)):
        for key, value in entries.items():
            name, _, rest = key.rpartition("/")
            if name not in parts:
                raise SnapshotMismatch(f"{key} belongs to none of the layers {short(names)}")
            parts[name][which][rest] = value  # type: ignore[assignment]
    return {name: Snapshot(*both) for name, both in parts.items()}


@dataclass(frozen=True)
class Told:
    """What a snapshot says of all layers, once it was compared with them and with itself."""

    pieces: Mapping[str, Snapshot]  # by layer
    leaves: Mapping[str, snapshot.Told]  # attention layers that have tokens
    kinds: Mapping[int, snapshot.Told]  # one of each kind, in order; none without tokens
    pasts: Sequence[Past]
    followed: Mapping[str, Any]  # what states of the host are to become


def told_by(layers: Layers, whole: Snapshot, apart: Mapping[int, int] | None = None) -> Told:
    """What a snapshot for such layers says, but for so many pages, by kind, that come apart."""
    pieces = _pieces(whole, list(layers.leaves))
    apart = apart or {}
    leaves: dict[str, snapshot.Told] = {}
    told: dict[int, snapshot.Told | None] = {}
    pasts: list[Past] = []
    followed: dict[str, Any] = {}
    for name, leaf in layers.leaves.items():
        try:
            if isinstance(leaf, Recurrent):
                pasts.append(restored_past(leaf.spec, pieces[name]))
                continue
            if not isinstance(leaf, Attention):
                followed[name] = leaf.restored(pieces[name])
                continue
            kind, count = layers.ledger.kinds[leaf.kind], apart.get(leaf.kind, 0)
            found = snapshot.told_by(leaf.spec, kind, pieces[name], count)
            if found is not None:
                leaves[name] = found
            known = told.setdefault(leaf.kind, found)
            if (known is None) != (found is None) or (found and known and not found.agrees(known)):
                raise SnapshotMismatch("other sequences than those of a layer of the same kind")
        except SnapshotMismatch as error:
            raise SnapshotMismatch(f"layer {name}: {error}") from None
    kinds = {kind: one for kind, one in sorted(told.items()) if one is not None}
    if len(kinds) not in (0, len(told)):
        raise SnapshotMismatch("some layers have tokens, others none")
    sequences = {len(one.numbers) // one.heads for one in kinds.values()}
    batches = sorted(sequences | ({past.batch for past in pasts} - {0}))
    if len(batches) > 1:
        raise SnapshotMismatch(f"layers with batches of {batches}")
    return Told(pieces, leaves, kinds, pasts, followed)


def restore_into(layers: Layers, whole: Snapshot) -> Mapping[str, Any]:
    """Fill layers that are empty; what states of the host are to become."""
    found, ledger = told_by(layers, whole), layers.ledger
    for name, leaf in layers.attention():
        if name in found.leaves:
            storage = snapshot.restored(
                leaf.spec, found.leaves[name], found.pieces[name], leaf.tiles
            )
            ledger.book.storages[leaf.leaf] = storage
    extents = [
        placed(ledger.kinds[kind], one.numbers, ledger.pools[kind], heads=one.heads)
        for kind, one in found.kinds.items()
    ]
    ledger.keep(replace(ledger.book, extents=tuple(extents), states=tuple(found.pasts)))
    return found.followed


def recode_into(new: Layers, old: Layers) -> None:
    """Fill layers that are empty with what others read."""
    ledger, book = new.ledger, old.ledger.book
    if not book.extents:
        return
    before = dict(old.attention())
    begins: dict[int, Ints] = {}  # by kind: from where on all of its layers have rows
    for name, leaf in new.attention():
        with _naming(name):
            was = book.extents[before[name].kind]
            recode.check_rows(was, ledger.kinds[leaf.kind])
            first = recode.first_rows(was)
            begins[leaf.kind] = np.maximum(begins.get(leaf.kind, first), first)
    extents: dict[int, Extent] = {}
    for name, leaf in new.attention():
        with _naming(name):
            source, was = before[name].storage, book.extents[before[name].kind]
            kind, pools = ledger.kinds[leaf.kind], ledger.pools[leaf.kind]
            if leaf.kind not in extents:
                extents[leaf.kind] = recode.recoded(was, begins[leaf.kind], kind, pools)
            elif (extents[leaf.kind].lengths != was.lengths).any():
                raise CacheError(
                    f"{was.columns} tokens, {extents[leaf.kind].columns} in a layer before it: "
                    "rewind to a length that all layers have"
                )
            if source is None:
                continue
            storage = recode.storage_for(source, leaf.spec)
            storage.fit(pools.open.size, pools.sealed.size)
            recode.refill(source, was, storage, extents[leaf.kind], leaf.tally)
            ledger.book.storages[leaf.leaf] = storage
    after = tuple(extents[kind] for kind in range(len(ledger.kinds)))
    ledger.keep(replace(ledger.book, extents=after))


@contextmanager
def _naming(layer: str) -> Iterator[None]:
    """An error within is one of this layer."""
    try:
        yield
    except (CacheError, ValueError) as error:
        raise type(error)(f"layer {layer}: {error}") from error


def brought(
    layers: Layers, there: Layers, begun: Sequence[Extent] = ()
) -> tuple[Sequence[Extent], list[Retired]]:
    """The sequences of a cache in the pools of another: as they are, or copies of their pages.

    Also the slots that were taken for the copies. A sequence that begins with the tokens of one
    that is `begun` there shares its whole pages.
    """
    book = layers.ledger.book
    mine = {name: leaf.storage for name, leaf in layers.attention()}
    other = {name: leaf.storage for name, leaf in there.attention()}
    if all(mine[name] is other[name] for name in mine):
        if not begun:
            return book.extents, []
        return [sharing(*both) for both in zip(book.extents, begun, strict=True)], []
    pools = there.ledger.pools
    before = begun or (None,) * len(pools)
    parts = zip(book.extents, pools, before, strict=True)
    extents = [placed(e.kind, e.numbers, pool, had, e.heads) for e, pool, had in parts]
    taken = [taken_for(e, had) for e, had in zip(extents, before, strict=True)]
    for name, leaf in layers.attention():
        source, target = mine[name], other[name]
        if source is None or target is None or source.geometry != target.geometry:
            raise ValueError(f"layer {name}: rows of other shapes, or on another device")
        if source.tiles != target.tiles:
            raise ValueError(f"layer {name}: bytes in {source.tiles}, and in {target.tiles}")
        target.fit(pools[leaf.kind].open.size, pools[leaf.kind].sealed.size)
        target.take(source, book.extents[leaf.kind], extents[leaf.kind], taken[leaf.kind])
    return extents, list(enumerate(taken))

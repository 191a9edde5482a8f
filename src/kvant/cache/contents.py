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
from kvant.cache.advance import Pools, allocate_table, list_allocated_slots, share_prefix_pages
from kvant.cache.layer import PagedLayer, make_layer_group
from kvant.cache.recurrent import RecurrentLayer, StateHistory
from kvant.cache.recurrent import restore_history as restored_past
from kvant.cache.recurrent import snapshot_history as past_snapshot
from kvant.cache.state import RetiredSlots
from kvant.cache.tracker import StateTracker
from kvant.contracts import ExternalState, Pruning, Snapshot, Tiles
from kvant.errors import CacheError, SnapshotMismatch
from kvant.page_table import Bools, Ints, PageTable
from kvant.recipes import CacheSpec, EmptySpec, GroupSpec, LayerSpec, RecurrentSpec, SharedSpec

AnyLayer = Any  # an Attention, a Recurrent, or a HostState


class GroupLayer(dict[str, AnyLayer]):
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
class CacheContents:
    """What a cache holds: it is replaced as a whole."""

    spec: CacheSpec
    tracker: StateTracker
    leaves: Mapping[str, AnyLayer]  # by the number of the layer, and the name of a part
    indexed_layers: Mapping[int, Any]  # those that remember something

    @cached_property
    def capacity(self) -> int | None:
        limits = [leaf.capacity for leaf in self.leaves.values()]
        return min((limit for limit in limits if limit is not None), default=None)

    @classmethod
    def make_empty(
        cls,
        spec: CacheSpec,
        tiles: Tiles | None,
        external_states: Mapping[str, ExternalState],
        previous: CacheContents | None = None,
    ) -> CacheContents:
        """Empty ones, in pools of their own; states of the host are as they are."""
        every = dict(iterate_leaves(spec))
        recipes = {name: recipe for name, recipe in every.items() if name not in external_states}
        told = [
            make_layer_group(recipe, leaf) if isinstance(recipe, LayerSpec) else None
            for leaf, recipe in enumerate(recipes.values())
        ]
        kinds = [kind for kind in dict.fromkeys(told) if kind is not None]
        states = tuple(StateHistory() for r in recipes.values() if isinstance(r, RecurrentSpec))
        own = [None if kind is None else kinds.index(kind) for kind in told]
        ledger = StateTracker(kinds, [Pools.make(kind) for kind in kinds], own, states)
        ledger.external_states = tuple(external_states.values())
        leaves: dict[str, AnyLayer] = dict(external_states)
        place = 0
        for leaf, ((name, recipe), kind) in enumerate(zip(recipes.items(), own, strict=True)):
            if isinstance(recipe, LayerSpec):
                assert kind is not None
                leaves[name] = PagedLayer(recipe, ledger, kind, leaf, tiles)
            else:
                leaves[name] = RecurrentLayer(recipe, ledger, place, leaf)
                place += 1
        for one in leaves.values():
            one.stats.warned = next(iter(leaves.values())).stats.warned  # it is said once a cache
        leaves = {name: leaves[name] for name in every}
        layers = cls(spec, ledger, leaves, _index_layers(spec, leaves))
        if previous is not None:
            layers.inherit_from(previous)
        return layers

    def __post_init__(self) -> None:
        own = weakref.ref(self)  # the ledger is ours
        self.tracker.prune_callback = lambda: None if (layers := own()) is None else layers.prune()

    def prune(self) -> int:
        """Let rows go that recipes do not keep; how many a head, in the mean of what was pruned.

        All layers or none: pages that stay lie in new slots before the old ones go.
        """
        ledger, book = self.tracker, self.tracker.state
        due = dict(enumerate(map(self._find_sequences_to_prune, range(len(book.page_tables)))))
        leaves = [leaf for _, leaf in self.list_attention() if due.get(leaf.group) is not None]
        extents, taken, gone, heads = dict(enumerate(book.page_tables)), list[RetiredSlots](), 0, 0
        if leaves:
            with ledger.guard_counts():
                for leaf in leaves:
                    which, before = due[leaf.group], book.page_tables[leaf.group]
                    assert which is not None
                    kept = leaf.select_retained_rows(which)
                    if extents[leaf.group] is before:
                        pools = ledger.pools[leaf.group]
                        extents[leaf.group], slots = pruning.pack_table(before, kept, pools)
                        taken.append((leaf.group, slots))
                    leaf.write_retained_rows(kept, extents[leaf.group])
                    gone, heads = gone + kept.num_removed, heads + len(kept.counts)
                late = {
                    leaf.leaf
                    for leaf in leaves
                    if leaf.pruning and leaf.pruning.score.prunes_during_decode
                }
                asked = {leaf: one for leaf, one in book.pruning_queries.items() if leaf in late}
                ledger.replace_tables(extents.values(), book.histories, taken, asked)
            ledger.compact(after_prune=True)
        elif book.has_unpruned_prompt:
            ledger.replace_queries({}, has_unpruned_prompt=False)
        return round(gone / heads) if heads else 0

    def _find_sequences_to_prune(self, group: int) -> Bools | None:
        """The sequences of which rows are to go now; None: none is.

        While tokens are decoded, those go that a score can tell, where enough of them came.
        """
        ledger, book = self.tracker, self.tracker.state
        rule: Pruning | None = ledger.layer_groups[group].pruning
        if rule is None or not (book.has_unpruned_prompt or rule.score.prunes_during_decode):
            return None
        which = pruning.mask_over_budget(
            rule,
            book.page_tables[group],
            0 if book.has_unpruned_prompt else pruning.MAX_DECODE_EXCESS,
        )
        mine = [leaf for leaf, own in enumerate(ledger.leaf_groups) if own == group]
        told = not rule.score.num_queries or book.pruning_queries.keys() >= set(mine)
        return which if which.any() and (book.has_unpruned_prompt or told) else None

    @property
    def tokens_until_prune(self) -> int | None:
        """So many tokens may come before rows are pruned again; None: any number."""
        book, found = self.tracker.state, list[float]()
        for extent in book.page_tables:
            rule: Pruning | None = extent.layer_group.pruning
            if rule is not None and rule.score.prunes_during_decode:
                left = pruning.count_spare_rows(rule, extent)
                left = np.maximum(left, 0) if book.has_unpruned_prompt else left
                found.append(pruning.MAX_DECODE_EXCESS + 1 + float(left.min(initial=0)))
        return max(0, int(min(found))) if found else None

    def inherit_from(self, previous: CacheContents) -> None:
        """Be read by the backend that was asked for, and go on counting what happens."""
        self.tracker.num_abandoned, self.tracker.num_changes = (
            previous.tracker.num_abandoned,
            previous.tracker.num_changes,
        )
        self.tracker.backend = previous.tracker.backend
        self.tracker.in_speculation = previous.tracker.in_speculation
        self.tracker.external_speculation, self.tracker.in_prompt = (
            previous.tracker.external_speculation,
            previous.tracker.in_prompt,
        )
        self.tracker.replace_queries(
            dict(previous.tracker.state.pruning_queries),
            has_unpruned_prompt=previous.tracker.state.has_unpruned_prompt,
        )
        leaves: list[tuple[str, AnyLayer]] = [*self.list_attention(), *self.list_recurrent()]
        for name, leaf in leaves:
            leaf.stats = previous.leaves[name].stats

    def make_empty_sibling(self, external_states: Mapping[str, ExternalState]) -> CacheContents:
        """The same over the same pools, without any sequences."""
        old = self.tracker
        states = tuple(StateHistory() for _ in old.state.histories)
        ledger = StateTracker(
            old.layer_groups, old.pools, old.leaf_groups, states, old.state.storages, old.lock
        )
        ledger.external_states, ledger.backend = tuple(external_states.values()), old.backend
        leaves = {
            name: external_states[name] if name in external_states else leaf.make_sibling(ledger)
            for name, leaf in self.leaves.items()
        }
        return CacheContents(self.spec, ledger, leaves, _index_layers(self.spec, leaves))

    def list_attention(self) -> list[tuple[str, PagedLayer]]:
        return [(name, leaf) for name, leaf in self.leaves.items() if isinstance(leaf, PagedLayer)]

    def list_recurrent(self) -> list[tuple[str, RecurrentLayer]]:
        return [
            (name, leaf) for name, leaf in self.leaves.items() if isinstance(leaf, RecurrentLayer)
        ]

    def gather_snapshot(self, snapshot_rows: Callable[[PagedLayer], Snapshot]) -> Snapshot:
        """A snapshot of all layers, with what attention layers give."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, int] = {}
        for name, leaf in self.leaves.items():
            if isinstance(leaf, PagedLayer):
                piece = snapshot_rows(leaf)
            elif isinstance(leaf, RecurrentLayer):
                piece = past_snapshot(leaf.history)
            else:
                piece = leaf.shared_snapshot()
            tensors |= {f"{name}/{key}": tensor for key, tensor in piece.tensors.items()}
            numbers |= {f"{name}/{key}": number for key, number in piece.numbers.items()}
        return Snapshot(tensors, numbers)

    def collect_external_states(self) -> dict[str, ExternalState]:
        ours = (PagedLayer, RecurrentLayer)
        return {name: leaf for name, leaf in self.leaves.items() if not isinstance(leaf, ours)}


def iterate_leaves(spec: CacheSpec) -> Iterator[tuple[str, LayerSpec | RecurrentSpec]]:
    """The recipes of all memories, by the names that files know them by."""
    for index, recipe in enumerate(spec.layers):
        if isinstance(recipe, GroupSpec):
            yield from ((f"{index}/{name}", part) for name, part in recipe.parts)
        elif isinstance(recipe, LayerSpec | RecurrentSpec):
            yield str(index), recipe


def _index_layers(spec: CacheSpec, leaves: Mapping[str, AnyLayer]) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for index, recipe in enumerate(spec.layers):
        if isinstance(recipe, SharedSpec):
            found[index] = found[recipe.layer]
        elif isinstance(recipe, GroupSpec):
            found[index] = GroupLayer((name, leaves[f"{index}/{name}"]) for name, _ in recipe.parts)
        elif not isinstance(recipe, EmptySpec):
            found[index] = leaves[str(index)]
    return found


def _split_snapshot(snapshot: Snapshot, names: list[str]) -> dict[str, Snapshot]:
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
class ParsedSnapshot:
    """What a snapshot says of all layers, once it was compared with them and with itself."""

    layer_snapshots: Mapping[str, Snapshot]  # by layer
    leaves: Mapping[str, snapshot.ParsedLayer]  # attention layers that have tokens
    layer_groups: Mapping[
        int, snapshot.ParsedLayer
    ]  # one of each kind, in order; none without tokens
    histories: Sequence[StateHistory]
    external_histories: Mapping[str, Any]  # what states of the host are to become


def parse_snapshot(
    contents: CacheContents,
    full_snapshot: Snapshot,
    num_separate_pages: Mapping[int, int] | None = None,
) -> ParsedSnapshot:
    """What a snapshot for such layers says, but for so many pages, by kind, that come apart."""
    pieces = _split_snapshot(full_snapshot, list(contents.leaves))
    num_separate_pages = num_separate_pages or {}
    leaves: dict[str, snapshot.ParsedLayer] = {}
    told: dict[int, snapshot.ParsedLayer | None] = {}
    pasts: list[StateHistory] = []
    followed: dict[str, Any] = {}
    for name, leaf in contents.leaves.items():
        try:
            if isinstance(leaf, RecurrentLayer):
                pasts.append(restored_past(leaf.spec, pieces[name]))
                continue
            if not isinstance(leaf, PagedLayer):
                followed[name] = leaf.parse_snapshot(pieces[name])
                continue
            kind, count = (
                contents.tracker.layer_groups[leaf.group],
                num_separate_pages.get(leaf.group, 0),
            )
            found = snapshot.parse_layer(leaf.spec, kind, pieces[name], count)
            if found is not None:
                leaves[name] = found
            known = told.setdefault(leaf.group, found)
            if (known is None) != (found is None) or (
                found and known and not found.matches_sequences(known)
            ):
                raise SnapshotMismatch("other sequences than those of a layer of the same kind")
        except SnapshotMismatch as error:
            raise SnapshotMismatch(f"layer {name}: {error}") from None
    kinds = {kind: one for kind, one in sorted(told.items()) if one is not None}
    if len(kinds) not in (0, len(told)):
        raise SnapshotMismatch("some layers have tokens, others none")
    sequences = {len(one.numbers) // one.tables_per_sequence for one in kinds.values()}
    batches = sorted(sequences | ({past.batch for past in pasts} - {0}))
    if len(batches) > 1:
        raise SnapshotMismatch(f"layers with batches of {batches}")
    return ParsedSnapshot(pieces, leaves, kinds, pasts, followed)


def restore_into(contents: CacheContents, full_snapshot: Snapshot) -> Mapping[str, Any]:
    """Fill layers that are empty; what states of the host are to become."""
    found, ledger = parse_snapshot(contents, full_snapshot), contents.tracker
    for name, leaf in contents.list_attention():
        if name in found.leaves:
            storage = snapshot.restore_storage(
                leaf.spec, found.leaves[name], found.layer_snapshots[name], leaf.tiles
            )
            ledger.state.storages[leaf.leaf] = storage
    extents = [
        allocate_table(
            ledger.layer_groups[kind],
            one.numbers,
            ledger.pools[kind],
            tables_per_sequence=one.tables_per_sequence,
        )
        for kind, one in found.layer_groups.items()
    ]
    ledger.commit(
        replace(ledger.state, page_tables=tuple(extents), histories=tuple(found.histories))
    )
    return found.external_histories


def recode_into(new: CacheContents, old: CacheContents) -> None:
    """Fill layers that are empty with what others read."""
    ledger, book = new.tracker, old.tracker.state
    if not book.page_tables:
        return
    before = dict(old.list_attention())
    begins: dict[int, Ints] = {}  # by kind: from where on all of its layers have rows
    for name, leaf in new.list_attention():
        with _name_layer_in_errors(name):
            was = book.page_tables[before[name].group]
            recode.check_recodable(was, ledger.layer_groups[leaf.group])
            first = recode.find_first_rows(was)
            begins[leaf.group] = np.maximum(begins.get(leaf.group, first), first)
    extents: dict[int, PageTable] = {}
    for name, leaf in new.list_attention():
        with _name_layer_in_errors(name):
            source, was = before[name].storage, book.page_tables[before[name].group]
            kind, pools = ledger.layer_groups[leaf.group], ledger.pools[leaf.group]
            if leaf.group not in extents:
                extents[leaf.group] = recode.allocate_recoded(was, begins[leaf.group], kind, pools)
            elif (extents[leaf.group].lengths != was.lengths).any():
                raise CacheError(
                    f"{was.num_columns} tokens, {extents[leaf.group].num_columns} in a layer "
                    "before it: "
                    "rewind to a length that all layers have"
                )
            if source is None:
                continue
            storage = recode.make_storage(source, leaf.spec)
            storage.ensure_slots(pools.open.size, pools.sealed.size)
            recode.recode_rows(source, was, storage, extents[leaf.group], leaf.stats)
            ledger.state.storages[leaf.leaf] = storage
    after = tuple(extents[kind] for kind in range(len(ledger.layer_groups)))
    ledger.commit(replace(ledger.state, page_tables=after))


@contextmanager
def _name_layer_in_errors(layer: str) -> Iterator[None]:
    """An error within is one of this layer."""
    try:
        yield
    except (CacheError, ValueError) as error:
        raise type(error)(f"layer {layer}: {error}") from error


def import_pages(
    contents: CacheContents, target_contents: CacheContents, prefixes: Sequence[PageTable] = ()
) -> tuple[Sequence[PageTable], list[RetiredSlots]]:
    """The sequences of a cache in the pools of another: as they are, or copies of their pages.

    Also the slots that were taken for the copies. A sequence that begins with the tokens of one
    that is `begun` there shares its whole pages.
    """
    book = contents.tracker.state
    mine = {name: leaf.storage for name, leaf in contents.list_attention()}
    other = {name: leaf.storage for name, leaf in target_contents.list_attention()}
    if all(mine[name] is other[name] for name in mine):
        if not prefixes:
            return book.page_tables, []
        return [
            share_prefix_pages(*both) for both in zip(book.page_tables, prefixes, strict=True)
        ], []
    pools = target_contents.tracker.pools
    before = prefixes or (None,) * len(pools)
    parts = zip(book.page_tables, pools, before, strict=True)
    extents = [
        allocate_table(e.layer_group, e.numbers, pool, had, e.tables_per_sequence)
        for e, pool, had in parts
    ]
    taken = [list_allocated_slots(e, had) for e, had in zip(extents, before, strict=True)]
    for name, leaf in contents.list_attention():
        source, target = mine[name], other[name]
        if source is None or target is None or source.geometry != target.geometry:
            raise ValueError(f"layer {name}: rows of other shapes, or on another device")
        if source.tiles != target.tiles:
            raise ValueError(f"layer {name}: bytes in {source.tiles}, and in {target.tiles}")
        target.ensure_slots(pools[leaf.group].open.size, pools[leaf.group].sealed.size)
        target.copy_pages_from(
            source, book.page_tables[leaf.group], extents[leaf.group], taken[leaf.group]
        )
    return extents, list(enumerate(taken))

"""The contents of a cache: its spec, its layers, their storages and their state tracker.

A cache replaces its contents as a whole: a restore or a recode fills new ones first.
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
from kvant.cache.recurrent import (
    RecurrentLayer,
    StateHistory,
    restore_history,
    snapshot_history,
)
from kvant.cache.state import RetiredSlots
from kvant.cache.tracker import StateTracker
from kvant.contracts import ExternalState, Pruning, Snapshot, Tiles
from kvant.errors import CacheError, SnapshotMismatch
from kvant.page_table import Bools, Ints, PageTable
from kvant.recipes import CacheSpec, EmptySpec, GroupSpec, LayerSpec, RecurrentSpec, SharedSpec

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


@dataclass(frozen=True, eq=False)
class CacheContents:
    """The layers of a cache, replaced as a whole."""

    spec: CacheSpec
    tracker: StateTracker
    leaves: Mapping[str, AnyLayer]  # by layer number, or number/part of a group
    indexed_layers: Mapping[int, Any]  # the layers that have a cache

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
        """Create empty layers with pools of their own; `external_states` are kept as they are."""
        all_recipes = dict(iterate_leaves(spec))
        recipes = {
            name: recipe for name, recipe in all_recipes.items() if name not in external_states
        }
        groups = [
            make_layer_group(recipe, leaf) if isinstance(recipe, LayerSpec) else None
            for leaf, recipe in enumerate(recipes.values())
        ]
        unique_groups = [group for group in dict.fromkeys(groups) if group is not None]
        histories = tuple(StateHistory() for r in recipes.values() if isinstance(r, RecurrentSpec))
        leaf_groups = [None if group is None else unique_groups.index(group) for group in groups]
        tracker = StateTracker(
            unique_groups, [Pools.make(group) for group in unique_groups], leaf_groups, histories
        )
        tracker.external_states = tuple(external_states.values())
        leaves: dict[str, AnyLayer] = dict(external_states)
        history_index = 0
        for leaf, ((name, recipe), group) in enumerate(
            zip(recipes.items(), leaf_groups, strict=True)
        ):
            if isinstance(recipe, LayerSpec):
                assert group is not None
                leaves[name] = PagedLayer(recipe, tracker, group, leaf, tiles)
            else:
                leaves[name] = RecurrentLayer(recipe, tracker, history_index, leaf)
                history_index += 1
        for layer in leaves.values():  # each warning is issued once per cache
            layer.stats.warned = next(iter(leaves.values())).stats.warned
        leaves = {name: leaves[name] for name in all_recipes}
        contents = cls(spec, tracker, leaves, _index_layers(spec, leaves))
        if previous is not None:
            contents.inherit_from(previous)
        return contents

    def __post_init__(self) -> None:
        contents_ref = weakref.ref(self)  # no cycle: the tracker belongs to these contents
        self.tracker.prune_callback = lambda: (
            None if (contents := contents_ref()) is None else contents.prune()
        )

    def prune(self) -> int:
        """Drop the rows that recipes do not retain; return how many per head, on average.

        Retained rows are copied to new slots before any old slot is freed, so an error changes
        nothing.
        """
        tracker, state = self.tracker, self.tracker.state
        due = dict(enumerate(map(self._find_sequences_to_prune, range(len(state.page_tables)))))
        leaves = [leaf for _, leaf in self.list_attention() if due.get(leaf.group) is not None]
        page_tables = dict(enumerate(state.page_tables))
        allocated = list[RetiredSlots]()
        num_removed = 0
        num_heads = 0
        if leaves:
            with tracker.guard_counts():
                for leaf in leaves:
                    sequence_mask, old_table = due[leaf.group], state.page_tables[leaf.group]
                    assert sequence_mask is not None
                    retained = leaf.select_retained_rows(sequence_mask)
                    if page_tables[leaf.group] is old_table:
                        pools = tracker.pools[leaf.group]
                        page_tables[leaf.group], slots = pruning.pack_table(
                            old_table, retained, pools
                        )
                        allocated.append((leaf.group, slots))
                    leaf.write_retained_rows(retained, page_tables[leaf.group])
                    num_removed += retained.num_removed
                    num_heads += len(retained.counts)
                decode_leaves = {
                    leaf.leaf
                    for leaf in leaves
                    if leaf.pruning and leaf.pruning.score.prunes_during_decode
                }
                queries = {
                    leaf: leaf_queries
                    for leaf, leaf_queries in state.pruning_queries.items()
                    if leaf in decode_leaves
                }
                tracker.replace_tables(page_tables.values(), state.histories, allocated, queries)
            tracker.compact(after_prune=True)
        elif state.has_unpruned_prompt:
            tracker.replace_queries({}, has_unpruned_prompt=False)
        return round(num_removed / num_heads) if num_heads else 0

    def _find_sequences_to_prune(self, group: int) -> Bools | None:
        """Return a mask of the sequences to prune now; None: none of them.

        During decoding this is limited to scores that support it, and to sequences far over budget.
        """
        tracker, state = self.tracker, self.tracker.state
        rule: Pruning | None = tracker.layer_groups[group].pruning
        if rule is None or not (state.has_unpruned_prompt or rule.score.prunes_during_decode):
            return None
        mask = pruning.mask_over_budget(
            rule,
            state.page_tables[group],
            0 if state.has_unpruned_prompt else pruning.MAX_DECODE_EXCESS,
        )
        leaves = [
            leaf for leaf, leaf_group in enumerate(tracker.leaf_groups) if leaf_group == group
        ]
        has_queries = not rule.score.num_queries or state.pruning_queries.keys() >= set(leaves)
        return mask if mask.any() and (state.has_unpruned_prompt or has_queries) else None

    @property
    def tokens_until_prune(self) -> int | None:
        """Tokens that fit before rows are pruned again; None: any number."""
        state, spare_tokens = self.tracker.state, list[float]()
        for page_table in state.page_tables:
            rule: Pruning | None = page_table.layer_group.pruning
            if rule is not None and rule.score.prunes_during_decode:
                spare_rows = pruning.count_spare_rows(rule, page_table)
                spare_rows = np.maximum(spare_rows, 0) if state.has_unpruned_prompt else spare_rows
                spare_tokens.append(
                    pruning.MAX_DECODE_EXCESS + 1 + float(spare_rows.min(initial=0))
                )
        return max(0, int(min(spare_tokens))) if spare_tokens else None

    def inherit_from(self, previous: CacheContents) -> None:
        """Take over the backend, the modes and the counters of `previous`."""
        self.tracker.num_abandoned = previous.tracker.num_abandoned
        self.tracker.num_changes = previous.tracker.num_changes
        self.tracker.backend = previous.tracker.backend
        self.tracker.in_speculation = previous.tracker.in_speculation
        self.tracker.external_speculation = previous.tracker.external_speculation
        self.tracker.in_prompt = previous.tracker.in_prompt
        self.tracker.replace_queries(
            dict(previous.tracker.state.pruning_queries),
            has_unpruned_prompt=previous.tracker.state.has_unpruned_prompt,
        )
        leaves: list[tuple[str, AnyLayer]] = [*self.list_attention(), *self.list_recurrent()]
        for name, leaf in leaves:
            leaf.stats = previous.leaves[name].stats

    def make_empty_sibling(self, external_states: Mapping[str, ExternalState]) -> CacheContents:
        """Create empty layers over the same pools and storages."""
        old_tracker = self.tracker
        histories = tuple(StateHistory() for _ in old_tracker.state.histories)
        tracker = StateTracker(
            old_tracker.layer_groups,
            old_tracker.pools,
            old_tracker.leaf_groups,
            histories,
            old_tracker.state.storages,
            old_tracker.lock,
        )
        tracker.external_states = tuple(external_states.values())
        tracker.backend = old_tracker.backend
        leaves = {
            name: external_states[name] if name in external_states else leaf.make_sibling(tracker)
            for name, leaf in self.leaves.items()
        }
        return CacheContents(self.spec, tracker, leaves, _index_layers(self.spec, leaves))

    def list_attention(self) -> list[tuple[str, PagedLayer]]:
        return [(name, leaf) for name, leaf in self.leaves.items() if isinstance(leaf, PagedLayer)]

    def list_recurrent(self) -> list[tuple[str, RecurrentLayer]]:
        return [
            (name, leaf) for name, leaf in self.leaves.items() if isinstance(leaf, RecurrentLayer)
        ]

    def gather_snapshot(self, snapshot_rows: Callable[[PagedLayer], Snapshot]) -> Snapshot:
        """Return a snapshot of all layers, those with pages by `snapshot_rows`."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, int] = {}
        for name, leaf in self.leaves.items():
            if isinstance(leaf, PagedLayer):
                layer_snapshot = snapshot_rows(leaf)
            elif isinstance(leaf, RecurrentLayer):
                layer_snapshot = snapshot_history(leaf.history)
            else:
                layer_snapshot = leaf.shared_snapshot()
            tensors |= {f"{name}/{key}": tensor for key, tensor in layer_snapshot.tensors.items()}
            numbers |= {f"{name}/{key}": number for key, number in layer_snapshot.numbers.items()}
        return Snapshot(tensors, numbers)

    def collect_external_states(self) -> dict[str, ExternalState]:
        ours = (PagedLayer, RecurrentLayer)
        return {name: leaf for name, leaf in self.leaves.items() if not isinstance(leaf, ours)}


def iterate_leaves(spec: CacheSpec) -> Iterator[tuple[str, LayerSpec | RecurrentSpec]]:
    """Yield the recipe of each cache of a spec, with its name in files."""
    for index, recipe in enumerate(spec.layers):
        if isinstance(recipe, GroupSpec):
            yield from ((f"{index}/{name}", part) for name, part in recipe.parts)
        elif isinstance(recipe, LayerSpec | RecurrentSpec):
            yield str(index), recipe


def _index_layers(spec: CacheSpec, leaves: Mapping[str, AnyLayer]) -> dict[int, Any]:
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
    return layers


def _split_snapshot(snapshot: Snapshot, names: list[str]) -> dict[str, Snapshot]:
    """Split a snapshot by layer."""
    parts: dict[str, tuple[dict[str, Tensor], dict[str, int]]] = {n: ({}, {}) for n in names}
    for index, entries in enumerate((snapshot.tensors, snapshot.numbers)):
        for key, value in entries.items():
            name, _, tensor_name = key.rpartition("/")
            if name not in parts:
                raise SnapshotMismatch(f"{key} belongs to none of the layers {short(names)}")
            parts[name][index][tensor_name] = value  # type: ignore[assignment]
    return {name: Snapshot(*pair) for name, pair in parts.items()}


@dataclass(frozen=True)
class ParsedSnapshot:
    """The validated contents of a snapshot."""

    layer_snapshots: Mapping[str, Snapshot]  # by layer
    leaves: Mapping[str, snapshot.ParsedLayer]  # attention layers with tokens
    layer_groups: Mapping[int, snapshot.ParsedLayer]  # one per group, in order; {}: no tokens
    histories: Sequence[StateHistory]
    external_histories: Mapping[str, Any]  # arguments of `prepare_restore`, by layer


def parse_snapshot(
    contents: CacheContents,
    full_snapshot: Snapshot,
    num_separate_pages: Mapping[int, int] | None = None,
) -> ParsedSnapshot:
    """Validate `full_snapshot` against the layers of `contents`.

    `num_separate_pages` counts the full pages of each group that are not in the snapshot.
    """
    layer_snapshots = _split_snapshot(full_snapshot, list(contents.leaves))
    num_separate_pages = num_separate_pages or {}
    leaves: dict[str, snapshot.ParsedLayer] = {}
    first_of_group: dict[int, snapshot.ParsedLayer | None] = {}
    histories: list[StateHistory] = []
    external_histories: dict[str, Any] = {}
    for name, leaf in contents.leaves.items():
        try:
            if isinstance(leaf, RecurrentLayer):
                histories.append(restore_history(leaf.spec, layer_snapshots[name]))
                continue
            if not isinstance(leaf, PagedLayer):
                external_histories[name] = leaf.parse_snapshot(layer_snapshots[name])
                continue
            group = contents.tracker.layer_groups[leaf.group]
            count = num_separate_pages.get(leaf.group, 0)
            parsed = snapshot.parse_layer(leaf.spec, group, layer_snapshots[name], count)
            if parsed is not None:
                leaves[name] = parsed
            first = first_of_group.setdefault(leaf.group, parsed)
            if (first is None) != (parsed is None) or (
                parsed and first and not parsed.matches_sequences(first)
            ):
                raise SnapshotMismatch(
                    "its sequences differ from those of a layer of the same kind"
                )
        except SnapshotMismatch as error:
            raise SnapshotMismatch(f"layer {name}: {error}") from None
    groups = {
        group: parsed_layer
        for group, parsed_layer in sorted(first_of_group.items())
        if parsed_layer is not None
    }
    if len(groups) not in (0, len(first_of_group)):
        raise SnapshotMismatch("some layers have tokens, others none")
    batch_sizes = {
        len(parsed_layer.numbers) // parsed_layer.tables_per_sequence
        for parsed_layer in groups.values()
    }
    batches = sorted(batch_sizes | ({history.batch for history in histories} - {0}))
    if len(batches) > 1:
        raise SnapshotMismatch(f"layers with batches of {batches}")
    return ParsedSnapshot(layer_snapshots, leaves, groups, histories, external_histories)


def restore_into(contents: CacheContents, full_snapshot: Snapshot) -> Mapping[str, Any]:
    """Fill empty layers from a snapshot; return the arguments of `prepare_restore` by layer."""
    parsed, tracker = parse_snapshot(contents, full_snapshot), contents.tracker
    for name, leaf in contents.list_attention():
        if name in parsed.leaves:
            storage = snapshot.restore_storage(
                leaf.spec, parsed.leaves[name], parsed.layer_snapshots[name], leaf.tiles
            )
            tracker.state.storages[leaf.leaf] = storage
    page_tables = [
        allocate_table(
            tracker.layer_groups[group],
            layer.numbers,
            tracker.pools[group],
            tables_per_sequence=layer.tables_per_sequence,
        )
        for group, layer in parsed.layer_groups.items()
    ]
    tracker.commit(
        replace(tracker.state, page_tables=tuple(page_tables), histories=tuple(parsed.histories))
    )
    return parsed.external_histories


def recode_into(new: CacheContents, old: CacheContents) -> None:
    """Fill empty layers with the rows of `old`."""
    tracker, state = new.tracker, old.tracker.state
    if not state.page_tables:
        return
    old_leaves = dict(old.list_attention())
    first_rows: dict[int, Ints] = {}  # by group: the first row that all its layers have
    for name, leaf in new.list_attention():
        with _name_layer_in_errors(name):
            old_table = state.page_tables[old_leaves[name].group]
            recode.check_recodable(old_table, tracker.layer_groups[leaf.group])
            first = recode.find_first_rows(old_table)
            first_rows[leaf.group] = np.maximum(first_rows.get(leaf.group, first), first)
    page_tables: dict[int, PageTable] = {}
    for name, leaf in new.list_attention():
        with _name_layer_in_errors(name):
            source, old_table = old_leaves[name].storage, state.page_tables[old_leaves[name].group]
            group, pools = tracker.layer_groups[leaf.group], tracker.pools[leaf.group]
            if leaf.group not in page_tables:
                page_tables[leaf.group] = recode.allocate_recoded(
                    old_table, first_rows[leaf.group], group, pools
                )
            elif (page_tables[leaf.group].lengths != old_table.lengths).any():
                raise CacheError(
                    f"{old_table.num_columns} tokens, {page_tables[leaf.group].num_columns} in an "
                    "earlier layer: rewind to a length that all layers have"
                )
            if source is None:
                continue
            storage = recode.make_storage(source, leaf.spec)
            storage.ensure_slots(pools.open.size, pools.sealed.size)
            recode.recode_rows(source, old_table, storage, page_tables[leaf.group], leaf.stats)
            tracker.state.storages[leaf.leaf] = storage
    new_tables = tuple(page_tables[group] for group in range(len(tracker.layer_groups)))
    tracker.commit(replace(tracker.state, page_tables=new_tables))


@contextmanager
def _name_layer_in_errors(layer: str) -> Iterator[None]:
    """Prefix errors with the name of the layer."""
    try:
        yield
    except (CacheError, ValueError) as error:
        raise type(error)(f"layer {layer}: {error}") from error


def import_pages(
    contents: CacheContents, target_contents: CacheContents, prefixes: Sequence[PageTable] = ()
) -> tuple[Sequence[PageTable], list[RetiredSlots]]:
    """Return the sequences of `contents` as tables over the pools of `target_contents`.

    Pages are shared if both use the same storages, else copied. Also return the slots allocated for
    copies. A sequence that starts with the tokens of one of `prefixes` shares its full pages.
    """
    state = contents.tracker.state
    sources = {name: leaf.storage for name, leaf in contents.list_attention()}
    targets = {name: leaf.storage for name, leaf in target_contents.list_attention()}
    if all(sources[name] is targets[name] for name in sources):
        if not prefixes:
            return state.page_tables, []
        return [
            share_prefix_pages(*pair) for pair in zip(state.page_tables, prefixes, strict=True)
        ], []
    pools = target_contents.tracker.pools
    optional_prefixes = prefixes or (None,) * len(pools)
    parts = zip(state.page_tables, pools, optional_prefixes, strict=True)
    page_tables = [
        allocate_table(table.layer_group, table.numbers, pool, prefix, table.tables_per_sequence)
        for table, pool, prefix in parts
    ]
    allocated = [
        list_allocated_slots(table, prefix)
        for table, prefix in zip(page_tables, optional_prefixes, strict=True)
    ]
    for name, leaf in contents.list_attention():
        source, target = sources[name], targets[name]
        if source is None or target is None or source.geometry != target.geometry:
            raise ValueError(f"layer {name}: rows of other shapes, or on another device")
        if source.tiles != target.tiles:
            raise ValueError(f"layer {name}: bytes in {source.tiles}, and in {target.tiles}")
        target.ensure_slots(pools[leaf.group].open.size, pools[leaf.group].sealed.size)
        target.copy_pages_from(
            source, state.page_tables[leaf.group], page_tables[leaf.group], allocated[leaf.group]
        )
    return page_tables, list(enumerate(allocated))

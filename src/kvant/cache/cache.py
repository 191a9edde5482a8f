"""The cache of a model: its layers, and one committed page table per layer group.

`cache.length` counts the tokens that all layers have. Each method applies to all layers, or raises
and changes none. It sees committed tokens only: an incomplete forward is rolled back first. Most
methods are arithmetic on page tables. Forks share pages until one of them writes to a page.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention import check_backend
from kvant.attention.write_rows import reopen_pages
from kvant.cache import snapshot
from kvant.cache.advance import (
    concat_tables,
    is_exact_rewind,
    mask_reachable,
    rewind_table,
    select_sequences,
)
from kvant.cache.contents import (
    CacheContents,
    GroupLayer,
    import_pages,
    iterate_leaves,
    recode_into,
    restore_into,
)
from kvant.cache.layer import PagedLayer, make_layer_group
from kvant.cache.recode import constrain_spec, list_attention_layers, replace_formats
from kvant.cache.recurrent import RecurrentLayer, StateHistory, concat_histories
from kvant.cache.state import CacheState, PruningQueries, RetiredSlots
from kvant.cache.tracker import StateTracker
from kvant.contracts import ExternalState, LayerStats, Snapshot, Tiles
from kvant.errors import CacheError, RewindError, UsageHints
from kvant.page_table import LENGTH, PADDING, AppendPlan, Ints, PageTable
from kvant.recipes import AnySpec, CacheSpec, iterate_attention
from kvant.renamed import RenamedAttribute
from kvant.sizes import format_size
from kvant.spec import as_spec, check_fitted, describe_spec

ALL_SEQUENCES = slice(None)


class Cache(UsageHints):
    """The keys and values, or recurrent states, of the layers of a model for B sequences.

    >>> cache = kvant.Cache(num_layers=1, spec="affine8,window=4096")
    >>> view = cache[0].append(torch.randn(1, 2, 10, 64), torch.randn(1, 2, 10, 64))  # [B, H, T, D]
    >>> cache.length, cache.batch
    (10, 1)
    """

    resumable = RenamedAttribute("find_exact_rewind")
    extended = RenamedAttribute("import_sequence")
    prompting = RenamedAttribute("prompt_mode")
    speculating = RenamedAttribute("speculation_mode")

    def __init__(
        self,
        num_layers: int | None = None,
        spec: AnySpec = "raw",
        *,
        tiles: Tiles | None = None,
        external_states: Mapping[str, ExternalState] | None = None,
        backend: str | None = None,
    ) -> None:
        """Create an empty cache.

        `spec` is a string of the spec language, one recipe for all layers, or a CacheSpec.
        `backend` names the attention backend of all layers; None: the first that supports the view.
        `external_states` are recurrent states that the model updates in place, by layer name.
        """
        self.tiles = tiles
        full = check_fitted(as_spec(spec, num_layers))
        self._adopt(CacheContents.make_empty(full, tiles, external_states or {}))
        self.backend = backend
        self._recodes: list[dict[str, Any]] = []  # length, specs and bytes of each recode

    def _adopt(self, contents: CacheContents) -> None:
        self.contents = contents  # one assignment, so an interrupt cannot split it

    @property
    def spec(self) -> CacheSpec:
        return self.contents.spec

    @property
    def layers(self) -> Mapping[int, Any]:
        """The layers that have a cache, by number."""
        return self.contents.indexed_layers

    @property
    def _tracker(self) -> StateTracker:
        return self.contents.tracker

    def __getitem__(self, layer: int) -> Any:
        cached_layer = self.contents.indexed_layers.get(layer)
        if cached_layer is not None:
            return cached_layer
        index = range(len(self))[layer]
        if index not in self.layers:
            raise ValueError(f"layer {index} has no cache: its recipe in the spec is EmptySpec")
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.spec.layers)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the layers that have a cache; a shared layer is repeated."""
        return iter(self.layers.values())

    def __repr__(self) -> str:
        contents = f"{len(self)} layers, length {self.length}, {format_size(self.nbytes)}"
        return f"Cache({describe_spec(self.spec)}: {contents})"

    @property
    def backend(self) -> str | None:
        """The attention backend of all layers; None: the first that supports the view."""
        return self._tracker.backend

    @backend.setter
    def backend(self, name: str | None) -> None:
        check_backend(name)
        self._tracker.backend = name

    @property
    def external_states(self) -> list[ExternalState]:
        """The recurrent states that the model updates in place."""
        return list(self._tracker.external_states)

    @property
    def num_changes(self) -> int:
        """A counter of changes that may affect `nbytes`: an equal value means equal bytes."""
        return self._tracker.num_changes

    @property
    def length(self) -> int:
        """Tokens that every layer has of the longest sequence, padding included."""
        tracker = self.contents.tracker
        if not tracker.external_states:
            return tracker.state.length
        lengths = [external_state.length for external_state in tracker.external_states]
        return min([*lengths, tracker.state.length] if tracker.leaf_groups else lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, without padding."""
        page_tables = self._tracker.state.page_tables
        if page_tables:
            rows = [
                page_table.reduce_to_sequences(page_table.seq_lens) for page_table in page_tables
            ]
            lengths: list[int] = np.min(rows, 0).tolist()
            return lengths
        return [self.length] * self.batch

    @property
    def ragged(self) -> bool:
        """Whether sequences differ in length even with padding counted, as after a merge."""
        page_tables = self.contents.tracker.state.page_tables
        return bool(page_tables) and page_tables[0].ragged  # all groups have the same sequences

    @property
    def batch(self) -> int:
        """The number of sequences; 0 before the first rows."""
        state = self._tracker.state
        batches = [page_table.batch for page_table in state.page_tables if page_table.num_columns]
        batches += [history.batch for history in state.histories]
        return max(
            batches + [external_state.batch for external_state in self._tracker.external_states],
            default=0,
        )

    @property
    def num_rows(self) -> int:
        """The number of rows that `read` returns for the layer with the most."""
        return max((leaf.num_rows for leaf in self.contents.leaves.values()), default=0)

    held = num_rows  # the public name

    @property
    def max_held(self) -> int | None:
        """Upper bound of `held`; None: unbounded."""
        limits = [leaf.max_held for leaf in self.contents.leaves.values()]
        return None if None in limits else max((limit or 0 for limit in limits), default=0)

    @property
    def capacity(self) -> int | None:
        """The maximum length of all layers; None: unbounded."""
        return self.contents.capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated: pages that this cache holds, shared or not, free pages of its pools, and
        the queries retained for a prune.
        """
        pages = sum(int(leaf.nbytes) for leaf in self.contents.leaves.values())
        return pages + self._tracker.query_nbytes if self._tracker.prunes else pages

    @property
    def nbytes_used(self) -> int:
        """Bytes of stored rows and states."""
        return sum(leaf.nbytes_used for leaf in self.contents.leaves.values())

    def nbytes_after(self, num_new_tokens: int, spec: AnySpec | None = None) -> int:
        """Return the bytes allocated after `num_new_tokens` more tokens.

        If `spec` is given, the cache is taken to be recoded to it first. The result is 0 before the
        first rows, because their size is unknown. Checkpoints still to come are not counted.
        """
        self.rollback()
        recipes = dict(
            iterate_leaves(
                self.spec if spec is None else replace_formats(self.spec, self._resolve_spec(spec))
            )
        )
        leaves: Mapping[str, Any] = self.contents.leaves
        return sum(
            int(leaf.nbytes_after(num_new_tokens, recipes[name])) for name, leaf in leaves.items()
        )

    @property
    def is_complete(self) -> bool:
        """Whether no forward is open: the last one reached every layer, or was rolled back."""
        return not self._tracker.state.appended_leaves

    def has_appended(self, layer: int) -> bool:
        """Return whether the open forward has rows of `layer`.

        If so, the next append to this layer starts a new forward.
        """
        cached_layer, tracker = self[layer], self._tracker
        leaves = (
            list(cached_layer.values()) if isinstance(cached_layer, GroupLayer) else [cached_layer]
        )
        return any(
            leaf.leaf in tracker.state.appended_leaves
            for leaf in leaves
            if leaf not in tracker.external_states
        )

    def rollback(self) -> None:
        """Roll back an incomplete forward."""
        with self._tracker.lock:
            self._tracker.rollback()

    def free_retired_pages(self) -> None:
        """Free the pages that the last forward released; its views become invalid."""
        if self._tracker.state.retired_slots:
            with self._tracker.guard_counts():
                self._tracker.free_retired_slots()

    def plan_token(self, *, seals: bool = False) -> list[AppendPlan]:
        """Allocate one more token of every sequence, whose rows an external kernel writes.

        Pages that are due by now are sealed here, and shared pages to be written are copied.
        If the kernel `seals`, it does both itself. Return one plan per layer group: it tells where
        rows go. Call `arrive` afterwards, or `rollback`.
        """
        self.rollback()
        with self._tracker.lock:
            plans = self._tracker.plan_token(seals=seals)
            for _, layer in self.contents.list_attention():
                if not (plan := plans[layer.group]).is_steady:
                    layer.grow_storage()
                    if not seals:
                        layer.seal_due_pages(plan)
        return plans

    @property
    def page_buffers(self) -> list[object]:
        """One object per attention layer, replaced when the tensors of the layer are."""
        layers = (layer for _, layer in self.contents.list_attention())
        return [layer.storage and layer.storage.sides for layer in layers]

    def commit_token(self, backend: str, page_buffers: Sequence[object] | None = None) -> bool:
        """Commit the token of `expect`, whose rows and attention an external kernel computed.

        Return False, and roll back, if `page_buffers` are no longer those of this cache: another
        cache of the same pools has reallocated them.
        """
        with self._tracker.lock:
            num_plans, num_groups = len(self._tracker.state.plans), len(self._tracker.layer_groups)
            if num_plans < num_groups or not self.is_complete:
                raise CacheError("arrive() without expect(): call expect() first")
            buffers = self.page_buffers
            if page_buffers is not None and not all(map(operator.is_, page_buffers, buffers)):
                self._tracker.rollback()
                return False
            for _, layer in self.contents.list_attention():
                layer.stats.appends += 1
                layer.stats.attend_calls[backend] += 1
                self._tracker.commit_layer(layer.leaf)
            return True

    def reachable(self, to: int) -> int:
        """Return the longest length <= `to` that every layer can rewind to."""
        self.rollback()
        to = min(to, self.length)
        while to > 0:
            longest = min(self._find_reachable(name, to) for name in self.contents.leaves)
            if longest == to:
                return to
            to = longest
        return max(to, 0)

    def find_exact_rewind(self, to: int) -> int:
        """Return the longest length <= `to` whose rewind is exact.

        An exact rewind decodes no sealed page.
        """
        length = self.reachable(to)
        if self._is_exact_rewind(length):
            return length
        page = max(page_table.layer_group.page for page_table in self._tracker.state.page_tables)
        length = self.reachable(length - length % page)
        return length if self._is_exact_rewind(length) else 0

    def rewind(self, to: int) -> None:
        """Shorten all sequences so that the longest has `to` tokens."""
        self.rollback()
        to = operator.index(to)
        self._check_reachable(to)
        contents, tracker = self.contents, self._tracker
        if to == self.length and tracker.state.lengths <= {to}:
            for finish_rewind in [
                external_state.prepare_rewind(to) for external_state in tracker.external_states
            ]:
                finish_rewind()  # a state updated in place may be invalid even at this length
            return
        if to == 0:
            self._drop_tokens(count_rewinds=True)
            return
        with tracker.guard_counts():
            lengths = [
                self._compute_rewound_lengths(page_table, to)
                for page_table in tracker.state.page_tables
            ]
            plans = [
                rewind_table(page_table, group_lengths, pools)
                for page_table, group_lengths, pools in zip(
                    tracker.state.page_tables, lengths, tracker.pools, strict=True
                )
            ]
            for _, leaf in contents.list_attention():
                if leaf.storage is not None:
                    pools = tracker.pools[leaf.group]
                    leaf.storage.ensure_slots(pools.open.size, pools.sealed.size)
                    reopen_pages(plans[leaf.group], leaf.storage.sides)
                decoded = len(plans[leaf.group].reopens) > 0
                leaf.stats.rewinds_exact += not decoded
                leaf.stats.rewinds_decoded += decoded
            histories = tuple(history.rewind(to) for history in tracker.state.histories)
            for _, layer in contents.list_recurrent():
                layer.stats.rewinds_exact += 1
            allocated = [(group, plan.allocated_slots) for group, plan in enumerate(plans)]
            new_tables, state = [plan.new_table for plan in plans], tracker.state
            finish_rewinds = [
                external_state.prepare_rewind(to) for external_state in tracker.external_states
            ]
            truncated = {
                leaf: queries.truncate(to) for leaf, queries in state.pruning_queries.items()
            }
            remaining_queries = {
                leaf: queries for leaf, queries in truncated.items() if queries is not None
            }
            has_unpruned_prompt = state.has_unpruned_prompt and len(remaining_queries) == len(
                truncated
            )
            tracker.replace_tables(
                new_tables,
                histories,
                allocated,
                remaining_queries,
                has_unpruned_prompt=has_unpruned_prompt,
            )
            for finish_rewind in finish_rewinds:
                finish_rewind()

    def prune(self) -> int:
        """Drop the rows that the spec does not retain after a prompt.

        Return the number of rows dropped per head, on average. Appending the first token after a
        prompt prunes automatically. So do later tokens, if the score allows it, once rows exceed
        the budget far enough.
        """
        self.rollback()
        with self._tracker.lock:
            return self.contents.prune() if self._tracker.prunes else 0

    @property
    def tokens_until_prune(self) -> int | None:
        """Tokens that fit before rows are pruned again; None: any number."""
        return self.contents.tokens_until_prune if self._tracker.prunes else None

    def end_padding(self) -> None:
        """End the left padding of sequences without tokens; their next column is a token."""
        self.rollback()
        tracker, page_tables = self._tracker, []
        for page_table in tracker.state.page_tables:
            numbers = page_table.numbers.copy()
            numbers[:, PADDING] += np.minimum(numbers[:, LENGTH], 0)
            numbers[:, LENGTH] = page_table.seq_lens
            page_tables.append(replace(page_table, numbers=numbers, derived={}, steady_tokens=0))
        tracker.commit(replace(tracker.state, page_tables=tuple(page_tables)))

    def trim(self, count: int) -> int:
        """Drop the newest `count` tokens, at most all; return the number dropped."""
        if count < 0:
            raise ValueError(f"trim({count}): 0 or more tokens")
        self.rollback()
        dropped = min(count, self.length)
        self.rewind(self.length - dropped)
        return dropped

    def checkpoint(self) -> None:
        """Store the current state of recurrent layers, so that a rewind can restore it."""
        self.rollback()
        tracker, specs = self._tracker, [leaf.spec for _, leaf in self.contents.list_recurrent()]
        for external_state in tracker.external_states:
            external_state.checkpoint()
        histories = tracker.state.histories
        new_histories = tuple(
            history.add_checkpoint(spec.max_checkpoints)
            for history, spec in zip(histories, specs, strict=True)
        )
        tracker.commit(replace(tracker.state, histories=new_histories))

    def snapshot(self) -> Snapshot:
        """Return a copy of the complete state, for `restore`."""
        return self.shared_snapshot().copy()

    def shared_snapshot(self) -> Snapshot:
        """Return a snapshot that may share memory with the cache; the next change may alter it."""
        self.rollback()
        tracker = self._tracker
        return self.contents.gather_snapshot(
            lambda leaf: snapshot.snapshot_layer(
                leaf.storage, tracker.get_committed_table(leaf.group)
            )
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Replace the contents by those of `snapshot`."""
        self.rollback()
        self._adopt_snapshot(self.spec, snapshot)
        self._tracker.replace_queries({}, has_unpruned_prompt=False)

    def fork(self) -> Cache:
        """Return a second cache with the same tokens; pages are shared until one writes to them."""
        self.rollback()
        state = self._tracker.state
        external_states = {
            name: external_state.fork()
            for name, external_state in self.contents.collect_external_states().items()
        }
        page_tables = [
            select_sequences(page_table, np.arange(page_table.batch))
            for page_table in state.page_tables
        ]
        with self._tracker.guard_counts():
            copy = self._make_sibling(page_tables, state.histories, external_states)
            copy._tracker.replace_queries(
                dict(state.pruning_queries), has_unpruned_prompt=state.has_unpruned_prompt
            )
            return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return self.fork()

    def extract(self, sequence: int) -> Cache:
        """Return a cache of one of the sequences; pages are shared."""
        index = _check_indices([sequence], self.batch)
        self.rollback()
        state = self._tracker.state
        _check_padding_ended(state.page_tables, index)
        page_tables = [
            concat_tables([select_sequences(page_table, index)]) for page_table in state.page_tables
        ]
        external_states = {
            name: state_copy.fork()
            for name, state_copy in self.contents.collect_external_states().items()
        }
        external_histories = _select_histories(
            [state_copy.get_history() for state_copy in external_states.values()],
            index,
            state,
            page_tables,
        )
        for external_state, history in zip(
            external_states.values(), external_histories, strict=True
        ):
            external_state.prepare_restore(history)()
        with self._tracker.guard_counts():
            selected = _select_histories(state.histories, index, state, page_tables)
            copy = self._make_sibling(page_tables, selected, external_states)
            copy._tracker.replace_queries(
                self._select_queries(index, page_tables),
                has_unpruned_prompt=state.has_unpruned_prompt,
            )
            return copy

    def merge_with(self, others: Sequence[Cache]) -> Cache:
        """Return a cache of the sequences of this one and of `others`, in its pools; see `merge`.

        If this cache is empty, only its pools are used.
        """
        if self.length:
            return self._merge_caches([self, *others])
        return self._merge_caches(others, first_number=1)

    def import_sequence(self, other: Cache) -> Cache:
        """Return a copy of `other` in the pools of this cache, to share their common prefix.

        Each cache has one sequence; that of `other` starts with the tokens of this one. Full pages
        of this prefix are shared; others are copied unless they are in these pools already.
        """
        if self.batch != 1 or other.batch != 1:
            raise ValueError(
                f"import of {other.batch} sequences, {self.batch} here: one each is needed"
            )
        return self._merge_caches([other], self._tracker.state.page_tables, first_number=1)

    def _merge_caches(
        self, caches: Sequence[Cache], prefixes: Sequence[PageTable] = (), first_number: int = 0
    ) -> Cache:
        """Merge `caches`; `first_number` is the number of the first in error messages."""
        for number, cache in enumerate(caches, first_number):
            if not isinstance(cache, Cache):
                raise TypeError(f"cache {number} is a {type(cache).__name__}, cache 0 is not")
            cache.rollback()
            if cache.spec != self.spec:
                raise ValueError(
                    f"cache {number} is {describe_spec(cache.spec)}, cache 0 "
                    f"{describe_spec(self.spec)}: recode it"
                )
            if not cache.length:
                raise ValueError(f"cache {number} has no tokens: merge caches with tokens")
            _check_padding_ended(cache._tracker.state.page_tables)
        caches = [_prune_copy(cache) for cache in caches]
        length = max(max(cache.lengths) for cache in caches)
        external_states = {
            name: external_state.fork()
            for name, external_state in self.contents.collect_external_states().items()
        }
        for name, external_state in external_states.items():
            histories = [
                cache.contents.collect_external_states()[name].get_history() for cache in caches
            ]
            external_state.prepare_restore(concat_histories(histories, length))()
        merged_histories = tuple(
            concat_histories(histories, length)
            for histories in zip(*(cache._tracker.state.histories for cache in caches), strict=True)
        )
        with self._tracker.guard_counts():
            imported, allocated = [], []
            for cache in caches:
                tables, slots = import_pages(cache.contents, self.contents, prefixes)
                imported.append(tables)
                allocated += slots
            page_tables = [
                concat_tables(group_tables) for group_tables in zip(*imported, strict=True)
            ]
            copy = self._make_sibling(page_tables, merged_histories, external_states, allocated)
            copy._tracker.replace_queries(_merge_queries(caches), has_unpruned_prompt=False)
            return copy

    def remove(self, sequence: int) -> None:
        """Remove one of the sequences; the others are unchanged."""
        _check_indices([sequence], self.batch)
        if self.batch == 1:
            raise ValueError("remove of the only sequence: clear() or reset() the cache")
        self.select([i for i in range(self.batch) if i != sequence])

    def select(self, index: Sequence[int] | Tensor) -> None:
        """Replace the batch by the sequences `index`, in this order, repeats allowed."""
        self.rollback()
        indices = _check_indices(index, self.batch)
        state = self._tracker.state
        page_tables = [select_sequences(page_table, indices) for page_table in state.page_tables]
        new_histories = _select_histories(state.histories, indices, state, page_tables)
        external_states = self._tracker.external_states
        external_histories = _select_histories(
            [external_state.get_history() for external_state in external_states],
            indices,
            state,
            page_tables,
        )
        queries = self._select_queries(indices, page_tables)
        with self._tracker.guard_counts():
            pairs = zip(external_states, external_histories, strict=True)
            restores = [
                external_state.prepare_restore(history) for external_state, history in pairs
            ]
            self._tracker.replace_tables(
                page_tables,
                new_histories,
                (),
                queries,
                has_unpruned_prompt=state.has_unpruned_prompt,
            )
            for restore in restores:
                restore()

    def repeat(self, count: int) -> None:
        """Repeat every sequence `count` times; copies are adjacent."""
        if count < 1:
            raise ValueError(f"repeat({count}): 1 or more times")
        self.select(torch.arange(self.batch).repeat_interleave(count))

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """Replace sequence i by sequence `index[i]`, for all i: a step of beam search."""
        if len(index) != self.batch:
            raise ValueError(f"reorder with {len(index)} sequences of a batch of {self.batch}")
        self.select(index)

    def move(self, device: torch.device | str) -> None:
        """Move all tensors to another device."""
        target = torch.empty(0, device=device).device
        with self._tracker.lock:  # other threads may grow the same pools and storages
            self.rollback()
            old_contents = self.contents
            new_contents = old_contents.make_empty_sibling(old_contents.collect_external_states())
            new_contents.inherit_from(old_contents)
            for external_state in new_contents.tracker.external_states:
                external_state.prepare_restore(external_state.get_history().to_device(target))()
            for _, leaf in new_contents.list_attention():
                if leaf.storage is not None:
                    new_contents.tracker.state.storages[leaf.leaf] = leaf.storage.copy_to_device(
                        target, self.tiles
                    )
            state = self._tracker.state
            histories = tuple(history.to_device(target) for history in state.histories)
            with new_contents.tracker.guard_counts():
                new_contents.tracker.replace_tables(
                    state.page_tables,
                    histories,
                    (),
                    state.pruning_queries,
                    has_unpruned_prompt=state.has_unpruned_prompt,
                )
        self._adopt(new_contents)

    @contextmanager
    def prompt_mode(self) -> Iterator[None]:
        """Treat appended tokens as a prompt, even single ones: they do not prune."""
        self._tracker.in_prompt = True
        try:
            yield
        finally:
            self._tracker.in_prompt = False

    @property
    def external_speculation(self) -> bool:
        """Whether the model library may append drafts as chunks."""
        return self._tracker.external_speculation

    @external_speculation.setter
    def external_speculation(self, value: bool) -> None:
        self._tracker.external_speculation = value

    @contextmanager
    def speculation_mode(self) -> Iterator[None]:
        """Treat chunks as possible drafts: each token reads the rows that it would read alone."""
        self._tracker.in_speculation = True
        try:
            yield
        finally:
            self._tracker.in_speculation = False

    def ensure_slack(self, slack: int) -> None:
        """Make rewinds of up to `slack` tokens exact from now on."""
        spec = self.spec.with_slack(slack)
        if spec == self.spec:
            return
        self.rollback()
        groups = {replace(group, per_head_layer=None) for group in self._tracker.layer_groups}
        if len(set(map(make_layer_group, iterate_attention(*spec.layers)))) < len(groups):
            self._adopt_recoded(spec)  # two layer groups become one
        else:
            self._adopt_snapshot(spec, self.shared_snapshot())

    def recode(self, spec: AnySpec) -> None:
        """Convert the stored rows to another spec.

        A CacheSpec gives the recipe of each layer. A single recipe applies to all attention layers,
        within the limits of the model, see `constrain_spec`.
        """
        full = replace_formats(self.spec, check_fitted(self._resolve_spec(spec)))
        self.rollback()
        event = {
            "length": self.length,
            "from": describe_spec(self.spec),
            "nbytes_before": self.nbytes,
        }
        self._adopt_recoded(full)
        self._recodes.append(event | {"to": describe_spec(full), "nbytes_after": self.nbytes})

    def reset(self) -> None:
        """Remove all tokens; the memory stays allocated."""
        self._drop_tokens()

    def clear(self) -> None:
        """Remove all tokens and free the memory."""
        self._drop_tokens()
        old = self.contents
        self._adopt(
            CacheContents.make_empty(self.spec, self.tiles, old.collect_external_states(), old)
        )
        self._tracker.replace_queries({}, has_unpruned_prompt=False)

    def stats(self) -> dict[str, Any]:
        """Return the sizes and the event counters of the cache."""
        stats = LayerStats()
        for leaf in self.contents.leaves.values():
            stats.add(leaf.stats)
        allocated, used = self.nbytes, self.nbytes_used
        return {
            "sequences": self.batch,
            "length": self.length,
            "held": self.num_rows,
            "nbytes": allocated,
            "nbytes_used": used,
            "efficiency": used / allocated if allocated else 0.0,
            "appends": stats.appends,
            "rewinds_exact": stats.rewinds_exact,
            "rewinds_decoded": stats.rewinds_decoded,
            "abandoned": self._tracker.num_abandoned,
            "recodes": len(self._recodes),
            "recoded": [dict(event) for event in self._recodes],
            "attended": dict(stats.attend_calls),
            "sealed": dict(stats.sealed_pages),
            "clamped": stats.clamped_values,
        }

    def measure_pools(self) -> dict[str, int]:
        """Return the bytes of pages in its pools: held, the shared part of these, and free."""
        held = shared = free = 0
        with self._tracker.guard_counts():  # other threads may take slots
            for _, leaf in self.contents.list_attention():
                if (storage := leaf.storage) is not None:
                    sizes = storage.open_nbytes, storage.sealed_nbytes
                    for pool, size in zip(self._tracker.pools[leaf.group], sizes, strict=True):
                        pool.collect_orphans()
                        held += size * (pool.size - pool.num_free)
                        shared += size * int((pool.ref_counts > 1).sum())
                        free += size * pool.num_free
        return {"nbytes_held": held, "nbytes_shared": shared, "nbytes_free": free}

    def check(self) -> None:
        """Verify that each slot of the pools is free, or counted once per holder."""
        self._tracker.check()

    def _make_sibling(
        self,
        page_tables: Sequence[PageTable],
        histories: tuple[StateHistory, ...],
        external_states: Mapping[str, ExternalState],
        allocated_slots: Sequence[RetiredSlots] = (),
    ) -> Cache:
        """Return a cache of these tables over the same pools; call within `guard_counts`."""
        copy = Cache.__new__(Cache)
        copy.tiles = self.tiles
        copy._adopt(self.contents.make_empty_sibling(external_states))
        copy._recodes = list(self._recodes)
        copy._tracker.replace_tables(page_tables, histories, allocated_slots)
        return copy

    def _select_queries(
        self, sequences: Ints, new_tables: Sequence[PageTable]
    ) -> dict[int, PruningQueries]:
        """Return the pruning queries of `sequences`, whose tables are `new_tables`."""
        state, selected = self._tracker.state, dict[int, PruningQueries]()
        for leaf, queries in state.pruning_queries.items():
            group = self._tracker.leaf_groups[leaf]
            assert group is not None
            old_table = state.page_tables[group]
            selected[leaf] = queries.select(
                sequences, old_table.num_columns - new_tables[group].num_columns
            )
        return selected

    def _drop_tokens(self, count_rewinds: bool = False) -> None:
        """Remove all tokens; the memory stays allocated."""
        tracker = self._tracker
        tracker.rollback()
        for leaf in self.contents.leaves.values():
            leaf.stats.rewinds_exact += count_rewinds
        restores = [
            external_state.prepare_restore(StateHistory())
            for external_state in tracker.external_states
        ]
        page_tables = [
            PageTable.make_empty(table.layer_group, [0] * table.batch)
            for table in tracker.state.page_tables
        ]
        with tracker.guard_counts():
            tracker.replace_tables(
                page_tables, tuple(StateHistory() for _ in tracker.state.histories)
            )
            for restore in restores:
                restore()

    def _adopt_recoded(self, spec: CacheSpec) -> None:
        # The new memory is complete before the old one is freed, so that an error changes nothing.
        # The peak is old + new, plus the scratch of a few pages of one layer.
        old_contents = self.contents
        new_contents = CacheContents.make_empty(
            spec, self.tiles, old_contents.collect_external_states(), old_contents
        )
        recode_into(new_contents, old_contents)
        new_contents.tracker.commit(
            replace(new_contents.tracker.state, histories=old_contents.tracker.state.histories)
        )
        self._adopt(new_contents)

    def _adopt_snapshot(self, spec: CacheSpec, snapshot: Snapshot) -> None:
        old_contents = self.contents
        new_contents = CacheContents.make_empty(
            spec, self.tiles, old_contents.collect_external_states(), old_contents
        )
        external_histories = restore_into(new_contents, snapshot)
        restores = [
            new_contents.leaves[name].prepare_restore(history)
            for name, history in external_histories.items()
        ]
        self._adopt(new_contents)
        for restore in restores:
            restore()

    def _compute_rewound_lengths(self, page_table: PageTable, to: int) -> Ints:
        """Return the lengths of sequences once the longest has `to` tokens."""
        lengths: Ints = np.maximum(
            page_table.lengths - (page_table.num_columns - to), -page_table.padding
        )
        return lengths

    def _is_exact_rewind(self, to: int) -> bool:
        page_tables = self._tracker.state.page_tables
        return all(
            is_exact_rewind(page_table, self._compute_rewound_lengths(page_table, to))
            for page_table in page_tables
        )

    def _find_reachable(self, name: str, to: int) -> int:
        """Return the longest length <= `to` that one layer can rewind to."""
        leaf = self.contents.leaves[name]
        if isinstance(leaf, RecurrentLayer):
            return leaf.history.reachable(to)
        if not isinstance(leaf, PagedLayer):
            return int(leaf.reachable(to))
        page_table = self._tracker.get_committed_table(leaf.group)
        if page_table is None or to >= page_table.num_columns:
            return 0 if page_table is None else page_table.num_columns
        return (
            to
            if mask_reachable(page_table, self._compute_rewound_lengths(page_table, to)).all()
            else 0
        )

    def _check_reachable(self, to: int) -> None:
        if 0 <= to <= self.length and self.reachable(to) == to:
            return
        for name in self.contents.leaves:
            longest = self._find_reachable(name, to)
            if not 0 <= to <= self.length or longest != to:
                raise RewindError(
                    f"layer {name.partition('/')[0]}: cannot rewind from {self.length} to {to}: "
                    f"the longest length it can reach is {max(longest, 0)} (a window retains "
                    "`slack` more rows: give the spec a larger slack=N; a recurrent layer rewinds "
                    "to its checkpoints; pruned rows are lost)"
                )
        raise RewindError(
            f"length {to}: the longest that all layers can reach is {self.reachable(to)}"
        )

    def _resolve_spec(self, spec: AnySpec) -> CacheSpec:
        """Return a spec with one recipe per layer.

        `spec` has one for each layer, one for each attention layer, or one for all of these.
        """
        if isinstance(spec, CacheSpec) and len(spec.layers) == len(self):
            return as_spec(spec, len(self))
        attention_layers = list_attention_layers(self.spec)
        recipes = as_spec(
            spec, len(attention_layers) or 1
        ).layers  # validated even without attention layers
        by_layer = dict(enumerate(self.spec.layers)) | dict(
            zip(attention_layers, recipes, strict=False)
        )
        full = CacheSpec(tuple(by_layer.values()))
        return full if isinstance(spec, CacheSpec) else constrain_spec(self.spec, full)


def merge(caches: Sequence[Any]) -> Any:
    """Return one cache with the sequences of all `caches`, whatever their lengths.

    Forks of one cache share pages with the result; pages of other caches are copied once. The
    arguments are unchanged. All are `kvant.Cache` objects, or results of `cache_for`.

    >>> short, long = kvant.Cache(1, "affine8"), kvant.Cache(1, "affine8")
    >>> for cache, length in ((short, 3), (long, 10)):
    ...     view = cache[0].append(*torch.randn(2, 1, 2, length, 64))
    >>> kvant.merge([short, long]).lengths
    [3, 10]
    """
    if not caches:
        raise ValueError("merge of no caches: one or more are needed")
    if not caches[0].length:
        raise ValueError("cache 0 has no tokens: merge caches with tokens")
    return caches[0].merge_with(caches[1:])


def _prune_copy(cache: Cache) -> Cache:
    """Return `cache`, or a pruned fork of it if its prompt is to be pruned."""
    if not (cache._tracker.prunes and cache._tracker.state.has_unpruned_prompt):
        return cache
    copy = cache.fork()
    copy.prune()
    return copy


def _merge_queries(caches: Sequence[Cache]) -> dict[int, PruningQueries]:
    """Concatenate the pruning queries of `caches`, for layers where all are up to date."""
    states = [cache._tracker.state for cache in caches]
    merged: dict[int, PruningQueries] = {}
    for leaf in set.intersection(*(set(state.pruning_queries) for state in states)):
        parts = [state.pruning_queries[leaf] for state in states]
        if all(part.num_columns == state.length for part, state in zip(parts, states, strict=True)):
            count = min(part.queries.shape[3] for part in parts)
            queries = torch.cat([part.queries[:, :, :, -count:] for part in parts])
            columns = max(part.num_columns for part in parts)
            merged[leaf] = replace(parts[0], queries=queries, num_columns=columns)
    return merged


def _check_indices(indices: Sequence[int] | Tensor, batch: int) -> Ints:
    tensor = torch.as_tensor(indices).cpu()
    valid = tensor.ndim == 1 and not (tensor.is_floating_point() or tensor.is_complex())
    valid = valid and tensor.dtype != torch.bool and all(0 <= i < batch for i in tensor.tolist())
    if not valid or (batch and not len(tensor)):
        problem = f"sequences {tensor.tolist()} of a batch of {batch}"
        raise ValueError(f"{problem}: indices from 0 to {batch - 1} are needed")
    return tensor.long().numpy()


def _select_histories(
    histories: Sequence[StateHistory],
    indices: Ints,
    state: CacheState,
    page_tables: Sequence[PageTable],
) -> tuple[StateHistory, ...]:
    """Return the histories of the sequences `indices`, without columns where all are padding."""
    removed_columns = (
        state.page_tables[0].num_columns - page_tables[0].num_columns if page_tables else 0
    )
    return tuple(
        history.select(torch.from_numpy(indices)).drop_columns(removed_columns)
        for history in histories
    )


def _check_padding_ended(
    page_tables: Sequence[PageTable], indices: Ints | slice = ALL_SEQUENCES
) -> None:
    """Refuse sequences whose left padding is not yet appended in full."""
    for page_table in page_tables:
        if (missing := int(-page_table.lengths[indices].min(initial=0))) > 0:
            raise ValueError(
                f"a sequence lacks {missing} columns of its padding: append up to its first token "
                "before"
            )

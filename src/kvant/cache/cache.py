"""The cache of a model: layers, and one committed extent a kind.

`cache.length` is what every layer holds. Verbs act on all layers or on none, and on the committed
tokens: what a forward that died left behind is taken back first. Most of them are arithmetic with
the integers of the sequences; caches that came of each other share pages until one writes to them.
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
from kvant.cache.recurrent import RecurrentLayer, StateHistory
from kvant.cache.recurrent import concat_histories as joined_pasts
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
    """Keys and values, or whatever its layers remember, of some sequences.

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
        """`spec` is a string of the spec language, one recipe for all layers, or one a layer.

        `backend` is the one that is to read every layer, else the first that can. `host_states` are
        the states that a host changes in place, by the name of their layer.
        """
        self.tiles = tiles
        full = check_fitted(as_spec(spec, num_layers))
        self._adopt(CacheContents.make_empty(full, tiles, external_states or {}))
        self.backend = backend
        self._recodes: list[dict[str, Any]] = []  # each recode: where, from what, to what

    def _adopt(self, contents: CacheContents) -> None:
        self.contents = contents  # replaced as a whole, by one assignment

    @property
    def spec(self) -> CacheSpec:
        return self.contents.spec

    @property
    def layers(self) -> Mapping[int, Any]:
        """Those that remember something, by number."""
        return self.contents.indexed_layers

    @property
    def _tracker(self) -> StateTracker:
        return self.contents.tracker

    def __getitem__(self, layer: int) -> Any:
        found = self.contents.indexed_layers.get(layer)
        if found is not None:
            return found
        index = range(len(self))[layer]
        if index not in self.layers:
            raise ValueError(f"layer {index} remembers nothing: the spec gives it no memory")
        return self.layers[index]

    def __len__(self) -> int:
        return len(self.spec.layers)

    def __iter__(self) -> Iterator[Any]:
        """The layers that remember something; a shared one comes twice."""
        return iter(self.layers.values())

    def __repr__(self) -> str:
        held = f"{len(self)} layers, length {self.length}, {format_size(self.nbytes)}"
        return f"Cache({describe_spec(self.spec)}: {held})"

    @property
    def backend(self) -> str | None:
        """The one that reads every layer; None: the first that can."""
        return self._tracker.backend

    @backend.setter
    def backend(self, name: str | None) -> None:
        check_backend(name)
        self._tracker.backend = name

    @property
    def external_states(self) -> list[ExternalState]:
        """The states that a host changes in place."""
        return list(self._tracker.external_states)

    @property
    def num_changes(self) -> int:
        """Grows with all that may change `nbytes`: who remembers it need not ask the layers."""
        return self._tracker.num_changes

    @property
    def length(self) -> int:
        """Tokens that every layer has seen, of the longest sequence, its padding included."""
        ledger = self.contents.tracker
        if not ledger.external_states:
            return ledger.state.length
        lengths = [follower.length for follower in ledger.external_states]
        return min([*lengths, ledger.state.length] if ledger.leaf_groups else lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, without padding."""
        extents = self._tracker.state.page_tables
        if extents:
            rows = [extent.reduce_to_sequences(extent.seq_lens) for extent in extents]
            lengths: list[int] = np.min(rows, 0).tolist()
            return lengths
        return [self.length] * self.batch

    @property
    def ragged(self) -> bool:
        """Do sequences of different lengths stand side by side without padding?"""
        extents = self.contents.tracker.state.page_tables
        return bool(extents) and extents[0].ragged  # kinds are of the same sequences

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first rows."""
        book = self._tracker.state
        batches = [extent.batch for extent in book.page_tables if extent.num_columns]
        batches += [past.batch for past in book.histories]
        return max(batches + [one.batch for one in self._tracker.external_states], default=0)

    @property
    def num_rows(self) -> int:
        """Rows that reading returns, of the layer that holds most."""
        return max((leaf.num_rows for leaf in self.contents.leaves.values()), default=0)

    held = num_rows  # the public name

    @property
    def max_held(self) -> int | None:
        """What `held` never passes; None where only memory is the limit."""
        limits = [leaf.max_held for leaf in self.contents.leaves.values()]
        return None if None in limits else max((limit or 0 for limit in limits), default=0)

    @property
    def capacity(self) -> int | None:
        """The length that no layer passes; None where only memory is the limit."""
        return self.contents.capacity

    @property
    def nbytes(self) -> int:
        """Bytes allocated: pages that this cache holds, shared or not, and those kept free.

        And the queries that a prune is to know.
        """
        pages = sum(int(leaf.nbytes) for leaf in self.contents.leaves.values())
        return pages + self._tracker.query_nbytes if self._tracker.prunes else pages

    @property
    def nbytes_used(self) -> int:
        """Bytes of rows that are there."""
        return sum(leaf.nbytes_used for leaf in self.contents.leaves.values())

    def nbytes_after(self, coming: int, spec: AnySpec | None = None) -> int:
        """Bytes allocated after so many more tokens, recoded to `spec` first where one is given.

        Before the first rows nobody knows how large they are: 0. Checkpoints are not foreseen.
        """
        self.rollback()
        recipes = dict(
            iterate_leaves(
                self.spec if spec is None else replace_formats(self.spec, self._resolve_spec(spec))
            )
        )
        leaves: Mapping[str, Any] = self.contents.leaves
        return sum(int(leaf.nbytes_after(coming, recipes[name])) for name, leaf in leaves.items())

    @property
    def is_complete(self) -> bool:
        """Has no forward reached some of the layers and not the others?"""
        return not self._tracker.state.appended_leaves

    def has_appended(self, layer: int) -> bool:
        """Has the forward under way this layer's rows? One more append begins a new forward."""
        found, ledger = self[layer], self._tracker
        leaves = list(found.values()) if isinstance(found, GroupLayer) else [found]
        return any(
            one.leaf in ledger.state.appended_leaves
            for one in leaves
            if one not in ledger.external_states
        )

    def rollback(self) -> None:
        """Take back what a forward left that died before it reached every layer."""
        with self._tracker.lock:
            self._tracker.rollback()

    def free_retired_pages(self) -> None:
        """Free the pages that the last forward retired: its views must not be read any more."""
        if self._tracker.state.retired_slots:
            with self._tracker.guard_counts():
                self._tracker.free_retired_slots()

    def expect(self, *, seals: bool = False) -> list[AppendPlan]:
        """Make room for one more token of every sequence, the rows of which somebody else writes.

        What falls due before them is sealed, unless whoever writes `seals`, and makes copies, too.
        The changes, one a kind, say where rows go; a layer shows them as `expected(change)`. Then
        all layers `arrive`, or the token is rolled back.
        """
        self.rollback()
        with self._tracker.lock:
            changes = self._tracker.plan_token(seals=seals)
            for _, layer in self.contents.list_attention():
                if not (change := changes[layer.group]).is_steady:
                    layer.grow_storage()
                    if not seals:
                        layer.seal_due_pages(change)
        return changes

    @property
    def page_buffers(self) -> list[object]:
        """Where the pages of each layer lie: other objects, once they lie elsewhere."""
        layers = (layer for _, layer in self.contents.list_attention())
        return [layer.storage and layer.storage.sides for layer in layers]

    def arrive(self, backend: str, page_buffers: Sequence[object] | None = None) -> bool:
        """The token that was expected has its rows in every layer, and was attended with.

        False where these rows went to a `memory` that another cache over the same pools has left
        meanwhile: then the token is taken back.
        """
        with self._tracker.lock:
            if (
                len(self._tracker.state.plans) < len(self._tracker.layer_groups)
                or not self.is_complete
            ):
                raise CacheError("a token that nobody expects has arrived: call expect() before")
            if page_buffers is not None and not all(
                map(operator.is_, page_buffers, self.page_buffers)
            ):
                self._tracker.rollback()
                return False
            for _, layer in self.contents.list_attention():
                layer.stats.appends += 1
                layer.stats.attend_calls[backend] += 1
                self._tracker.commit_layer(layer.leaf)
            return True

    def reachable(self, to: int) -> int:
        """The longest length <= `to` that every layer can go back to."""
        self.rollback()
        to = min(to, self.length)
        while to > 0:
            reach = min(self._find_reachable(name, to) for name in self.contents.leaves)
            if reach == to:
                return to
            to = reach
        return max(to, 0)

    def find_exact_rewind(self, to: int) -> int:
        """The longest length <= `to` to go back to and be as if no more had ever come.

        Sealed pages whose rows would be dense there are not opened for it.
        """
        at = self.reachable(to)
        if self._is_exact_rewind(at):
            return at
        page = max(extent.layer_group.page for extent in self._tracker.state.page_tables)
        at = self.reachable(at - at % page)
        return at if self._is_exact_rewind(at) else 0

    def rewind(self, to: int) -> None:
        """Go back to length `to`; every layer, or an error and none."""
        self.rollback()
        to = operator.index(to)
        self._check_reachable(to)
        layers, ledger = self.contents, self._tracker
        if to == self.length and ledger.state.lengths <= {to}:
            for back in [follower.prepare_rewind(to) for follower in ledger.external_states]:
                back()  # what may be lost
            return
        if to == 0:
            self._drop_tokens(count_rewinds=True)
            return
        with ledger.guard_counts():
            lengths = [
                self._compute_rewound_lengths(extent, to) for extent in ledger.state.page_tables
            ]
            changes = [
                rewind_table(extent, at, pools)
                for extent, at, pools in zip(
                    ledger.state.page_tables, lengths, ledger.pools, strict=True
                )
            ]
            for _, leaf in layers.list_attention():
                if leaf.storage is not None:
                    pools = ledger.pools[leaf.group]
                    leaf.storage.ensure_slots(pools.open.size, pools.sealed.size)
                    reopen_pages(changes[leaf.group], leaf.storage.sides)
                decoded = len(changes[leaf.group].reopens) > 0
                leaf.stats.rewinds_exact += not decoded
                leaf.stats.rewinds_decoded += decoded
            states = tuple(past.rewind(to) for past in ledger.state.histories)
            for _, one in layers.list_recurrent():
                one.stats.rewinds_exact += 1
            taken = [(kind, change.allocated_slots) for kind, change in enumerate(changes)]
            after, book = [change.new_table for change in changes], ledger.state
            backs = [follower.prepare_rewind(to) for follower in ledger.external_states]
            cut = {leaf: asked.truncate(to) for leaf, asked in book.pruning_queries.items()}
            known = {leaf: asked for leaf, asked in cut.items() if asked is not None}
            prompted = book.has_unpruned_prompt and len(known) == len(cut)
            ledger.replace_tables(after, states, taken, known, has_unpruned_prompt=prompted)
            for back in backs:
                back()

    def prune(self) -> int:
        """Let rows go that the spec does not keep behind a prompt; how many a head, in the mean.

        The first token behind a prompt does it by itself, and tokens do that are decoded, where
        the score allows it and enough of them came.
        """
        self.rollback()
        with self._tracker.lock:
            return self.contents.prune() if self._tracker.prunes else 0

    @property
    def tokens_until_prune(self) -> int | None:
        """So many tokens may come before rows are pruned again; None: any number."""
        return self.contents.tokens_until_prune if self._tracker.prunes else None

    def end_padding(self) -> None:
        """Let sequences that have no token yet begin with the next one: no more padding comes."""
        self.rollback()
        ledger, extents = self._tracker, []
        for extent in ledger.state.page_tables:
            numbers = extent.numbers.copy()
            numbers[:, PADDING] += np.minimum(numbers[:, LENGTH], 0)
            numbers[:, LENGTH] = extent.seq_lens
            extents.append(replace(extent, numbers=numbers, derived={}, steady_tokens=0))
        ledger.commit(replace(ledger.state, page_tables=tuple(extents)))

    def trim(self, count: int) -> int:
        """Drop the newest `count` tokens, or all there are; how many that was."""
        if count < 0:
            raise ValueError(f"trim({count}): 0 or more tokens")
        self.rollback()
        dropped = min(count, self.length)
        self.rewind(self.length - dropped)
        return dropped

    def checkpoint(self) -> None:
        """Make the present length one that recurrent layers can come back to."""
        self.rollback()
        ledger, specs = self._tracker, [leaf.spec for _, leaf in self.contents.list_recurrent()]
        for follower in ledger.external_states:
            follower.checkpoint()
        states = ledger.state.histories
        marked = tuple(
            p.add_checkpoint(s.max_checkpoints) for p, s in zip(states, specs, strict=True)
        )
        ledger.commit(replace(ledger.state, histories=marked))

    def snapshot(self) -> Snapshot:
        """A copy of all that is remembered, to `restore` from."""
        return self.shared_snapshot().copy()

    def shared_snapshot(self) -> Snapshot:
        """A snapshot that may share memory with the cache: to be read before anything else."""
        self.rollback()
        ledger = self._tracker
        return self.contents.gather_snapshot(
            lambda leaf: snapshot.snapshot_layer(
                leaf.storage, ledger.get_committed_table(leaf.group)
            )
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Become what the snapshot holds; every layer, or an error and none."""
        self.rollback()
        self._adopt_snapshot(self.spec, snapshot)
        self._tracker.replace_queries({}, has_unpruned_prompt=False)

    def fork(self) -> Cache:
        """A second cache with the same tokens, which shares pages until one writes to them."""
        self.rollback()
        book = self._tracker.state
        host_states = {
            name: one.fork() for name, one in self.contents.collect_external_states().items()
        }
        extents = [select_sequences(extent, np.arange(extent.batch)) for extent in book.page_tables]
        with self._tracker.guard_counts():
            twin = self._make_sibling(extents, book.histories, host_states)
            twin._tracker.replace_queries(
                dict(book.pruning_queries), has_unpruned_prompt=book.has_unpruned_prompt
            )
            return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return self.fork()

    def extract(self, sequence: int) -> Cache:
        """A cache of one of the sequences alone, which shares its pages."""
        index = _check_indices([sequence], self.batch)
        self.rollback()
        book = self._tracker.state
        _check_padding_ended(book.page_tables, index)
        extents = [concat_tables([select_sequences(extent, index)]) for extent in book.page_tables]
        host_states = {
            name: one.fork() for name, one in self.contents.collect_external_states().items()
        }
        pasts = _select_histories(
            [one.get_history() for one in host_states.values()], index, book, extents
        )
        for follower, past in zip(host_states.values(), pasts, strict=True):
            follower.prepare_restore(past)()
        with self._tracker.guard_counts():
            states = _select_histories(book.histories, index, book, extents)
            twin = self._make_sibling(extents, states, host_states)
            twin._tracker.replace_queries(
                self._select_queries(index, extents), has_unpruned_prompt=book.has_unpruned_prompt
            )
            return twin

    def merge_with(self, others: Sequence[Cache]) -> Cache:
        """The sequences of this cache and of others under one, in its pools: see `merge`.

        Where this one has no tokens, it only lends its pools.
        """
        if self.length:
            return self._merge_caches([self, *others])
        return self._merge_caches(others, first_number=1)

    def import_sequence(self, other: Cache) -> Cache:
        """Another cache of one sequence in these pools, which begins with the tokens of this one.

        Whole pages that both have are shared, the rest is copied.
        """
        if self.batch != 1 or other.batch != 1:
            raise ValueError(f"{self.batch} sequences by {other.batch}: both have to be of one")
        return self._merge_caches([other], self._tracker.state.page_tables, first_number=1)

    def _merge_caches(
        self, caches: Sequence[Cache], prefixes: Sequence[PageTable] = (), first_number: int = 0
    ) -> Cache:
        """They have numbers from `first` on, in errors."""
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
                raise ValueError(f"cache {number} has no tokens: merge caches that have some")
            _check_padding_ended(cache._tracker.state.page_tables)
        caches = [_prune_copy(cache) for cache in caches]
        length = max(max(cache.lengths) for cache in caches)
        host_states = {
            name: one.fork() for name, one in self.contents.collect_external_states().items()
        }
        for name, follower in host_states.items():
            pasts = [
                cache.contents.collect_external_states()[name].get_history() for cache in caches
            ]
            follower.prepare_restore(joined_pasts(pasts, length))()
        states = tuple(
            joined_pasts(pasts, length)
            for pasts in zip(*(cache._tracker.state.histories for cache in caches), strict=True)
        )
        with self._tracker.guard_counts():
            books, taken = [], []
            for cache in caches:
                found, slots = import_pages(cache.contents, self.contents, prefixes)
                books.append(found)
                taken += slots
            extents = [concat_tables(kinds) for kinds in zip(*books, strict=True)]
            twin = self._make_sibling(extents, states, host_states, taken)
            twin._tracker.replace_queries(_merge_queries(caches), has_unpruned_prompt=False)
            return twin

    def remove(self, sequence: int) -> None:
        """Let one of the sequences go; the others stay as they are."""
        _check_indices([sequence], self.batch)
        if self.batch == 1:
            raise ValueError("remove of the only sequence: clear() or reset() the cache")
        self.select([i for i in range(self.batch) if i != sequence])

    def select(self, index: Sequence[int] | Tensor) -> None:
        """Keep these sequences of the batch, in this order, with repeats if there are any."""
        self.rollback()
        chosen = _check_indices(index, self.batch)
        book = self._tracker.state
        extents = [select_sequences(extent, chosen) for extent in book.page_tables]
        states = _select_histories(book.histories, chosen, book, extents)
        host_states = self._tracker.external_states
        pasts = _select_histories([one.get_history() for one in host_states], chosen, book, extents)
        asked = self._select_queries(chosen, extents)
        with self._tracker.guard_counts():
            both = zip(host_states, pasts, strict=True)
            becomes = [follower.prepare_restore(past) for follower, past in both]
            self._tracker.replace_tables(
                extents, states, (), asked, has_unpruned_prompt=book.has_unpruned_prompt
            )
            for become in becomes:
                become()

    def repeat(self, count: int) -> None:
        """Every sequence `count` times, one after the other."""
        if count < 1:
            raise ValueError(f"repeat({count}): 1 or more times")
        self.select(torch.arange(self.batch).repeat_interleave(count))

    def reorder(self, index: Sequence[int] | Tensor) -> None:
        """As many sequences as now, each taken from where `index` says: a step of beam search."""
        if len(index) != self.batch:
            raise ValueError(f"reorder with {len(index)} sequences of a batch of {self.batch}")
        self.select(index)

    def move(self, device: torch.device | str) -> None:
        """Lie in the memory of another device, the same otherwise."""
        where = torch.empty(0, device=device).device
        with self._tracker.lock:  # others grow the same pools and storages
            self.rollback()
            layers = self.contents.make_empty_sibling(self.contents.collect_external_states())
            layers.inherit_from(self.contents)
            for follower in layers.tracker.external_states:
                follower.prepare_restore(follower.get_history().to_device(where))()
            for _, leaf in layers.list_attention():
                if leaf.storage is not None:
                    layers.tracker.state.storages[leaf.leaf] = leaf.storage.copy_to_device(
                        where, self.tiles
                    )
            book = self._tracker.state
            moved = tuple(past.to_device(where) for past in book.histories)
            with layers.tracker.guard_counts():
                layers.tracker.replace_tables(
                    book.page_tables,
                    moved,
                    (),
                    book.pruning_queries,
                    has_unpruned_prompt=book.has_unpruned_prompt,
                )
        self._adopt(layers)

    @contextmanager
    def prompt_mode(self) -> Iterator[None]:
        """Within, tokens are of a prompt, though one may come alone: no rows are pruned."""
        self._tracker.in_prompt = True
        try:
            yield
        finally:
            self._tracker.in_prompt = False

    @property
    def external_speculation(self) -> bool:
        """Does a host say that chunks may be drafts?"""
        return self._tracker.external_speculation

    @external_speculation.setter
    def external_speculation(self, value: bool) -> None:
        self._tracker.external_speculation = value

    @contextmanager
    def speculation_mode(self) -> Iterator[None]:
        """Within, a chunk may be drafts: it is read as one token after the other would be."""
        self._tracker.in_speculation = True
        try:
            yield
        finally:
            self._tracker.in_speculation = False

    def ensure_slack(self, slack: int) -> None:
        """From now on, let rewinds of so many tokens be exact."""
        spec = self.spec.with_slack(slack)
        if spec == self.spec:
            return
        self.rollback()
        kinds = {replace(kind, per_head_layer=None) for kind in self._tracker.layer_groups}
        if len(set(map(make_layer_group, iterate_attention(*spec.layers)))) < len(kinds):
            self._adopt_recoded(spec)  # layers of two kinds are of one now
        else:
            self._adopt_snapshot(spec, self.shared_snapshot())

    def recode(self, spec: AnySpec) -> None:
        """Store the same tokens by another spec; every layer, or an error and none.

        A CacheSpec says it of each layer. One recipe for all goes to those that attend, and leaves
        them what follows from the model (see `within`).
        """
        full = replace_formats(self.spec, check_fitted(self._resolve_spec(spec)))
        self.rollback()
        told = {
            "length": self.length,
            "from": describe_spec(self.spec),
            "nbytes_before": self.nbytes,
        }
        self._adopt_recoded(full)
        self._recodes.append(told | {"to": describe_spec(full), "nbytes_after": self.nbytes})

    def reset(self) -> None:
        """Forget the tokens, keep the memory."""
        self._drop_tokens()

    def clear(self) -> None:
        """Forget the tokens and free the memory."""
        self._drop_tokens()
        old = self.contents
        self._adopt(
            CacheContents.make_empty(self.spec, self.tiles, old.collect_external_states(), old)
        )
        self._tracker.replace_queries({}, has_unpruned_prompt=False)

    def stats(self) -> dict[str, Any]:
        """What there is and what happened, in numbers."""
        tally = LayerStats()
        for leaf in self.contents.leaves.values():
            tally.add(leaf.stats)
        allocated, used = self.nbytes, self.nbytes_used
        return {
            "sequences": self.batch,
            "length": self.length,
            "held": self.num_rows,
            "nbytes": allocated,
            "nbytes_used": used,
            "efficiency": used / allocated if allocated else 0.0,
            "appends": tally.appends,
            "rewinds_exact": tally.rewinds_exact,
            "rewinds_decoded": tally.rewinds_decoded,
            "abandoned": self._tracker.num_abandoned,
            "recodes": len(self._recodes),
            "recoded": [dict(told) for told in self._recodes],
            "attended": dict(tally.attend_calls),
            "sealed": dict(tally.sealed_pages),
            "clamped": tally.clamped_values,
        }

    def measure_pools(self) -> dict[str, int]:
        """Bytes of the pages in its pools: those that somebody holds, several do, nobody does."""
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
        """Are the slots of all pools free, or counted as often as they are held?"""
        self._tracker.check()

    def _make_sibling(
        self,
        page_tables: Sequence[PageTable],
        histories: tuple[StateHistory, ...],
        external_states: Mapping[str, ExternalState],
        allocated_slots: Sequence[RetiredSlots] = (),
    ) -> Cache:
        """A cache over the same pools with these sequences, while counts change."""
        twin = Cache.__new__(Cache)
        twin.tiles = self.tiles
        twin._adopt(self.contents.make_empty_sibling(external_states))
        twin._recodes = list(self._recodes)
        twin._tracker.replace_tables(page_tables, histories, allocated_slots)
        return twin

    def _select_queries(
        self, sequences: Ints, new_tables: Sequence[PageTable]
    ) -> dict[int, PruningQueries]:
        """What is known of the queries of these sequences, whose extents are to be these."""
        book, found = self._tracker.state, dict[int, PruningQueries]()
        for leaf, asked in book.pruning_queries.items():
            kind = self._tracker.leaf_groups[leaf]
            assert kind is not None
            before = book.page_tables[kind]
            found[leaf] = asked.select(sequences, before.num_columns - new_tables[kind].num_columns)
        return found

    def _drop_tokens(self, count_rewinds: bool = False) -> None:
        """No tokens in the same memory."""
        ledger = self._tracker
        ledger.rollback()
        for leaf in self.contents.leaves.values():
            leaf.stats.rewinds_exact += count_rewinds
        becomes = [follower.prepare_restore(StateHistory()) for follower in ledger.external_states]
        extents = [
            PageTable.make_empty(e.layer_group, [0] * e.batch) for e in ledger.state.page_tables
        ]
        with ledger.guard_counts():
            ledger.replace_tables(extents, tuple(StateHistory() for _ in ledger.state.histories))
            for become in becomes:
                become()

    def _adopt_recoded(self, spec: CacheSpec) -> None:
        # All of the new memory is there before any of the old one goes, or an error halfway could
        # not be undone. So the peak is old + new, and the scratch of a few pages of one layer.
        old = self.contents
        layers = CacheContents.make_empty(spec, self.tiles, old.collect_external_states(), old)
        recode_into(layers, old)
        layers.tracker.commit(replace(layers.tracker.state, histories=old.tracker.state.histories))
        self._adopt(layers)

    def _adopt_snapshot(self, spec: CacheSpec, snapshot: Snapshot) -> None:
        old = self.contents
        layers = CacheContents.make_empty(spec, self.tiles, old.collect_external_states(), old)
        followed = restore_into(layers, snapshot)
        becomes = [layers.leaves[name].prepare_restore(past) for name, past in followed.items()]
        self._adopt(layers)
        for become in becomes:
            become()

    def _compute_rewound_lengths(self, page_table: PageTable, to: int) -> Ints:
        """The lengths of sequences once the longest has `to` tokens."""
        lengths: Ints = np.maximum(
            page_table.lengths - (page_table.num_columns - to), -page_table.padding
        )
        return lengths

    def _is_exact_rewind(self, to: int) -> bool:
        extents = self._tracker.state.page_tables
        return all(
            is_exact_rewind(extent, self._compute_rewound_lengths(extent, to)) for extent in extents
        )

    def _find_reachable(self, name: str, to: int) -> int:
        """The longest length <= `to` that one layer can go back to."""
        leaf = self.contents.leaves[name]
        if isinstance(leaf, RecurrentLayer):
            return leaf.history.reachable(to)
        if not isinstance(leaf, PagedLayer):
            return int(leaf.reachable(to))
        extent = self._tracker.get_committed_table(leaf.group)
        if extent is None or to >= extent.num_columns:
            return 0 if extent is None else extent.num_columns
        return to if mask_reachable(extent, self._compute_rewound_lengths(extent, to)).all() else 0

    def _check_reachable(self, to: int) -> None:
        if 0 <= to <= self.length and self.reachable(to) == to:
            return
        for name in self.contents.leaves:
            longest = self._find_reachable(name, to)
            if not 0 <= to <= self.length or longest != to:
                raise RewindError(
                    f"layer {name.partition('/')[0]}: length {to} cannot be reached from "
                    f"{self.length}: the longest that can is {max(longest, 0)} (a window keeps "
                    "`slack` rows to go back to: give the spec a larger slack=N; a recurrence "
                    "goes back to its checkpoints; what a prune has let go is gone)"
                )
        raise RewindError(f"length {to}: {self.reachable(to)} is the longest all can reach")

    def _resolve_spec(self, spec: AnySpec) -> CacheSpec:
        """One recipe a layer, from one for each or one for all that attend."""
        if isinstance(spec, CacheSpec) and len(spec.layers) == len(self):
            return as_spec(spec, len(self))
        places = list_attention_layers(self.spec)
        told = as_spec(spec, len(places) or 1).layers  # read even where it concerns nobody
        by_layer = dict(enumerate(self.spec.layers)) | dict(zip(places, told, strict=False))
        full = CacheSpec(tuple(by_layer.values()))
        return full if isinstance(spec, CacheSpec) else constrain_spec(self.spec, full)


def merge(caches: Sequence[Any]) -> Any:
    """The sequences of all of these under one cache, whatever their lengths.

    Caches that came of each other share pages with it; the pages of others are copied once. The
    caches stay as they are. They are of one kind: `kvant.Cache`, or what `cache_for` gives.

    >>> short, long = kvant.Cache(1, "affine8"), kvant.Cache(1, "affine8")
    >>> for cache, length in ((short, 3), (long, 10)):
    ...     view = cache[0].append(*torch.randn(2, 1, 2, length, 64))
    >>> kvant.merge([short, long]).lengths
    [3, 10]
    """
    if not caches:
        raise ValueError("merge of no caches: one or more are needed")
    if not caches[0].length:
        raise ValueError("cache 0 has no tokens: merge caches that have some")
    return caches[0].merge_with(caches[1:])


def _prune_copy(cache: Cache) -> Cache:
    """A cache whose prompt is pruned, where its spec says so: the cache itself stays as it is."""
    if not (cache._tracker.prunes and cache._tracker.state.has_unpruned_prompt):
        return cache
    twin = cache.fork()
    twin.prune()
    return twin


def _merge_queries(caches: Sequence[Cache]) -> dict[int, PruningQueries]:
    """What the newest tokens of all of these asked, where that is known of each."""
    books = [cache._tracker.state for cache in caches]
    found: dict[int, PruningQueries] = {}
    for leaf in set.intersection(*(set(book.pruning_queries) for book in books)):
        parts = [book.pruning_queries[leaf] for book in books]
        if all(part.num_columns == book.length for part, book in zip(parts, books, strict=True)):
            count = min(part.queries.shape[3] for part in parts)
            queries = torch.cat([part.queries[:, :, :, -count:] for part in parts])
            columns = max(part.num_columns for part in parts)
            found[leaf] = replace(parts[0], queries=queries, num_columns=columns)
    return found


def _check_indices(indices: Sequence[int] | Tensor, batch: int) -> Ints:
    chosen = torch.as_tensor(indices).cpu()
    fits = chosen.ndim == 1 and not (chosen.is_floating_point() or chosen.is_complex())
    fits = fits and chosen.dtype != torch.bool and all(0 <= i < batch for i in chosen.tolist())
    if not fits or (batch and not len(chosen)):
        said = f"sequences {chosen.tolist()} of a batch of {batch}"
        raise ValueError(f"{said}: numbers from 0 to {batch - 1} are needed")
    return chosen.long().numpy()


def _select_histories(
    histories: Sequence[StateHistory],
    indices: Ints,
    state: CacheState,
    page_tables: Sequence[PageTable],
) -> tuple[StateHistory, ...]:
    """The states of some sequences, whose extents are these; they count the longest one."""
    gone = state.page_tables[0].num_columns - page_tables[0].num_columns if page_tables else 0
    return tuple(past.select(torch.from_numpy(indices)).drop_columns(gone) for past in histories)


def _check_padding_ended(
    page_tables: Sequence[PageTable], indices: Ints | slice = ALL_SEQUENCES
) -> None:
    """Refuse sequences whose padding is still to come: nobody could tell how much of it."""
    for extent in page_tables:
        if (to_come := int(-extent.lengths[indices].min(initial=0))) > 0:
            raise ValueError(
                f"a sequence of which {to_come} columns of padding are still to come: append up to "
                "its first token before"
            )

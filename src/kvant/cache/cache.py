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
from kvant.attention.writing import reopen
from kvant.cache import snapshot
from kvant.cache.book import Asked, Book, Retired
from kvant.cache.changes import exact, joined, reachable, rewound, selected
from kvant.cache.contents import Group, Layers, brought, leaves_of, recode_into, restore_into
from kvant.cache.layer import Attention, kind_of
from kvant.cache.ledger import Ledger
from kvant.cache.recode import attending, spec_after, within
from kvant.cache.recurrent import Past, Recurrent
from kvant.cache.recurrent import joined as joined_pasts
from kvant.contracts import HostState, Snapshot, Tally, Tiles
from kvant.errors import CacheError, Refusals, RewindError
from kvant.extent import LENGTH, PADDING, Change, Extent, Ints
from kvant.recipes import AnySpec, CacheSpec, attention_in
from kvant.sizes import format_size
from kvant.spec import as_spec, check_fitted, words

ALL = slice(None)


class Cache(Refusals):
    """Keys and values, or whatever its layers remember, of some sequences.

    >>> cache = kvant.Cache(num_layers=1, spec="affine8,window=4096")
    >>> view = cache[0].append(torch.randn(1, 2, 10, 64), torch.randn(1, 2, 10, 64))  # [B, H, T, D]
    >>> cache.length, cache.batch
    (10, 1)
    """

    def __init__(
        self,
        num_layers: int | None = None,
        spec: AnySpec = "raw",
        *,
        tiles: Tiles | None = None,
        host_states: Mapping[str, HostState] | None = None,
        backend: str | None = None,
    ) -> None:
        """`spec` is a string of the spec language, one recipe for all layers, or one a layer.

        `backend` is the one that is to read every layer, else the first that can. `host_states` are
        the states that a host changes in place, by the name of their layer.
        """
        self.tiles = tiles
        full = check_fitted(as_spec(spec, num_layers))
        self._hold(Layers.of(full, tiles, host_states or {}))
        self.backend = backend
        self._recoded: list[dict[str, Any]] = []  # each recode: where, from what, to what

    def _hold(self, layers: Layers) -> None:
        self.contents = layers  # replaced as a whole, by one assignment

    @property
    def spec(self) -> CacheSpec:
        return self.contents.spec

    @property
    def layers(self) -> Mapping[int, Any]:
        """Those that remember something, by number."""
        return self.contents.by_layer

    @property
    def _ledger(self) -> Ledger:
        return self.contents.ledger

    def __getitem__(self, layer: int) -> Any:
        found = self.contents.by_layer.get(layer)
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
        return f"Cache({words(self.spec)}: {held})"

    @property
    def backend(self) -> str | None:
        """The one that reads every layer; None: the first that can."""
        return self._ledger.backend

    @backend.setter
    def backend(self, name: str | None) -> None:
        check_backend(name)
        self._ledger.backend = name

    @property
    def host_states(self) -> list[HostState]:
        """The states that a host changes in place."""
        return list(self._ledger.host_states)

    @property
    def changes(self) -> int:
        """Grows with all that may change `nbytes`: who remembers it need not ask the layers."""
        return self._ledger.changes

    @property
    def length(self) -> int:
        """Tokens that every layer has seen, of the longest sequence, its padding included."""
        ledger = self.contents.ledger
        if not ledger.host_states:
            return ledger.book.length
        lengths = [follower.length for follower in ledger.host_states]
        return min([*lengths, ledger.book.length] if ledger.leaves else lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, without padding."""
        extents = self._ledger.book.extents
        if extents:
            rows = [extent.of_sequences(extent.rows) for extent in extents]
            lengths: list[int] = np.min(rows, 0).tolist()
            return lengths
        return [self.length] * self.batch

    @property
    def ragged(self) -> bool:
        """Do sequences of different lengths stand side by side without padding?"""
        extents = self.contents.ledger.book.extents
        return bool(extents) and extents[0].ragged  # kinds are of the same sequences

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first rows."""
        book = self._ledger.book
        batches = [extent.batch for extent in book.extents if extent.columns]
        batches += [past.batch for past in book.states]
        return max(batches + [one.batch for one in self._ledger.host_states], default=0)

    @property
    def held(self) -> int:
        """Rows that reading returns, of the layer that holds most."""
        return max((leaf.held for leaf in self.contents.leaves.values()), default=0)

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
        return pages + self._ledger.asked_nbytes if self._ledger.prunes else pages

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
            leaves_of(self.spec if spec is None else spec_after(self.spec, self._asked(spec)))
        )
        leaves: Mapping[str, Any] = self.contents.leaves
        return sum(int(leaf.nbytes_after(coming, recipes[name])) for name, leaf in leaves.items())

    @property
    def whole(self) -> bool:
        """Has no forward reached some of the layers and not the others?"""
        return not self._ledger.book.arrived

    def reached(self, layer: int) -> bool:
        """Has the forward under way this layer's rows? One more append begins a new forward."""
        found, ledger = self[layer], self._ledger
        leaves = list(found.values()) if isinstance(found, Group) else [found]
        return any(
            one.leaf in ledger.book.arrived for one in leaves if one not in ledger.host_states
        )

    def rollback(self) -> None:
        """Take back what a forward left that died before it reached every layer."""
        with self._ledger.lock:
            self._ledger.rollback()

    def release(self) -> None:
        """Free the pages that the last forward retired: its views must not be read any more."""
        if self._ledger.book.retired:
            with self._ledger.counting():
                self._ledger.release()

    def expect(self, *, seals: bool = False) -> list[Change]:
        """Make room for one more token of every sequence, the rows of which somebody else writes.

        What falls due before them is sealed, unless whoever writes `seals`, and makes copies, too.
        The changes, one a kind, say where rows go; a layer shows them as `expected(change)`. Then
        all layers `arrive`, or the token is rolled back.
        """
        self.rollback()
        with self._ledger.lock:
            changes = self._ledger.expect(seals=seals)
            for _, layer in self.contents.attention():
                if not (change := changes[layer.kind]).calm:
                    layer.make_room()
                    if not seals:
                        layer.seal(change)
        return changes

    @property
    def memory(self) -> list[object]:
        """Where the pages of each layer lie: other objects, once they lie elsewhere."""
        layers = (layer for _, layer in self.contents.attention())
        return [layer.storage and layer.storage.sides for layer in layers]

    def arrive(self, backend: str, memory: Sequence[object] | None = None) -> bool:
        """The token that was expected has its rows in every layer, and was attended with.

        False where these rows went to a `memory` that another cache over the same pools has left
        meanwhile: then the token is taken back.
        """
        with self._ledger.lock:
            if len(self._ledger.book.changes) < len(self._ledger.kinds) or not self.whole:
                raise CacheError("a token that nobody expects has arrived: call expect() before")
            if memory is not None and not all(map(operator.is_, memory, self.memory)):
                self._ledger.rollback()
                return False
            for _, layer in self.contents.attention():
                layer.tally.appends += 1
                layer.tally.attended[backend] += 1
                self._ledger.arrive(layer.leaf)
            return True

    def reachable(self, to: int) -> int:
        """The longest length <= `to` that every layer can go back to."""
        self.rollback()
        to = min(to, self.length)
        while to > 0:
            reach = min(self._reach(name, to) for name in self.contents.leaves)
            if reach == to:
                return to
            to = reach
        return max(to, 0)

    def resumable(self, to: int) -> int:
        """The longest length <= `to` to go back to and be as if no more had ever come.

        Sealed pages whose rows would be dense there are not opened for it.
        """
        at = self.reachable(to)
        if self._exact(at):
            return at
        page = max(extent.kind.page for extent in self._ledger.book.extents)
        at = self.reachable(at - at % page)
        return at if self._exact(at) else 0

    def rewind(self, to: int) -> None:
        """Go back to length `to`; every layer, or an error and none."""
        self.rollback()
        to = operator.index(to)
        self._check_reach(to)
        layers, ledger = self.contents, self._ledger
        if to == self.length and ledger.book.lengths <= {to}:
            for back in [follower.going_back(to) for follower in ledger.host_states]:
                back()  # what may be lost
            return
        if to == 0:
            self._forget(rewound=True)
            return
        with ledger.counting():
            lengths = [self._back(extent, to) for extent in ledger.book.extents]
            changes = [
                rewound(extent, at, pools)
                for extent, at, pools in zip(
                    ledger.book.extents, lengths, ledger.pools, strict=True
                )
            ]
            for _, leaf in layers.attention():
                if leaf.storage is not None:
                    pools = ledger.pools[leaf.kind]
                    leaf.storage.fit(pools.open.size, pools.sealed.size)
                    reopen(changes[leaf.kind], leaf.storage.sides)
                decoded = len(changes[leaf.kind].opens) > 0
                leaf.tally.rewinds_exact += not decoded
                leaf.tally.rewinds_decoded += decoded
            states = tuple(past.rewound(to) for past in ledger.book.states)
            for _, one in layers.recurrent():
                one.tally.rewinds_exact += 1
            taken = [(kind, change.taken) for kind, change in enumerate(changes)]
            after, book = [change.after for change in changes], ledger.book
            backs = [follower.going_back(to) for follower in ledger.host_states]
            cut = {leaf: asked.cut(to) for leaf, asked in book.asked.items()}
            known = {leaf: asked for leaf, asked in cut.items() if asked is not None}
            prompted = book.prompted and len(known) == len(cut)
            ledger.swap(after, states, taken, known, prompted=prompted)
            for back in backs:
                back()

    def prune(self) -> int:
        """Let rows go that the spec does not keep behind a prompt; how many a head, in the mean.

        The first token behind a prompt does it by itself, and tokens do that are decoded, where
        the score allows it and enough of them came.
        """
        self.rollback()
        with self._ledger.lock:
            return self.contents.prune() if self._ledger.prunes else 0

    @property
    def before_prune(self) -> int | None:
        """So many tokens may come before rows are pruned again; None: any number."""
        return self.contents.room if self._ledger.prunes else None

    def end_padding(self) -> None:
        """Let sequences that have no token yet begin with the next one: no more padding comes."""
        self.rollback()
        ledger, extents = self._ledger, []
        for extent in ledger.book.extents:
            numbers = extent.numbers.copy()
            numbers[:, PADDING] += np.minimum(numbers[:, LENGTH], 0)
            numbers[:, LENGTH] = extent.rows
            extents.append(replace(extent, numbers=numbers, memo={}, calm=0))
        ledger.keep(replace(ledger.book, extents=tuple(extents)))

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
        ledger, specs = self._ledger, [leaf.spec for _, leaf in self.contents.recurrent()]
        for follower in ledger.host_states:
            follower.checkpoint()
        states = ledger.book.states
        marked = tuple(p.marked(s.max_checkpoints) for p, s in zip(states, specs, strict=True))
        ledger.keep(replace(ledger.book, states=marked))

    def snapshot(self) -> Snapshot:
        """A copy of all that is remembered, to `restore` from."""
        return self.shared_snapshot().copied()

    def shared_snapshot(self) -> Snapshot:
        """A snapshot that may share memory with the cache: to be read before anything else."""
        self.rollback()
        ledger = self._ledger
        return self.contents.gathered(
            lambda leaf: snapshot.shared_snapshot(leaf.storage, ledger.committed(leaf.kind))
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Become what the snapshot holds; every layer, or an error and none."""
        self.rollback()
        self._restored(self.spec, snapshot)
        self._ledger.ask({}, prompted=False)

    def fork(self) -> Cache:
        """A second cache with the same tokens, which shares pages until one writes to them."""
        self.rollback()
        book = self._ledger.book
        host_states = {name: one.fork() for name, one in self.contents.host_states().items()}
        extents = [selected(extent, np.arange(extent.batch)) for extent in book.extents]
        with self._ledger.counting():
            twin = self._twin(extents, book.states, host_states)
            twin._ledger.ask(dict(book.asked), prompted=book.prompted)
            return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return self.fork()

    def extract(self, sequence: int) -> Cache:
        """A cache of one of the sequences alone, which shares its pages."""
        index = _chosen([sequence], self.batch)
        self.rollback()
        book = self._ledger.book
        _check_begun(book.extents, index)
        extents = [joined([selected(extent, index)]) for extent in book.extents]
        host_states = {name: one.fork() for name, one in self.contents.host_states().items()}
        pasts = _selected([one.settled() for one in host_states.values()], index, book, extents)
        for follower, past in zip(host_states.values(), pasts, strict=True):
            follower.becoming(past)()
        with self._ledger.counting():
            states = _selected(book.states, index, book, extents)
            twin = self._twin(extents, states, host_states)
            twin._ledger.ask(self._asked_by(index, extents), prompted=book.prompted)
            return twin

    def merged(self, others: Sequence[Cache]) -> Cache:
        """The sequences of this cache and of others under one, in its pools: see `merge`.

        Where this one has no tokens, it only lends its pools.
        """
        if self.length:
            return self._merged([self, *others])
        return self._merged(others, first=1)

    def extended(self, other: Cache) -> Cache:
        """Another cache of one sequence in these pools, which begins with the tokens of this one.

        Whole pages that both have are shared, the rest is copied.
        """
        if self.batch != 1 or other.batch != 1:
            raise ValueError(f"{self.batch} sequences by {other.batch}: both have to be of one")
        return self._merged([other], self._ledger.book.extents, first=1)

    def _merged(
        self, caches: Sequence[Cache], begun: Sequence[Extent] = (), first: int = 0
    ) -> Cache:
        """They have numbers from `first` on, in errors."""
        for number, cache in enumerate(caches, first):
            if not isinstance(cache, Cache):
                raise TypeError(f"cache {number} is a {type(cache).__name__}, cache 0 is not")
            cache.rollback()
            if cache.spec != self.spec:
                raise ValueError(
                    f"cache {number} is {words(cache.spec)}, cache 0 {words(self.spec)}: recode it"
                )
            if not cache.length:
                raise ValueError(f"cache {number} has no tokens: merge caches that have some")
            _check_begun(cache._ledger.book.extents)
        caches = [_pruned(cache) for cache in caches]
        length = max(max(cache.lengths) for cache in caches)
        host_states = {name: one.fork() for name, one in self.contents.host_states().items()}
        for name, follower in host_states.items():
            pasts = [cache.contents.host_states()[name].settled() for cache in caches]
            follower.becoming(joined_pasts(pasts, length))()
        states = tuple(
            joined_pasts(pasts, length)
            for pasts in zip(*(cache._ledger.book.states for cache in caches), strict=True)
        )
        with self._ledger.counting():
            books, taken = [], []
            for cache in caches:
                found, slots = brought(cache.contents, self.contents, begun)
                books.append(found)
                taken += slots
            extents = [joined(kinds) for kinds in zip(*books, strict=True)]
            twin = self._twin(extents, states, host_states, taken)
            twin._ledger.ask(_asked_of(caches), prompted=False)
            return twin

    def remove(self, sequence: int) -> None:
        """Let one of the sequences go; the others stay as they are."""
        _chosen([sequence], self.batch)
        if self.batch == 1:
            raise ValueError("remove of the only sequence: clear() or reset() the cache")
        self.select([i for i in range(self.batch) if i != sequence])

    def select(self, index: Sequence[int] | Tensor) -> None:
        """Keep these sequences of the batch, in this order, with repeats if there are any."""
        self.rollback()
        chosen = _chosen(index, self.batch)
        book = self._ledger.book
        extents = [selected(extent, chosen) for extent in book.extents]
        states = _selected(book.states, chosen, book, extents)
        host_states = self._ledger.host_states
        pasts = _selected([one.settled() for one in host_states], chosen, book, extents)
        asked = self._asked_by(chosen, extents)
        with self._ledger.counting():
            both = zip(host_states, pasts, strict=True)
            becomes = [follower.becoming(past) for follower, past in both]
            self._ledger.swap(extents, states, (), asked, prompted=book.prompted)
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
        with self._ledger.lock:  # others grow the same pools and storages
            self.rollback()
            layers = self.contents.twin(self.contents.host_states())
            layers.succeed(self.contents)
            for follower in layers.ledger.host_states:
                follower.becoming(follower.settled().moved(where))()
            for _, leaf in layers.attention():
                if leaf.storage is not None:
                    layers.ledger.book.storages[leaf.leaf] = leaf.storage.moved(where, self.tiles)
            book = self._ledger.book
            moved = tuple(past.moved(where) for past in book.states)
            with layers.ledger.counting():
                layers.ledger.swap(book.extents, moved, (), book.asked, prompted=book.prompted)
        self._hold(layers)

    @contextmanager
    def prompting(self) -> Iterator[None]:
        """Within, tokens are of a prompt, though one may come alone: no rows are pruned."""
        self._ledger.prompting = True
        try:
            yield
        finally:
            self._ledger.prompting = False

    @property
    def recording(self) -> bool:
        """Does a host say that chunks may be drafts?"""
        return self._ledger.recording

    @recording.setter
    def recording(self, value: bool) -> None:
        self._ledger.recording = value

    @contextmanager
    def speculating(self) -> Iterator[None]:
        """Within, a chunk may be drafts: it is read as one token after the other would be."""
        self._ledger.speculating = True
        try:
            yield
        finally:
            self._ledger.speculating = False

    def widen(self, slack: int) -> None:
        """From now on, let rewinds of so many tokens be exact."""
        spec = self.spec.widened(slack)
        if spec == self.spec:
            return
        self.rollback()
        kinds = {replace(kind, own=None) for kind in self._ledger.kinds}
        if len(set(map(kind_of, attention_in(*spec.layers)))) < len(kinds):
            self._recode(spec)  # layers of two kinds are of one now
        else:
            self._restored(spec, self.shared_snapshot())

    def recode(self, spec: AnySpec) -> None:
        """Store the same tokens by another spec; every layer, or an error and none.

        A CacheSpec says it of each layer. One recipe for all goes to those that attend, and leaves
        them what follows from the model (see `within`).
        """
        full = spec_after(self.spec, check_fitted(self._asked(spec)))
        self.rollback()
        told = {"length": self.length, "from": words(self.spec), "nbytes_before": self.nbytes}
        self._recode(full)
        self._recoded.append(told | {"to": words(full), "nbytes_after": self.nbytes})

    def reset(self) -> None:
        """Forget the tokens, keep the memory."""
        self._forget()

    def clear(self) -> None:
        """Forget the tokens and free the memory."""
        self._forget()
        old = self.contents
        self._hold(Layers.of(self.spec, self.tiles, old.host_states(), old))
        self._ledger.ask({}, prompted=False)

    def stats(self) -> dict[str, Any]:
        """What there is and what happened, in numbers."""
        tally = Tally()
        for leaf in self.contents.leaves.values():
            tally.add(leaf.tally)
        allocated, used = self.nbytes, self.nbytes_used
        return {
            "sequences": self.batch,
            "length": self.length,
            "held": self.held,
            "nbytes": allocated,
            "nbytes_used": used,
            "efficiency": used / allocated if allocated else 0.0,
            "appends": tally.appends,
            "rewinds_exact": tally.rewinds_exact,
            "rewinds_decoded": tally.rewinds_decoded,
            "abandoned": self._ledger.abandoned,
            "recodes": len(self._recoded),
            "recoded": [dict(told) for told in self._recoded],
            "attended": dict(tally.attended),
            "sealed": dict(tally.sealed),
            "clamped": tally.clamped,
        }

    def pooled(self) -> dict[str, int]:
        """Bytes of the pages in its pools: those that somebody holds, several do, nobody does."""
        held = shared = free = 0
        with self._ledger.counting():  # other threads may take slots
            for _, leaf in self.contents.attention():
                if (storage := leaf.storage) is not None:
                    sizes = storage.open_nbytes, storage.sealed_nbytes
                    for pool, size in zip(self._ledger.pools[leaf.kind], sizes, strict=True):
                        pool.collect()
                        held += size * (pool.size - pool.free)
                        shared += size * int((pool.counts > 1).sum())
                        free += size * pool.free
        return {"nbytes_held": held, "nbytes_shared": shared, "nbytes_free": free}

    def check(self) -> None:
        """Are the slots of all pools free, or counted as often as they are held?"""
        self._ledger.check()

    def _twin(
        self,
        extents: Sequence[Extent],
        states: tuple[Past, ...],
        host_states: Mapping[str, HostState],
        taken: Sequence[Retired] = (),
    ) -> Cache:
        """A cache over the same pools with these sequences, while counts change."""
        twin = Cache.__new__(Cache)
        twin.tiles = self.tiles
        twin._hold(self.contents.twin(host_states))
        twin._recoded = list(self._recoded)
        twin._ledger.swap(extents, states, taken)
        return twin

    def _asked_by(self, sequences: Ints, after: Sequence[Extent]) -> dict[int, Asked]:
        """What is known of the queries of these sequences, whose extents are to be these."""
        book, found = self._ledger.book, dict[int, Asked]()
        for leaf, asked in book.asked.items():
            kind = self._ledger.leaves[leaf]
            assert kind is not None
            before = book.extents[kind]
            found[leaf] = asked.of(sequences, before.columns - after[kind].columns)
        return found

    def _forget(self, rewound: bool = False) -> None:
        """No tokens in the same memory."""
        ledger = self._ledger
        ledger.rollback()
        for leaf in self.contents.leaves.values():
            leaf.tally.rewinds_exact += rewound
        becomes = [follower.becoming(Past()) for follower in ledger.host_states]
        extents = [Extent.empty(e.kind, [0] * e.batch) for e in ledger.book.extents]
        with ledger.counting():
            ledger.swap(extents, tuple(Past() for _ in ledger.book.states))
            for become in becomes:
                become()

    def _recode(self, spec: CacheSpec) -> None:
        # All of the new memory is there before any of the old one goes, or an error halfway could
        # not be undone. So the peak is old + new, and the scratch of a few pages of one layer.
        old = self.contents
        layers = Layers.of(spec, self.tiles, old.host_states(), old)
        recode_into(layers, old)
        layers.ledger.keep(replace(layers.ledger.book, states=old.ledger.book.states))
        self._hold(layers)

    def _restored(self, spec: CacheSpec, snapshot: Snapshot) -> None:
        old = self.contents
        layers = Layers.of(spec, self.tiles, old.host_states(), old)
        followed = restore_into(layers, snapshot)
        becomes = [layers.leaves[name].becoming(past) for name, past in followed.items()]
        self._hold(layers)
        for become in becomes:
            become()

    def _back(self, extent: Extent, to: int) -> Ints:
        """The lengths of sequences once the longest has `to` tokens."""
        lengths: Ints = np.maximum(extent.lengths - (extent.columns - to), -extent.padding)
        return lengths

    def _exact(self, to: int) -> bool:
        extents = self._ledger.book.extents
        return all(exact(extent, self._back(extent, to)) for extent in extents)

    def _reach(self, name: str, to: int) -> int:
        """The longest length <= `to` that one layer can go back to."""
        leaf = self.contents.leaves[name]
        if isinstance(leaf, Recurrent):
            return leaf.past.reachable(to)
        if not isinstance(leaf, Attention):
            return int(leaf.reachable(to))
        extent = self._ledger.committed(leaf.kind)
        if extent is None or to >= extent.columns:
            return 0 if extent is None else extent.columns
        return to if reachable(extent, self._back(extent, to)).all() else 0

    def _check_reach(self, to: int) -> None:
        if 0 <= to <= self.length and self.reachable(to) == to:
            return
        for name in self.contents.leaves:
            longest = self._reach(name, to)
            if not 0 <= to <= self.length or longest != to:
                raise RewindError(
                    f"layer {name.partition('/')[0]}: length {to} cannot be reached from "
                    f"{self.length}: the longest that can is {max(longest, 0)} (a window keeps "
                    "`slack` rows to go back to: give the spec a larger slack=N; a recurrence "
                    "goes back to its checkpoints; what a prune has let go is gone)"
                )
        raise RewindError(f"length {to}: {self.reachable(to)} is the longest all can reach")

    def _asked(self, spec: AnySpec) -> CacheSpec:
        """One recipe a layer, from one for each or one for all that attend."""
        if isinstance(spec, CacheSpec) and len(spec.layers) == len(self):
            return as_spec(spec, len(self))
        places = attending(self.spec)
        told = as_spec(spec, len(places) or 1).layers  # read even where it concerns nobody
        by_layer = dict(enumerate(self.spec.layers)) | dict(zip(places, told, strict=False))
        full = CacheSpec(tuple(by_layer.values()))
        return full if isinstance(spec, CacheSpec) else within(self.spec, full)


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
    return caches[0].merged(caches[1:])


def _pruned(cache: Cache) -> Cache:
    """A cache whose prompt is pruned, where its spec says so: the cache itself stays as it is."""
    if not (cache._ledger.prunes and cache._ledger.book.prompted):
        return cache
    twin = cache.fork()
    twin.prune()
    return twin


def _asked_of(caches: Sequence[Cache]) -> dict[int, Asked]:
    """What the newest tokens of all of these asked, where that is known of each."""
    books = [cache._ledger.book for cache in caches]
    found: dict[int, Asked] = {}
    for leaf in set.intersection(*(set(book.asked) for book in books)):
        parts = [book.asked[leaf] for book in books]
        if all(part.columns == book.length for part, book in zip(parts, books, strict=True)):
            count = min(part.queries.shape[3] for part in parts)
            queries = torch.cat([part.queries[:, :, :, -count:] for part in parts])
            columns = max(part.columns for part in parts)
            found[leaf] = replace(parts[0], queries=queries, columns=columns)
    return found


def _chosen(index: Sequence[int] | Tensor, batch: int) -> Ints:
    chosen = torch.as_tensor(index).cpu()
    fits = chosen.ndim == 1 and not (chosen.is_floating_point() or chosen.is_complex())
    fits = fits and chosen.dtype != torch.bool and all(0 <= i < batch for i in chosen.tolist())
    if not fits or (batch and not len(chosen)):
        said = f"sequences {chosen.tolist()} of a batch of {batch}"
        raise ValueError(f"{said}: numbers from 0 to {batch - 1} are needed")
    return chosen.long().numpy()


def _selected(
    pasts: Sequence[Past], index: Ints, book: Book, extents: Sequence[Extent]
) -> tuple[Past, ...]:
    """The states of some sequences, whose extents are these; they count the longest one."""
    gone = book.extents[0].columns - extents[0].columns if extents else 0
    return tuple(past.selected(torch.from_numpy(index)).later(gone) for past in pasts)


def _check_begun(extents: Sequence[Extent], index: Ints | slice = ALL) -> None:
    """Refuse sequences whose padding is still to come: nobody could tell how much of it."""
    for extent in extents:
        if (to_come := int(-extent.lengths[index].min(initial=0))) > 0:
            raise ValueError(
                f"a sequence of which {to_come} columns of padding are still to come: append up to "
                "its first token before"
            )

"""The cache of a model: its layers, and operations that change all layers or none.

`cache.length` counts the tokens that all layers have. An operation sees committed tokens only: an
incomplete forward is rolled back first. It computes the next state (transitions.py), which the
holder adopts by one assignment. Most operations only compute page tables. Forks share pages until
one of them writes to a page.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvant.attention import check_backend
from kvant.cache import transitions
from kvant.cache.holder import StateHolder
from kvant.cache.layers import make_layers
from kvant.cache.layout import CacheLayout, iterate_leaves, make_layer_group
from kvant.cache.recode import recode_state, replace_formats, resolve_spec
from kvant.cache.recurrent import StateHistory, concat_histories
from kvant.cache.row_attention import RowAttention
from kvant.cache.snapshot import parse_snapshot, restore_state, snapshot_layer, take_snapshot
from kvant.cache.state import CacheState
from kvant.cache.transitions import Transition
from kvant.contracts import ExternalState, LayerStats, Snapshot
from kvant.errors import RenamedAttribute, RewindError, UsageHints
from kvant.page_table import Ints, PageTable
from kvant.platform.figures import format_of_raw
from kvant.platform.sizes import format_size
from kvant.recipes import AnySpec, CacheSpec, iterate_attention
from kvant.spec import as_spec, check_fitted, describe_spec, refuse_second_pass
from kvant.spec.language import check_spec

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
        external_states: Mapping[str, ExternalState] | None = None,
        backend: str | None = None,
    ) -> None:
        """Create an empty cache.

        `spec` is a string of the spec language, one recipe for all layers, or a CacheSpec.
        `backend` names the attention backend of all layers; None: the first that supports the view.
        `external_states` are recurrent states that the model updates in place, by layer name.
        """
        full = refuse_second_pass(check_fitted(as_spec(spec, num_layers)))
        self._initialize(full, external_states or {}, backend)

    @classmethod
    def from_spec(
        cls, spec: CacheSpec, external_states: Mapping[str, ExternalState] | None = None
    ) -> Cache:
        """Create an empty cache; the caller runs the second pass that a prune may need."""
        cache = cls.__new__(cls)
        cache._initialize(check_fitted(spec), external_states or {}, None)
        return cache

    def _initialize(
        self, spec: CacheSpec, external_states: Mapping[str, ExternalState], backend: str | None
    ) -> None:
        layout = CacheLayout.from_spec(spec, external_states)
        self.holder = StateHolder(CacheState.make_empty(layout), external_states)
        self.layers: Mapping[int, Any]  # those that have a cache, by number
        self.leaves, self.layers = make_layers(self.holder, layout.spec)
        self.backend = backend
        self.recodes: list[dict[str, Any]] = []  # length, specs and bytes of each recode

    @property
    def state(self) -> CacheState:
        """The committed state."""
        return self.holder.state

    @property
    def spec(self) -> CacheSpec:
        return self.holder.state.layout.spec

    def __getitem__(self, layer: int) -> Any:
        cached_layer = self.layers.get(layer)
        if cached_layer is not None:
            return cached_layer
        if not -len(self) <= layer < len(self):
            raise IndexError(f"layer {layer}: this cache has the layers 0 to {len(self) - 1}")
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
        nbytes, raw_nbytes = self.nbytes, self.raw_nbytes
        share = f", {format_of_raw(nbytes / raw_nbytes)} of raw" if raw_nbytes else ""
        contents = f"{len(self)} layers, length {self.length}, {format_size(nbytes)}{share}"
        return f"Cache({describe_spec(self.spec)}: {contents})"

    @property
    def backend(self) -> str | None:
        """The attention backend of all layers; None: the first that supports the view."""
        return self.holder.backend

    @backend.setter
    def backend(self, name: str | None) -> None:
        check_backend(name)
        self.holder.backend = name

    # ---- sizes

    @property
    def length(self) -> int:
        """Tokens of the longest sequence, padding included, that every layer has."""
        holder = self.holder
        if not holder.external_states:
            return holder.state.length
        lengths = [external_state.length for external_state in holder.external_states.values()]
        return min([*lengths, holder.state.length] if holder.state.layout.leaves else lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, without padding."""
        page_tables = self.state.page_tables
        if page_tables:
            rows = [
                page_table.reduce_to_sequences(page_table.seq_lens) for page_table in page_tables
            ]
            lengths: list[int] = np.min(rows, 0).tolist()
            return lengths
        return [self.length] * self.batch

    @property
    def batch(self) -> int:
        """The number of sequences; 0 before the first rows."""
        state = self.state
        batches = [page_table.batch for page_table in state.page_tables if page_table.num_columns]
        batches += [history.batch for history in state.histories]
        batches += [external.batch for external in self.holder.external_states.values()]
        return max(batches, default=0)

    @property
    def num_rows(self) -> int:
        """The number of rows that `read` returns for the layer with the most."""
        return max((leaf.num_rows for leaf in self.leaves.values()), default=0)

    held = num_rows  # the public name

    @property
    def max_held(self) -> int | None:
        """Upper bound of `held`; None: unbounded."""
        limits = [leaf.max_held for leaf in self.leaves.values()]
        return None if None in limits else max((limit or 0 for limit in limits), default=0)

    @property
    def capacity(self) -> int | None:
        """The maximum length of all layers; None: unbounded."""
        return self.holder.state.layout.capacity

    @property
    def is_recurrent(self) -> bool:
        """Whether a layer is recurrent, and can be rewound to its checkpoints only."""
        return bool(self.state.layout.recurrent or self.holder.external_states)

    @property
    def nbytes(self) -> int:
        """Bytes allocated: pages that this cache holds, shared or not, free pages of its pools, and
        the queries retained for a prune.
        """
        return sum(int(leaf.nbytes) for leaf in self.leaves.values()) + self.holder.query_nbytes

    @property
    def nbytes_used(self) -> int:
        """Bytes of stored rows and states."""
        return sum(leaf.nbytes_used for leaf in self.leaves.values())

    @property
    def raw_nbytes(self) -> int:
        """Bytes that the rows of all tokens would take without a format, and the states."""
        attention = self.state.layout.attention_by_name
        return sum(
            leaf.count_raw_nbytes() if name in attention else leaf.nbytes_used
            for name, leaf in self.leaves.items()
        )

    def nbytes_after(self, num_new_tokens: int, spec: AnySpec | None = None) -> int:
        """Return the bytes allocated after `num_new_tokens` more tokens.

        If `spec` is given, the cache is taken to be recoded to it first. The result is 0 before the
        first rows, because their size is unknown. Checkpoints still to come are not counted.
        """
        self.rollback()
        new_spec = self.spec
        if spec is not None:
            new_spec = replace_formats(new_spec, resolve_spec(new_spec, spec))
        recipes = dict(iterate_leaves(new_spec))
        leaves: Mapping[str, Any] = self.leaves
        return sum(
            int(leaf.nbytes_after(num_new_tokens, recipes[name])) for name, leaf in leaves.items()
        )

    def stats(self) -> dict[str, Any]:
        """Return the sizes and the event counters of the cache."""
        stats = LayerStats()
        for leaf_stats in self.holder.stats.values():
            stats.add(leaf_stats)
        allocated, used = self.nbytes, self.nbytes_used
        return {
            "sequences": self.batch,
            "length": self.length,
            "held": self.num_rows,
            "nbytes": allocated,
            "nbytes_used": used,
            "raw_nbytes": self.raw_nbytes,
            "efficiency": used / allocated if allocated else 0.0,
            "appends": stats.appends,
            "rewinds_exact": stats.rewinds_exact,
            "rewinds_decoded": stats.rewinds_decoded,
            "abandoned": self.holder.num_abandoned,
            "recodes": len(self.recodes),
            "recoded": [dict(event) for event in self.recodes],
            "attended": dict(stats.attend_calls),
            "sealed": dict(stats.sealed_pages),
            "clamped": stats.clamped_values,
        }

    # ---- forwards

    @property
    def is_complete(self) -> bool:
        """Whether no forward is open: the last one reached every layer, or was rolled back."""
        forward = self.holder.open_forward
        return forward is None or not forward.appended

    def rollback(self) -> None:
        """Roll back an incomplete forward."""
        with self.holder.lock:
            self.holder.rollback()

    @contextmanager
    def prompt_mode(self) -> Iterator[None]:
        """Treat appended tokens as a prompt, even single ones: they do not prune."""
        previous, self.holder.in_prompt = self.holder.in_prompt, True
        try:
            yield
        finally:
            self.holder.in_prompt = previous

    @contextmanager
    def speculation_mode(self) -> Iterator[None]:
        """Treat chunks as drafts: tokens read the rows that they would read one at a time."""
        previous, self.holder.in_speculation = self.holder.in_speculation, True
        try:
            yield
        finally:
            self.holder.in_speculation = previous

    @contextmanager
    def record_attention(self, row_attention: RowAttention) -> Iterator[None]:
        """Record the attention weights that rows get from appended tokens, of one sequence."""
        if self.batch != 1:
            raise ValueError(f"record_attention() of {self.batch} sequences: extract one before")
        self.holder.row_attention = row_attention
        try:
            yield
        finally:
            self.holder.row_attention = None

    def prune(self, row_attention: RowAttention | None = None) -> int:
        """Drop the rows that the spec does not retain after a prompt.

        Return the number of rows dropped per head, on average. Some scores need the `row_attention`
        of a second pass over all tokens. Appending the first token after a prompt prunes
        automatically. So do later tokens, if the score allows it, once rows exceed
        the budget far enough.
        """
        self.rollback()
        with self.holder.lock:
            return self.holder.prune(row_attention) if self.state.layout.prunes else 0

    # ---- lengths

    def reachable(self, to: int) -> int:
        """Return the longest length <= `to` that every layer can rewind to."""
        self.rollback()
        externals = self.holder.external_states
        return transitions.find_reachable(self.state, externals, min(to, self.length))

    def find_exact_rewind(self, to: int) -> int:
        """Return the longest length <= `to` whose rewind is exact.

        An exact rewind decodes no sealed page.
        """
        length = self.reachable(to)
        if transitions.is_exact_length(self.state, length):
            return length
        page = math.lcm(*(table.layer_group.page for table in self.state.page_tables))
        length = self.reachable(length - length % page)
        return length if transitions.is_exact_length(self.state, length) else 0

    def rewind(self, to: int) -> None:
        """Shorten all sequences so that the longest has `to` tokens."""
        self.rollback()
        holder, to = self.holder, operator.index(to)
        transitions.check_reachable(holder.state, holder.external_states, to, self.length)
        if to == self.length and holder.state.lengths <= {to}:
            for external_state in holder.external_states.values():
                external_state.prepare_rewind(to)()  # it may be invalid even at this length
            return
        if to == 0:
            for stats in holder.stats.values():
                stats.rewinds_exact += 1
            self.reset()
            return
        with holder.state.pools.guard_counts():
            transition = transitions.rewind(holder.state, to, holder.stats)
            finish_rewinds = [
                external_state.prepare_rewind(to)
                for external_state in holder.external_states.values()
            ]
            holder.adopt(*transition)
            for finish_rewind in finish_rewinds:
                finish_rewind()

    def rewind_each(self, lengths: Sequence[int]) -> None:
        """Shorten each sequence to its own length."""
        self.rollback()
        holder, current = self.holder, self.lengths
        lengths = [operator.index(length) for length in lengths]
        if len(lengths) != len(current):
            raise ValueError(
                f"{len(lengths)} lengths for {len(current)} sequences: one for each is needed"
            )
        for index, (old, new) in enumerate(zip(current, lengths, strict=True)):
            if not 0 <= new <= old:
                raise RewindError(
                    f"lengths[{index}]={new}: sequence {index} has {old} tokens, so 0 to {old}"
                )
        if not current:
            return
        removed = {old - new for old, new in zip(current, lengths, strict=True)}
        if len(removed) == 1:
            self.rewind(self.length - removed.pop())
            return
        transitions.check_each_reachable(holder.state, holder.external_states, lengths)
        with holder.state.pools.guard_counts():
            holder.adopt(*transitions.rewind_each(holder.state, lengths, holder.stats))

    def trim(self, count: int) -> int:
        """Drop the newest `count` tokens, at most all; return the number dropped."""
        if count < 0:
            raise ValueError(f"trim({count}): 0 or more tokens")
        self.rollback()
        dropped = min(count, self.length)
        self.rewind(self.length - dropped)
        return dropped

    def reset(self) -> None:
        """Remove all tokens; the memory stays allocated."""
        self.rollback()
        empty = {name: StateHistory() for name in self.holder.external_states}
        adopt_transition(self.holder, transitions.drop_tokens(self.state), empty)

    def clear(self) -> None:
        """Remove all tokens and free the memory."""
        self.reset()
        adopt_transition(self.holder, Transition(CacheState.make_empty(self.state.layout)))

    def checkpoint(self) -> None:
        """Store the current state of recurrent layers, so that a rewind can restore it."""
        self.rollback()
        for external_state in self.holder.external_states.values():
            external_state.checkpoint()
        leaves = self.state.layout.recurrent
        histories = tuple(
            history.add_checkpoint(leaf.spec.max_checkpoints)
            for history, leaf in zip(self.state.histories, leaves, strict=True)
        )
        self.holder.replace_state(histories=histories)

    # ---- contents

    def snapshot(self) -> Snapshot:
        """Return a copy of the complete state, for `restore`."""
        return self.shared_snapshot().copy()

    def shared_snapshot(self) -> Snapshot:
        """Return a snapshot that may share memory with the cache; the next change may alter it."""
        self.rollback()
        state = self.state
        return take_snapshot(
            state,
            self.holder.external_states,
            lambda leaf: snapshot_layer(
                state.storages.get(leaf.index), state.get_page_table(leaf.group)
            ),
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Replace the contents by those of `snapshot`."""
        self.rollback()
        parsed = parse_snapshot(self.state.layout, self.holder.external_states, snapshot)
        adopt_transition(
            self.holder, restore_state(self.state.layout, parsed), parsed.external_histories
        )

    def recode(self, spec: AnySpec) -> None:
        """Convert the stored rows to another spec.

        A CacheSpec gives the recipe of each layer. A single recipe applies to all attention layers,
        within the limits of the model, see `constrain_spec`.
        """
        full = replace_formats(self.spec, check_fitted(resolve_spec(self.spec, spec)))
        if not self.spec.repeats_prompt:
            refuse_second_pass(full)
        self.rollback()
        event = {
            "length": self.length,
            "from": describe_spec(self.spec),
            "nbytes_before": self.nbytes,
        }
        layout = self.state.layout.replace_spec(full)
        adopt_transition(self.holder, recode_state(self.state, layout, self.holder.stats))
        self.recodes.append(event | {"to": describe_spec(full), "nbytes_after": self.nbytes})

    def ensure_slack(self, slack: int) -> None:
        """Make rewinds of up to `slack` tokens exact from now on."""
        spec = self.spec.with_slack(operator.index(slack))
        if spec == self.spec:
            return
        check_spec(spec)
        self.rollback()
        state, layout = self.state, self.state.layout.replace_spec(spec)
        groups = {replace(group, per_head_layer=None) for group in state.layout.layer_groups}
        if len(set(map(make_layer_group, iterate_attention(*spec.layers)))) < len(groups):
            adopt_transition(
                self.holder, recode_state(state, layout, self.holder.stats)
            )  # two groups become one
            return
        parsed = parse_snapshot(layout, self.holder.external_states, self.shared_snapshot())
        restored, allocated = restore_state(layout, parsed)
        restored = replace(
            restored,
            pruning_queries=state.pruning_queries,
            has_unpruned_prompt=state.has_unpruned_prompt,
        )
        adopt_transition(self.holder, Transition(restored, allocated), parsed.external_histories)

    def move(self, device: torch.device | str) -> None:
        """Move all tensors to another device."""
        target = torch.empty(0, device=device).device
        with self.holder.lock:  # other threads may grow the same pools and storages
            self.rollback()
            moved = transitions.move(self.state, target)
            restores = [
                external_state.prepare_restore(external_state.get_history().to_device(target))
                for external_state in self.holder.external_states.values()
            ]
            self.holder.replace_state(storages=moved.storages, histories=moved.histories)
            for restore in restores:
                restore()

    # ---- sequences

    def fork(self) -> Cache:
        """Return a second cache with the same tokens; pages are shared until one writes to them."""
        self.rollback()
        with self.state.pools.guard_counts():
            return make_sibling(self, transitions.fork(self.state))

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        return self.fork()

    def extract(self, sequence: int) -> Cache:
        """Return a cache of one of the sequences; pages are shared."""
        index = _check_indices([sequence], self.batch)
        self.rollback()
        _check_padding_ended(self.state.page_tables, index)
        selected = transitions.select(self.state, index, drop_padding=True)
        external_histories = _select_external(self.holder, index, selected.state)
        with self.state.pools.guard_counts():
            return make_sibling(self, selected, external_histories)

    def merge_with(self, others: Sequence[Cache]) -> Cache:
        """Return a cache of the sequences of this one and of `others`, in its pools; see `merge`.

        If this cache is empty, only its pools are used.
        """
        if self.length:
            return _merge_into(self, [self, *others])
        return _merge_into(self, [*others], first_number=1)

    def import_sequence(self, other: Cache) -> Cache:
        """Return a copy of `other` in the pools of this cache, to share their common prefix.

        Each cache has one sequence; that of `other` starts with the tokens of this one. Full pages
        of this prefix are shared; others are copied unless they are in these pools already.
        """
        if self.batch != 1 or other.batch != 1:
            raise ValueError(
                f"import of {other.batch} sequences, {self.batch} here: one each is needed"
            )
        if self.state.layout.prunes:
            raise ValueError(
                "import into a cache with prune=, whose pages hold other tokens: merge the caches"
            )
        return _merge_into(self, [other], self.state.page_tables, first_number=1)

    def remove(self, sequence: int) -> None:
        """Remove one of the sequences; the others are unchanged."""
        self.select(list_other_sequences(self.batch, sequence))

    def select(self, index: Sequence[int] | Tensor) -> None:
        """Replace the batch by the sequences `index`, in this order, repeats allowed."""
        self.rollback()
        indices = _check_indices(index, self.batch)
        selected = transitions.select(self.state, indices)
        adopt_transition(
            self.holder, selected, _select_external(self.holder, indices, selected.state)
        )

    def repeat(self, count: int) -> None:
        """Repeat every sequence `count` times; copies are adjacent."""
        if count < 1:
            raise ValueError(f"repeat({count}): 1 or more times")
        self.select(torch.arange(self.batch).repeat_interleave(count))


def list_other_sequences(batch: int, sequence: int) -> list[int]:
    """Return the sequences of a batch but one; raise if it is missing or the only one."""
    _check_indices([sequence], batch)
    if batch == 1:
        raise ValueError("remove of the only sequence: clear() or reset() the cache")
    return [i for i in range(batch) if i != sequence]


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


def make_sibling(
    cache: Cache, transition: Transition, external_histories: Mapping[str, Any] | None = None
) -> Cache:
    """Return a cache of another state over the pools of `cache`; call within `guard_counts`."""
    holder = cache.holder
    external_states = {name: state.fork() for name, state in holder.external_states.items()}
    for name, history in (external_histories or {}).items():
        external_states[name].prepare_restore(history)()
    empty = CacheState.make_empty(cache.state.layout, cache.state.pools)
    copy = Cache.__new__(Cache)
    copy.holder = StateHolder(empty, external_states)
    copy.holder.backend = holder.backend
    copy.leaves, copy.layers = make_layers(copy.holder, cache.spec)
    copy.recodes = list(cache.recodes)
    copy.holder.adopt(*transition)
    return copy


def adopt_transition(
    holder: StateHolder,
    transition: Transition,
    external_histories: Mapping[str, Any] | None = None,
) -> None:
    """Adopt a state, and set external states to these histories."""
    with transition.state.pools.guard_counts():
        restores = [
            holder.external_states[name].prepare_restore(history)
            for name, history in (external_histories or {}).items()
        ]
        holder.adopt(*transition)
        for restore in restores:
            restore()


def _merge_into(
    target: Cache,
    caches: Sequence[Cache],
    prefixes: Sequence[PageTable] = (),
    first_number: int = 0,
) -> Cache:
    """Merge `caches` in the pools of `target`; errors count them from `first_number`."""
    if not caches:
        raise ValueError("merge of no caches: one or more are needed")
    for number, cache in enumerate(caches, first_number):
        if not isinstance(cache, Cache):
            raise TypeError(f"cache {number} is a {type(cache).__name__}, cache 0 is not")
        cache.rollback()
        if cache.spec != target.spec:
            texts = [describe_spec(each.spec) for each in (cache, target)]
            way_out = "recode it"
            if texts[0] == texts[1]:
                layers = iterate_attention(*cache.spec.layers, *target.spec.layers)
                slack = max((layer.slack for layer in layers), default=0)
                way_out = f"make both by one spec, or call ensure_slack({slack}) of each"
            raise ValueError(f"cache {number} is {texts[0]}, cache 0 {texts[1]}: {way_out}")
        if not cache.length:
            raise ValueError(f"cache {number} has no tokens: merge caches with tokens")
        _check_padding_ended(cache.state.page_tables)
    caches = [_prune_copy(cache) for cache in caches]
    length = max(max(cache.lengths) for cache in caches)
    external_histories = {
        name: concat_histories(
            [cache.holder.external_states[name].get_history() for cache in caches], length
        )
        for name in target.holder.external_states
    }
    with target.state.pools.guard_counts():
        states = [cache.state for cache in caches]
        merged = transitions.merge(states, target.state, length, prefixes)
        return make_sibling(target, merged, external_histories)


def _select_external(
    holder: StateHolder, indices: Ints, selected: CacheState
) -> dict[str, StateHistory]:
    """Return the histories of external states for the sequences `indices`."""
    states = holder.external_states
    histories = [external_state.get_history() for external_state in states.values()]
    selected_histories = transitions.select_histories(
        holder.state, histories, indices, selected.page_tables
    )
    return dict(zip(states, selected_histories, strict=True))


def _prune_copy(cache: Cache) -> Cache:
    """Return `cache`, or a pruned fork of it if its prompt is to be pruned."""
    if not (cache.state.layout.prunes and cache.state.has_unpruned_prompt):
        return cache
    copy = cache.fork()
    copy.prune()
    return copy


def _check_indices(indices: Sequence[int] | Tensor, batch: int) -> Ints:
    tensor = torch.as_tensor(indices).cpu()
    valid = tensor.ndim == 1 and not (tensor.is_floating_point() or tensor.is_complex())
    valid = valid and tensor.dtype != torch.bool and all(0 <= i < batch for i in tensor.tolist())
    if not valid or (batch and not len(tensor)):
        problem = f"sequences {tensor.tolist()} of a batch of {batch}"
        raise ValueError(f"{problem}: indices from 0 to {batch - 1} are needed")
    return tensor.long().numpy()


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

"""Many sequences by id: a `Cache` each, under one limit of bytes, for any number of threads.

What the caches take never passes `max_bytes` once an operation has returned. Different sequences do
not wait for each other. Nothing here knows a layer, a format or a model.
"""

# ruff: noqa: A002 - an id is what everybody calls it

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from reprlib import repr as short
from threading import current_thread
from typing import Any

from torch import Tensor

from kvant.cache.cache import Cache
from kvant.cache.sequence_table import BACKEND_STATS, EVENT_STATS, SequenceTable
from kvant.contracts import Order, View
from kvant.recipes import AnySpec, LayerSpec, Prefill, SharedSpec
from kvant.sizes import as_bytes, format_size
from kvant.spec import as_spec, check_fitted, describe_spec


class Sequences:
    """Caches by any hashable id, all of one spec.

    >>> sequences = kvant.Sequences(num_layers=1, spec="affine8", max_bytes="64MiB")
    >>> view = sequences.append("chat-1", 0, torch.randn(1, 2, 10, 64), torch.randn(1, 2, 10, 64))
    >>> sequences.length("chat-1"), "chat-2" in sequences
    (10, False)
    """

    def __init__(
        self,
        num_layers: int | None = None,
        spec: AnySpec = "raw",
        max_bytes: int | str | None = None,
        *,
        patience: float = 30.0,
    ) -> None:
        """`max_bytes` may be a size such as "1GiB".

        `patience`: how many seconds a thread waits for a sequence that another one writes to.
        """
        limit = None if max_bytes is None else as_bytes(max_bytes)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(f"max_bytes={max_bytes}: a whole number from 1 on, or a size")
        if not patience >= 0:
            raise ValueError(f"patience={patience}: 0 seconds or more")
        self.spec = check_fitted(as_spec(spec, num_layers))
        self._table = SequenceTable(self.spec, limit, patience)

    @property
    def max_bytes(self) -> int | None:
        return self._table.max_bytes

    @property
    def patience(self) -> float:
        return self._table.patience

    def __len__(self) -> int:
        return len(self._table.list_ids())

    def __contains__(self, id: Hashable) -> bool:
        return self._table.find(id) is not None

    def __iter__(self) -> Iterator[Hashable]:
        """The ids as they are now, the least recently used first."""
        return iter(self._table.list_ids())

    def __repr__(self) -> str:
        held = f"{len(self)} of {len(self.spec.layers)} layers, {format_size(self.nbytes)}"
        return f"Sequences({describe_spec(self.spec)}: {held})"

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._table.measure_bytes()[0]

    def get_or_create(self, id: Hashable) -> Cache:
        """The cache of a sequence, an empty one for a new id.

        It may be used directly, by one thread, until the sequence is evicted; what that takes
        counts from the next operation on. `writing` keeps other threads and eviction away.
        """
        return self._table.get_or_create(id)

    @contextmanager
    def writing(self, id: Hashable) -> Iterator[Cache]:
        """The cache of a sequence, held: no other thread writes or reads it, and none evicts it.

        An exception takes back the forward that it ended. What outgrew `max_bytes` in the block is
        a CapacityError behind it: the rows are there, to be made smaller in another block.
        """
        me = current_thread()
        with self._table.lock_for_write(id) as sequence:
            sequence.is_persistent = True
            try:
                self._table.mark_used(id, sequence)
                yield sequence.cache
                self._table.mark_used(id, sequence)
                self._table.check_size(id, sequence)
            except BaseException:
                if sequence.owner is me:  # and no other thread, because this one had died
                    sequence.cache.rollback()
                raise

    def append(
        self,
        id: Hashable,
        layer: int,
        keys: Tensor,
        values: Tensor | None = None,
        *,
        start: list[int] | Tensor | None = None,
        order: Order = "BHTD",
        prefill: Prefill | None = None,
    ) -> View:
        """Add the rows of T new tokens to a layer; what attention may read for them.

        A forward appends to every layer once; until all have its rows, other threads wait.
        """
        self._check_layer(layer)
        given: dict[str, Any] = {"start": start, "order": order, "prefill": prefill}
        with self._table.lock_for_write(id) as sequence:
            cache = sequence.cache
            state = cache[layer]
            if cache.has_appended(layer):  # the forward before this one died
                cache.rollback()
            more = state.nbytes_after_append(keys, values, **given) - state.nbytes
            self._table.reserve_bytes(id, sequence, max(0, more))
            view: View = state.append(keys, values, **given)
            sequence.confirm_append()
            sequence.is_persistent = True
        return view

    def get(self, id: Hashable, layer: int, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Copies of the dense keys and values of positions [start, start + length).

        Of a forward that is under way nothing is seen.
        """
        self._check_layer(layer)
        with self._table.lock_for_read(id) as cache:
            stop, there = start + length, cache.length
            if not 0 <= start <= stop <= there:
                raise ValueError(f"rows [{start}, {stop}) of sequence {short(id)}: it has {there}")
            keys, values = cache[layer].read(start, stop, committed=True)
            return keys.clone(), values.clone()

    def length(self, id: Hashable) -> int:
        """Tokens that every layer has; 0 for an id that is not there."""
        sequence = self._table.find(id)
        return 0 if sequence is None else sequence.cache.length

    def clear(self, id: Hashable) -> None:
        """Forget the tokens and free the memory, keep the id; nothing where it is not there."""
        self._table.clear(id)

    def remove(self, id: Hashable) -> None:
        """Forget the sequence; nothing where it is not there."""
        self._table.remove(id)

    def stats(self) -> dict[str, Any]:
        """What there is, and what happened to all sequences that ever were, in numbers.

        `hit_rate` is the share of tokens asked for that were there already. `get_or_create` begins
        a request: the tokens that are there then are re-used, and those that come until the next
        one are new. One token more, or none, is a reply that goes on, and re-uses nothing.
        """
        living, total = self._table.list_entries()
        for sequence in living:
            total += sequence.count_events() + sequence.count_request_tokens()
        allocated, used = self._table.measure_bytes()
        lengths = sum(sequence.cache.length for sequence in living)
        asked, reused = total["tokens_asked"], total["tokens_reused"]
        told: dict[str, Any] = {
            "sequences": len(living),
            "average_length": lengths / len(living) if living else 0.0,
            "nbytes": allocated,
            "nbytes_used": used,
            "efficiency": used / allocated if allocated else 0.0,
            "tokens_asked": asked,
            "tokens_reused": reused,
            "hit_rate": reused / asked if asked else 0.0,
        }
        told |= {name: total[name] for name in ("evictions", *EVENT_STATS)}
        for kind in BACKEND_STATS:
            mark = f"{kind}."
            told[kind] = {k.removeprefix(mark): n for k, n in total.items() if k.startswith(mark)}
        return told

    def _check_layer(self, layer: int) -> None:
        count = len(self.spec.layers)
        if layer not in range(-count, count):
            raise ValueError(f"layer {layer} of {count}: 0 to {count - 1} is needed")
        if not isinstance(self.spec.layers[layer], LayerSpec | SharedSpec):
            raise ValueError(f"layer {layer} has no rows: use its state, within `writing(id)`")

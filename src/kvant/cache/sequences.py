"""Many sequences by id: one `Cache` each, under one limit of bytes, for any number of threads.

Once an operation has returned, the caches together take at most `max_bytes`. Threads wait only for
the same sequence.
"""

# ruff: noqa: A002 - `id` is the public parameter name

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
from kvant.platform.sizes import as_bytes, format_size
from kvant.recipes import AnySpec, LayerSpec, Prefill, SharedSpec
from kvant.spec import as_spec, check_fitted, describe_spec


class Sequences:
    """Caches by any hashable id, all with the same spec.

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
        """Create an empty table; `max_bytes` may be a size such as "1GiB".

        `patience` is the number of seconds that a thread waits for a sequence in use by another
        one.
        """
        limit = None if max_bytes is None else as_bytes(max_bytes)
        if limit is not None and (type(limit) is not int or limit < 1):
            raise ValueError(
                f"max_bytes={max_bytes}: a whole number >= 1, or a size such as '1GiB', is needed"
            )
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
        """Iterate over the present ids, the least recently used first."""
        return iter(self._table.list_ids())

    def __repr__(self) -> str:
        contents = f"{len(self)} of {len(self.spec.layers)} layers, {format_size(self.nbytes)}"
        return f"Sequences({describe_spec(self.spec)}: {contents})"

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self._table.measure_bytes()[0]

    def get_or_create(self, id: Hashable) -> Cache:
        """Return the cache of a sequence; a new id gets an empty one.

        One thread may use it without a lock until the sequence is evicted. What it allocates counts
        from the next operation of this table on. Use `writing` to exclude other threads and
        eviction.
        """
        return self._table.get_or_create(id)

    @contextmanager
    def writing(self, id: Hashable) -> Iterator[Cache]:
        """Lock a sequence: no other thread reads or writes it, and it is not evicted.

        An exception rolls back an incomplete forward. If the block exceeds `max_bytes`, its end
        raises CapacityError. The rows remain; shorten the cache in another block.
        """
        thread = current_thread()
        with self._table.lock_for_write(id) as sequence:
            sequence.is_persistent = True
            try:
                self._table.mark_used(id, sequence)
                yield sequence.cache
                self._table.mark_used(id, sequence)
                self._table.check_size(id, sequence)
            except BaseException:
                if sequence.owner is thread:  # else another thread has replaced it
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
        """Append the rows of T tokens to a layer; return the view for attention.

        A forward appends to every layer once. Until all have its rows, other threads cannot write.
        """
        self._check_layer(layer)
        options: dict[str, Any] = {"start": start, "order": order, "prefill": prefill}
        with self._table.lock_for_write(id) as sequence:
            cache = sequence.cache
            cache_layer = cache[layer]
            if cache_layer.has_appended:  # an earlier forward has failed
                cache.rollback()
            new_nbytes = (
                cache_layer.nbytes_after_append(keys, values, **options) - cache_layer.nbytes
            )
            self._table.reserve_bytes(id, sequence, max(0, new_nbytes))
            view: View = cache_layer.append(keys, values, **options)
            sequence.confirm_append()
            sequence.is_persistent = True
        return view

    def get(self, id: Hashable, layer: int, start: int, length: int) -> tuple[Tensor, Tensor]:
        """Return copies of the dense keys and values of positions [start, start + length).

        Rows of an open forward are not included.
        """
        self._check_layer(layer)
        with self._table.lock_for_read(id) as cache:
            stop, num_tokens = start + length, cache.length
            if not 0 <= start <= stop <= num_tokens:
                raise ValueError(
                    f"rows [{start}, {stop}) of sequence {short(id)}: it has {num_tokens}"
                )
            keys, values = cache[layer].read(start, stop, committed=True)
            return keys.clone(), values.clone()

    def length(self, id: Hashable) -> int:
        """Return the tokens that every layer has; 0 for an unknown id."""
        sequence = self._table.find(id)
        return 0 if sequence is None else sequence.cache.length

    def clear(self, id: Hashable) -> None:
        """Remove the tokens and free the memory; the id remains. Unknown ids are ignored."""
        self._table.clear(id)

    def remove(self, id: Hashable) -> None:
        """Remove the sequence; unknown ids are ignored."""
        self._table.remove(id)

    def stats(self) -> dict[str, Any]:
        """Return sizes, and the event counters of all sequences, removed ones included.

        `hit_rate` is the share of requested tokens that were cached already. Each `get_or_create`
        begins a request. Tokens already in the cache count as reused, and tokens appended until the
        next request as new. With at most one new token, a request is a decode step: it counts no
        token as reused.
        """
        entries, total = self._table.list_entries()
        for sequence in entries:
            total += sequence.count_events() + sequence.count_request_tokens()
        allocated, used = self._table.measure_bytes()
        lengths = sum(sequence.cache.length for sequence in entries)
        requested, reused = total["tokens_asked"], total["tokens_reused"]
        stats: dict[str, Any] = {
            "sequences": len(entries),
            "average_length": lengths / len(entries) if entries else 0.0,
            "nbytes": allocated,
            "nbytes_used": used,
            "efficiency": used / allocated if allocated else 0.0,
            "tokens_asked": requested,
            "tokens_reused": reused,
            "hit_rate": reused / requested if requested else 0.0,
        }
        stats |= {name: total[name] for name in ("evictions", *EVENT_STATS)}
        for group in BACKEND_STATS:
            prefix = f"{group}."
            stats[group] = {
                k.removeprefix(prefix): n for k, n in total.items() if k.startswith(prefix)
            }
        return stats

    def _check_layer(self, layer: int) -> None:
        count = len(self.spec.layers)
        if layer not in range(-count, count):
            raise ValueError(f"layer {layer} of {count}: 0 to {count - 1} is needed")
        if not isinstance(self.spec.layers[layer], LayerSpec | SharedSpec):
            raise ValueError(f"layer {layer} has no rows: use its state, within `writing(id)`")

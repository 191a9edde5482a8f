"""Connect an engine's requests to cached prefixes: match, restore from a store, insert, evict.

Prefixes count towards the engine's `max_bytes`. When a request needs memory, they are evicted
first. Store lookups and flushes run in threads of their own; everything else runs in the engine's
thread. All matches, inserts and evictions of the engine's prefixes are made here.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import abc, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any
from weakref import WeakValueDictionary

from kvant.engine.actions import Evict
from kvant.engine.batch import Batch
from kvant.engine.future import RequestFuture
from kvant.engine.request import Request, Sequence, clear_traceback_frames
from kvant.engine.scheduler import Scheduler
from kvant.prefixes import LookupDeadline, PendingRestore, Prefixes, PrefixNamespace
from kvant.prefixes.eviction import EvictionRules
from kvant.prefixes.memory import PrefixPools
from kvant.prefixes.restore import STORE_TIMEOUT_S, start_daemon
from kvant.stores import Store

log = logging.getLogger("kvant")

# Age at which a check whether the model's weights changed is repeated. A check takes as long as a
# decode, or longer.
WEIGHTS_CHECK_INTERVAL_S = 1.0
MAX_STORE_WAIT_S = STORE_TIMEOUT_S  # longest wait of a request for a store
EVICTION_FLUSH_S = 2.0  # longest wait of an eviction for pending store writes
MAX_LOOKUP_THREADS = 4  # including lookups whose requests gave up waiting

Inbox = SimpleQueue[Callable[[], None]]  # calls for the engine's thread, from any thread


class PrefixReuse:
    """Reuse prefixes in the batch, and report the memory they hold to the scheduler."""

    def __init__(
        self,
        batch: Batch,
        scheduler: Scheduler,
        requests: Mapping[Request, RequestFuture[Any]],
        inbox: Inbox,
    ) -> None:
        """Share these objects with the engine; `requests` maps open requests to their futures."""
        self.batch = batch
        self.scheduler = scheduler
        self.requests = requests
        self.inbox = inbox
        self._namespace: PrefixNamespace | None = None  # without a salt; None: prefixes are off
        self._pools: PrefixPools | None = None  # of the weights at the last match
        self._adapter_namespaces: dict[str, PrefixNamespace] = {}  # without a salt, by adapter key
        # Only the open requests of a salt reference its namespace; it is freed with the last one.
        self._salted_namespaces: WeakValueDictionary[tuple[str, str], PrefixNamespace] = (
            WeakValueDictionary()  # by (adapter key or "", salt)
        )
        self._is_flushing = False
        self._flush_finished = False  # the next eviction may include unwritten prefixes

    def attach(self, prefixes: Prefixes) -> None:
        """Match prompts with `prefixes` and insert into them from now on."""
        caches = self.batch.caches
        self._namespace = prefixes.open_namespace(
            self.batch.decoder.model, caches.empty_cache, WEIGHTS_CHECK_INTERVAL_S
        )
        self._pools = self._namespace.pools
        if (pool_cache := self._pools.cache) is not None:
            pool_cache = pool_cache.fork()
            pool_cache.backend = caches.empty_cache.backend
            caches.adopt_pools(pool_cache)
            state, memory_model = pool_cache.states.state, self.scheduler.memory_model
            groups = zip(state.layout.layer_groups, state.pools, strict=True)
            sizes = {group: (pools.open.size, pools.sealed.size) for group, pools in groups}
            self.scheduler.memory_budget.record_slots(memory_model.count_page_slots(sizes))
        self.update_prefix_slots()

    def invalidate_weights_check(self) -> None:
        """Before the next use of a prefix, check again whether the model's weights changed."""
        others = *self._adapter_namespaces.values(), *self._salted_namespaces.values()
        for namespace in filter(None, (self._namespace, *others)):
            namespace.invalidate_weights_check()

    def open_namespace(self, request: Request) -> None:
        """Give a request the namespace of its adapter and salt, if it may use prefixes."""
        namespace, adapter_key = None if request.is_embedding else self._namespace, ""
        if namespace is not None and request.adapter is not None:
            adapter_key = request.adapter.key
            if adapter_key not in self._adapter_namespaces:
                self._adapter_namespaces[adapter_key] = namespace.fork(adapter_key=adapter_key)
            namespace = self._adapter_namespaces[adapter_key]
        if namespace is not None and request.salt:
            key = adapter_key, request.salt
            namespace = self._salted_namespaces.get(key) or namespace.fork(request.salt)
            self._salted_namespaces[key] = namespace
        request.namespace = namespace

    def match_prefix(self, request: Request) -> None:
        """Match a prompt with the prefixes, and give the result to scheduler and client."""
        length, checkpoints, miss = 0, list[int](), None
        sequence, namespace, caches = request.sequences[0], request.namespace, self.batch.caches
        assert namespace is not None
        try:
            length = caches.count_tokens(sequence)
            tokens = sequence.prefix_tokens
            cache, num_prefilled = namespace.match_prefix(tokens, caches.empty_cache.fork(), 0)
            if namespace.has_keys:
                self._use_pools(namespace.pools)
            found = request.layout.find_resumable(cache.length, cache.find_exact_rewind)
            if found > length:
                cache.rewind(found)
                length = found
                sequence.num_prefilled = min(num_prefilled, length)
                sequence.cache = caches.import_cache(cache)  # it may be in other pools
            checkpoints = [
                end
                for point in namespace.plan_checkpoints(tokens, length, request.branch_points)
                if (end := request.layout.clip_length(point)) > length
            ]
            miss = namespace.last_miss
        except Exception as error:  # the prompt can still be prefilled
            clear_traceback_frames(error)
            log.warning("a prompt was not matched with prefixes: %r", error)
            caches.release([sequence])
            length, checkpoints = 0, []
        self.requests[request].set_prefix_usage(length, request.restored_range, miss)
        request.set_match(self.scheduler.prefix_version, length, tuple(sorted({*checkpoints})))
        self.update_prefix_slots()

    def insert_prefix(self, request: Request, sequence: Sequence) -> None:
        """Insert a sequence of a request into the prefixes, if it fits."""
        (cache, index), namespace = self.batch.caches.locate(sequence), request.namespace
        length = self.batch.caches.count_tokens(sequence)
        if not length or not self.scheduler.can_insert_prefix(request, length):
            return
        try:
            if namespace is not None and cache is not None and namespace.pools is self._pools:
                single = cache if sequence.cache is not None else cache.extract(index)
                tokens = sequence.prefix_tokens[: single.length]
                features = {} if request.images is None else {**request.images.features}
                namespace.insert_prefix(tokens, single, sequence.num_prefilled, features)
        except Exception as error:  # no answer depends on it
            clear_traceback_frames(error)
            log.warning("a prefix was not inserted: %r", error)
        self.update_prefix_slots()

    def reject_restored_prefix(self, request: Request) -> None:
        """Drop the restored prefix of a request: the model failed on it."""
        if request.restored_range and request.namespace is not None:
            tokens = request.sequences[0].prefix_tokens
            request.namespace.reject(tokens[: request.restored_range.stop])
            self.update_prefix_slots()

    def record_lookup(self, request: Request) -> None:
        """Count the tokens of a prompt, and those found in the cache."""
        if request.namespace is not None:
            request.namespace.memory.record_lookup(
                request.num_prompt_tokens, request.num_computed_tokens
            )

    def record_prefill_time(self, count: int, seconds: float) -> None:
        """Record that `count` prompt tokens were prefilled in `seconds`."""
        if self._pools is not None:
            self._pools.record_prefill_time(count, seconds)

    def evict_prefixes(self, action: Evict) -> None:
        """Evict unused prefixes, then those that waiting requests matched.

        Matched prefixes are evicted only if nothing else is left and no request runs. If
        only prefixes with pending store writes are left, a thread flushes them first, unless
        `include_unwritten`. The request that needs the memory waits for it; others continue.
        """
        if self._namespace is None or (pools := self._pools) is None:
            return
        memory = self._namespace.memory
        nbytes, include_unwritten = action.nbytes, action.include_unwritten or self._flush_finished
        self._flush_finished = False
        rules = EvictionRules(include_unwritten, include_used=False)
        evicted = memory.evict(nbytes, pools, rules).num_entries > 0
        pending = not (evicted or include_unwritten) and pools.has_unwritten
        if pending and not self._is_flushing:
            self._is_flushing = True
            try:
                start_daemon(self._flush_store, "kvant-store-flush")
            except RuntimeError as error:  # no thread could start; writes continue slowly
                self._is_flushing = False
                log.warning("store writes are not flushed: %r", error)
        running = self.scheduler.queue.running
        if not evicted and not pending and not running:
            self.drop_waiting_matches()
            rules = EvictionRules(include_unwritten=True, include_used=True)
            evicted = memory.evict(nbytes, pools, rules).num_entries > 0
        self.update_prefix_slots()
        self.scheduler.may_evict = evicted or not (pending or running)

    def drop_waiting_matches(self) -> None:
        """Release the matched prefixes of waiting requests."""
        for request in self.scheduler.queue.waiting:
            if request.holds_match:
                self.batch.caches.release(request.sequences)
                request.set_match()

    def update_prefix_slots(self) -> None:
        """Tell the scheduler the slots of all prefixes, and which of them each request shares."""
        if self._pools is None:
            return
        memory_model, usage = self.scheduler.memory_model, self._pools.measure_pages()
        for request in self.requests:
            if not request.sequences:  # all have finished: the scheduler has removed the request
                continue
            cache, index = self.batch.caches.locate(request.sequences[0])
            length, pages = request.num_prompt_tokens, {}
            if cache is not None:
                pages = usage.count_shared_pages(cache.states, index, length)
            request.shared_slots = memory_model.count_page_slots(pages)
            is_copy = cache is not None and not usage.may_share_pages(cache.states)
            if request.holds_match and not is_copy and request in self.scheduler.queue.waiting:
                needed = memory_model.count_shared_slots(request.num_computed_tokens)
                if (needed > request.shared_slots).any():  # the matched prefix was evicted
                    self.batch.caches.release(request.sequences)
                    request.set_match()
        slots = memory_model.count_page_slots(usage.num_pages, usage.num_caches)
        num_image_tokens = self._pools.count_image_tokens()
        self.scheduler.set_prefix_slots(slots + memory_model.count_image_slots(num_image_tokens))

    def _use_pools(self, pools: PrefixPools) -> None:
        """Count the prefixes of `pools` from now on; evict those of weights that have changed."""
        if self._namespace is not None and self._pools is not None and pools is not self._pools:
            self._namespace.memory.evict(sys.maxsize, self._pools)
            self._pools = pools

    def _flush_store(self) -> None:
        """Flush pending store writes with a time limit, in a thread of its own."""
        if self._namespace is not None and self._namespace.memory.prefix_store is not None:
            self._namespace.memory.prefix_store.flush(EVICTION_FLUSH_S)
        self.inbox.put(self._finish_flush)

    def _finish_flush(self) -> None:
        """Allow the next eviction to include unwritten prefixes."""
        self._is_flushing, self._flush_finished = False, True
        self.update_prefix_slots()  # this also allows another eviction


class StoreLookups:
    """Look up prompts in a store, one by one, in threads of their own."""

    def __init__(self, reuse: PrefixReuse) -> None:
        self._reuse = reuse
        self._num_threads = 0  # includes those of cancelled lookups
        self._queue: deque[tuple[Request, float]] = deque()  # with end times, monotonic seconds
        self._current: tuple[Request, LookupDeadline] | None = None

    def close(self) -> None:
        """Cancel the current lookup."""
        if self._current is not None:
            self._current[1].cancel()

    def add(self, request: Request) -> None:
        """Queue a lookup of a prompt, limited to the time that its prefill would take.

        Lookups run one by one, in the order in which requests are admitted. The time limit of a
        queued lookup counts from the latest deadline of the lookups before it.
        """
        assert request.namespace is not None
        now = time.monotonic()
        queue_end = max(1e-3 * other.store_deadline_ms for other in self._reuse.requests)
        count = request.num_prompt_tokens - request.num_computed_tokens
        try:
            prefill = request.namespace.pools.estimate_prefill_seconds(count)
        except Exception as error:  # hashing the weights failed; the prompt can still be prefilled
            log.warning("a prompt was not looked up in a store: %r", error)
            self._reuse.scheduler.finish_store_lookup(request, 0)
            return
        end_time = now + min(max(queue_end - now, 0.0) + prefill, MAX_STORE_WAIT_S)
        request.store_deadline_ms = int(1e3 * end_time)
        request.timeline.begin_phase("store")
        self._queue.append((request, end_time))
        self._start_next()

    def cancel(self, request: Request) -> None:
        """Cancel the running lookup, if it is of this request, and free its memory.

        A queued lookup stays queued. It is skipped, because its request waits no longer.
        """
        request.timeline.end_phase("store")
        if self._current is not None and self._current[0] is request:
            self._current[1].cancel()
            self._current = None  # a hung store must not delay other prompts
            self._start_next()

    # ---- internals

    def _start_next(self) -> None:
        """Start the next lookup in a thread, once the result of the previous one was adopted.

        The previous restore may create the pools that the next one uses. If `MAX_LOOKUP_THREADS`
        threads still wait for a store, the prompt is prefilled without a lookup.
        """
        while self._queue and self._current is None:
            request, end_time = self._queue.popleft()
            deadline = LookupDeadline(partial(_compute_seconds_left, request, end_time))
            try:
                has_time = deadline.compute_seconds_left() > 0
                if has_time and self._num_threads < MAX_LOOKUP_THREADS:
                    start_daemon(self._make_lookup(request, deadline), "kvant-store-read")
                    self._current = request, deadline
                    self._num_threads += 1
            except Exception as error:  # the prompt can still be prefilled
                deadline.cancel()
                clear_traceback_frames(error)
                log.warning("a prompt was not looked up in a store: %r", error)
            if self._current is None:
                request.timeline.end_phase("store")
                self._reuse.scheduler.finish_store_lookup(request, 0)

    def _make_lookup(self, request: Request, deadline: LookupDeadline) -> Callable[[], None]:
        """Return a function that looks up a prompt, to be called in another thread."""
        batch, sequence = self._reuse.batch, request.sequences[0]
        lookup = None if request.namespace is None else request.namespace.open_store_lookup()
        assert lookup is not None
        # Stores are untrusted, so blobs must have the shapes of this model. A forward of one token
        # determines them.
        if not batch.caches.empty_cache.has_shapes:
            batch.prefill(Sequence(sequence.tokens[:1]), 1)
        base_cache = (sequence.cache or batch.caches.empty_cache).fork()
        tokens, num_cached = list(sequence.prefix_tokens), base_cache.length
        deadline.allocate(lambda: base_cache)  # registered, so that a cancel frees it

        def look_up() -> None:
            restore = None
            with suppress(Exception):  # the prompt can still be prefilled
                restore = lookup.run(tokens, base_cache, num_cached, deadline)
            with suppress(Exception):
                deadline.release(base_cache)  # at once: its pages may be needed
            self._reuse.inbox.put(lambda: self._finish(request, deadline, restore))

        return look_up

    def _finish(
        self, request: Request, deadline: LookupDeadline, restore: PendingRestore | None
    ) -> None:
        """Adopt the result of a lookup unless it was cancelled, and start the next one."""
        self._num_threads -= 1
        try:
            if not deadline.is_cancelled:
                self._current = None
                self._adopt(request, restore)
                request.timeline.end_phase("store")
        finally:
            self._start_next()

    def _adopt(self, request: Request, restore: PendingRestore | None) -> None:
        """Continue a prompt from restored tokens, in the memory that was reserved for it."""
        scheduler, caches = self._reuse.scheduler, self._reuse.batch.caches
        length = 0 if restore is None else len(restore.restored.tokens)
        is_usable = scheduler.finish_store_lookup(request, length)
        if restore is None:
            return
        if not is_usable:
            restore.restored.cache.clear()
            return
        try:
            insert = scheduler.can_insert_prefix(request, length)
            num_cached = self._import_restore(request, restore, insert=insert)
        except Exception as error:  # the prompt can still be prefilled
            clear_traceback_frames(error)
            log.warning("a restored prefix was not adopted: %r", error)
            num_cached = caches.count_tokens(request.sequences[0])
        finally:
            restore.restored.cache.clear()
        if num_cached > request.num_computed_tokens:
            request.restored_range = restore.restored_range
            self._reuse.requests[request].set_prefix_usage(num_cached, restore.restored_range, None)
        request.num_computed_tokens = num_cached
        self._reuse.update_prefix_slots()

    def _import_restore(self, request: Request, restore: PendingRestore, *, insert: bool) -> int:
        """Move restored tokens to the sequence of a prompt; return how many tokens are cached then.

        With `insert`, other requests may use them, too.
        """
        namespace, sequence = request.namespace, request.sequences[0]
        caches, restored = self._reuse.batch.caches, restore.restored
        assert namespace is not None
        num_before = caches.count_tokens(sequence)
        find = partial(namespace.count_usable_tokens, restore)
        length = request.layout.find_resumable(find(len(sequence.tokens) - 1), find)
        if length <= num_before:
            return num_before
        if sequence.cache is not None:
            cache = sequence.cache.import_sequence(restored.cache)
        else:
            cache = caches.import_cache(restored.cache.fork())
        sequence.cache = None  # frees pages before the rewind below may need one
        restored.cache.clear()
        if insert:
            namespace.insert_restored(restore._replace(restored=replace(restored, cache=cache)))
            cache = cache.fork()
        cache.rewind(length)
        num_prefilled = restored.num_prefilled
        if sequence.num_prefilled != num_before:  # some tokens were generated, not prefilled
            num_prefilled = min(num_prefilled, sequence.num_prefilled)
        sequence.cache, sequence.num_prefilled = cache, min(num_prefilled, length)
        return length


def _compute_seconds_left(request: Request, end_time: float) -> float:
    """Return how long a request still waits for a store; any thread may call this."""
    return end_time - time.monotonic() if request.store_deadline_ms else 0.0


def make_own_prefixes(
    store: str | Store | abc.Sequence[str | Store] | None,
    max_bytes: int | str | None,
    prefixes: Prefixes | None,
) -> Prefixes | None:
    """Return new prefixes for an engine that was given a `store`; None without one.

    Without `max_bytes`, their limit is 1 GiB. Otherwise, only the engine's limit applies to them.
    """
    if store is not None and prefixes is not None:
        raise TypeError("prefixes and a store: give the store to kvant.Prefixes(store=...)")
    return None if store is None else Prefixes("1GiB" if max_bytes is None else None, store=store)

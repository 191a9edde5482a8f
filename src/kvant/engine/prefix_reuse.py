"""Connect an engine's requests to cached prefixes: match, restore from a store, insert, evict.

Prefixes count towards the engine's `max_bytes`. When a request needs memory, they are evicted
first. Store lookups and flushes run in threads of their own; everything else runs in the engine's
thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvant.engine.batch import Batch, EngineSequence
from kvant.engine.request import Request, clear_traceback_frames
from kvant.engine.scheduler import ScheduledRequest, Scheduler
from kvant.prefixes import LookupDeadline, PendingRestore, Prefixes
from kvant.prefixes.restore import STORE_TIMEOUT_S
from kvant.prefixes.threads import start_daemon
from kvant.stores import Store

log = logging.getLogger("kvant")

MAX_STORE_WAIT_S = STORE_TIMEOUT_S  # longest wait of a request for a store
EVICTION_FLUSH_S = 2.0  # longest wait of an eviction for pending store writes
MAX_LOOKUP_THREADS = 4  # including lookups whose requests gave up waiting


class PrefixReuse:
    """Reuse prefixes in the batch, and keep the scheduler's counts of their slots up to date."""

    def __init__(
        self,
        batch: Batch,
        scheduler: Scheduler,
        requests: Mapping[ScheduledRequest, Request],
        tokenizer: Any,
        call_in_engine: Callable[[Callable[[], None]], None],
    ) -> None:
        """`call_in_engine` queues a call for the engine's thread, from any thread."""
        self._batch = batch
        self._scheduler = scheduler
        self._requests = requests
        self._tokenizer = tokenizer
        self._call_in_engine = call_in_engine
        self._num_lookups = 0  # running lookup threads, also of cancelled lookups
        self._lookup_queue: deque[tuple[Request, float]] = deque()  # with end times
        self._current_lookup: tuple[ScheduledRequest, LookupDeadline] | None = None
        self._is_flushing = False
        self._flush_finished = False  # the last flush is over: evict without another one

    def close(self) -> None:
        """Cancel the current store lookup."""
        if self._current_lookup is not None:
            self._current_lookup[1].cancel()

    def match_prefix(self, scheduled: ScheduledRequest) -> None:
        """Match a prompt with the prefixes, and give the result to scheduler and stream."""
        self.cancel_lookup(scheduled)
        request = self._requests[scheduled]
        try:
            length, checkpoints = self._batch.match_prefix(request.sequence, request.branch_points)
            mismatch = self._batch.describe_mismatch(request.sequence, self._tokenizer)
        except Exception as error:  # the prompt can still be prefilled
            clear_traceback_frames(error)
            log.warning("a prompt was not matched with prefixes: %r", error)
            self._batch.release(request.sequence)
            length, checkpoints, mismatch = 0, (), None
        request.stream.set_prefix_usage(length, request.restored_range, mismatch)
        self._scheduler.record_prefix_match(scheduled, length, checkpoints)
        self.update_prefix_slots()

    def look_up_store(self, scheduled: ScheduledRequest) -> None:
        """Queue a store lookup of a prompt, limited to the time that its prefill would take.

        Lookups run one by one, in the order of their prefills. The time of a queued lookup starts
        at the latest deadline of those before it.
        """
        request, now = self._requests[scheduled], time.monotonic()
        queue_end = max((1e-3 * other.store_deadline_ms for other in self._requests), default=0.0)
        wait = max(queue_end - now, 0.0) + self._batch.estimate_prefill_seconds(
            scheduled.num_prompt_tokens - scheduled.num_computed_tokens
        )
        end_time = now + min(wait, MAX_STORE_WAIT_S)
        scheduled.store_deadline_ms = int(1e3 * end_time)
        self._lookup_queue.append((request, end_time))
        self._start_next_lookup()

    def cancel_lookup(self, scheduled: ScheduledRequest) -> None:
        """Cancel the store lookup of a request and free its memory."""
        if self._current_lookup is not None and self._current_lookup[0] is scheduled:
            self._current_lookup[1].cancel()
            self._current_lookup = None  # a hung store must not delay other prompts
            self._start_next_lookup()

    def insert_prefix(self, scheduled: ScheduledRequest, sequence: EngineSequence) -> None:
        """Insert a sequence of a request into the prefixes, if it fits."""
        length = self._batch.count_tokens(sequence)
        if not length or not self._scheduler.can_insert_prefix(scheduled, length):
            return
        try:
            self._batch.insert_prefix(sequence)
        except Exception as error:  # the client already has all tokens
            clear_traceback_frames(error)
            log.warning("a prefix was not inserted: %r", error)
        self.update_prefix_slots()

    def reject(self, request: Request) -> None:
        """Drop the restored prefix of a request: the model failed on it."""
        if request.restored_range:
            self._batch.reject(request.sequence, request.restored_range.stop)
            self.update_prefix_slots()

    def evict_prefixes(self, nbytes: int, *, include_unwritten: bool) -> None:
        """Evict unused prefixes; if there is none and no request runs, those of waiting ones.

        Without `include_unwritten`, pending store writes are flushed first; the request that needs
        the memory waits for them, and others continue.
        """
        include_unwritten, self._flush_finished = include_unwritten or self._flush_finished, False
        evicted = self._batch.evict_prefixes(nbytes, include_unwritten=include_unwritten)
        pending = not (evicted or include_unwritten) and self._batch.has_unwritten_prefixes
        if pending and not self._is_flushing:
            self._is_flushing = True
            try:
                start_daemon(self._flush_store, "kvant-store-flush")
            except RuntimeError as error:  # no thread could start; writes continue slowly
                self._is_flushing = False
                log.warning("store writes are not flushed: %r", error)
        if not evicted and not pending and not self._scheduler.running:
            self.drop_waiting_matches()
            evicted = self._batch.evict_prefixes(nbytes, include_unwritten=True, include_used=True)
        self.update_prefix_slots()
        may_free_later = bool(pending or self._scheduler.running)
        self._scheduler.record_eviction(any_freed=evicted or not may_free_later)

    def drop_waiting_matches(self) -> None:
        """Release the matched prefixes of waiting requests."""
        for scheduled in self._scheduler.waiting:
            if scheduled.matched_version is not None and not scheduled.is_swapped_out:
                self._batch.release(self._requests[scheduled].sequence)
                self._scheduler.clear_prefix_match(scheduled)

    def update_prefix_slots(self) -> None:
        """Tell the scheduler the slots of all prefixes, and which of them each request shares."""
        if (usage := self._batch.measure_prefixes()) is None:
            return
        model = self._scheduler.memory_model
        for request in self._requests.values():
            scheduled, sequences = request.scheduled, request.sequences
            shared_pages = self._batch.count_shared_pages(
                sequences[0], scheduled.num_prompt_tokens, usage
            )
            scheduled.shared_slots = model.count_page_slots(shared_pages)
            holds_match = (
                scheduled.matched_version is not None
                and not scheduled.is_swapped_out
                and scheduled in self._scheduler.waiting
            )
            if holds_match:
                needed = model.count_shared_slots(scheduled.num_computed_tokens)
                if (needed > scheduled.shared_slots).any():  # the matched prefix was evicted
                    self._batch.release(request.sequence)
                    self._scheduler.clear_prefix_match(scheduled)
        slots = model.count_page_slots(usage.num_pages, len(usage.unique_nbytes))
        self._scheduler.set_prefix_slots(slots)

    # ---- internals

    def _start_next_lookup(self) -> None:
        """Start the next lookup in a thread, once the result of the previous one was adopted.

        The previous restore may create the pools that the next one uses. If `MAX_LOOKUP_THREADS`
        threads still wait for a store, the prompt is prefilled without a lookup.
        """
        while self._lookup_queue and self._current_lookup is None:
            request, end_time = self._lookup_queue.popleft()
            deadline = LookupDeadline(
                partial(self._compute_seconds_left, request.scheduled, end_time)
            )
            look_up = None
            try:
                has_time = deadline.compute_seconds_left() > 0
                if has_time and self._num_lookups < MAX_LOOKUP_THREADS:
                    look_up = self._batch.prepare_store_lookup(request.sequence, deadline)
                    run = partial(self._run_lookup, request, deadline, look_up)
                    start_daemon(run, "kvant-store-read")
            except Exception as error:  # the prompt can still be prefilled
                deadline.cancel()
                clear_traceback_frames(error)
                log.warning("a prompt was not looked up in a store: %r", error)
                look_up = None
            if look_up is None:
                self._scheduler.finish_store_lookup(request.scheduled, 0)
            else:
                self._current_lookup = request.scheduled, deadline
                self._num_lookups += 1

    def _compute_seconds_left(self, scheduled: ScheduledRequest, end_time: float) -> float:
        """Return how long a request still waits for a store; any thread may call this."""
        return end_time - time.monotonic() if scheduled.store_deadline_ms else 0.0

    def _run_lookup(
        self,
        request: Request,
        deadline: LookupDeadline,
        look_up: Callable[[], PendingRestore | None],
    ) -> None:
        restore = None
        with suppress(Exception):  # the prompt can still be prefilled
            restore = look_up()
        self._call_in_engine(lambda: self._finish_lookup(request, deadline, restore))

    def _finish_lookup(
        self, request: Request, deadline: LookupDeadline, restore: PendingRestore | None
    ) -> None:
        """Adopt the result of a lookup unless it was cancelled, and start the next one."""
        self._num_lookups -= 1
        try:
            if not deadline.is_cancelled:
                self._current_lookup = None
                self._adopt_restore(request, restore)
        finally:
            self._start_next_lookup()

    def _adopt_restore(self, request: Request, restore: PendingRestore | None) -> None:
        """Continue a prompt from restored tokens, in the memory that was reserved for it."""
        scheduled = request.scheduled
        length = 0 if restore is None else len(restore.restored.tokens)
        is_usable = self._scheduler.finish_store_lookup(scheduled, length)
        if restore is None:
            return
        if not is_usable:
            restore.restored.cache.clear()
            return
        try:
            insert = self._scheduler.can_insert_prefix(scheduled, length)
            num_cached = self._batch.adopt_restore(request.sequence, restore, insert=insert)
        except Exception as error:  # the prompt can still be prefilled
            clear_traceback_frames(error)
            log.warning("a restored prefix was not adopted: %r", error)
            num_cached = self._batch.count_tokens(request.sequence)
        finally:
            restore.restored.cache.clear()
        if num_cached > scheduled.num_computed_tokens:
            request.restored_range = restore.restored_range
            request.stream.set_prefix_usage(num_cached, restore.restored_range, None)
        scheduled.num_computed_tokens = num_cached
        self.update_prefix_slots()

    def _flush_store(self) -> None:
        """Flush pending store writes with a time limit, in a thread of its own."""
        self._batch.flush_store(EVICTION_FLUSH_S)
        self._call_in_engine(self._finish_flush)

    def _finish_flush(self) -> None:
        """Allow the next eviction to include unwritten prefixes."""
        self._is_flushing, self._flush_finished = False, True
        self.update_prefix_slots()
        self._scheduler.record_eviction(any_freed=True)


def make_own_prefixes(
    store: str | Store | Sequence[str | Store] | None,
    max_bytes: int | str | None,
    prefixes: Prefixes | None,
) -> Prefixes | None:
    """Return prefixes for one engine alone if it has a store of its own.

    If the engine has no `max_bytes`, their limit is 1 GiB; otherwise, only that of the engine.
    """
    if store is not None and prefixes is not None:
        raise TypeError("prefixes and a store: give the store to kvant.Prefixes(store=...)")
    return None if store is None else Prefixes("1GiB" if max_bytes is None else None, store=store)

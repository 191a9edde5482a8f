"""What requests find of each other's prompts and replies, and leave for others.

In memory, prefixes count within the bytes of the engine, and are the first to go where a request
needs room. A store is asked and written to beside the engine's thread, in which all else happens.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from kvant.engine.batch import Batch, EngineSequence
from kvant.engine.request import Request, clear_traceback_frames
from kvant.engine.scheduler import ScheduledRequest, Scheduler
from kvant.prefixes import LookupDeadline, PendingRestore
from kvant.prefixes.lookup_deadline import STORE_TIMEOUT_S
from kvant.prefixes.threads import start_daemon

log = logging.getLogger("kvant")

MAX_STORE_WAIT_S = STORE_TIMEOUT_S  # seconds that a request waits for a store at most,
EVICTION_FLUSH_S = 2.0  # and that prefixes whose memory is needed wait to be written
LOOKUPS = 4  # that may be under way, where requests did not wait for their ends


class PrefixReuse:
    """Prefixes between the schedule, which counts, and the batch, which has the pages."""

    def __init__(
        self,
        batch: Batch,
        scheduler: Scheduler,
        requests: Mapping[ScheduledRequest, Request],
        tokenizer: Any,
        call_in_engine: Callable[[Callable[[], None]], None],
    ) -> None:
        """`later` has something done in the engine's thread, from any other."""
        self._batch = batch
        self._scheduler = scheduler
        self._requests = requests
        self._tokenizer = tokenizer
        self._call_in_engine = call_in_engine
        self._lookups = 0  # threads that look into a store
        self._lookup_queue: deque[tuple[Request, float]] = deque()  # to be looked for, until when
        self._current_lookup: tuple[ScheduledRequest, LookupDeadline] | None = (
            None  # who is looked for
        )
        self._is_flushing = False  # it does that now
        self._flush_expired = False  # it did, and what must go may go

    def close(self) -> None:
        """Wait for no store any more."""
        if self._current_lookup is not None:
            self._current_lookup[1].cancel()

    def match_prefix(self, scheduled: ScheduledRequest) -> None:
        """Go on from what there is of a prompt."""
        self.cancel_lookup(scheduled)
        request = self._requests[scheduled]
        try:
            held, stops = self._batch.match_prefix(request.sequence, request.branch_points)
            lost = self._batch.describe_mismatch(request.sequence, self._tokenizer)
        except Exception as error:  # it can still be read
            clear_traceback_frames(error)
            log.warning("prefixes were not looked for: %r", error)
            self._batch.release(request.sequence)
            held, stops, lost = 0, (), None
        request.stream.set_prefix_usage(held, request.restored_range, lost)
        self._scheduler.record_prefix_match(scheduled, held, stops)
        self.update_prefix_slots()

    def look_up_store(self, scheduled: ScheduledRequest) -> None:
        """Look for a prompt in a store, for as long as it would take to read it.

        Prompts are looked for one after the other, as they would be read: behind others it may
        take as long as theirs besides.
        """
        request, now = self._requests[scheduled], time.monotonic()
        before = max((1e-3 * other.store_deadline_ms for other in self._requests), default=0.0)
        wait = max(before - now, 0.0) + self._batch.estimate_prefill_seconds(
            scheduled.num_prompt_tokens - scheduled.num_computed_tokens
        )
        until = now + min(wait, MAX_STORE_WAIT_S)
        scheduled.store_deadline_ms = int(1e3 * until)
        self._lookup_queue.append((request, until))
        self._start_next_lookup()

    def cancel_lookup(self, scheduled: ScheduledRequest) -> None:
        """It goes on without what a store has: what was taken for that is free."""
        if self._current_lookup is not None and self._current_lookup[0] is scheduled:
            self._current_lookup[1].cancel()
            self._current_lookup = (
                None  # a store that does not answer keeps no other prompt waiting
            )
            self._start_next_lookup()

    def insert_prefix(self, scheduled: ScheduledRequest, sequence: EngineSequence) -> None:
        """Let others go on from a sequence of a request, if there is room for it."""
        length = self._batch.count_tokens(sequence)
        if not length or not self._scheduler.can_insert_prefix(scheduled, length):
            return
        try:
            self._batch.insert_prefix(sequence)
        except Exception as error:  # whoever asked has all tokens
            clear_traceback_frames(error)
            log.warning("a prefix was not kept: %r", error)
        self.update_prefix_slots()

    def reject(self, request: Request) -> None:
        """Drop what a store had of a request whose prompt the model cannot read with it."""
        if request.restored_range:
            self._batch.reject(request.sequence, request.restored_range.stop)
            self.update_prefix_slots()

    def evict_prefixes(self, nbytes: int, *, include_unwritten: bool) -> None:
        """Let go of prefixes; where nobody is served, also of what those have who wait.

        Unless it is to be `at_once`, a store gets the time to have them before, and whoever needs
        their memory waits for that; others go on.
        """
        include_unwritten, self._flush_expired = include_unwritten or self._flush_expired, False
        went = self._batch.evict_prefixes(nbytes, include_unwritten=include_unwritten)
        writing = not (went or include_unwritten) and self._batch.has_unwritten_prefixes
        if writing and not self._is_flushing:
            self._is_flushing = True
            try:
                start_daemon(self._flush_store, "kvant-hurry")
            except RuntimeError as error:  # a limit on threads; the store writes without a hurry
                self._is_flushing = False
                log.warning("the writes of a store are not hurried: %r", error)
        if not went and not writing and not self._scheduler.running:
            self.drop_waiting_matches()
            went = self._batch.evict_prefixes(nbytes, include_unwritten=True, include_used=True)
        self.update_prefix_slots()
        self._scheduler.record_eviction(any_freed=went or not (writing or self._scheduler.running))

    def drop_waiting_matches(self) -> None:
        """Let go of what requests found that wait."""
        for job in self._scheduler.waiting:
            if job.matched_version is not None and not job.is_swapped_out:
                self._batch.release(self._requests[job].sequence)
                self._scheduler.clear_prefix_match(job)

    def update_prefix_slots(self) -> None:
        """Tell the schedule what prefixes hold, and who has pages of them."""
        if (kept := self._batch.measure_prefixes()) is None:
            return
        pages = self._scheduler.memory_model.count_page_slots
        for request in self._requests.values():
            job, seats = request.scheduled, request.sequences
            job.shared_slots = pages(
                self._batch.count_shared_pages(seats[0], job.num_prompt_tokens, kept)
            )
            waits = (
                job.matched_version is not None
                and not job.is_swapped_out
                and job in self._scheduler.waiting
            )
            if (
                waits
                and (
                    self._scheduler.memory_model.count_shared_slots(job.num_computed_tokens)
                    > job.shared_slots
                ).any()
            ):
                self._batch.release(request.sequence)  # prefixes went whose pages it held
                self._scheduler.clear_prefix_match(job)
        self._scheduler.set_prefix_slots(pages(kept.num_pages, len(kept.unique_nbytes)))

    # ---- within

    def _start_next_lookup(self) -> None:
        """Look for the next prompt, once the one before it was taken: it lies where that one does.

        In a thread of its own, beside the engine's. No thread is started while as many as may be
        are still waiting for a store, whose requests went on without it.
        """
        while self._lookup_queue and self._current_lookup is None:
            request, until = self._lookup_queue.popleft()
            waiting = LookupDeadline(partial(self._compute_seconds_left, request.scheduled, until))
            try:
                looks = waiting.compute_seconds_left() > 0 and self._lookups < LOOKUPS
                scout = (
                    self._batch.prepare_store_lookup(request.sequence, waiting) if looks else None
                )
                if scout is not None:
                    start_daemon(partial(self._run_lookup, request, waiting, scout), "kvant-fetch")
            except Exception as error:  # it can still be read
                waiting.cancel()
                clear_traceback_frames(error)
                log.warning("a store was not looked into: %r", error)
                scout = None
            if scout is None:
                self._scheduler.finish_store_lookup(request.scheduled, 0)
            else:
                self._current_lookup, self._lookups = (
                    (request.scheduled, waiting),
                    self._lookups + 1,
                )

    def _compute_seconds_left(self, scheduled: ScheduledRequest, end_time: float) -> float:
        """The seconds for which a request waits; in any thread."""
        return end_time - time.monotonic() if scheduled.store_deadline_ms else 0.0

    def _run_lookup(
        self,
        request: Request,
        waiting: LookupDeadline,
        look_up: Callable[[], PendingRestore | None],
    ) -> None:
        coming = None
        with suppress(Exception):  # it can still be read
            coming = look_up()
        self._call_in_engine(lambda: self._finish_lookup(request, waiting, coming))

    def _finish_lookup(
        self, request: Request, waiting: LookupDeadline, restore: PendingRestore | None
    ) -> None:
        """Take what a store had of a prompt, unless its request left, and look for the next one."""
        self._lookups -= 1
        try:
            if not waiting.is_cancelled:
                self._current_lookup = None
                self._adopt_restore(request, restore)
        finally:
            self._start_next_lookup()

    def _adopt_restore(self, request: Request, restore: PendingRestore | None) -> None:
        """Go on from what came for a prompt, in the bytes that it was promised."""
        job, length = request.scheduled, 0 if restore is None else len(restore.restored.tokens)
        arrived = self._scheduler.finish_store_lookup(job, length)
        if restore is None:
            return
        if not arrived:
            restore.restored.cache.clear()
            return
        try:
            held = self._batch.adopt_restore(
                request.sequence, restore, insert=self._scheduler.can_insert_prefix(job, length)
            )
        except Exception as error:  # it can still be read
            clear_traceback_frames(error)
            log.warning("a prefix from a store was not taken: %r", error)
            held = self._batch.count_tokens(request.sequence)
        finally:
            restore.restored.cache.clear()
        if held > job.num_computed_tokens:
            request.restored_range = restore.restored_range
            request.stream.set_prefix_usage(held, restore.restored_range, None)
        job.num_computed_tokens = held
        self.update_prefix_slots()

    def _flush_store(self) -> None:
        """Wait until prefixes are written, beside the engine's thread, and not for ever."""
        self._batch.flush_store(EVICTION_FLUSH_S)
        self._call_in_engine(self._finish_flush)

    def _finish_flush(self) -> None:
        """From now on nobody waits for a store any more; who needs memory asks for it again."""
        self._is_flushing, self._flush_expired = False, True
        self.update_prefix_slots()
        self._scheduler.record_eviction(any_freed=True)

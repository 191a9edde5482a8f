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

from kvant.engine.batch import Batch, Seat
from kvant.engine.request import Request, clear
from kvant.engine.schedule import Job, Schedule
from kvant.prefixes import Coming, Waiting
from kvant.prefixes.threads import start_daemon
from kvant.prefixes.waiting import STORE_TIMEOUT_S

log = logging.getLogger("kvant")

PATIENCE = STORE_TIMEOUT_S  # seconds that a request waits for a store at most,
HURRY = 2.0  # and that prefixes whose memory is needed wait to be written
LOOKUPS = 4  # that may be under way, where requests did not wait for their ends


class Reuse:
    """Prefixes between the schedule, which counts, and the batch, which has the pages."""

    def __init__(
        self,
        batch: Batch,
        schedule: Schedule,
        requests: Mapping[Job, Request],
        tokenizer: Any,
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """`later` has something done in the engine's thread, from any other."""
        self._batch = batch
        self._schedule = schedule
        self._requests = requests
        self._tokenizer = tokenizer
        self._later = later
        self._lookups = 0  # threads that look into a store
        self._unasked: deque[tuple[Request, float]] = deque()  # to be looked for, until when
        self._asking: tuple[Job, Waiting] | None = None  # who is looked for
        self._hurrying = False  # it does that now
        self._late = False  # it did, and what must go may go

    def close(self) -> None:
        """Wait for no store any more."""
        if self._asking is not None:
            self._asking[1].leave()

    def begin(self, job: Job) -> None:
        """Go on from what there is of a prompt."""
        self.leave(job)
        request = self._requests[job]
        try:
            held, stops = self._batch.begin(request.seat, request.marks)
            lost = self._batch.lost(request.seat, self._tokenizer)
        except Exception as error:  # it can still be read
            clear(error)
            log.warning("prefixes were not looked for: %r", error)
            self._batch.drop(request.seat)
            held, stops, lost = 0, (), None
        request.stream.found(held, request.came, lost)
        self._schedule.begun(job, held, stops)
        self.weigh()

    def fetch(self, job: Job) -> None:
        """Look for a prompt in a store, for as long as it would take to read it.

        Prompts are looked for one after the other, as they would be read: behind others it may
        take as long as theirs besides.
        """
        request, now = self._requests[job], time.monotonic()
        before = max((1e-3 * other.waits_until for other in self._requests), default=0.0)
        wait = max(before - now, 0.0) + self._batch.seconds(job.prompt - job.read)
        until = now + min(wait, PATIENCE)
        job.waits_until = int(1e3 * until)
        self._unasked.append((request, until))
        self._ask()

    def leave(self, job: Job) -> None:
        """It goes on without what a store has: what was taken for that is free."""
        if self._asking is not None and self._asking[0] is job:
            self._asking[1].leave()
            self._asking = None  # a store that does not answer keeps no other prompt waiting
            self._ask()

    def keep(self, job: Job, seat: Seat) -> None:
        """Let others go on from a sequence of a request, if there is room for it."""
        length = self._batch.held(seat)
        if not length or not self._schedule.keeps(job, length):
            return
        try:
            self._batch.keep(seat)
        except Exception as error:  # whoever asked has all tokens
            clear(error)
            log.warning("a prefix was not kept: %r", error)
        self.weigh()

    def reject(self, request: Request) -> None:
        """Drop what a store had of a request whose prompt the model cannot read with it."""
        if request.came:
            self._batch.reject(request.seat, request.came.stop)
            self.weigh()

    def evict(self, nbytes: int, *, at_once: bool) -> None:
        """Let go of prefixes; where nobody is served, also of what those have who wait.

        Unless it is to be `at_once`, a store gets the time to have them before, and whoever needs
        their memory waits for that; others go on.
        """
        at_once, self._late = at_once or self._late, False
        went = self._batch.evict(nbytes, unwritten=at_once)
        writing = not (went or at_once) and self._batch.writes
        if writing and not self._hurrying:
            self._hurrying = True
            try:
                start_daemon(self._hurry, "kvant-hurry")
            except RuntimeError as error:  # a limit on threads; the store writes without a hurry
                self._hurrying = False
                log.warning("the writes of a store are not hurried: %r", error)
        if not went and not writing and not self._schedule.running:
            self.forget()
            went = self._batch.evict(nbytes, unwritten=True, used=True)
        self.weigh()
        self._schedule.evicted(went=went or not (writing or self._schedule.running))

    def forget(self) -> None:
        """Let go of what requests found that wait."""
        for job in self._schedule.waiting:
            if job.looked is not None and not job.aside:
                self._batch.drop(self._requests[job].seat)
                self._schedule.forgot(job)

    def weigh(self) -> None:
        """Tell the schedule what prefixes hold, and who has pages of them."""
        if (kept := self._batch.kept()) is None:
            return
        pages = self._schedule.footprint.pages
        for request in self._requests.values():
            job, seats = request.job, request.seats
            job.shared = pages(self._batch.shared(seats[0], job.prompt, kept))
            waits = job.looked is not None and not job.aside and job in self._schedule.waiting
            if waits and (self._schedule.footprint.shared(job.read) > job.shared).any():
                self._batch.drop(request.seat)  # prefixes went whose pages it held
                self._schedule.forgot(job)
        self._schedule.keep(pages(kept.pages, len(kept.own)))

    # ---- within

    def _ask(self) -> None:
        """Look for the next prompt, once the one before it was taken: it lies where that one does.

        In a thread of its own, beside the engine's. No thread is started while as many as may be
        are still waiting for a store, whose requests went on without it.
        """
        while self._unasked and self._asking is None:
            request, until = self._unasked.popleft()
            waiting = Waiting(partial(self._left, request.job, until))
            try:
                looks = waiting.left() > 0 and self._lookups < LOOKUPS
                scout = self._batch.scout(request.seat, waiting) if looks else None
                if scout is not None:
                    start_daemon(partial(self._look, request, waiting, scout), "kvant-fetch")
            except Exception as error:  # it can still be read
                waiting.leave()
                clear(error)
                log.warning("a store was not looked into: %r", error)
                scout = None
            if scout is None:
                self._schedule.arrived(request.job, 0)
            else:
                self._asking, self._lookups = (request.job, waiting), self._lookups + 1

    def _left(self, job: Job, until: float) -> float:
        """The seconds for which a request waits; in any thread."""
        return until - time.monotonic() if job.waits_until else 0.0

    def _look(self, request: Request, waiting: Waiting, scout: Callable[[], Coming | None]) -> None:
        coming = None
        with suppress(Exception):  # it can still be read
            coming = scout()
        self._later(lambda: self._arrived(request, waiting, coming))

    def _arrived(self, request: Request, waiting: Waiting, coming: Coming | None) -> None:
        """Take what a store had of a prompt, unless its request left, and look for the next one."""
        self._lookups -= 1
        try:
            if not waiting.over:
                self._asking = None
                self._take(request, coming)
        finally:
            self._ask()

    def _take(self, request: Request, coming: Coming | None) -> None:
        """Go on from what came for a prompt, in the bytes that it was promised."""
        job, length = request.job, 0 if coming is None else len(coming.restored.tokens)
        arrived = self._schedule.arrived(job, length)
        if coming is None:
            return
        if not arrived:
            coming.restored.cache.clear()
            return
        try:
            held = self._batch.take(request.seat, coming, keep=self._schedule.keeps(job, length))
        except Exception as error:  # it can still be read
            clear(error)
            log.warning("a prefix from a store was not taken: %r", error)
            held = self._batch.held(request.seat)
        finally:
            coming.restored.cache.clear()
        if held > job.read:
            request.came = coming.came
            request.stream.found(held, coming.came, None)
        job.read = held
        self.weigh()

    def _hurry(self) -> None:
        """Wait until prefixes are written, beside the engine's thread, and not for ever."""
        self._batch.flush(HURRY)
        self._later(self._written)

    def _written(self) -> None:
        """From now on nobody waits for a store any more; who needs memory asks for it again."""
        self._hurrying, self._late = False, True
        self.weigh()
        self._schedule.evicted(went=True)

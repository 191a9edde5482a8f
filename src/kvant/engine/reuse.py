"""What requests find of each other's prompts and replies, and leave for others.

In memory, prefixes count within the bytes of the engine, and are the first to go where a request
needs room. A store is asked and written to beside the engine's thread, in which all else happens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from kvant.engine.batch import Batch, Seat
from kvant.engine.request import Request, clear
from kvant.engine.schedule import Job, Schedule
from kvant.prefixes import Coming

log = logging.getLogger("kvant")

PATIENCE = 10.0  # seconds that a request waits for a store at most,
HURRY = 2.0  # and that prefixes whose memory is needed wait to be written


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
        self.batch = batch
        self.schedule = schedule
        self.requests = requests
        self.tokenizer = tokenizer
        self._later = later
        self._fetching = ThreadPoolExecutor(1, "kvant-fetch")  # one prompt at a time comes beside
        self._hurrying = ThreadPoolExecutor(1, "kvant-hurry")  # waits until prefixes are written
        self._hurried = False

    def close(self) -> None:
        """Wait for no store any more."""
        for beside in (self._fetching, self._hurrying):
            beside.shutdown(wait=False, cancel_futures=True)

    def begin(self, job: Job) -> None:
        """Go on from what there is of a prompt."""
        request = self.requests[job]
        try:
            held, stops = self.batch.begin(request.seat, request.marks)
            lost = self.batch.lost(self.tokenizer)
        except Exception as error:  # it can still be read
            clear(error)
            log.warning("prefixes were not looked for: %r", error)
            self.batch.drop(request.seat)
            held, stops, lost = 0, (), None
        request.stream.found(held, request.came, lost)
        self.schedule.begun(job, held, stops)
        self.weigh()

    def fetch(self, job: Job) -> None:
        """Look for a prompt in a store, for as long as it would take to read it."""
        request = self.requests[job]
        wait = min(self.batch.seconds(job.prompt - job.read), PATIENCE)
        job.coming = int(1e3 * (time.monotonic() + wait))
        self._fetching.submit(self._look, request, self.batch.scout(request.seat))

    def keep(self, job: Job, seat: Seat) -> None:
        """Let others go on from a sequence of a request, if there is room for it."""
        if not self.schedule.keeps(job, len(seat.tokens)):
            return
        kept = True
        try:
            kept = self.batch.keep(seat)
        except Exception as error:  # whoever asked has all tokens
            clear(error)
            log.warning("a prefix was not kept: %r", error)
        if kept:
            self.weigh()

    def evict(self, nbytes: int) -> None:
        """Let go of prefixes; where nobody is served, also of what those have who wait.

        A store has them before; whoever needs their memory waits for that, others go on.
        """
        went = self.batch.evict(nbytes)
        writing = not went and self.batch.writes
        if writing and not self._hurried:
            self._hurried = True
            self._hurrying.submit(self._hurry, nbytes)
        if not went and not writing and not self.schedule.running:
            self.forget()
            went = self.batch.evict(nbytes, unwritten=True, used=True)
        self.weigh()
        self.schedule.evicted(went=went or not (writing or self.schedule.running))

    def forget(self) -> None:
        """Let go of what requests found that wait."""
        for job in self.schedule.waiting:
            if job.looked is not None and not job.aside:
                self.batch.drop(self.requests[job].seat)
                self.schedule.forgot(job)

    def weigh(self) -> None:
        """Tell the schedule what prefixes hold, and who has pages of them."""
        if (kept := self.batch.kept()) is None:
            return
        pages = self.schedule.footprint.pages
        for request in self.requests.values():
            job, seats = request.job, request.seats
            job.shared = pages(self.batch.shared(seats[0], job.prompt, kept))
            waits = job.looked is not None and not job.aside and job in self.schedule.waiting
            if waits and (self.schedule.footprint.shared(job.read) > job.shared).any():
                self.batch.drop(request.seat)  # prefixes went whose pages it held
                self.schedule.forgot(job)
        self.schedule.keep(pages(kept.pages, len(kept.own)))

    # ---- within

    def _look(self, request: Request, scout: Callable[[], Coming | None]) -> None:
        """Look for it, beside the engine's thread."""
        coming = None
        with suppress(Exception):  # it can still be read; later than that it does not wait
            coming = scout() if 1e3 * time.monotonic() < request.job.coming else None
        self._later(lambda: self._arrived(request, coming))

    def _arrived(self, request: Request, coming: Coming | None) -> None:
        """Go on from what came for a prompt, in the bytes that it was promised."""
        job, length = request.job, 0 if coming is None else len(coming.restored.tokens)
        if not self.schedule.arrived(job, length) or coming is None:
            return
        keep = self.schedule.keeps(job, length)
        try:
            held = self.batch.take(request.seat, coming, keep=keep)
        except Exception as error:  # it can still be read
            told = repr(error)  # whoever keeps the error keeps what came
            log.warning("a prefix from a store was not taken: %s", told)
            return
        if held > job.read:
            request.came = coming.came
            request.stream.found(held, coming.came, None)
            self.schedule.begun(job, held, job.stops)
        self.weigh()

    def _hurry(self, nbytes: int) -> None:
        """Wait until prefixes are written, beside the engine's thread, and not for ever."""
        self.batch.flush(HURRY)
        self._later(lambda: self._written(nbytes))

    def _written(self, nbytes: int) -> None:
        """Let go of prefixes that waited for a store."""
        self._hurried = False
        self.batch.evict(nbytes, unwritten=True)
        self.weigh()
        self.schedule.evicted(went=True)

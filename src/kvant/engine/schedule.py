"""Which request is served next, and with how many tokens: no model, no memory, no clock.

A request waits until all that it may need fits beside what the others may need; it is never thrown
out after that. Its prompt is read in chunks, and everybody who decodes gets a token between some of
them: the more prompts are being read, the more time they get. Who waits gains on priorities with
time, and nobody overtakes the first who does not fit: so nobody starves.

Prefixes that are kept take room, too, and are let go where a request needs it and nobody uses them.
Whoever is first in line sees what there is of its prompt: that is not read again, and its pages
count once. With a store, who has its bytes is looked for there before it is read; one request is
let in ahead of its place, to be looked for while it waits.

With `overcommit` more is promised than there is. Where it comes to that, the newest of those with
the lowest priority is put aside, pages and all, and is taken back once there is room for all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kvant.engine.pace import LEEWAY, Pace
from kvant.engine.room import Footprint, Room
from kvant.errors import CapacityError, ContextError
from kvant.extent import Ints
from kvant.sizes import format_size

AGE = 10_000  # milliseconds of waiting that count as one step of priority
PROMPTS = 4  # that get time of their own between two tokens, at most


@dataclass(eq=False)
class Job:
    """What a schedule knows of a request: counts of tokens."""

    number: int  # in the order of arrival
    prompt: int
    new: int  # tokens that it may say at most
    width: int = 1  # sequences that continue the prompt
    priority: int = 0
    tenant: str = ""
    arrived: int = 0  # in milliseconds
    read: int = 0  # tokens of the prompt
    said: int = 0  # by each sequence that still goes on
    looked: int | None = None  # after which news of prefixes was its prompt looked for?
    started: bool = False  # was anything of its prompt read for it?
    stops: tuple[int, ...] = ()  # lengths of its prompt at which a chunk is to end
    shared: Ints | None = None  # slots of it that prefixes hold, too
    ended: int = 0  # sequences that do not
    aside: bool = False
    placed: bool = False  # it has a place among those who are served
    waits_until: int = 0  # in milliseconds, for what a store has of its prompt; 0: not

    @property
    def decodes(self) -> bool:
        return self.read == self.prompt

    @property
    def sequences(self) -> int:
        return self.width - self.ended

    def aged(self, now: int) -> int:
        """Its priority, and what it gained by waiting."""
        return self.priority + (now - self.arrived) // AGE


@dataclass(frozen=True)
class Begin:
    """See what there is of the prompt of a request."""

    job: Job


@dataclass(frozen=True)
class Evict:
    """Let go of prefixes that take so many bytes, or of all that nobody uses."""

    nbytes: int
    at_once: bool = False  # also of what a store is yet to have: somebody is served already


@dataclass(frozen=True)
class Fetch:
    """Look for the prompt of a request in a store; its bytes are promised to it."""

    job: Job


@dataclass(frozen=True)
class Read:
    """Read so many tokens of the prompt of a request."""

    job: Job
    count: int


@dataclass(frozen=True)
class Decode:
    """One token for each sequence of these."""

    jobs: tuple[Job, ...]


@dataclass(frozen=True)
class PutAside:
    """Keep the pages of a request elsewhere."""

    job: Job


@dataclass(frozen=True)
class TakeBack:
    """Bring them back."""

    job: Job


@dataclass(frozen=True)
class Renew:
    """No sequence is left: let go of all memory."""


Action = Begin | Evict | Fetch | Read | Decode | PutAside | TakeBack | Renew


@dataclass
class Schedule:
    """Requests that wait, and those that are served."""

    footprint: Footprint
    pace: Pace
    max_bytes: int | None = None
    max_sequences: int = 16
    overcommit: float = 1.0
    chunk_seconds: float = math.inf  # that each prompt which is read has between two tokens
    fetches: bool = False  # is there a store? Then the next one is let in ahead, and looked for
    kept: Ints | None = None  # slots that prefixes hold; None: there are no prefixes
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    _oldest: bool = False  # was the last chunk one of the oldest?
    _waited: float = 0.0  # seconds that chunks have kept others from their next token
    _news: int = 0  # how often prefixes became more
    _evictable: bool = True  # may there be prefixes that nobody uses?
    _stuck: bool = False  # did the first who waits not fit, and has nobody come or gone since?

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_sequences", "overcommit"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ValueError(f"{name}={value}: 1 or more is needed")
        if not self.chunk_seconds > 0:
            raise ValueError(f"chunk_seconds={self.chunk_seconds}: more than 0 is needed")
        if self.overcommit > 1 and self.max_bytes is None:
            raise ValueError(f"overcommit={self.overcommit} of no max_bytes: give max_bytes, too")
        self.room = Room(self.footprint, self.max_bytes)

    def check(self, job: Job) -> None:
        """Refuse a request that could never be served."""
        if job.width > self.max_sequences:
            raise CapacityError(
                f"n={job.width} with max_sequences={self.max_sequences}: ask for fewer, or make an "
                "engine for more"
            )
        closing = self.footprint.closing(job.prompt)
        need = self.room.alone(self._most(job) + closing)
        if self.max_bytes is not None and need > self.max_bytes:
            one = self._at(job, job.prompt + job.new - 1, 1)
            fits = self.room.alone(one + closing) <= self.max_bytes
            raise (CapacityError if fits else ContextError)(
                f"{job.prompt} tokens and {job.new} new ones need {format_size(need)} of a limit "
                f"of {format_size(self.max_bytes)}: a smaller format, a window, a shorter prompt, "
                "a smaller max_new_tokens or n, or a larger max_bytes"
            )

    def add(self, job: Job) -> None:
        """Let a request wait."""
        self.waiting.append(job)
        self._stuck = False

    def next(self, now: int) -> Action | None:
        """What to do at a time in milliseconds; None where there is nothing to do."""
        admitted = self._admit(now)
        if admitted is not None:
            return admitted
        action = self._chosen()
        if action is None:
            return Renew() if self._renews and not self.running else None
        if isinstance(action, Read) and self._looks(action.job):
            return Begin(action.job)
        if self.overcommit > 1:
            used = self._used_after(action)
            if not self.room.fits(used):
                return self._evict(used, at_once=True) or PutAside(self._victim(now))
            self.room.use(used)
        return action

    def done(self, action: Action) -> None:
        """That was done."""
        if isinstance(action, Read):
            if any(job.decodes and job.placed for job in self.running):
                self._waited += self.pace.seconds(action.count, action.job.read)
            action.job.read += action.count
            action.job.started = True
            action.job.said += action.job.decodes  # the last logits of a prompt give a token
            self._oldest = not self._oldest
        elif isinstance(action, Decode):
            for job in action.jobs:
                job.said += 1
            self._waited = 0.0
        elif isinstance(action, PutAside):
            action.job.aside, action.job.shared = True, None  # files share nothing
            action.job.placed, action.job.waits_until = False, 0
            self.running.remove(action.job)
            self._stuck, self._evictable = False, True
            self.waiting.append(action.job)
        elif isinstance(action, TakeBack):
            action.job.aside = False
        elif isinstance(action, Renew):
            self.room.renew()
            self._stuck = False

    def arrived(self, job: Job, length: int) -> bool:
        """So much of its prompt came from a store: can it go on from that, and is there room?

        It may be late: then nobody waits for it any more, but nothing of the prompt was read yet.
        """
        job.waits_until = 0
        if job.started or job not in self.running:
            return False
        used = self._used()
        if self.overcommit > 1:
            used = used - self._now(job) + self._at(job, max(length, job.read), 1)
        return self.room.fits(used)

    def wakes(self, now: int) -> float | None:
        """The seconds after which somebody waits no longer for a store."""
        found = [job.waits_until for job in self.running if job.placed and job.waits_until]
        return max(min(found) - now, 0) / 1e3 if found else None

    def begun(self, job: Job, held: int, stops: tuple[int, ...]) -> None:
        """So many tokens of its prompt are there; where chunks are to end behind them."""
        job.read, job.stops, job.looked = held, stops, self._news

    def forgot(self, job: Job) -> None:
        """A job that waits has nothing of its prompt any more."""
        job.read, job.stops, job.looked, job.shared = 0, (), None, None

    def evicted(self, *, went: bool) -> None:
        """Prefixes went; or there were none that could."""
        self._evictable = went

    def keep(self, slots: Ints) -> None:
        """Prefixes hold so many."""
        self._news += self.kept is None or bool((slots > self.kept).any())
        self.kept = slots
        self._stuck, self._evictable = False, True
        self.room.use(self._used())

    def keeps(self, job: Job, length: int) -> bool:
        """Is there room for a prefix of such a length, which a request has?

        Whoever goes on shares pages with it; whoever was served leaves what was promised to it.
        """
        goes_on = job in self.running
        own = self.footprint.shared(min(length, job.prompt)) if goes_on else self._shared(job)
        more = np.maximum(self.footprint.slots(length) - own, 0)
        return self.kept is not None and self.room.fits(self._used() + more)

    def ended(self, job: Job) -> None:
        """One of its sequences says no more."""
        job.ended += 1
        self._stuck, self._evictable = False, True
        if not job.sequences:
            self.remove(job)

    def remove(self, job: Job) -> None:
        """Forget a request, wherever it is."""
        self._stuck, self._evictable = False, True
        job.waits_until = 0
        for place in (self.waiting, self.running):
            if job in place:
                place.remove(job)

    def load(self, tenant: str | None = None) -> dict[str, int]:
        """Count requests that wait and that run, and sequences; with `tenant`, its own alone."""
        every = (*self.waiting, *self.running)
        jobs = [job for job in every if tenant is None or job.tenant == tenant]
        running = [job.sequences for job in jobs if job.placed]
        return {
            "waiting": len(jobs) - len(running),
            "running": len(running),
            "sequences": sum(running),
        }

    @property
    def sequences(self) -> int:
        """That are served, or for which there is a place."""
        return sum(job.sequences for job in self.running if job.placed)

    # ---- within

    def _used(self) -> Ints:
        """Slots that are taken, or may come to be."""
        return self._promised() if self.overcommit == 1 else self._held()

    def _admit(self, now: int) -> Action | None:
        """Let those in that fit, in order; what has to be done before anything else is."""
        for job in self.running:
            job.placed = job.placed or self._has_place_for(job)
            if job.placed and job.waits_until <= now:
                job.waits_until = 0
        while not self._stuck and self.waiting:
            job = min(self.waiting, key=lambda one: self._rank(one, now))
            ahead = any(not one.placed for one in self.running)
            if ahead or not (self._has_place_for(job) or (self.fetches and not job.aside)):
                self._stuck = True
                break
            if self._looks(job):
                return Begin(job)
            if not self._fits(job):
                if evict := self._evict(self._promised(job)):
                    return evict
                if not self.running and self._renews:
                    return Renew()
                self._stuck = True
                break
            self.waiting.remove(job)
            job.placed = self._has_place_for(job)
            self.running.append(job)
            if self.overcommit == 1:
                self.room.use(self._promised())
            if job.aside:
                self.room.use(self._held())
                return TakeBack(job)
            if self._fetches(job):
                return Fetch(job)
        return None

    def _fetches(self, job: Job) -> bool:
        """Is there a store, and room for all that it may have of a prompt?"""
        if not self.fetches or self.overcommit == 1:
            return self.fetches
        return self.room.fits(self._held() - self._now(job) + self._at(job, job.prompt, 1))

    def _looks(self, job: Job) -> bool:
        """May there be more of its prompt than when it was looked for?"""
        new = self.kept is not None and job.looked != self._news
        return new and not (job.started or job.aside)

    def _has_place_for(self, job: Job) -> bool:
        """Is there a place for all of its sequences?"""
        return self.sequences + job.sequences <= self.max_sequences

    def _evict(self, slots: Ints, *, at_once: bool = False) -> Evict | None:
        """What has to go for these to fit, if there are prefixes that could."""
        if self.kept is None or self.max_bytes is None:
            return None
        if not (self._evictable and self.kept.any()):
            return None
        return Evict(max(self.room.nbytes(slots) - self.max_bytes, 1), at_once)

    @property
    def _renews(self) -> bool:
        """Is there memory that nobody uses, prefixes neither?"""
        return self.room.used and (self.kept is None or not self.kept.any())

    @property
    def _kept(self) -> Ints:
        return self.room.nothing if self.kept is None else self.kept

    def _promised(self, *more: Job) -> Ints:
        """Slots that the running jobs, and these, may come to need."""
        jobs = (*self.running, *more)
        own = sum((self._most(job) - self._shared(job) for job in jobs), self._kept)
        return own + self._closing(*jobs)

    def _closing(self, *jobs: Job) -> Ints:
        """Slots that reading a prompt of these jobs holds for a moment, one at a time."""
        found = [self.footprint.closing(job.prompt) for job in jobs]
        most: Ints = np.max([self.room.nothing, *found], axis=0)
        return most

    def _shared(self, job: Job) -> Ints:
        return self.room.nothing if job.shared is None else job.shared

    def _held(self) -> Ints:
        """Slots that they have now."""
        own = (self._now(job) - self._shared(job) for job in self.running)
        return sum(own, self._kept)

    def _rank(self, job: Job, now: int) -> tuple[bool, int, int, int]:
        """Who was put aside comes first, then by priority, by what a tenant has, by arrival."""
        taken = sum(one.sequences for one in self.running if one.tenant == job.tenant)
        return not job.aside, -job.aged(now), taken, job.number

    def _fits(self, job: Job) -> bool:
        """Is there room for all that it may need, beside what the others may need?"""
        if self.max_bytes is None:
            return True
        most = self._promised(job)
        if self.overcommit == 1:
            return self.room.fits(most)
        if job.aside:  # what comes back lies beside its place in the pools for a moment
            twice = self._now(job) if self.room.used else self.room.nothing
            return self.room.fits(most, beside=twice)
        first = self.footprint.slots(min(job.prompt, job.read + self.pace.largest))
        first = first - self._shared(job) + self._closing(job)
        fits = self.room.fits(self._held() + first)
        return fits and self.room.alone(most) <= self.overcommit * self.max_bytes

    def _chosen(self) -> Read | Decode | None:
        served = [job for job in self.running if job.placed and not job.waits_until]
        reading = [job for job in served if not job.decodes]
        decoding = tuple(job for job in served if job.decodes)
        if reading:
            job = self._reader(reading)
            stop = min([job.prompt, *(stop for stop in job.stops if stop > job.read)])
            most = self.chunk_seconds * min(len(reading), PROMPTS) if decoding else math.inf
            count = self.pace.chunk(job.read, stop, most)
            wait = self._waited + self.pace.seconds(count, job.read)
            if not self._waited or wait <= LEEWAY * most:
                return Read(job, count)
        return Decode(decoding) if decoding else None

    def _reader(self, reading: list[Job]) -> Job:
        """The one that is done soonest, and every other time the oldest."""
        if not self._oldest:
            return min(reading, key=lambda job: job.number)
        return min(reading, key=lambda job: (job.prompt - job.read, job.number))

    def _victim(self, now: int) -> Job:
        return max(self.running, key=lambda job: (-job.aged(now), job.number))

    def _used_after(self, action: Read | Decode) -> Ints:
        used = self._held()
        if isinstance(action, Read):
            job, read = action.job, action.job.read + action.count
            width = 1 if read < job.prompt else job.width
            return used - self._now(job) + self._at(job, read, width) + self._closing(job)
        for job in action.jobs:
            used = used - self._now(job) + self._at(job, job.prompt + job.said, job.sequences)
        return used

    def _now(self, job: Job) -> Ints:
        """What it holds; the newest token is not stored before the next one is computed."""
        if not job.decodes:  # what comes from a store takes its slots before it is here
            return self._at(job, job.prompt if job.waits_until else job.read, 1)
        return self._at(job, job.prompt + job.said - 1, job.sequences)

    def _most(self, job: Job) -> Ints:
        return self._at(job, job.prompt + job.new - 1, job.sequences)

    def _at(self, job: Job, length: int, sequences: int) -> Ints:
        """So many sequences of a request, at a length.

        They share what was the prompt, unless they may be put aside: files share nothing.
        """
        slots = sequences * self.footprint.slots(length)
        if sequences == 1 or self.overcommit > 1:
            return slots
        return slots - (sequences - 1) * self.footprint.shared(job.prompt)

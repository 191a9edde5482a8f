"""A crowd of requests without a model: the schedule, page tables and pools, a clock, a store."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from engine.caches import Caches, Line, Slots
from kvant.engine.pace import PAGE, Pace
from kvant.engine.room import Footprint
from kvant.engine.schedule import (
    Action,
    Begin,
    Decode,
    Evict,
    Fetch,
    Job,
    PutAside,
    Read,
    Schedule,
    TakeBack,
)
from kvant.extent import Kind, Paging

RAW = Kind(Paging(PAGE, None))  # a page for every 64 tokens, and nothing else
SEALED = Kind(Paging(PAGE, 0), slack=16)
WINDOW = Kind(Paging(PAGE, 0), window=200, sinks=4, slack=16)
CHUNK = 512
STATE = 10  # bytes
START, TOKEN, READ, AGAIN = 5.0, 0.4, 1.0, 1e-3  # milliseconds: a forward, a row, a token, by held
BUDGET = 250.0
MOVE = 50.0


def footprint(*kinds: Kind) -> Footprint:
    """An open page takes 1,000 bytes, a sealed one 500."""
    sizes = [size for kind in kinds for size in (1000, 500 * kind.seals)]
    return Footprint(kinds, np.array([*sizes, STATE]), CHUNK)


FOOTPRINT = footprint(RAW)


def milliseconds(count: int, read: int) -> float:
    return START + count * (READ + AGAIN * (read + count / 2))


@dataclass
class Life:
    """What the simulation knows of a request, by itself."""

    job: Job
    ends: list[int]  # tokens that each of its sequences will say
    lines: list[Line] = field(default_factory=lambda: [Line()])
    stored: int = 0  # tokens of a sequence that is put aside
    admitted: float | None = None
    said_at: float | None = None  # when its last token came
    cancel: float | None = None


@dataclass(eq=False)
class Kept:
    """A prefix: pages that a sequence had."""

    line: Line
    slots: Slots


@dataclass
class World:
    """A clock, and a machine whose costs are what `milliseconds` says."""

    schedule: Schedule
    clock: float = 0.0
    lives: dict[Job, Life] = field(default_factory=dict)
    order: list[Life] = field(default_factory=list)  # as they were admitted
    finished: int = 0
    moves: int = 0
    most: int = 0  # bytes, after any action
    waits: list[float] = field(default_factory=list)  # beyond what a token may wait
    kept: list[Kept] = field(default_factory=list)  # prefixes
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    hit: int = 0  # tokens of prompts that were found in prefixes
    gone: int = 0  # prefixes
    coming: dict[Job, float] = field(default_factory=dict)  # when a store will have answered
    came: int = 0  # tokens from the store
    late: int = 0  # answers that came when the prompt was being read
    overdue: int = 0  # answers that were used after the request's wait had ended

    def __post_init__(self) -> None:
        self.caches = Caches(self.schedule.footprint)

    def do(self, action: Action) -> None:
        cost = 0.0
        if isinstance(action, Read):
            cost = self.read(action)
        elif isinstance(action, Decode):
            lines = [line for job in action.jobs for line in self.lives[job].lines]
            cost = START + TOKEN * len(lines)
            self.caches.decode(lines)
            self.schedule.done(action)
        elif isinstance(action, PutAside | TakeBack):
            cost, self.moves = MOVE, self.moves + 1
            self.move(action)
            self.schedule.done(action)
        elif isinstance(action, Begin):
            self.look(action.job)
        elif isinstance(action, Evict):
            self.evict(action.nbytes)
        elif isinstance(action, Fetch):
            action.job.waits_until = int(self.clock + self.chance.choice([1, 40, 400]))
            self.coming[action.job] = self.clock + self.chance.choice([1, 40, 400])
        else:
            self.forget()
            assert self.caches.held == 0
            self.caches.renew()
            self.schedule.done(action)
        self.clock += cost
        self.weigh_bytes()
        self.say(action, cost)

    def weigh_bytes(self) -> None:
        """Compare what pools have allocated, and states, with the limit."""
        states = sum(len(x.lines) for j, x in self.lives.items() if j in self.schedule.running)
        now = self.caches.nbytes + STATE * (states + len(self.kept))
        self.most = max(self.most, now)
        limit = self.schedule.max_bytes
        assert limit is None or now <= limit, f"{now} bytes of {limit} at {self.clock:.0f} ms"

    def read(self, action: Read) -> float:
        job, life = action.job, self.lives[action.job]
        cost = milliseconds(action.count, job.read)
        self.schedule.pace.took(action.count, job.read, cost / 1e3)
        self.caches.read(life.lines[0], action.count)
        self.schedule.done(action)
        if job.decodes:
            life.lines += [self.caches.fork(life.lines[0]) for _ in range(job.width - 1)]
        if job.read in job.stops:
            self.keep(job, life.lines[0])
        return cost

    def move(self, action: PutAside | TakeBack) -> None:
        life = self.lives[action.job]
        if isinstance(action, PutAside):
            life.stored = self.caches.length(life.lines[0])
        for line in life.lines:
            if isinstance(action, PutAside):
                self.caches.drop(line)
            elif life.stored:
                self.caches.read(line, life.stored)

    def say(self, action: Action, cost: float) -> None:
        """Note whose token came after how long, and end those who said all."""
        if isinstance(action, Read) and action.job.decodes:
            going = [self.lives[action.job]]
        elif isinstance(action, Decode):
            going = [self.lives[job] for job in action.jobs]
        else:
            going = []
        for life in going:
            if life.said_at is not None:
                self.waits.append(self.clock - life.said_at - cost)
            life.said_at = self.clock
            for end in [n for n in life.ends if n <= life.job.said]:
                life.ends.remove(end)
                line = life.lines.pop()
                self.schedule.ended(life.job)
                self.keep(life.job, line)
                self.caches.drop(line)
            if not life.ends:
                self.finish(life)

    def finish(self, life: Life) -> None:
        """Forget a request that ended, or was cancelled; prefixes keep what it had."""
        self.schedule.remove(life.job)
        for line in life.lines:
            self.keep(life.job, line)
            self.caches.drop(line)
        self.finished += 1
        del self.lives[life.job]

    def keep(self, job: Job, line: Line) -> None:
        """Keep what a sequence has for others, if there is room."""
        length = self.caches.length(line)
        if self.schedule.kept is None or not length or not self.schedule.keeps(job, length):
            return
        twin = self.caches.fork(line)
        self.kept.append(Kept(twin, self.caches.slots(twin)))
        self.weigh()

    def look(self, job: Job) -> None:
        """A request begins with the first tokens of some prefix, or with none."""
        life, found, length = self.lives[job], None, 0
        if self.kept and self.chance.random() < 0.7:
            kept = self.chance.choice(self.kept)
            length = self.caches.resumable(kept.line, self.chance.randrange(job.prompt))
            found = self.caches.fork(kept.line) if length > job.read else None
        if found is not None:
            self.caches.rewind(found, length)
            self.hit += length - job.read
            life.lines = [found]
        held = self.caches.length(life.lines[0])
        stops = {job.prompt} if self.chance.random() < 0.3 else set()
        stops |= {(held // PAGE + 1) * PAGE} if self.chance.random() < 0.3 else set()
        self.schedule.begun(job, held, tuple(sorted(n for n in stops if held < n <= job.prompt)))
        self.weigh()

    def arrive(self, job: Job) -> None:
        """A store had tokens behind those in memory, or none; a request goes on from them."""
        del self.coming[job]
        line = self.lives[job].lines[0]
        length = self.chance.choice([job.read, (job.prompt - 1) // PAGE * PAGE])
        self.late += job.started
        overdue = job.waits_until <= self.clock
        if self.schedule.arrived(job, length) and length > job.read:
            assert job.read == self.caches.length(line)
            self.caches.read(line, length - job.read)
            self.came += length - job.read
            self.overdue += overdue
            job.read = length

    def evict(self, nbytes: int) -> None:
        """Drop the oldest prefixes without another holder; if none, those that waiters found."""
        went = self.drop(nbytes)
        if not went and not self.schedule.running:
            self.forget()
            went = self.drop(nbytes)
        self.weigh()
        self.schedule.evicted(went=went)

    def forget(self) -> None:
        for job in self.schedule.waiting:
            if job.looked is not None and not job.aside:
                self.forget_prompt(job)

    def forget_prompt(self, job: Job) -> None:
        self.lives[job].lines = [Line()]
        self.schedule.forgot(job)

    def drop(self, nbytes: int) -> bool:
        freed, before = 0, len(self.kept)
        for kept in list(self.kept):
            if freed < nbytes and not self.caches.others(kept.slots, [k.slots for k in self.kept]):
                self.kept.remove(kept)
                freed += sum(map(len, kept.slots)) * 500
        self.gone += before - len(self.kept)
        return len(self.kept) < before

    def weigh(self) -> None:
        """Tell the schedule what prefixes hold, and which of their pages requests have."""
        if self.schedule.kept is None:
            return
        among = self.caches.among([kept.slots for kept in self.kept])
        for job in (*self.schedule.running, *self.schedule.waiting):
            job.shared = self.caches.shared(self.lives[job].lines[0], job.prompt, among)
            waits = job.looked is not None and not job.aside and job in self.schedule.waiting
            if waits and (self.schedule.footprint.shared(job.read) > job.shared).any():
                self.forget_prompt(job)
        self.schedule.keep(np.array([*(int(mask.sum()) for mask in among), len(self.kept)]))

    def run(self, arriving: list[Life]) -> None:
        arriving = sorted(arriving, key=lambda life: life.job.arrived)
        while arriving or self.lives:
            while arriving and arriving[0].job.arrived <= self.clock:
                life = arriving.pop(0)
                self.lives[life.job] = life
                self.schedule.add(life.job)
            for life in [x for x in self.lives.values() if (x.cancel or 1e18) <= self.clock]:
                self.finish(life)
            for job in [job for job, when in self.coming.items() if when <= self.clock]:
                if job in self.lives:
                    self.arrive(job)
                else:
                    del self.coming[job]
            action = self.schedule.next(int(self.clock))
            seated = [job for job in self.schedule.running if job.placed]
            assert sum(job.sequences for job in seated) <= self.schedule.max_sequences
            for life in self.lives.values():
                if life.admitted is None and life.job in self.schedule.running:
                    life.admitted = self.clock
                    self.order.append(life)
            if action is not None:
                self.do(action)
            elif (wait := self.schedule.wakes(int(self.clock))) is not None:
                self.clock += max(1e3 * wait, 1.0)
            else:
                assert not self.lives
                self.clock = max(self.clock, arriving[0].job.arrived) if arriving else self.clock


def requests(
    count: int, seed: int, gap: float = 900.0, widths: tuple[int, ...] = (1, 1, 1, 1, 1, 1, 3)
) -> list[Life]:
    chance = random.Random(seed)
    lives, clock = [], 0.0
    for number in range(count):
        clock += chance.expovariate(1 / gap)
        new, width = chance.choice([1, 5, 40, 200]), chance.choice(widths)
        job = Job(
            number,
            chance.choice([1, 20, 63, 64, 300, 2000]) + chance.randrange(40),
            new,
            width,
            chance.choice([0, 0, 0, 1, 5]),
            chance.choice("abc"),
            int(clock),
        )
        life = Life(job, ends=[chance.randint(1, new) for _ in range(width)])
        life.cancel = clock + chance.uniform(0, 20_000) if chance.random() < 0.1 else None
        lives.append(life)
    return lives


def world(
    max_bytes: int | None,
    overcommit: float = 1.0,
    sequences: int = 8,
    kinds: tuple[Kind, ...] = (RAW,),
) -> World:
    seconds = BUDGET / 1e3
    schedule = Schedule(footprint(*kinds), Pace(CHUNK), max_bytes, sequences, overcommit, seconds)
    return World(schedule)

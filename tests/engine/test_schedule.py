"""Thousands of requests without a model: bytes, order and waits, in integers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvant.engine.pace import PAGE, Pace
from kvant.engine.room import Footprint
from kvant.engine.schedule import (
    AGE,
    PROMPTS,
    Action,
    Begin,
    Decode,
    Evict,
    Fetch,
    Job,
    PutAside,
    Read,
    Renew,
    Schedule,
    TakeBack,
)
from kvant.errors import CapacityError
from kvant.extent import Kind, Paging

RAW = Kind(Paging(PAGE, None))  # a page for every 64 tokens, and nothing else
FOOTPRINT = Footprint((RAW,), np.array([1000, 0, 10]), 512)
START, TOKEN, READ, AGAIN = 5.0, 0.4, 1.0, 1e-3  # milliseconds: a forward, a row, a token, by held
BUDGET = 250.0
MOVE = 50.0


def milliseconds(count: int, read: int) -> float:
    return START + count * (READ + AGAIN * (read + count / 2))


@dataclass
class Life:
    """What the simulation knows of a request, by itself."""

    job: Job
    lengths: list[int] = field(default_factory=list)  # of its sequences
    ends: list[int] = field(default_factory=list)  # tokens that each will say
    admitted: float | None = None
    told: float | None = None  # when its last token came
    cancel: float | None = None


@dataclass(eq=False)
class Kept:
    """A prefix, of pages of its own."""

    pages: int


@dataclass
class World:
    """A clock, and a machine whose costs are what `milliseconds` says."""

    schedule: Schedule
    clock: float = 0.0
    lives: dict[Job, Life] = field(default_factory=dict)
    order: list[Life] = field(default_factory=list)  # as they were admitted
    finished: int = 0
    moves: int = 0
    peak: int = 0  # pages that were held at a time since the pools began
    most: int = 0  # bytes
    waits: list[float] = field(default_factory=list)  # beyond what a token may wait
    kept: list[Kept] = field(default_factory=list)  # prefixes
    hits: dict[Job, tuple[Kept, int]] = field(default_factory=dict)  # whose pages, and how many
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    hit: int = 0  # pages
    gone: int = 0  # prefixes
    coming: dict[Job, float] = field(default_factory=dict)  # when a store will have answered
    came: int = 0  # pages
    late: int = 0  # answers that came when the prompt was being read
    overdue: int = 0  # answers that were used though nobody waited for them any more

    def pages(self) -> int:
        """That lie in memory: what was the prompt is shared, if it may be."""
        total = 0
        for job, life in self.lives.items():
            if life.job in self.schedule.running and life.lengths:
                shared = job.prompt // PAGE if self.schedule.overcommit == 1 else 0
                shared = shared if job.decodes else 0
                total += sum(-(-n // PAGE) - shared for n in life.lengths) + shared
                total -= self.hits[job][1] if job in self.hits else 0
        return total + sum(kept.pages for kept in self.kept)

    def do(self, action: Action) -> None:
        cost = 0.0
        if isinstance(action, Read):
            life = self.lives[action.job]
            cost = milliseconds(action.count, action.job.read)
            self.schedule.pace.took(action.count, action.job.read, cost / 1e3)
            self.schedule.done(action)
            life.lengths = [action.job.read]
            if action.job.decodes:
                life.lengths = [action.job.prompt] * action.job.width
        elif isinstance(action, Decode):
            going = [self.lives[job] for job in action.jobs]
            cost = START + TOKEN * sum(len(life.lengths) for life in going)
            self.schedule.done(action)
            for life in going:
                life.lengths = [n + 1 for n in life.lengths]
        elif isinstance(action, PutAside | TakeBack):
            cost, self.moves = MOVE, self.moves + 1
            self.schedule.done(action)
        elif isinstance(action, Begin):
            self.look(action.job)
        elif isinstance(action, Evict):
            self.evict(action.nbytes)
        elif isinstance(action, Fetch):
            action.job.waits_until = int(self.clock + self.chance.choice([1, 40, 400]))
            self.coming[action.job] = self.clock + self.chance.choice([1, 40, 400])
        else:
            assert self.pages() == 0
            self.schedule.done(action)
            self.peak = 0
        self.clock += cost
        self.peak = max(self.peak, self.pages())
        states = sum(len(x.lengths) for j, x in self.lives.items() if j in self.schedule.running)
        self.most = max(self.most, 1000 * self.peak + 10 * (states + len(self.kept)))
        self.said(action, cost)

    def said(self, action: Action, cost: float) -> None:
        """Who got a token, how long it waited, and whose end it was."""
        if isinstance(action, Read) and action.job.decodes:
            got = [self.lives[action.job]]
        elif isinstance(action, Decode):
            got = [self.lives[job] for job in action.jobs]
        else:
            got = []
        for life in got:
            if life.told is not None:
                self.waits.append(self.clock - life.told - cost)
            life.told = self.clock
            for end in [n for n in life.ends if n <= life.job.said]:
                life.ends.remove(end)
                life.lengths.pop()
                self.schedule.ended(life.job)
            if not life.ends:
                self.finished += 1
                del self.lives[life.job]
                self.keep(life.job)

    def keep(self, job: Job) -> None:
        """What a request had goes to the prefixes, if there is room: pages that none has yet."""
        _, shared = self.hits.pop(job, (None, 0))
        length = job.read + job.said
        if length and self.schedule.kept is not None and self.schedule.keeps(job, length):
            self.kept.append(Kept(-(-length // PAGE) - shared))
        self.weigh()

    def look(self, job: Job) -> None:
        """A request begins with pages of some prefix, or with none."""
        old, held = self.hits.pop(job, None), 0
        if self.kept and self.chance.random() < 0.7:
            kept = self.chance.choice(self.kept)
            held = min(kept.pages, (job.prompt - 1) // PAGE)
            if held:
                self.hits[job] = kept, held
        if job in self.schedule.running and PAGE * held <= job.read:  # it has more already
            self.hits.pop(job, None)
            self.hits.update({} if old is None else {job: old})
            self.schedule.begun(job, job.read, job.stops)
            return
        self.lives[job].lengths = []
        self.hit += held
        self.schedule.begun(job, held * PAGE, (PAGE * held + PAGE,) if held % 2 else ())
        self.weigh()

    def arrive(self, job: Job) -> None:
        """A store had pages behind those in memory, or none; a request goes on from them."""
        del self.coming[job]
        _, shared = self.hits.get(job, (None, 0))
        pages = self.chance.choice([shared, (job.prompt - 1) // PAGE])
        self.late += job.started
        overdue = job.waits_until <= self.clock
        if self.schedule.arrived(job, PAGE * pages) and pages > shared:
            assert job.read == PAGE * shared
            self.came += pages - shared
            self.overdue += overdue
            self.lives[job].lengths = [PAGE * pages]
            job.read = PAGE * pages

    def evict(self, nbytes: int) -> None:
        """The oldest that nobody uses."""
        went = self.drop(nbytes)
        if not went and not self.schedule.running:
            for job in [one for one in self.hits if one in self.schedule.waiting]:
                del self.hits[job]
            for job in self.schedule.waiting:
                self.schedule.forgot(job)
            went = self.drop(nbytes)
        self.weigh()
        self.schedule.evicted(went=went)

    def drop(self, nbytes: int) -> bool:
        used, freed, went = {id(kept) for kept, _ in self.hits.values()}, 0, False
        for kept in [one for one in self.kept if id(one) not in used]:
            if freed < nbytes:
                self.kept.remove(kept)
                freed, went, self.gone = freed + 1000 * kept.pages, True, self.gone + 1
        return went

    def weigh(self) -> None:
        if self.schedule.kept is not None:
            for job in (*self.schedule.running, *self.schedule.waiting):
                _, shared = self.hits.get(job, (None, 0))
                job.shared = np.array([shared, 0, 0])
            pages = sum(kept.pages for kept in self.kept)
            self.schedule.keep(np.array([pages, 0, len(self.kept)]))

    def run(self, arriving: list[Life]) -> None:
        arriving = sorted(arriving, key=lambda life: life.job.arrived)
        while arriving or self.lives:
            while arriving and arriving[0].job.arrived <= self.clock:
                life = arriving.pop(0)
                self.lives[life.job] = life
                self.schedule.add(life.job)
            for life in [x for x in self.lives.values() if (x.cancel or 1e18) <= self.clock]:
                self.schedule.remove(life.job)
                del self.lives[life.job]
                self.finished += 1
                self.keep(life.job)
            for job in [job for job, when in self.coming.items() if when <= self.clock]:
                self.arrive(job)
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


def requests(count: int, seed: int, gap: float = 900.0) -> list[Life]:
    chance = random.Random(seed)
    lives, clock = [], 0.0
    for number in range(count):
        clock += chance.expovariate(1 / gap)
        new, width = chance.choice([1, 5, 40, 200]), chance.choice([1] * 6 + [3])
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


def world(max_bytes: int | None, overcommit: float = 1.0, sequences: int = 8) -> World:
    seconds = BUDGET / 1e3
    return World(Schedule(FOOTPRINT, Pace(512), max_bytes, sequences, overcommit, seconds))


LIVES = [
    pytest.param(count, seed, overcommit, marks=marks)
    for count, seed, overcommit, marks in [
        (500, 0, 1.0, ()),
        (500, 1, 3.0, ()),
        (10_000, 2, 1.0, pytest.mark.laws),
        (10_000, 3, 3.0, pytest.mark.laws),
    ]
]


@pytest.mark.parametrize("fetches", [False, True])
@pytest.mark.parametrize(("count", "seed", "overcommit"), LIVES)
def test_all_are_served_within_the_bytes_and_nobody_waits_too_long(
    count: int, seed: int, overcommit: float, fetches: bool
) -> None:
    limit = 120 * 1000
    here = world(limit, overcommit)
    here.schedule.fetches = fetches
    here.run(requests(count, seed))
    assert here.finished == count and here.most <= limit
    assert fetches or (here.moves > 0) == (overcommit > 1)  # what a store has is read sooner
    # Chunks of some prompts, the moves that made room, and the forwards of others.
    longest = PROMPTS * 1.1 * BUDGET
    usual = [wait for wait in here.waits if wait > longest]
    assert len(usual) <= here.moves
    for place, late in enumerate(here.order):
        for early in here.order[place + 1 : place + 50]:
            gained = max(0, late.job.priority - early.job.priority) + 1
            assert late.job.arrived <= early.job.arrived + AGE * gained


@pytest.mark.parametrize(
    ("count", "overcommit"),
    [
        (500, 1.0),
        (500, 3.0),
        pytest.param(10_000, 1.0, marks=pytest.mark.laws),
        pytest.param(10_000, 3.0, marks=pytest.mark.laws),
    ],
)
@pytest.mark.parametrize("fetches", [False, True])
def test_prefixes_take_only_what_nobody_needs(count: int, overcommit: float, fetches: bool) -> None:
    limit = 150 * 1000
    here = world(limit, overcommit)
    here.schedule.fetches = fetches
    here.schedule.keep(here.schedule.room.nothing)
    here.run(requests(count, seed=7))
    assert here.finished == count and here.most <= limit
    assert here.hit > count and here.gone > count // 4
    assert (here.came > count // 2) == fetches and (here.late > count // 20) == fetches
    assert (here.overdue > count // 20) == fetches


def test_the_next_one_is_looked_for_while_it_waits_for_a_place() -> None:
    schedule = world(None, sequences=1).schedule
    schedule.fetches = True
    one, two, three = (Job(number, 64, 2) for number in range(3))
    for job in (one, two, three):
        schedule.add(job)
    assert schedule.next(0) == Fetch(one)
    one.waits_until = 100
    assert schedule.next(0) == Fetch(two)  # and no third one ahead of its place
    two.waits_until = 100
    assert schedule.next(0) is None and schedule.wakes(0) == 0.1
    assert schedule.arrived(two, 0)
    assert schedule.next(50) is None  # it came, but the place is that of the first
    assert schedule.arrived(one, 0)
    assert schedule.next(60) == Read(one, 64)
    schedule.remove(one)
    assert schedule.next(70) == Fetch(three)
    assert schedule.next(70) == Read(two, 64)


def test_what_comes_late_is_used_if_nothing_was_read() -> None:
    schedule = world(None, sequences=3).schedule
    schedule.fetches = True
    jobs = [Job(number, 64, 2) for number in range(3)]
    for job in jobs:
        schedule.add(job)
        assert schedule.next(0) == Fetch(job)
        job.waits_until = 50
    one, _, three = jobs
    assert schedule.next(60) == Read(one, 64)
    assert not any(job.waits_until for job in jobs)
    schedule.done(Read(one, 64))
    schedule.remove(three)
    assert [schedule.arrived(job, 0) for job in jobs] == [False, True, False]


def test_who_waits_ahead_of_its_place_is_overtaken_by_nobody() -> None:
    schedule = world(None, sequences=4).schedule
    schedule.fetches = True
    jobs = [Job(0, 64, 9), Job(1, 64, 9, width=4), Job(2, 64, 9)]
    for job in jobs:
        schedule.add(job)
    assert schedule.next(0) == Fetch(jobs[0])
    assert schedule.next(0) == Fetch(jobs[1])
    assert schedule.next(0) == Read(jobs[0], 64)  # three places are free, and kept for four
    assert jobs[2] in schedule.waiting


def test_a_low_priority_is_served_though_high_ones_never_end() -> None:
    here = world(None, sequences=1)
    crowd = [Life(Job(n, 64, 20, 1, 3, "", 150 * n), ends=[20]) for n in range(1000)]
    low = Life(Job(5000, 64, 20, 1, 0, "", 0), ends=[20])
    here.run([*crowd, low])
    assert low.admitted is not None and low.admitted < 4.5 * AGE


def test_the_first_who_does_not_fit_is_overtaken_by_nobody() -> None:
    here = world(50 * 1000)
    small = [Life(Job(2 * n, 64, 400, arrived=n), ends=[400]) for n in range(40)]
    large = Life(Job(7, 2900, 2, arrived=3), ends=[2])
    here.run([*small, large])
    places = [life.job.number for life in here.order]
    assert places.index(7) <= 4


def test_tenants_take_turns() -> None:
    here = world(None, sequences=4)
    greedy = [Life(Job(n, 64, 50, tenant="greedy", arrived=0), ends=[50]) for n in range(30)]
    modest = [Life(Job(50 + n, 64, 50, tenant="modest", arrived=1), ends=[50]) for n in range(4)]
    here.run([*greedy, *modest])
    places = [life.job.number for life in here.order]
    assert max(places.index(50 + n) for n in range(4)) < 14


@pytest.mark.parametrize(("prompts", "times"), [(1, 1), (2, 2), (3, 3), (6, PROMPTS)])
def test_the_more_prompts_are_read_the_longer_others_wait(prompts: int, times: int) -> None:
    """Each has a budget of time between two tokens, up to so many of them."""
    here = world(None)
    speaking = [Life(Job(0, 20, 300), ends=[300])]
    reading = [Life(Job(1 + n, 3000, 1, arrived=1000), ends=[1]) for n in range(prompts)]
    here.run([*speaking, *reading])
    assert (times - 1) * BUDGET < max(here.waits) < 1.1 * times * BUDGET


def test_chunks_of_several_prompts_fit_between_two_tokens() -> None:
    schedule, order = world(None).schedule, list[str]()
    for tokens in (64, 128, 256):
        schedule.pace.took(tokens, 0, milliseconds(tokens, 0) / 1e3)
    jobs = [Job(0, 20, 3), *(Job(1 + n, 100, 1) for n in range(3))]  # 110 ms each, of 250
    for job in jobs:
        schedule.add(job)
    while action := schedule.next(0):
        order.append(type(action).__name__)
        schedule.done(action)
        for job in [one for one in jobs if one.said == one.new and one.sequences]:
            schedule.ended(job)
        if isinstance(action, Renew):
            break
    assert order == ["Read", "Read", "Read", "Decode", "Read", "Decode", "Renew"]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [(130, 130), (240, 240), (260, 192)],  # 225 ms of 250 at 200 tokens, 274 at 240, 299 at 260
)
def test_a_few_tokens_more_come_with_the_last_chunk(prompt: int, count: int) -> None:
    pace = Pace(512)
    for tokens in (64, 128, 256):
        pace.took(tokens, 0, milliseconds(tokens, 0) / 1e3)
    assert pace.chunk(0, prompt, BUDGET / 1e3) == count


def test_what_can_never_fit_is_refused_with_what_it_needs() -> None:
    here = world(10 * 1000)
    with pytest.raises(CapacityError, match=r"700 tokens and 10 new ones need .* of a limit of"):
        here.schedule.check(Job(0, 700, 10))
    with pytest.raises(CapacityError, match=r"n=9 with max_sequences=8"):
        here.schedule.check(Job(0, 7, 10, 9))
    here.schedule.check(Job(0, 500, 10))


def test_memory_is_let_go_once_nobody_is_left() -> None:
    schedule = world(None).schedule
    job = Job(0, 10, 1)
    schedule.add(job)
    action = schedule.next(0)
    assert action == Read(job, 10)
    schedule.done(action)
    schedule.ended(job)
    assert schedule.next(1) == Renew()
    schedule.done(Renew())
    assert schedule.next(2) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_bytes", 0), ("max_sequences", 0), ("overcommit", 0.5), ("overcommit", float("nan"))],
)
def test_wrong_numbers_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: 1 or more"):
        Schedule(FOOTPRINT, Pace(512), **{name: value})  # type: ignore[arg-type]

"""A crowd of requests without a model: the schedule, page tables and pools, a clock, a store."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from engine.caches import Caches, Line, Slots
from kvant.engine.chunk_sizer import CHUNK_ALIGNMENT, ChunkSizer
from kvant.engine.memory import MemoryModel
from kvant.engine.scheduler import (
    Action,
    Decode,
    Evict,
    LookUpStore,
    MatchPrefix,
    Prefill,
    ScheduledRequest,
    Scheduler,
    SwapIn,
    SwapOut,
)
from kvant.page_table import LayerGroup, Paging

RAW = LayerGroup(Paging(CHUNK_ALIGNMENT, None))  # a page for every 64 tokens, and nothing else
SEALED = LayerGroup(Paging(CHUNK_ALIGNMENT, 0), slack=16)
WINDOW = LayerGroup(Paging(CHUNK_ALIGNMENT, 0), window=200, sinks=4, slack=16)
CHUNK = 512
STATE = 10  # bytes
START, TOKEN, READ, AGAIN = 5.0, 0.4, 1.0, 1e-3  # milliseconds: a forward, a row, a token, by held
BUDGET = 250.0
MOVE = 50.0


def footprint(*kinds: LayerGroup) -> MemoryModel:
    """An open page takes 1,000 bytes, a sealed one 500."""
    sizes = [size for kind in kinds for size in (1000, 500 * kind.seals)]
    return MemoryModel(kinds, np.array([*sizes, STATE]), CHUNK)


FOOTPRINT = footprint(RAW)


def milliseconds(count: int, read: int) -> float:
    return START + count * (READ + AGAIN * (read + count / 2))


@dataclass
class Life:
    """What the simulation knows of a request, by itself."""

    job: ScheduledRequest
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

    schedule: Scheduler
    clock: float = 0.0
    lives: dict[ScheduledRequest, Life] = field(default_factory=dict)
    order: list[Life] = field(default_factory=list)  # as they were admitted
    finished: int = 0
    moves: int = 0
    most: int = 0  # bytes, after any action
    waits: list[float] = field(default_factory=list)  # beyond what a token may wait
    kept: list[Kept] = field(default_factory=list)  # prefixes
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    hit: int = 0  # tokens of prompts that were found in prefixes
    gone: int = 0  # prefixes
    coming: dict[ScheduledRequest, float] = field(
        default_factory=dict
    )  # when a store will have answered
    came: int = 0  # tokens from the store
    late: int = 0  # answers that came when the prompt was being read
    overdue: int = 0  # answers that were used after the request's wait had ended

    def __post_init__(self) -> None:
        self.caches = Caches(self.schedule.memory_model)

    def do(self, action: Action) -> None:
        cost = 0.0
        if isinstance(action, Prefill):
            cost = self.read(action)
        elif isinstance(action, Decode):
            lines = [line for job in action.requests for line in self.lives[job].lines]
            cost = START + TOKEN * len(lines)
            self.caches.decode(lines)
            self.schedule.complete(action)
        elif isinstance(action, SwapOut | SwapIn):
            cost, self.moves = MOVE, self.moves + 1
            self.move(action)
            self.schedule.complete(action)
        elif isinstance(action, MatchPrefix):
            self.look(action.request)
        elif isinstance(action, Evict):
            self.evict(action.nbytes)
        elif isinstance(action, LookUpStore):
            action.request.store_deadline_ms = int(self.clock + self.chance.choice([1, 40, 400]))
            self.coming[action.request] = self.clock + self.chance.choice([1, 40, 400])
        else:
            self.forget()
            assert self.caches.held == 0
            self.caches.renew()
            self.schedule.complete(action)
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

    def read(self, action: Prefill) -> float:
        job, life = action.request, self.lives[action.request]
        cost = milliseconds(action.count, job.num_computed_tokens)
        self.schedule.chunk_sizer.record_time(action.count, job.num_computed_tokens, cost / 1e3)
        self.caches.read(life.lines[0], action.count)
        self.schedule.complete(action)
        if job.is_decoding:
            life.lines += [self.caches.fork(life.lines[0]) for _ in range(job.num_choices - 1)]
        if job.num_computed_tokens in job.checkpoint_positions:
            self.keep(job, life.lines[0])
        return cost

    def move(self, action: SwapOut | SwapIn) -> None:
        life = self.lives[action.request]
        if isinstance(action, SwapOut):
            life.stored = self.caches.length(life.lines[0])
        for line in life.lines:
            if isinstance(action, SwapOut):
                self.caches.drop(line)
            elif life.stored:
                self.caches.read(line, life.stored)

    def say(self, action: Action, cost: float) -> None:
        """Note whose token came after how long, and end those who said all."""
        if isinstance(action, Prefill) and action.request.is_decoding:
            going = [self.lives[action.request]]
        elif isinstance(action, Decode):
            going = [self.lives[job] for job in action.requests]
        else:
            going = []
        for life in going:
            if life.said_at is not None:
                self.waits.append(self.clock - life.said_at - cost)
            life.said_at = self.clock
            for end in [n for n in life.ends if n <= life.job.num_output_tokens]:
                life.ends.remove(end)
                line = life.lines.pop()
                self.schedule.finish_sequence(life.job)
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

    def keep(self, job: ScheduledRequest, line: Line) -> None:
        """Keep what a sequence has for others, if there is room."""
        length = self.caches.length(line)
        if (
            self.schedule.prefix_slots is None
            or not length
            or not self.schedule.can_insert_prefix(job, length)
        ):
            return
        twin = self.caches.fork(line)
        self.kept.append(Kept(twin, self.caches.slots(twin)))
        self.weigh()

    def look(self, job: ScheduledRequest) -> None:
        """A request begins with the first tokens of some prefix, or with none."""
        life, found, length = self.lives[job], None, 0
        if self.kept and self.chance.random() < 0.7:
            kept = self.chance.choice(self.kept)
            length = self.caches.resumable(kept.line, self.chance.randrange(job.num_prompt_tokens))
            found = self.caches.fork(kept.line) if length > job.num_computed_tokens else None
        if found is not None:
            self.caches.rewind(found, length)
            self.hit += length - job.num_computed_tokens
            life.lines = [found]
        held = self.caches.length(life.lines[0])
        stops = {job.num_prompt_tokens} if self.chance.random() < 0.3 else set()
        stops |= (
            {(held // CHUNK_ALIGNMENT + 1) * CHUNK_ALIGNMENT}
            if self.chance.random() < 0.3
            else set()
        )
        self.schedule.record_prefix_match(
            job, held, tuple(sorted(n for n in stops if held < n <= job.num_prompt_tokens))
        )
        self.weigh()

    def arrive(self, job: ScheduledRequest) -> None:
        """A store had tokens behind those in memory, or none; a request goes on from them."""
        del self.coming[job]
        line = self.lives[job].lines[0]
        length = self.chance.choice(
            [
                job.num_computed_tokens,
                (job.num_prompt_tokens - 1) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT,
            ]
        )
        self.late += job.prefill_started
        overdue = job.store_deadline_ms <= self.clock
        if self.schedule.finish_store_lookup(job, length) and length > job.num_computed_tokens:
            assert job.num_computed_tokens == self.caches.length(line)
            self.caches.read(line, length - job.num_computed_tokens)
            self.came += length - job.num_computed_tokens
            self.overdue += overdue
            job.num_computed_tokens = length

    def evict(self, nbytes: int) -> None:
        """Drop the oldest prefixes without another holder; if none, those that waiters found."""
        went = self.drop(nbytes)
        if not went and not self.schedule.running:
            self.forget()
            went = self.drop(nbytes)
        self.weigh()
        self.schedule.record_eviction(any_freed=went)

    def forget(self) -> None:
        for job in self.schedule.waiting:
            if job.matched_version is not None and not job.is_swapped_out:
                self.forget_prompt(job)

    def forget_prompt(self, job: ScheduledRequest) -> None:
        self.lives[job].lines = [Line()]
        self.schedule.clear_prefix_match(job)

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
        if self.schedule.prefix_slots is None:
            return
        among = self.caches.among([kept.slots for kept in self.kept])
        for job in (*self.schedule.running, *self.schedule.waiting):
            job.shared_slots = self.caches.shared(
                self.lives[job].lines[0], job.num_prompt_tokens, among
            )
            waits = (
                job.matched_version is not None
                and not job.is_swapped_out
                and job in self.schedule.waiting
            )
            if (
                waits
                and (
                    self.schedule.memory_model.count_shared_slots(job.num_computed_tokens)
                    > job.shared_slots
                ).any()
            ):
                self.forget_prompt(job)
        self.schedule.set_prefix_slots(
            np.array([*(int(mask.sum()) for mask in among), len(self.kept)])
        )

    def run(self, arriving: list[Life]) -> None:
        arriving = sorted(arriving, key=lambda life: life.job.arrival_ms)
        while arriving or self.lives:
            while arriving and arriving[0].job.arrival_ms <= self.clock:
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
            action = self.schedule.choose_action(int(self.clock))
            seated = [job for job in self.schedule.running if job.is_active]
            assert sum(job.num_sequences for job in seated) <= self.schedule.max_sequences
            for life in self.lives.values():
                if life.admitted is None and life.job in self.schedule.running:
                    life.admitted = self.clock
                    self.order.append(life)
            if action is not None:
                self.do(action)
            elif (wait := self.schedule.compute_timeout(int(self.clock))) is not None:
                self.clock += max(1e3 * wait, 1.0)
            else:
                assert not self.lives
                self.clock = max(self.clock, arriving[0].job.arrival_ms) if arriving else self.clock


def requests(
    count: int, seed: int, gap: float = 900.0, widths: tuple[int, ...] = (1, 1, 1, 1, 1, 1, 3)
) -> list[Life]:
    chance = random.Random(seed)
    lives, clock = [], 0.0
    for number in range(count):
        clock += chance.expovariate(1 / gap)
        new, width = chance.choice([1, 5, 40, 200]), chance.choice(widths)
        job = ScheduledRequest(
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
    kinds: tuple[LayerGroup, ...] = (RAW,),
) -> World:
    seconds = BUDGET / 1e3
    schedule = Scheduler(
        footprint(*kinds), ChunkSizer(CHUNK), max_bytes, sequences, overcommit, seconds
    )
    return World(schedule)

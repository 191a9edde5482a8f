"""Thousands of requests without a model: bytes, order and waits, in integers."""

from __future__ import annotations

import random

import pytest

from engine.caches import Caches, Line
from engine.crowd import (
    BUDGET,
    CHUNK,
    FOOTPRINT,
    RAW,
    SEALED,
    WINDOW,
    Life,
    footprint,
    milliseconds,
    requests,
    world,
)
from kvant.engine.chunk_sizer import ChunkSizer
from kvant.engine.scheduler import (
    AGING_MS,
    MAX_TIMED_PROMPTS,
    FreePools,
    LookUpStore,
    Prefill,
    ScheduledRequest,
    Scheduler,
)
from kvant.errors import CapacityError

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
    here.schedule.has_store = fetches
    here.run(requests(count, seed))
    assert here.finished == count and here.most <= limit
    assert fetches or (here.moves > 0) == (overcommit > 1)  # what a store has is read sooner
    # Chunks of some prompts, the moves that made room, and the forwards of others.
    longest = MAX_TIMED_PROMPTS * 1.1 * BUDGET
    usual = [wait for wait in here.waits if wait > longest]
    assert len(usual) <= here.moves
    for place, late in enumerate(here.order):
        for early in here.order[place + 1 : place + 50]:
            gained = max(0, late.job.priority - early.job.priority) + 1
            assert late.job.arrival_ms <= early.job.arrival_ms + AGING_MS * gained


CROWDS = {"raw": (RAW,), "sealed": (SEALED,), "window": (WINDOW,), "both": (SEALED, WINDOW)}
LIMITS = {"raw": 150_000, "sealed": 90_000, "window": 48_000, "both": 150_000}


@pytest.mark.parametrize(
    ("count", "overcommit", "pages", "fetches"),
    [
        *[(300, 1.0, pages, False) for pages in CROWDS],
        (300, 3.0, "sealed", False),
        (300, 1.0, "sealed", True),
        (300, 3.0, "raw", True),
        *[
            pytest.param(10_000, overcommit, pages, fetches, marks=pytest.mark.laws)
            for overcommit in (1.0, 3.0)
            for pages in CROWDS
            for fetches in (False, True)
        ],
    ],
)
def test_prefixes_take_only_what_no_request_needs(
    count: int, overcommit: float, pages: str, fetches: bool
) -> None:
    """Also where half of the requests ask for several continuations: pools stay in the limit."""
    limit = LIMITS[pages]
    here = world(limit, overcommit, kinds=CROWDS[pages])
    here.schedule.has_store = fetches
    here.schedule.set_prefix_slots(here.schedule.memory_budget.zero_slots)
    here.run(requests(count, seed=7, widths=(1, 1, 2, 4)))
    assert here.finished == count and limit // 2 < here.most <= limit
    assert here.hit > 20 * count and here.gone > count
    assert (here.came > 50 * count) == fetches and (here.late > count // 20) == fetches
    assert (here.overdue > count // 20) == fetches


@pytest.mark.parametrize("pages", CROWDS)
def test_a_footprint_counts_the_pages_that_close_with_a_chunk(pages: str) -> None:
    """Pages that were open before a chunk are there until its last query has read them."""
    chance = random.Random(0)
    for _ in range(100):
        one = footprint(*CROWDS[pages])
        caches, line, length = Caches(one), Line(), 0
        for _ in range(chance.randint(1, 4)):
            count = chance.choice((1, chance.randint(1, 70), chance.randint(1, CHUNK)))
            caches.read(line, count)
            length += count
        most = (one.count_slots(length) + one.count_transient_slots(length) + one.pool_overhead)[
            :-1
        ]
        assert (caches.allocated <= most).all(), f"{caches.allocated} of {most}"
        assert caches.held == sum(map(len, caches.slots(line)))  # nothing waits to be freed


def test_the_next_one_is_looked_for_while_it_waits_for_a_place() -> None:
    schedule = world(None, sequences=1).schedule
    schedule.has_store = True
    one, two, three = (ScheduledRequest(number, 64, 2) for number in range(3))
    for job in (one, two, three):
        schedule.add(job)
    assert schedule.choose_action(0) == LookUpStore(one)
    one.store_deadline_ms = 100
    assert schedule.choose_action(0) == LookUpStore(two)  # and no third one ahead of its place
    two.store_deadline_ms = 100
    assert schedule.choose_action(0) is None and schedule.compute_timeout(0) == 0.1
    assert schedule.finish_store_lookup(two, 0)
    assert schedule.choose_action(50) is None  # it came, but the place is that of the first
    assert schedule.finish_store_lookup(one, 0)
    assert schedule.choose_action(60) == Prefill(one, 64)
    schedule.remove(one)
    assert schedule.choose_action(70) == LookUpStore(three)
    assert schedule.choose_action(70) == Prefill(two, 64)


def test_what_comes_late_is_used_if_nothing_was_read() -> None:
    schedule = world(None, sequences=3).schedule
    schedule.has_store = True
    jobs = [ScheduledRequest(number, 64, 2) for number in range(3)]
    for job in jobs:
        schedule.add(job)
        assert schedule.choose_action(0) == LookUpStore(job)
        job.store_deadline_ms = 50
    one, _, three = jobs
    assert schedule.choose_action(60) == Prefill(one, 64)
    assert not any(job.store_deadline_ms for job in jobs)
    schedule.complete(Prefill(one, 64))
    schedule.remove(three)
    assert [schedule.finish_store_lookup(job, 0) for job in jobs] == [False, True, False]


def test_who_waits_ahead_of_its_place_is_overtaken_by_nobody() -> None:
    schedule = world(None, sequences=4).schedule
    schedule.has_store = True
    jobs = [
        ScheduledRequest(0, 64, 9),
        ScheduledRequest(1, 64, 9, num_choices=4),
        ScheduledRequest(2, 64, 9),
    ]
    for job in jobs:
        schedule.add(job)
    assert schedule.choose_action(0) == LookUpStore(jobs[0])
    assert schedule.choose_action(0) == LookUpStore(jobs[1])
    assert schedule.choose_action(0) == Prefill(
        jobs[0], 64
    )  # three places are free, and kept for four
    assert jobs[2] in schedule.waiting


def test_a_low_priority_is_served_though_high_ones_never_end() -> None:
    here = world(None, sequences=1)
    crowd = [Life(ScheduledRequest(n, 64, 20, 1, 3, "", 150 * n), ends=[20]) for n in range(1000)]
    low = Life(ScheduledRequest(5000, 64, 20, 1, 0, "", 0), ends=[20])
    here.run([*crowd, low])
    assert low.admitted is not None and low.admitted < 4.5 * AGING_MS


def test_the_first_who_does_not_fit_is_overtaken_by_nobody() -> None:
    here = world(50 * 1000)
    small = [Life(ScheduledRequest(2 * n, 64, 400, arrival_ms=n), ends=[400]) for n in range(40)]
    large = Life(ScheduledRequest(7, 2900, 2, arrival_ms=3), ends=[2])
    here.run([*small, large])
    places = [life.job.number for life in here.order]
    assert places.index(7) <= 4


def test_tenants_take_turns() -> None:
    here = world(None, sequences=4)
    greedy = [
        Life(ScheduledRequest(n, 64, 50, tenant="greedy", arrival_ms=0), ends=[50])
        for n in range(30)
    ]
    modest = [
        Life(ScheduledRequest(50 + n, 64, 50, tenant="modest", arrival_ms=1), ends=[50])
        for n in range(4)
    ]
    here.run([*greedy, *modest])
    places = [life.job.number for life in here.order]
    assert max(places.index(50 + n) for n in range(4)) < 14


@pytest.mark.parametrize(("prompts", "times"), [(1, 1), (2, 2), (3, 3), (6, MAX_TIMED_PROMPTS)])
def test_the_more_prompts_are_read_the_longer_others_wait(prompts: int, times: int) -> None:
    """Each has a budget of time between two tokens, up to so many of them."""
    here = world(None)
    speaking = [Life(ScheduledRequest(0, 20, 300), ends=[300])]
    reading = [
        Life(ScheduledRequest(1 + n, 3000, 1, arrival_ms=1000), ends=[1]) for n in range(prompts)
    ]
    here.run([*speaking, *reading])
    assert (times - 1) * BUDGET < max(here.waits) < 1.1 * times * BUDGET


def test_chunks_of_several_prompts_fit_between_two_tokens() -> None:
    schedule, order = world(None).schedule, list[str]()
    for tokens in (64, 128, 256):
        schedule.chunk_sizer.record_time(tokens, 0, milliseconds(tokens, 0) / 1e3)
    jobs = [
        ScheduledRequest(0, 20, 3),
        *(ScheduledRequest(1 + n, 100, 1) for n in range(3)),
    ]  # 110 ms each, of 250
    for job in jobs:
        schedule.add(job)
    while action := schedule.choose_action(0):
        order.append(type(action).__name__)
        schedule.complete(action)
        for job in [
            one for one in jobs if one.num_output_tokens == one.max_new_tokens and one.num_sequences
        ]:
            schedule.finish_sequence(job)
        if isinstance(action, FreePools):
            break
    assert order == [*["Prefill"] * 3, "Decode", "Prefill", "Decode", "FreePools"]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [(130, 130), (240, 240), (260, 192)],  # 225 ms of 250 at 200 tokens, 274 at 240, 299 at 260
)
def test_a_few_tokens_more_come_with_the_last_chunk(prompt: int, count: int) -> None:
    pace = ChunkSizer(512)
    for tokens in (64, 128, 256):
        pace.record_time(tokens, 0, milliseconds(tokens, 0) / 1e3)
    assert pace.choose_chunk(0, prompt, BUDGET / 1e3) == count


def test_what_can_never_fit_is_refused_with_what_it_needs() -> None:
    here = world(10 * 1000)
    with pytest.raises(CapacityError, match=r"700 tokens and 10 new ones need .* of a limit of"):
        here.schedule.check_request(ScheduledRequest(0, 700, 10))
    with pytest.raises(CapacityError, match=r"n=9 with max_sequences=8"):
        here.schedule.check_request(ScheduledRequest(0, 7, 10, 9))
    here.schedule.check_request(ScheduledRequest(0, 500, 10))


def test_memory_is_let_go_once_nobody_is_left() -> None:
    schedule = world(None).schedule
    job = ScheduledRequest(0, 10, 1)
    schedule.add(job)
    action = schedule.choose_action(0)
    assert action == Prefill(job, 10)
    schedule.complete(action)
    schedule.finish_sequence(job)
    assert schedule.choose_action(1) == FreePools()
    schedule.complete(FreePools())
    assert schedule.choose_action(2) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_bytes", 0), ("max_sequences", 0), ("overcommit", 0.5), ("overcommit", float("nan"))],
)
def test_wrong_numbers_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: 1 or more"):
        Scheduler(FOOTPRINT, ChunkSizer(512), **{name: value})  # type: ignore[arg-type]

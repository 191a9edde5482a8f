"""Test thousands of requests without a model: bytes, order and waiting times, in integers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from engine.caches import SimulatedBatch, SimulatedSequence
from engine.crowd import (
    CHUNK_MS,
    MAX_CHUNK,
    MEMORY_MODEL,
    RAW,
    SEALED,
    WINDOW,
    SimulatedRequest,
    compute_chunk_ms,
    make_memory_model,
    make_requests,
    make_simulation,
)
from kvant.engine.actions import FreePools, LookUpStore, Prefill
from kvant.engine.chunk_sizer import MAX_TIMED_PROMPTS, ChunkSizer
from kvant.engine.request import AGING_MS, Request
from kvant.engine.scheduler import RequestQueue, Scheduler
from kvant.errors import CapacityError

LIVES = [
    pytest.param(count, seed, overcommit, marks=marks)
    for count, seed, overcommit, marks in [
        (200, 0, 1.0, ()),
        (200, 1, 3.0, ()),
        (10_000, 2, 1.0, pytest.mark.laws),
        (10_000, 3, 3.0, pytest.mark.laws),
    ]
]


@pytest.mark.parametrize("fetches", [False, True])
@pytest.mark.parametrize(("count", "seed", "overcommit"), LIVES)
def test_all_requests_finish_within_the_byte_limit_and_the_delay_bound(
    count: int, seed: int, overcommit: float, fetches: bool
) -> None:
    limit = 120 * 1000
    simulation = make_simulation(limit, overcommit)
    simulation.scheduler.has_store = fetches
    simulation.run(make_requests(count, seed))
    assert simulation.num_finished == count and simulation.peak_nbytes <= limit
    assert fetches or (simulation.num_swaps > 0) == (overcommit > 1)  # store lookups finish sooner
    # Chunks of some prompts, the evictions and swaps for them, and the forwards of others.
    longest = MAX_TIMED_PROMPTS * 1.1 * CHUNK_MS
    usual = [wait for wait in simulation.delays_ms if wait > longest]
    assert len(usual) <= simulation.num_swaps
    for place, life in enumerate(simulation.admitted):
        for early in simulation.admitted[place + 1 : place + 50]:
            gained = max(0, life.scheduled.priority - early.scheduled.priority) + 1
            assert life.scheduled.arrival_ms <= early.scheduled.arrival_ms + AGING_MS * gained


CROWDS = {"raw": (RAW,), "sealed": (SEALED,), "window": (WINDOW,), "both": (SEALED, WINDOW)}
LIMITS = {"raw": 150_000, "sealed": 90_000, "window": 48_000, "both": 150_000}


@pytest.mark.parametrize(
    ("count", "overcommit", "pages", "fetches"),
    [
        (150, 3.0, "raw", True),
        (150, 3.0, "sealed", False),
        (150, 1.0, "window", False),
        (150, 1.0, "both", True),
        *[
            pytest.param(10_000, overcommit, pages, fetches, marks=pytest.mark.laws)
            for overcommit in (1.0, 3.0)
            for pages in CROWDS
            for fetches in (False, True)
        ],
    ],
)
def test_prefixes_use_only_memory_no_request_needs(
    count: int, overcommit: float, pages: str, fetches: bool
) -> None:
    """Also if half of the requests have several continuations: pools stay within the limit."""
    limit = LIMITS[pages]
    simulation = make_simulation(limit, overcommit, groups=CROWDS[pages])
    simulation.scheduler.has_store = fetches
    simulation.scheduler.set_prefix_slots(simulation.scheduler.memory_budget.zero_slots)
    simulation.run(make_requests(count, seed=7, widths=(1, 1, 2, 4)))
    assert simulation.num_finished == count and limit // 2 < simulation.peak_nbytes <= limit
    assert simulation.num_hit_tokens > 20 * count and simulation.num_evicted > count
    assert (simulation.num_restored_tokens > 50 * count) == fetches and (
        simulation.num_late > count // 20
    ) == fetches
    assert (simulation.num_overdue > count // 20) == fetches


@pytest.mark.parametrize("pages", CROWDS)
def test_memory_model_counts_pages_sealed_by_a_chunk(pages: str) -> None:
    """Pages open before a chunk stay until its last query has read them."""
    chance = random.Random(0)
    for _ in range(100):
        memory_model = make_memory_model(*CROWDS[pages])
        caches, line, length = SimulatedBatch(memory_model), SimulatedSequence(), 0
        for _ in range(chance.randint(1, 4)):
            count = chance.choice((1, chance.randint(1, 70), chance.randint(1, MAX_CHUNK)))
            caches.prefill(line, count)
            length += count
        bound = (
            memory_model.count_slots(length)
            + memory_model.count_transient_slots(length)
            + memory_model.pool_overhead
        )[:-2]
        assert (caches.num_allocated <= bound).all(), f"{caches.num_allocated} of {bound}"
        assert caches.num_used == sum(
            map(len, caches.list_slots(line))
        )  # nothing waits to be freed


@pytest.mark.parametrize("pages", CROWDS)
def test_transient_slots_are_those_of_the_prompt_that_needs_most(pages: str) -> None:
    memory_model, lengths = make_memory_model(*CROWDS[pages]), (0, 3, 200, 65, 128)
    alone = [memory_model.count_transient_slots(length) for length in lengths]
    assert (memory_model.count_transient_slots(*lengths) == np.max(alone, 0)).all()
    assert not memory_model.count_transient_slots().any()
    assert not memory_model.count_fork_slots(200, 0).any()


def test_next_request_looks_up_its_prefix_while_it_queues() -> None:
    schedule = make_simulation(None, max_sequences=1).scheduler
    schedule.has_store = True
    first, two, three = (Request(number, 64, 2) for number in range(3))
    for job in (first, two, three):
        schedule.add(job)
    assert schedule.choose_action(0) == LookUpStore(first)
    first.store_deadline_ms = 100
    assert schedule.choose_action(0) == LookUpStore(two)  # no third request ahead of its turn
    two.store_deadline_ms = 100
    assert schedule.choose_action(0) is None and schedule.queue.compute_timeout(0) == 0.1
    assert schedule.finish_store_lookup(two, 0)
    assert schedule.choose_action(50) is None  # finished, but the first request is next
    assert schedule.finish_store_lookup(first, 0)
    assert schedule.choose_action(60) == Prefill(first, 64)
    schedule.remove(first)
    assert schedule.choose_action(70) == LookUpStore(three)
    assert schedule.choose_action(70) == Prefill(two, 64)


def test_late_store_hit_is_used_if_nothing_was_prefilled() -> None:
    schedule = make_simulation(None, max_sequences=3).scheduler
    schedule.has_store = True
    jobs = [Request(number, 64, 2) for number in range(3)]
    for job in jobs:
        schedule.add(job)
        assert schedule.choose_action(0) == LookUpStore(job)
        job.store_deadline_ms = 50
    first, _, three = jobs
    assert schedule.choose_action(60) == Prefill(first, 64)
    assert not any(job.store_deadline_ms for job in jobs)
    schedule.complete(Prefill(first, 64))
    schedule.remove(three)
    assert [schedule.finish_store_lookup(job, 0) for job in jobs] == [False, True, False]


def test_request_at_the_head_of_the_queue_is_not_overtaken() -> None:
    schedule = make_simulation(None, max_sequences=4).scheduler
    schedule.has_store = True
    jobs = [
        Request(0, 64, 9),
        Request(1, 64, 9, num_choices=4),
        Request(2, 64, 9),
    ]
    for job in jobs:
        schedule.add(job)
    assert schedule.choose_action(0) == LookUpStore(jobs[0])
    assert schedule.choose_action(0) == LookUpStore(jobs[1])
    # three places are free, and reserved for four
    assert schedule.choose_action(0) == Prefill(jobs[0], 64)
    assert jobs[2] in schedule.queue.waiting


def test_low_priority_request_is_not_starved() -> None:
    simulation = make_simulation(None, max_sequences=1)
    crowd = [
        SimulatedRequest(Request(n, 64, 20, 1, 3, "", 150 * n), output_lengths=[20])
        for n in range(1000)
    ]
    low = SimulatedRequest(Request(5000, 64, 20, 1, 0, "", 0), output_lengths=[20])
    simulation.run([*crowd, low])
    assert low.admitted_ms is not None and low.admitted_ms < 4.5 * AGING_MS


def test_high_priority_goes_before_swapped_out_requests() -> None:
    """Regression: a swapped-out request of low priority was first."""
    requests = [Request(n, 64, 20, 1, priority, "", 0) for n, priority in enumerate((0, 0, 5))]
    requests[1].is_swapped_out = True
    queue = RequestQueue(4, waiting=[*requests])
    assert queue.find_next(0) is requests[2]
    queue.waiting.remove(requests[2])
    assert queue.find_next(0) is requests[1]


def test_first_request_that_does_not_fit_is_not_overtaken() -> None:
    simulation = make_simulation(50 * 1000)
    small = [
        SimulatedRequest(Request(2 * n, 64, 400, arrival_ms=n), output_lengths=[400])
        for n in range(40)
    ]
    large = SimulatedRequest(Request(7, 2900, 2, arrival_ms=3), output_lengths=[2])
    simulation.run([*small, large])
    places = [life.scheduled.number for life in simulation.admitted]
    assert places.index(7) <= 4


def test_tenants_alternate() -> None:
    simulation = make_simulation(None, max_sequences=4)
    greedy = [
        SimulatedRequest(Request(n, 64, 50, tenant="greedy", arrival_ms=0), output_lengths=[50])
        for n in range(30)
    ]
    modest = [
        SimulatedRequest(
            Request(50 + n, 64, 50, tenant="modest", arrival_ms=1), output_lengths=[50]
        )
        for n in range(4)
    ]
    simulation.run([*greedy, *modest])
    places = [life.scheduled.number for life in simulation.admitted]
    assert max(places.index(50 + n) for n in range(4)) < 14


@pytest.mark.parametrize(("prompts", "times"), [(1, 1), (2, 2), (3, 3), (6, MAX_TIMED_PROMPTS)])
def test_decode_delay_grows_with_the_number_of_prefills(prompts: int, times: int) -> None:
    """Each prompt has a time budget between two tokens, up to a maximum number of prompts."""
    simulation = make_simulation(None)
    speaking = [SimulatedRequest(Request(0, 20, 300), output_lengths=[300])]
    reading = [
        SimulatedRequest(Request(1 + n, 3000, 1, arrival_ms=1000), output_lengths=[1])
        for n in range(prompts)
    ]
    simulation.run([*speaking, *reading])
    assert (times - 1) * CHUNK_MS < max(simulation.delays_ms) < 1.1 * times * CHUNK_MS


def test_chunks_of_several_prompts_fit_between_two_tokens() -> None:
    schedule, order = make_simulation(None).scheduler, list[str]()
    for tokens in (64, 128, 256):
        schedule.chunk_sizer.record_time(tokens, 0, compute_chunk_ms(tokens, 0) / 1e3)
    # 110 ms each, of 250
    jobs = [
        Request(0, 20, 3),
        *(Request(1 + n, 100, 1) for n in range(3)),
    ]
    for job in jobs:
        schedule.add(job)
    while action := schedule.choose_action(0):
        order.append(type(action).__name__)
        schedule.complete(action)
        for job in [
            job for job in jobs if job.num_output_tokens == job.max_new_tokens and job.num_sequences
        ]:
            schedule.finish_sequence(job)
        if isinstance(action, FreePools):
            break
    assert order == ["Prefill"] * 3 + ["Decode", "Prefill", "Decode", "FreePools"]


@pytest.mark.parametrize(
    ("prompt", "count"),
    [(130, 130), (240, 240), (260, 192)],  # 225 ms of 250 at 200 tokens, 274 at 240, 299 at 260
)
def test_last_chunk_absorbs_a_small_remainder(prompt: int, count: int) -> None:
    pace = ChunkSizer(512)
    for tokens in (64, 128, 256):
        pace.record_time(tokens, 0, compute_chunk_ms(tokens, 0) / 1e3)
    assert pace.choose_chunk(0, prompt, CHUNK_MS / 1e3) == count


def test_impossible_request_is_refused_with_the_needed_bytes() -> None:
    simulation = make_simulation(10 * 1000)
    with pytest.raises(CapacityError, match=r"700 tokens and 10 new ones need .* of a limit of"):
        simulation.scheduler.check_request(Request(0, 700, 10))
    with pytest.raises(CapacityError, match=r"n=9 with max_sequences=8"):
        simulation.scheduler.check_request(Request(0, 7, 10, 9))
    simulation.scheduler.check_request(Request(0, 500, 10))


def test_memory_is_released_when_all_requests_finish() -> None:
    schedule = make_simulation(None).scheduler
    job = Request(0, 10, 1)
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
def test_invalid_numbers_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: 1 or more"):
        Scheduler(MEMORY_MODEL, ChunkSizer(512), **{name: value})  # type: ignore[arg-type]

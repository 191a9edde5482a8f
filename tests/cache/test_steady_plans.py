"""A steady forward, planned from lengths alone, has the plan that the pages would give."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest
import torch

from cache.tagged import assert_same
from kvant import Cache, RewindError
from kvant.cache import merge
from kvant.cache.tokens import plan_tokens
from kvant.contracts import Snapshot
from kvant.page_table import AppendPlan, PageTable
from kvant.pages.advance import MAX_DRAFT_COLUMNS, advance, advance_steadily

SPECS = [
    "raw",
    "affine8",
    "affine4,tail=10,slack=20",
    "affine8,window=90,slack=8",
    "raw,window=70,slack=40,sinks=5",
    "affine8,sinks=70,start=150",
    "affine8,capacity=400",
    "affine8,tail=128,window=70,slack=8",
]


def append(cache: Cache, count: int, start: list[int] | None = None) -> None:
    rows = torch.randn(cache.batch or 2, 1, count, 32)
    with cache.speculation_mode():
        cache[0].append(rows, rows, start=start)


def copy_table(table: PageTable) -> PageTable:
    """Return a copy whose unused entries may be written."""
    tables = table.sealed_table.copy(), table.open_table.copy()
    return replace(table, sealed_table=tables[0], open_table=tables[1])


def list_rows(plan: AppendPlan) -> set[tuple[int, ...]]:
    """Return the table, slot, row and column of each row that a plan writes."""
    return {
        (table, slot, row + i, column + i)
        for table, slot, row, count, column in plan.writes.tolist()
        for i in range(count)
    }


def assert_plans_agree(cache: Cache) -> int:
    """Compare the plans of steady forwards; return how many there are."""
    (table,), (pools,) = cache.state.page_tables, cache.state.pools
    longest = min(MAX_DRAFT_COLUMNS, table.steady_tokens)
    for count in range(1, longest + 1):
        steady, full = (
            advance_steadily(table, count),
            advance(copy_table(table), count, pools.copy()),
        )
        if len(full.copies):  # a fork, which copies the page before it writes
            continue
        assert list_rows(steady) == list_rows(full)
        lists = full.seals, full.reopens, *full.allocated_slots, *full.freed_slots
        assert not any(map(len, lists)), "it changes only lengths"
        assert not full.reads_new_rows
        for new, expected in (
            (steady.new_table, full.new_table),
            (steady.read_table, full.read_table),
        ):
            assert (new.numbers[:, :2] == expected.numbers[:, :2]).all()
            for method in (PageTable.list_open_slots, PageTable.list_sealed_slots):
                assert method(new).tolist() == method(expected).tolist()
    return longest


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("seed", range(3))
def test_a_steady_plan_is_the_plan_from_the_pages(text: str, seed: int) -> None:
    torch.manual_seed(seed)
    draw, num_steady = random.Random(seed), 0
    cache = Cache(1, f"{text},prefill=stored")
    append(cache, draw.randrange(60, 130), [0, 40] if seed else None)
    forks = list[tuple[Cache, Snapshot]]()
    for _ in range(60):
        if draw.random() < 0.2:
            forks = [*forks[-2:], (cache.fork(), cache.snapshot())]
        if draw.random() < 0.1:
            cache = merge([cache.extract(i) for i in range(cache.batch)])
        if cache.length < 350:
            append(cache, draw.choice([1, 1, 2, 3, 5, 9]))
        num_steady += assert_plans_agree(cache)
        if draw.random() < 0.5:
            removed = [draw.randrange(6) for _ in range(cache.batch)]
            lengths = [max(0, old - new) for old, new in zip(cache.lengths, removed, strict=True)]
            with suppress(RewindError):  # beyond the slack of a window
                cache.rewind_each(lengths)
            num_steady += assert_plans_agree(cache)
        for fork, snapshot in forks:
            assert_same(fork.snapshot(), snapshot)
        cache.state.pools.check()
    assert num_steady > 100


def test_a_plan_that_copies_a_page_is_not_steady() -> None:
    cache = Cache(1, "raw,capacity=100")
    append(cache, 100, [5, 5])  # 95 rows each: there is room for 5 more
    fork = cache.fork()
    (plan,) = plan_tokens(fork)
    assert len(plan.copies) == 2
    assert not plan.is_steady


def test_no_plan_after_a_rewind_writes_to_a_shared_page() -> None:
    cache = Cache(1, "raw")
    append(cache, 100)
    fork = cache.fork()
    append(cache, 1)
    cache.rewind(98)
    assert cache.state.page_tables[0].steady_tokens == 0
    before = fork.snapshot()
    append(cache, 2)
    assert_same(before, fork.snapshot())

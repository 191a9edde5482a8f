"""When pages are sealed and which rows stay, by brute force over lengths."""

from __future__ import annotations

import itertools

import pytest
import torch

from kvant import LayerSpec
from kvant.codecs import Affine, Raw
from kvant.layers import Attention
from kvant.layers.geometry import Geometry
from kvant.layers.schedule import Schedule
from kvant.retention import All, Window
from layers.tagged import layer, put, recipe, told

PAGES, TAILS, SLACKS, STARTS = (8, 64), (0, 5, 64, 100), (0, 1, 16, 70), (0, 50, 200)
RULES = (All(), All(3), Window(1), Window(20, 4), Window(64), Window(150, 9))
SPECS = [
    recipe(codec, rule, page=page, tail=tail, slack=slack, dense_until=start)
    for codec in (Affine(8), Raw())
    for page, tail, slack, start, rule in itertools.product(PAGES, TAILS, SLACKS, STARTS, RULES)
]
LENGTHS = range(0, 420, 11)


def is_due(spec: LayerSpec, page: int, query: int) -> bool:
    """The rule of the architecture, word by word: page [s, s + P) is due at p."""
    end = (page + 1) * spec.page
    return (
        spec.seals and query + 1 >= spec.dense_until and end <= query - (spec.paging.tail or 0) + 1
    )


def due(spec: LayerSpec, length: int) -> int:
    """How many pages, the first of them first, are due at the newest token."""
    pages = (page for page in itertools.count() if not is_due(spec, page, length - 1))
    return next(pages)


def oldest_seen(spec: LayerSpec, length: int) -> int:
    """The first column, sinks aside, that a token sees after a rewind of up to `slack`."""
    newest = max(0, length - spec.slack)
    window = spec.retention.window
    seen = [c for c in range(length) if window is None or newest - 1 - c < window]
    return min(seen, default=0)


def test_due_is_the_rule_of_the_architecture() -> None:
    for spec in SPECS:
        found = [spec.paging.due(length) for length in LENGTHS]
        assert found == [due(spec, length) for length in LENGTHS], spec


def test_rows_stay_dense_for_a_rewind_of_slack() -> None:
    for spec in SPECS:
        schedule = Schedule(spec)
        for length in LENGTHS:
            oldest = oldest_seen(spec, length)
            shorter = range(max(0, length - spec.slack), length + 1)
            dense = min(due(spec, n) for n in shorter) * spec.page
            expected = max(dense, oldest // spec.page * spec.page) if spec.seals else oldest
            assert schedule.first_dense(length) == expected, (spec, length)


def test_pages_stay_while_a_row_of_theirs_may_be_seen() -> None:
    for spec in SPECS:
        pages = [Schedule(spec).first_page(length) for length in LENGTHS]
        assert pages == [oldest_seen(spec, n) // spec.page for n in LENGTHS], spec


def test_nothing_in_the_schedule_falls() -> None:
    for spec in SPECS:
        schedule = Schedule(spec)
        for ask in (spec.paging.due, schedule.keep, schedule.first_page, schedule.first_dense):
            values = [ask(length) for length in LENGTHS]
            assert values == sorted(values), spec


def test_bounds_are_never_passed_token_by_token() -> None:
    """What lies between the first unit kept and the newest one, while an append is open."""
    for spec in SPECS:
        schedule = Schedule(spec)
        rows, pages = [], []
        for length in range(1, 420):
            rows.append(length - schedule.first_dense(length - 1))
            pages.append(spec.paging.due(length) - schedule.first_page(length - 1))
        if schedule.dense_bound is not None:
            assert max(rows) <= schedule.dense_bound, spec
        if schedule.page_bound is not None:
            assert max(pages) <= schedule.page_bound, spec


def test_all_rows_stay_dense_only_without_window_and_sealing() -> None:
    for spec in SPECS:
        schedule = Schedule(spec)
        windowed = spec.retention.window is not None
        assert (schedule.dense_bound is None) == (not spec.seals and not windowed)
        assert (schedule.page_bound is None) == (not (windowed and spec.seals))


@pytest.mark.parametrize(
    "text",
    [
        "raw,window=20,sinks=4",
        "raw,window=20,sinks=100,slack=0",
        "raw,window=1,slack=0",
        "affine8,window=150,sinks=9",
        "affine8,window=20,tail=100",
        "affine8,tail=5,slack=70",
        "affine4,start=200",
        "affine8,window=100,start=200,slack=1",
    ],
)
@pytest.mark.parametrize("step", [1, 64, 256])
def test_memory_taken_token_by_token_stays_within_the_bounds(text: str, step: int) -> None:
    spec = layer(f"{text},step={step}")
    schedule, state = Schedule(spec), Attention(spec)
    row = 2 * 8 * 4
    sinks = spec.retention.sinks * row
    page = sum(slab.unit_nbytes for slab in state_slabs(spec))
    limit = sinks + (schedule.dense_bound or 0) * row
    limit += (400 // 64 if schedule.page_bound is None else schedule.page_bound) * page
    if schedule.page_bound is None:
        limit += -(-step // 64) * page
    for length in range(1, 400):
        put(state, 1)
        assert state.nbytes <= limit, length
    assert told(state)[-1] == 398


def state_slabs(spec: LayerSpec):
    dims = {"keys": 8, "values": 8}
    dtypes = dict.fromkeys(dims, torch.float32)
    return Geometry(1, 1, dims, dtypes, torch.device("cpu")).sealed(spec).slabs.values()


def test_raw_layers_seal_nothing() -> None:
    state = Attention(layer("raw,tail=0"))
    view = put(state, 300)
    assert view.page_table.shape == (1, 0)
    assert state.spec.paging.due(300) == 0


def test_the_tail_is_the_larger_one_that_the_codecs_ask_for() -> None:
    assert [layer(t).paging.tail for t in ("affine8", "affine8v4", "raw", "affine4,tail=9")] == [
        0,
        128,
        None,
        9,
    ]

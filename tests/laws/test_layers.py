"""Test the laws of an attention layer over every format, retention, arena, batch and dtype."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cache.tagged import LayerCache
from cache.tiled import make_tiled_cache
from kvant import Cache, CacheSpec, RewindError, Shape, attend, load, plan, save
from kvant.cache.layout import make_layer_group
from kvant.contracts import Snapshot
from kvant.pages.storage import pages_nbytes
from kvant.recipes import LayerSpec
from laws import oracle
from laws.cases import (
    ARENAS,
    BATCHES,
    DTYPES,
    FORMATS,
    GROUP,
    HEADS,
    KEY_DIM,
    RETENTIONS,
    VALUE_DIM,
    Case,
    append_chunk,
    list_readers,
    make_layer_of,
    pairwise,
    thin_cases,
)

Law = Callable[[Case], None]


def assert_same(a: Snapshot, b: Snapshot) -> None:
    assert a.numbers == b.numbers
    assert a.tensors.keys() == b.tensors.keys()
    for name in a.tensors:
        assert torch.equal(a.tensors[name], b.tensors[name]), name


def assert_same_rows(a: LayerCache, b: LayerCache) -> None:
    assert a.length == b.length
    for first, second in zip(a.read(), b.read(), strict=True):
        assert torch.equal(first, second)


def parts_add_up(case: Case) -> None:
    """append(a); append(b) = append(a + b), to the bit, for rows and attention."""
    whole, parts = case.state(), case.state()
    keys, values = case.rows(0, 300)
    append_chunk(case, whole, keys[:, :, :40], values[:, :, :40])
    append_chunk(case, parts, keys[:, :, :40], values[:, :, :40])
    q = case.queries(0, 260)
    view = whole.append(keys[:, :, 40:], values[:, :, 40:], prefill="stored")
    at_once = attend(q, view)
    pieces, place = [], 40
    for count in (1, 100, 158, 1):
        rows = (r[:, :, place : place + count] for r in (keys, values))
        view = parts.append(*rows, prefill="stored")
        pieces.append(attend(q[:, :, place - 40 : place - 40 + count], view))
        place += count
    assert_same(whole.snapshot(), parts.snapshot())
    error = (at_once.float() - torch.cat(pieces, 2).float()).abs().max()
    assert error <= case.tolerance("native")


def short_rewind_never_happened(case: Case) -> None:
    """A rewind within slack followed by an append leaves no trace, to the bit."""
    reference, rewound = make_layer_of(case, 250, 11), make_layer_of(case, 250, 11)
    wrong, right = case.rows(1, 16), case.rows(2, 40)
    append_chunk(case, rewound, wrong[0][:, :, :7], wrong[1][:, :, :7])
    append_chunk(case, rewound, wrong[0][:, :, 7:], wrong[1][:, :, 7:])
    rewound.rewind(261)
    assert_same_rows(reference, rewound)
    for state in (reference, rewound):
        append_chunk(case, state, right[0], right[1])
    assert_same(reference.snapshot(), rewound.snapshot())
    assert (rewound.stats.rewinds_exact, rewound.stats.rewinds_decoded) == (1, 0)


def deep_rewind_is_reported(case: Case) -> None:
    """A deeper rewind keeps rows and counts reopened pages, or is refused.

    The page of the sinks stays open: its rows may be dense.
    """
    state, spec = make_layer_of(case, 300), case.spec
    keys, values = state.read()
    window = spec.retention.window
    if window is not None:
        before = state.snapshot()
        with pytest.raises(RewindError, match="the longest length it can reach is 0"):
            state.rewind(300 - spec.slack - 1)
        assert_same(before, state.snapshot())
        return
    state.rewind(130)
    never = make_layer_of(case, 130).read()
    padding = max(case.start or [0])
    first_checked = padding + 64 if spec.retention.sinks else 0
    for now, before, original in zip(state.read(), (keys, values), never, strict=True):
        assert torch.equal(now[:, :, first_checked:], before[:, :, first_checked:130])
        assert ((now == before[:, :, :130]) | (now == original)).all()
    reopened = spec.seals and any(
        count_complete_pages(spec, 300 - start - spec.slack)
        > max(count_complete_pages(spec, 130 - start), spec.retention.sinks > 0)
        for start in case.start or [0]
    )
    assert (state.stats.rewinds_exact, state.stats.rewinds_decoded) == (not reopened, reopened)
    append_chunk(case, state, *case.rows(3, 100))
    assert state.length == 230


def count_complete_pages(spec: LayerSpec, length: int) -> int:
    return max(0, length - (spec.paging.tail or 0)) // 64


def copies_are_identical_and_apart(case: Case) -> None:
    """restore(snapshot()), load(save()) and fork give equal, independent copies."""
    cache = make_tiled_cache(None, CacheSpec((case.spec,)), case.state().tiles)
    keys, values = case.rows(0, 200)
    cache[0].append(keys, values, start=case.start)
    before = cache.snapshot()
    restored = Cache(None, cache.spec)
    restored.restore(before)
    copies = [cache.fork(), restored, save_and_load(cache)]
    for copy in copies:
        assert_same(before, copy.snapshot())
    assert copies[0].nbytes == cache.nbytes
    for copy in copies[1:]:  # memory grows at the next append
        assert copy.nbytes_used == cache.nbytes_used <= copy.nbytes <= cache.nbytes
    cache[0].append(*case.rows(4, 70))
    for number, copy in enumerate(copies):
        assert_same(before, copy.snapshot())
        copy[0].append(*case.rows(4, 70))
        assert_same(cache.snapshot(), copy.snapshot())
        copy[0].append(*case.rows(5 + number, 70))
        copy.state.pools.check()
    assert cache.length == 270
    cache.state.pools.check()


def save_and_load(cache: Cache) -> Cache:
    path = Path(save_and_load.folder) / "cache.safetensors"  # type: ignore[attr-defined]
    save(cache, path)
    return load(path)


def bytes_are_planned(case: Case) -> None:
    """Token by token the plan is exact; at once it is an upper bound, nearly reached."""
    shape, spec = Shape(1, HEADS, KEY_DIM, VALUE_DIM, case.dtype), CacheSpec((case.spec,))
    state = case.state()
    keys, values = case.rows(0, 502)
    for length in range(1, 201):
        append_chunk(
            case, state, keys[:, :, length - 1 : length], values[:, :, length - 1 : length]
        )
        if length in (1, 63, 64, 65, 150, 200) and case.start is None:
            assert state.nbytes == plan_nbytes(shape, spec, length, case.sequences), length
    peak = pages_nbytes(state.storage.geometry, case.spec, make_layer_group(case.spec), [128])
    for chunks in ((200,), (500, 1, 1)):
        state, length = make_layer_of(case, *chunks), sum(chunks)
        planned_nbytes = plan_nbytes(shape, spec, length, case.sequences)
        assert state.nbytes_used <= state.nbytes <= planned_nbytes
        if case.start is None:
            assert planned_nbytes - state.nbytes <= case.sequences * peak
        state.state.pools.check()


def plan_nbytes(shape: Shape, spec: CacheSpec, length: int, sequences: int) -> int:
    return plan(shape, spec, context=length, sequences=sequences).nbytes


def attention_is_over_read_rows(case: Case) -> None:
    """Attention of the newest token = float64 attention over read(), after any operations."""
    state = case.state()
    keys, values = case.rows(0, 400)
    q, place = case.queries(1, 400), 0
    start = torch.tensor(case.start or [0] * case.sequences)
    for count in (90, 1, 37, 1, 62, 1, 1, 150, 1):
        span = slice(place, place + count)
        padding = None if state.length else case.start
        view = state.append(keys[:, :, span], values[:, :, span], start=padding)
        place += count
        newest = q[:, :, place - 1 : place]
        rows, positions = [r.cpu() for r in state.read()], state.positions().cpu()
        query_position = place - 1 - start[:, None]
        visible = oracle.visible_positions(case.spec.mask, query_position, positions)[:, None]
        expected = oracle.exact_attention(newest.cpu(), *rows, visible)
        views = [state.view()] if count > 1 else [state.view(), view]
        for shown in views:
            for backend in list_readers(shown):
                out = attend(newest, shown, backend=backend).cpu()
                assert (out.double() - expected).abs().max() <= case.tolerance(backend), backend
        assert state.held == rows[0].shape[2] == positions.shape[1]
        assert state.max_held is None or state.held <= state.max_held
        state.state.pools.check()


LAWS: tuple[Law, ...] = (
    parts_add_up,
    short_rewind_never_happened,
    deep_rewind_is_reported,
    copies_are_identical_and_apart,
    bytes_are_planned,
    attention_is_over_read_rows,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> None:
    save_and_load.folder = tmp_path  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("law", "case"),
    thin_cases(LAWS, pairwise()),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_law_pairwise(law: Law, case: Case) -> None:
    law(case)


@pytest.mark.laws
@pytest.mark.parametrize("values", FORMATS)
@pytest.mark.parametrize("keys", FORMATS)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law_over_the_full_product(law: Law, keys: str, values: str) -> None:
    for retention in RETENTIONS:
        for arena in ARENAS:
            for batch in BATCHES:
                for dtype in DTYPES:
                    case = Case(keys, values, retention, arena, batch, dtype)
                    try:
                        law(case)
                    except AssertionError as error:
                        raise AssertionError(f"{case}: {error}") from error


def test_groups_share_rows() -> None:
    """The axes contain grouped queries and unequal widths."""
    assert GROUP > 1 and KEY_DIM != VALUE_DIM

"""Test that a query reads the sealed pages whose keys can matter, and no others."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from kvant import Cache, attend, merge
from kvant.attention.dispatch import BACKENDS
from kvant.attention.page_selection import refresh_summary
from kvant.contracts import AttentionRequest, Mask, PageSelection, View
from kvant.native import get_library
from kvant.spec import parse

HEADS, GROUP, DIM, PAGE = 2, 2, 32, 64
FORMATS = ("raw", "affine8", "affine4", "affine2,rotate", "turbo4v2", "fp8", "affine8v4,sinks=70")
KEPT = (
    *("affine8,window=600,sinks=0", "affine8,window=600", "affine8,window=600,sinks=5"),
    "affine4,tail=100,page=128",
)
NATIVE_ONLY = pytest.mark.skipif(
    get_library().functions is None, reason="the native library is not here"
)
NATIVE = pytest.param("native", marks=NATIVE_ONLY)
by_backend = pytest.mark.parametrize("backend", ["reference", NATIVE])


def make_cache(spec: str, length: int, batch: int = 1) -> Cache:
    torch.manual_seed(0)
    cache = Cache(1, spec)
    cache[0].append(*torch.randn(2, batch, HEADS, length, DIM))
    return cache


def append_and_query(cache: Cache, count: int = 1) -> tuple[View, Tensor]:
    """Return new tokens that select pages, with their queries."""
    torch.manual_seed(cache.length)
    batch = cache[0].batch
    view = cache[0].append(*torch.randn(2, batch, HEADS, count, DIM), prefill="stored")
    return view, torch.randn(batch, HEADS * GROUP, count, DIM)


def select_pages(q: Tensor, view: View, backend: str) -> Tensor | None:
    entry = next(entry for entry in BACKENDS if entry.name == backend)
    return entry.select_pages(
        AttentionRequest(view.keys.codec.frame.transform_queries(q), 1.0, view.mask), view
    )


def decode_keys(cache: Cache, view: View, sequence: int) -> Tensor:
    """Return the framed keys of a sequence's sealed pages, freshly decoded: [pages, H, P, D]."""
    stored, slots = view.keys, torch.from_numpy(view.page_table.sealed_table[sequence].copy())
    fields = {name: field[slots] for name, field in stored.sealed.items()}
    if stored.tiles is not None:
        fields = {n: stored.tiles.unpack(f"keys.{n}", field) for n, field in fields.items()}
    return stored.codec.open(fields).float()


def assert_best_pages(cache: Cache, view: View, q: Tensor, selection_: Tensor) -> None:
    """Return the pages with the highest score bounds, and those that are always read."""
    page, mask = view.page_table.layer_group.page, view.mask
    framed = view.keys.codec.frame.transform_queries(q).double()
    for b in range(view.batch):
        keys = decode_keys(cache, view, b).double()
        largest, least = keys.amax(2), keys.amin(2)  # [pages, H, D]
        half_range = (largest - least) / 2
        largest, least = largest + half_range, least - half_range
        length = int(view.page_table.lengths[b])
        for t in range(q.shape[2]):
            position = length - q.shape[2] + t
            due = min(
                view.page_table.layer_group.paging.count_due_pages(position + 1),
                int(view.page_table.stop_sealed[b]),
            )
            begin = 0 if mask.window is None else max(0, position - mask.window + 1)
            begin = max(
                begin,
                view.page_table.layer_group.sinks,
                page * int(view.page_table.first_sealed[b]),
            )
            visible = [n for n in range(due) if (n + 1) * page > begin]
            # page of the sequence that contains its sinks
            first = int(view.page_table.first_visible[b]) // page
            whole = [n for n in visible[: -256 // page] if n * page >= begin and n != first]
            selection = cache.spec.layers[0].select  # type: ignore[union-attr]
            assert selection is not None
            count = min(
                len(whole), max(selection.pages, -(-len(whole) * int(selection.percent) // 100))
            )
            for h in range(HEADS):
                read = [n for n in selection_[b, h, t].tolist() if n >= 0]
                assert read == sorted(set(read)) and set(visible) - set(whole) <= set(read)
                picked = [n for n in whole if n in read]
                assert len(picked) == count and set(read) <= set(visible)
                queries = framed[b, h * GROUP : (h + 1) * GROUP, t]
                bound = {
                    n: float(torch.maximum(queries * largest[n, h], queries * least[n, h]).sum())
                    for n in whole
                }
                rest = [bound[n] for n in whole if n not in read]
                if picked and rest:
                    assert min(bound[n] for n in picked) >= max(rest) - 1e-4 * abs(max(rest))


@by_backend
@pytest.mark.parametrize("spec", [*FORMATS, *KEPT])
@pytest.mark.parametrize("select", ["select=3:0", "select=25%:0"])
def test_the_best_pages_are_selected(spec: str, select: str, backend: str) -> None:
    cache = make_cache(f"{spec},{select}", 900, batch=2)
    for count in (1, 1, 3, 20):
        view, q = append_and_query(cache, count)
        selection = select_pages(q, view, backend)
        assert selection is not None or spec in KEPT  # there may be too few to select among
        if selection is not None:
            assert_best_pages(cache, view, q, selection)


@NATIVE_ONLY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_of_equal_pages_are_selected(dtype: torch.dtype) -> None:
    """Sums of small integers are exact, so both backends select the same pages."""
    torch.manual_seed(0)
    cache = Cache(1, "affine8,select=25%:0")
    cache[0].append(*torch.randn(2, 2, HEADS, 9000, DIM).to(dtype))
    view = cache[0].append(*torch.randn(2, 2, HEADS, 3, DIM).to(dtype), prefill="stored")
    bounds = refresh_summary(view).bounds
    for largest in (0, 1, 100):
        bounds.copy_(torch.randint(-largest, largest + 1, bounds.shape))
        q = torch.randint(-1, 2, (2, HEADS * GROUP, 3, DIM)).to(dtype)
        selection, expected = (select_pages(q, view, name) for name in ("native", "reference"))
        assert selection is not None
        assert expected is not None
        assert torch.equal(selection, expected)


@by_backend
def test_the_first_page_is_read_in_addition_to_the_selection(backend: str) -> None:
    """Its keys are the worst possible, so its bounds never select it."""
    caches = []
    for length in (700, 1000):
        rows, q = torch.randn(2, 1, HEADS, length, DIM), torch.ones(1, HEADS * GROUP, 1, DIM)
        rows[0, :, :, :PAGE] = -50.0
        caches.append(Cache(1, "affine8,select=1:0"))
        caches[-1][0].append(*rows)
    batched = merge(caches)
    view = batched[0].append(*torch.randn(2, 2, HEADS, 1, DIM), prefill="stored")
    selection = select_pages(q.expand(2, -1, -1, -1).contiguous(), view, backend)
    assert selection is not None
    for b, stop in enumerate((10, 15)):  # number of sealed pages; the newest 4 are always read
        for read in selection[b].flatten(0, 1).tolist():
            pages = [n for n in read if n >= 0]
            assert pages[0] == 0 and pages[2:] == list(range(stop - 4, stop)), pages
            assert 0 < pages[1] < stop - 4, "one page that was selected, beside the first"


def test_window_without_the_first_page_selects_among_its_pages() -> None:
    cache = make_cache("affine8,window=600,sinks=0,select=1:0", 1000)
    view, q = append_and_query(cache)
    selection = select_pages(q, view, "reference")
    assert selection is not None
    visible = range((1001 - 600) // PAGE, 15)
    assert {len([n for n in heads if n >= 0]) for heads in selection[0, :, 0].tolist()} == {6}
    assert set(selection.flatten().tolist()) <= {*visible}


@by_backend
@pytest.mark.parametrize("spec", FORMATS)
def test_selecting_all_pages_equals_full_attention(spec: str, backend: str) -> None:
    for select in ("select=100%:0", "select=1000:0"):
        first, second = make_cache(f"{spec},{select}", 500), make_cache(spec, 500)
        for count in (1, 5):
            (view, q), (plain, _) = append_and_query(first, count), append_and_query(second, count)
            same = attend(q, view, backend=backend), attend(q, plain, backend=backend)
            if spec == "raw":  # its pages are sealed for the test, so the order of sums differs
                torch.testing.assert_close(*same, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(*same)


@by_backend
@pytest.mark.parametrize("spec", ["affine8", "affine4", "turbo4v2", "fp8"])
def test_listing_all_pages_equals_full_attention(spec: str, backend: str) -> None:
    """Kernels that read a selection give the bits of those that read everything."""
    view, q = append_and_query(make_cache(f"{spec},select=1000:0", 500), 3)
    entry = next(entry for entry in BACKENDS if entry.name == backend)
    request = AttentionRequest(view.keys.codec.frame.transform_queries(q), DIM**-0.5, view.mask)
    pages = int(view.page_table.stop_sealed[0])
    every = torch.arange(pages).expand(1, HEADS, 3, pages).contiguous()
    selected = entry.attend(request._replace(selected_pages=every), view)
    assert torch.equal(selected[0], entry.attend(request, view)[0])


@by_backend
@pytest.mark.parametrize("spec", [*FORMATS, *KEPT])
def test_attention_covers_only_the_selected_pages(spec: str, backend: str) -> None:
    cache = make_cache(f"{spec},select=2:0", 900, batch=2)
    for count in (1, 4, 20):
        view, q = append_and_query(cache, count)
        selection = select_pages(q, view, "reference")
        if selection is None:
            continue
        out = attend(q, view, backend=backend)
        columns = view.page_table.num_columns
        visible = torch.ones(2, HEADS, count, columns, dtype=torch.bool)
        for b in range(2):
            for t in range(count):
                position = columns - count + t
                visible[b, :, t, position + 1 :] = False
                if view.mask.window is not None:
                    first = max(0, position - view.mask.window + 1)
                    visible[b, :, t, view.mask.sinks : max(first, view.mask.sinks)] = False
                due = min(
                    view.page_table.layer_group.paging.count_due_pages(position + 1),
                    int(view.page_table.stop_sealed[b]),
                )
                for h in range(HEADS):
                    for n in set(range(due)) - set(selection[b, h, t].tolist()):
                        begin = max(
                            n * view.page_table.layer_group.page, view.page_table.layer_group.sinks
                        )
                        visible[
                            b, h, t, begin : max(begin, (n + 1) * view.page_table.layer_group.page)
                        ] = False
        mask = visible.repeat_interleave(GROUP, 1)
        plain = attend(q, view._replace(selection=None), mask=mask, backend="reference")
        coarse = 2e-2 if "affine2" in spec or "v2" in spec else 4e-3
        torch.testing.assert_close(out, plain, rtol=coarse, atol=coarse)


def selects_same_pages(cache: Cache) -> bool:
    """Compare with a cache loaded from a file, which recomputes every summary."""
    fresh = Cache(spec=cache.spec)
    fresh.restore(cache.snapshot())
    (view, q), (second, _) = append_and_query(cache.fork()), append_and_query(fresh)
    first, two = select_pages(q, view, "reference"), select_pages(q, second, "reference")
    assert (first is None) == (two is None)
    assert first is None or two is None or torch.equal(first, two)
    return first is not None


@pytest.mark.parametrize(
    "spec", ["affine8", "affine4,window=800,sinks=5", "raw", "turbo4,tail=0,page=128"]
)
@pytest.mark.parametrize("seed", range(3))
def test_page_summary_bounds_the_rows_of_its_slot(spec: str, seed: int) -> None:
    """Slots are freed and reused in every life."""
    rng, cache = random.Random(seed), make_cache(f"{spec},select=1:0", 800)
    other_caches, chose = list[Cache](), 0
    for _ in range(25):
        operation = rng.choice(
            ("append", "append", "token", "rewind", "fork", "swap", "merge", "recode")
        )
        if operation == "append":
            cache[0].append(*torch.randn(2, cache[0].batch, HEADS, rng.randint(1, 200), DIM))
        elif operation == "token":
            view, q = append_and_query(cache)
            attend(q, view)
        elif operation == "rewind":
            length = cache.reachable(max(1, cache.length - rng.choice((3, 70, 200))))
            cache.rewind(length or cache.length)
        elif operation == "fork":
            other_caches.append(cache.fork())
        elif operation == "swap" and other_caches:
            other_caches.append(cache)
            cache = other_caches.pop(rng.randrange(len(other_caches) - 1))
        elif operation == "merge" and other_caches and cache[0].batch == 1:
            merged = merge([cache, other_caches.pop()])
            cache = merged.extract(rng.randint(0, 1))
        elif operation == "recode":
            cache.recode(f"{spec},select={rng.choice((1, 2))}:0")
        chose += selects_same_pages(cache)
    assert chose > 5


@by_backend
def test_each_sequence_selects_its_own_pages(backend: str) -> None:
    """Ragged batches equal single sequences."""
    single_ = [make_cache("affine8,select=3:0", n) for n in (200, 850, 1100)]
    batched = merge([single.fork() for single in single_])
    q, rows = torch.randn(3, HEADS * GROUP, 1, DIM), torch.randn(2, 3, HEADS, 1, DIM)
    out = attend(q, batched[0].append(*rows), backend=backend)
    for i, single in enumerate(single_):
        view = single[0].append(*rows[:, i : i + 1])
        torch.testing.assert_close(out[i : i + 1], attend(q[i : i + 1], view, backend=backend))


@by_backend
def test_draft_tokens_select_pages_one_by_one(backend: str) -> None:
    cache = make_cache("affine8,select=2:0,prefill=stored", 700)
    fork = cache.fork()
    rows, q = torch.randn(2, 1, HEADS, 9, DIM), torch.randn(1, HEADS * GROUP, 9, DIM)
    out = attend(q, cache[0].append(*rows), backend=backend)
    for t in range(9):
        view = fork[0].append(*rows[:, :, :, t : t + 1])
        single = attend(q[:, :, t : t + 1], view, backend=backend)
        torch.testing.assert_close(out[:, :, t : t + 1], single, rtol=1e-5, atol=1e-5)


def test_prefill_reads_all_pages_unless_stored() -> None:
    cache, rows = make_cache("affine8,select=1:0", 500), torch.randn(2, 1, HEADS, 100, DIM)
    assert cache.fork()[0].append(*rows).selection is None
    assert cache.fork()[0].append(*rows, prefill="stored").selection is not None


def test_tensor_mask_reads_all_pages_that_it_shows() -> None:
    """The mask may hide the pages that would be selected."""
    view, q = append_and_query(make_cache("affine8,select=2:0", 700))
    mask = torch.rand(1, 1, 1, view.page_table.num_columns) < 0.5
    every = view._replace(selection=None)
    assert torch.equal(attend(q, view, mask=mask), attend(q, every, mask=mask))


def test_sinks_of_an_external_mask_read_all_pages() -> None:
    view, q = append_and_query(make_cache("affine8,select=2:0", 900))
    mask = Mask(window=500, sinks=4)
    every = view._replace(selection=None)
    assert torch.equal(attend(q, view, mask=mask), attend(q, every, mask=mask))
    narrow = Mask(window=700)  # 10 pages: 5 of them can be selected
    assert not torch.equal(attend(q, view, mask=narrow), attend(q, every, mask=narrow))


def test_view_during_a_chunk_summarizes_evicted_pages() -> None:
    """Regression: cached tables were assumed valid for page tables with fewer pages."""
    cache = Cache(1, "affine8,window=600,sinks=0,tail=0,select=1:0")
    cache[0].append(*torch.randn(2, 1, HEADS, 1000, DIM))
    fork = cache.fork()
    view = cache[0].append(*torch.randn(2, 1, HEADS, 500, DIM), prefill="stored")
    q = torch.randn(1, HEADS * GROUP, 500, DIM)
    select_pages(q[:, :, -1:], cache[0].view(), "reference")
    assert_best_pages(cache, view, q, select_pages(q, view, "reference"))
    assert fork.length == 1000


def test_growing_summary_stays_within_its_bounds() -> None:
    """Regression: summaries were copied after their bounds, which other threads fill meanwhile."""
    storage: Any = make_cache("affine8,select=1:0", 300)[0].storage
    old = storage.sides["keys"].summary
    grown_ = storage._grow_tensor

    def fill_summary(*args: Any) -> Tensor:
        summary: Tensor = grown_(*args)
        if summary.shape[2] == 2:  # bounds may be filled by another thread with an older view
            old.slot_versions[:] = 7
        return summary

    storage._grow_tensor = fill_summary
    storage.ensure_slots(1, 10_000)
    assert not (storage.sides["keys"].summary.slot_versions == 7).any()


def test_pages_with_nan_values_are_read() -> None:
    rows = torch.randn(2, 1, HEADS, 500, DIM)
    rows[0, 0, 0, 130, 3] = float("nan")
    cache = Cache(1, "raw,select=1:0")
    cache[0].append(*rows)
    view, q = append_and_query(cache)
    for backend in (
        ("reference", "native") if get_library().functions is not None else ("reference",)
    ):
        selection = select_pages(q, view, backend)
        assert selection is not None and 2 in selection[0, 0, 0].tolist()


def test_first_layers_read_all_pages() -> None:
    layers: Any = parse("affine8,select=12%", 5).layers
    assert [layer.select for layer in layers] == [None] * 2 + [PageSelection(percent=12)] * 3
    layers = parse("affine8,select=7:1", 3).layers
    assert [layer.select for layer in layers] == [None] + [PageSelection(pages=7)] * 2


def test_window_smaller_than_the_selection_is_read_whole() -> None:
    view, q = append_and_query(make_cache("affine8,window=200,sinks=0,select=3:0", 600))
    assert select_pages(q, view, "reference") is None

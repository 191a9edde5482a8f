"""A query reads the sealed pages whose keys can matter, and no others."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from kvant import Cache, attend, merge
from kvant.attention.dispatch import BACKENDS
from kvant.contracts import AttentionRequest, Mask, PageSelection, View
from kvant.native import get_library
from kvant.spec import parse

HEADS, GROUP, DIM, PAGE = 2, 2, 32, 64
FORMATS = ("raw", "affine8", "affine4", "affine2,rotate", "turbo4v2", "fp8", "affine8v4,sinks=70")
KEPT = (
    *("affine8,window=600,sinks=0", "affine8,window=600", "affine8,window=600,sinks=5"),
    "affine4,tail=100,page=128",
)
NATIVE = pytest.param(
    "native",
    marks=pytest.mark.skipif(
        get_library().functions is None, reason="the native library is not here"
    ),
)
by_backend = pytest.mark.parametrize("backend", ["reference", NATIVE])


def grown(spec: str, length: int, batch: int = 1) -> Cache:
    torch.manual_seed(0)
    cache = Cache(1, spec)
    cache[0].append(*torch.randn(2, batch, HEADS, length, DIM))
    return cache


def more(cache: Cache, count: int = 1) -> tuple[View, Tensor]:
    """Tokens that choose, and their queries."""
    torch.manual_seed(cache.length)
    batch = cache[0].batch
    view = cache[0].append(*torch.randn(2, batch, HEADS, count, DIM), prefill="stored")
    return view, torch.randn(batch, HEADS * GROUP, count, DIM)


def chosen(q: Tensor, view: View, backend: str) -> Tensor | None:
    one = next(one for one in BACKENDS if one.name == backend)
    return one.select_pages(
        AttentionRequest(view.keys.codec.frame.transform_queries(q), 1.0, view.mask), view
    )


def keys_of(cache: Cache, view: View, sequence: int) -> Tensor:
    """The framed keys of the sealed pages of a sequence, opened anew: [pages, H, P, D]."""
    stored, slots = view.keys, torch.from_numpy(view.page_table.sealed_table[sequence].copy())
    fields = {name: field[slots] for name, field in stored.sealed.items()}
    if stored.tiles is not None:
        fields = {n: stored.tiles.unpack(f"keys.{n}", field) for n, field in fields.items()}
    return stored.codec.open(fields).float()


def best(cache: Cache, view: View, q: Tensor, found: Tensor) -> None:
    """What is chosen scores more by the bound than what is not, and some is read always."""
    page, mask = view.page_table.layer_group.page, view.mask
    framed = view.keys.codec.frame.transform_queries(q).double()
    for b in range(view.batch):
        keys = keys_of(cache, view, b).double()
        largest, least = keys.amax(2), keys.amin(2)  # [pages, H, D]
        wider = (largest - least) / 2
        largest, least = largest + wider, least - wider
        length = int(view.page_table.lengths[b])
        for t in range(q.shape[2]):
            at = length - q.shape[2] + t
            due = min(
                view.page_table.layer_group.paging.count_due_pages(at + 1),
                int(view.page_table.stop_sealed[b]),
            )
            begin = 0 if mask.window is None else max(0, at - mask.window + 1)
            begin = max(
                begin,
                view.page_table.layer_group.sinks,
                page * int(view.page_table.first_sealed[b]),
            )
            seen = [n for n in range(due) if (n + 1) * page > begin]
            first = (
                int(view.page_table.first_visible[b]) // page
            )  # of the sequence: its sinks lie there
            whole = [n for n in seen[: -256 // page] if n * page >= begin and n != first]
            selection = cache.spec.layers[0].select  # type: ignore[union-attr]
            assert selection is not None
            count = min(
                len(whole), max(selection.pages, -(-len(whole) * int(selection.percent) // 100))
            )
            for h in range(HEADS):
                read = [n for n in found[b, h, t].tolist() if n >= 0]
                assert read == sorted(set(read)) and set(seen) - set(whole) <= set(read)
                picked = [n for n in whole if n in read]
                assert len(picked) == count and set(read) <= set(seen)
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
def test_the_pages_that_are_read_are_the_best(spec: str, select: str, backend: str) -> None:
    cache = grown(f"{spec},{select}", 900, batch=2)
    for count in (1, 1, 3, 20):
        view, q = more(cache, count)
        found = chosen(q, view, backend)
        assert found is not None or spec in KEPT  # where there may be too few to choose among
        if found is not None:
            best(cache, view, q, found)


@by_backend
def test_the_first_page_of_a_sequence_is_read_on_top_of_what_is_selected(backend: str) -> None:
    """Its keys are made the worst there are: none of them is read for its bounds."""
    caches = []
    for length in (700, 1000):
        rows, q = torch.randn(2, 1, HEADS, length, DIM), torch.ones(1, HEADS * GROUP, 1, DIM)
        rows[0, :, :, :PAGE] = -50.0
        caches.append(Cache(1, "affine8,select=1:0"))
        caches[-1][0].append(*rows)
    together = merge(caches)
    view = together[0].append(*torch.randn(2, 2, HEADS, 1, DIM), prefill="stored")
    found = chosen(q.expand(2, -1, -1, -1).contiguous(), view, backend)
    assert found is not None
    for b, stop in enumerate((10, 15)):  # pages that are sealed, of which the newest 4 are read
        for read in found[b].flatten(0, 1).tolist():
            pages = [n for n in read if n >= 0]
            assert pages[0] == 0 and pages[2:] == list(range(stop - 4, stop)), pages
            assert 0 < pages[1] < stop - 4, "one page that was selected, beside the first"


def test_a_window_that_left_the_first_page_selects_among_all_it_sees() -> None:
    cache = grown("affine8,window=600,sinks=0,select=1:0", 1000)
    view, q = more(cache)
    found = chosen(q, view, "reference")
    assert found is not None
    seen = range((1001 - 600) // PAGE, 15)
    assert {len([n for n in heads if n >= 0]) for heads in found[0, :, 0].tolist()} == {6}
    assert set(found.flatten().tolist()) <= {*seen}


@by_backend
@pytest.mark.parametrize("spec", FORMATS)
def test_to_select_all_is_to_select_nothing(spec: str, backend: str) -> None:
    for select in ("select=100%:0", "select=1000:0"):
        one, other = grown(f"{spec},{select}", 500), grown(spec, 500)
        for count in (1, 5):
            (view, q), (plain, _) = more(one, count), more(other, count)
            same = attend(q, view, backend=backend), attend(q, plain, backend=backend)
            if spec == "raw":  # whose pages are sealed for it: read in another order
                torch.testing.assert_close(*same, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(*same)


@by_backend
@pytest.mark.parametrize("spec", ["affine8", "affine4", "turbo4v2", "fp8"])
def test_all_pages_by_their_numbers_are_all_pages(spec: str, backend: str) -> None:
    """The kernels that read some give the bits of those that read all."""
    view, q = more(grown(f"{spec},select=1000:0", 500), 3)
    one = next(one for one in BACKENDS if one.name == backend)
    request = AttentionRequest(view.keys.codec.frame.transform_queries(q), DIM**-0.5, view.mask)
    pages = int(view.page_table.stop_sealed[0])
    every = torch.arange(pages).expand(1, HEADS, 3, pages).contiguous()
    some = one.attend(request._replace(selected_pages=every), view)
    assert torch.equal(some[0], one.attend(request, view)[0])


@by_backend
@pytest.mark.parametrize("spec", [*FORMATS, *KEPT])
def test_attention_is_over_the_rows_of_these_pages_alone(spec: str, backend: str) -> None:
    cache = grown(f"{spec},select=2:0", 900, batch=2)
    for count in (1, 4, 20):
        view, q = more(cache, count)
        found = chosen(q, view, "reference")
        if found is None:
            continue
        out = attend(q, view, backend=backend)
        columns = view.page_table.num_columns
        seen = torch.ones(2, HEADS, count, columns, dtype=torch.bool)
        for b in range(2):
            for t in range(count):
                at = columns - count + t
                seen[b, :, t, at + 1 :] = False
                if view.mask.window is not None:
                    first = max(0, at - view.mask.window + 1)
                    seen[b, :, t, view.mask.sinks : max(first, view.mask.sinks)] = False
                due = min(
                    view.page_table.layer_group.paging.count_due_pages(at + 1),
                    int(view.page_table.stop_sealed[b]),
                )
                for h in range(HEADS):
                    for n in set(range(due)) - set(found[b, h, t].tolist()):
                        begin = max(
                            n * view.page_table.layer_group.page, view.page_table.layer_group.sinks
                        )
                        seen[
                            b, h, t, begin : max(begin, (n + 1) * view.page_table.layer_group.page)
                        ] = False
        mask = seen.repeat_interleave(GROUP, 1)
        plain = attend(q, view._replace(selection=None), mask=mask, backend="reference")
        coarse = 2e-2 if "affine2" in spec or "v2" in spec else 4e-3
        torch.testing.assert_close(out, plain, rtol=coarse, atol=coarse)


def same_choice(cache: Cache) -> bool:
    """As one that was just read from a file, which worked out every summary anew."""
    fresh = Cache(spec=cache.spec)
    fresh.restore(cache.snapshot())
    (view, q), (other, _) = more(cache.fork()), more(fresh)
    one, two = chosen(q, view, "reference"), chosen(q, other, "reference")
    assert (one is None) == (two is None)
    assert one is None or two is None or torch.equal(one, two)
    return one is not None


@pytest.mark.parametrize(
    "spec", ["affine8", "affine4,window=800,sinks=5", "raw", "turbo4,tail=0,page=128"]
)
@pytest.mark.parametrize("seed", range(3))
def test_a_summary_is_of_what_lies_in_a_slot(spec: str, seed: int) -> None:
    """Slots are given back and taken again, in any life."""
    rng, cache = random.Random(seed), grown(f"{spec},select=1:0", 800)
    others, chose = list[Cache](), 0
    for _ in range(25):
        what = rng.choice(
            ("append", "append", "token", "rewind", "fork", "swap", "merge", "recode")
        )
        if what == "append":
            cache[0].append(*torch.randn(2, cache[0].batch, HEADS, rng.randint(1, 200), DIM))
        elif what == "token":
            view, q = more(cache)
            attend(q, view)
        elif what == "rewind":
            to = cache.reachable(max(1, cache.length - rng.choice((3, 70, 200))))
            cache.rewind(to or cache.length)
        elif what == "fork":
            others.append(cache.fork())
        elif what == "swap" and others:
            others.append(cache)
            cache = others.pop(rng.randrange(len(others) - 1))
        elif what == "merge" and others and cache[0].batch == 1:
            both = merge([cache, others.pop()])
            cache = both.extract(rng.randint(0, 1))
        elif what == "recode":
            cache.recode(f"{spec},select={rng.choice((1, 2))}:0")
        chose += same_choice(cache)
    assert chose > 5


@by_backend
def test_sequences_choose_for_themselves(backend: str) -> None:
    """Ragged as alone."""
    alone = [grown("affine8,select=3:0", n) for n in (200, 850, 1100)]
    together = merge([one.fork() for one in alone])
    q, rows = torch.randn(3, HEADS * GROUP, 1, DIM), torch.randn(2, 3, HEADS, 1, DIM)
    out = attend(q, together[0].append(*rows), backend=backend)
    for i, one in enumerate(alone):
        view = one[0].append(*rows[:, i : i + 1])
        torch.testing.assert_close(out[i : i + 1], attend(q[i : i + 1], view, backend=backend))


@by_backend
def test_tokens_of_a_draft_choose_as_they_would_one_by_one(backend: str) -> None:
    cache = grown("affine8,select=2:0,prefill=stored", 700)
    twin = cache.fork()
    rows, q = torch.randn(2, 1, HEADS, 9, DIM), torch.randn(1, HEADS * GROUP, 9, DIM)
    out = attend(q, cache[0].append(*rows), backend=backend)
    for t in range(9):
        view = twin[0].append(*rows[:, :, :, t : t + 1])
        one = attend(q[:, :, t : t + 1], view, backend=backend)
        torch.testing.assert_close(out[:, :, t : t + 1], one, rtol=1e-5, atol=1e-5)


def test_a_prompt_reads_all_unless_it_is_stored() -> None:
    cache, rows = grown("affine8,select=1:0", 500), torch.randn(2, 1, HEADS, 100, DIM)
    assert cache.fork()[0].append(*rows).selection is None
    assert cache.fork()[0].append(*rows, prefill="stored").selection is not None


def test_a_mask_that_is_a_tensor_reads_all_that_it_shows() -> None:
    """It may hide the pages that would be chosen."""
    view, q = more(grown("affine8,select=2:0", 700))
    mask = torch.rand(1, 1, 1, view.page_table.num_columns) < 0.5
    every = view._replace(selection=None)
    assert torch.equal(attend(q, view, mask=mask), attend(q, every, mask=mask))


def test_sinks_of_somebody_elses_mask_read_all() -> None:
    view, q = more(grown("affine8,select=2:0", 900))
    mask = Mask(window=500, sinks=4)
    every = view._replace(selection=None)
    assert torch.equal(attend(q, view, mask=mask), attend(q, every, mask=mask))
    narrow = Mask(window=700)  # 10 pages: 5 of them to choose among
    assert not torch.equal(attend(q, view, mask=narrow), attend(q, every, mask=narrow))


def test_a_view_of_what_a_chunk_let_go_knows_all_its_pages() -> None:
    """Bug: tables were taken for known that an extent of fewer pages shares."""
    cache = Cache(1, "affine8,window=600,sinks=0,tail=0,select=1:0")
    cache[0].append(*torch.randn(2, 1, HEADS, 1000, DIM))
    kept = cache.fork()
    view = cache[0].append(*torch.randn(2, 1, HEADS, 500, DIM), prefill="stored")
    q = torch.randn(1, HEADS * GROUP, 500, DIM)
    chosen(q[:, :, -1:], cache[0].view(), "reference")
    best(cache, view, q, chosen(q, view, "reference"))
    assert kept.length == 1000


def test_a_summary_that_grows_knows_no_more_than_its_bounds() -> None:
    """Bug: what was known was copied behind the bounds, which others may fill meanwhile."""
    storage: Any = grown("affine8,select=1:0", 300)[0].storage
    old = storage.sides["keys"].summary
    grown_ = storage._grow_tensor

    def filled(*given: Any) -> Tensor:
        found: Tensor = grown_(*given)
        if found.shape[2] == 2:  # bounds: another thread, whose view is an older one, fills them
            old.slot_versions[:] = 7
        return found

    storage._grow_tensor = filled
    storage.ensure_slots(1, 10_000)
    assert not (storage.sides["keys"].summary.of == 7).any()


def test_values_that_are_no_number_are_read() -> None:
    rows = torch.randn(2, 1, HEADS, 500, DIM)
    rows[0, 0, 0, 130, 3] = float("nan")
    cache = Cache(1, "raw,select=1:0")
    cache[0].append(*rows)
    view, q = more(cache)
    for backend in (
        ("reference", "native") if get_library().functions is not None else ("reference",)
    ):
        found = chosen(q, view, backend)
        assert found is not None and 2 in found[0, 0, 0].tolist()


def test_the_first_layers_read_all() -> None:
    layers: Any = parse("affine8,select=12%", 5).layers
    assert [layer.select for layer in layers] == [None] * 2 + [PageSelection(percent=12)] * 3
    layers = parse("affine8,select=7:1", 3).layers
    assert [layer.select for layer in layers] == [None] + [PageSelection(pages=7)] * 2


def test_a_window_of_fewer_pages_than_are_chosen_is_read_whole() -> None:
    view, q = more(grown("affine8,window=200,sinks=0,select=3:0", 600))
    assert chosen(q, view, "reference") is None

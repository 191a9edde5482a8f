"""Moves between devices whose kernels want pages otherwise: the same rows, read where they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from attention.kernels import needed
from cache.tagged import forward, layer, rows, same
from cache.tiled import Tiled
from kvant import Cache, CacheSpec, RecurrentSpec, attend, explain
from kvant.attention.native import NATIVE_TILES
from kvant.cache import storage
from kvant.contracts import Tiles
from kvant.native import get_library

TEXTS = (
    "raw",
    "affine8",
    "affine4/turbo3,tail=3",
    "turbo4v2,window=100,sinks=4",
    "affine8,window=200,sinks=0",
    "affine4,capacity=900",
    "affine8/raw,sinks=3",
)


@contextmanager
def devices_like(tiles: Tiles | None) -> Iterator[None]:
    """Every device wants pages to lie so: `None` is how a GPU does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(storage, "select_tiles", lambda device: tiles)
        yield


def grown(text: str, tiles: Tiles | None, count: int = 300, given: Tiles | None = None) -> Cache:
    """Always the same rows, on a device that wants them in `tiles`."""
    torch.manual_seed(1)
    cache = Cache(1, text, tiles=given)
    with devices_like(tiles):
        append(cache, 150)
        append(cache, count - 150)
    return cache


def append(cache: Cache, count: int) -> None:
    """All by the rule, so that it does not matter how many come at once."""
    batch = cache.batch or 2
    rows = torch.randn(batch, 2, count, 32), torch.randn(batch, 2, count, 48)
    cache[0].append(*rows, start=None if cache.length else [0, 9], prefill="stored")


def alike(cache: Cache, twin: Cache) -> None:
    """The same, byte for byte and where it lies."""
    same(cache.snapshot(), twin.snapshot())
    ours, theirs = cache[0].view(), twin[0].view()
    assert (ours.keys.tiles, cache.nbytes) == (theirs.keys.tiles, twin.nbytes)
    for side, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        for name, field in side.sealed.items():
            slots = (torch.from_numpy(v.page_table.list_sealed_slots()) for v in (ours, theirs))
            pages = field[next(slots)], other.sealed[name][next(slots)]
            assert torch.equal(*pages), name


def move(cache: Cache, tiles: Tiles | None) -> None:
    with devices_like(tiles):
        cache.move("cpu")


@pytest.mark.parametrize("at_once", [1, 3, 32])
@pytest.mark.parametrize(
    "way", [(NATIVE_TILES, None), (None, NATIVE_TILES)], ids=["from a CPU", "to a CPU"]
)
@pytest.mark.parametrize("text", TEXTS)
def test_pages_lie_as_if_they_had_been_made_there(
    text: str, way: tuple[Tiles | None, Tiles | None], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_PAGES_PER_MOVE", at_once)
    cache, there = (grown(text, tiles) for tiles in way)
    before = cache.snapshot()
    move(cache, way[1])
    same(cache.snapshot(), before)
    alike(cache, there)


def test_the_ways_of_the_test_above_differ() -> None:
    ours, theirs = (grown("affine8", tiles)[0].view().keys.sealed for tiles in (NATIVE_TILES, None))
    assert not torch.equal(ours["codes"][0], theirs["codes"][0])


@pytest.mark.parametrize("text", TEXTS)
def test_everything_goes_on_after_a_move(text: str) -> None:
    """Appends that seal more, rewinds, forks, selections, another recipe, restores."""
    cache, twin = grown(text, NATIVE_TILES), grown(text, None)
    move(cache, None)
    with devices_like(None):
        for one in (cache, twin):
            torch.manual_seed(2)
            append(one, 100)
            one.rewind(one.length - 5)
            append(one, 90)
        alike(cache, twin)
        q = torch.randn(2, 4, 1, 32)
        outs = [attend(q, one[0].view(), backend="reference") for one in (cache, twin)]
        assert torch.equal(*outs)
        back = grown(text, None)
        back.restore(cache.snapshot())
        for one in (cache.fork(), back):
            same(one.snapshot(), twin.snapshot())
        for one in (cache, twin):
            one.select(torch.tensor([1, 1, 0]))
            if "capacity" not in text:
                one.recode("affine8,window=90,sinks=0")
            torch.manual_seed(3)
            append(one, 70)
        alike(cache, twin)


def test_a_round_trip_leaves_everything_as_it_was() -> None:
    cache, twin = grown("affine4/turbo3", NATIVE_TILES), grown("affine4/turbo3", NATIVE_TILES)
    for tiles in (None, NATIVE_TILES):
        move(cache, tiles)
    alike(cache, twin)


def test_a_forward_that_was_moved_can_be_undone() -> None:
    cache, rows = Cache(2, "affine8,prefill=stored"), torch.randn(2, 1, 2, 100, 32)
    with devices_like(NATIVE_TILES):
        for state in cache:
            state.append(*rows)
        before = cache.snapshot()
        cache[0].append(*rows)  # seals more
    with devices_like(None):
        cache[0].move(torch.device("cpu"))
        assert (cache[0].length, cache[0].view().keys.tiles) == (200, None)
        cache.rollback()
        assert (cache[0].length, cache[0].view().keys.tiles) == (100, None)
    same(cache.snapshot(), before)


def test_tiles_that_were_asked_for_stay() -> None:
    cache = grown("affine8", NATIVE_TILES, given=Tiled())
    before = cache[0].view().keys.sealed["codes"]
    move(cache, None)
    assert cache[0].view().keys.tiles == Tiled()
    assert torch.equal(cache[0].view().keys.sealed["codes"][:2], before[:2])


def test_pages_are_moved_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all of them would be held three times."""
    cache, asked = grown("affine8", NATIVE_TILES, 64 * 40), []
    swap = storage.retile

    def spied(name, pages, old, new):
        asked.append(len(pages))
        return swap(name, pages, old, new)

    monkeypatch.setattr(storage, "retile", spied)
    move(cache, None)
    assert (
        max(asked)
        == storage.MAX_PAGES_PER_MOVE
        < len(cache[0].view().page_table.list_sealed_slots())
    )


def test_a_device_may_be_named_by_its_kind() -> None:
    """Rows that come later say which one it is."""
    cache = grown("affine8", NATIVE_TILES)
    cache.move("cpu:0")  # on which tensors say "cpu"
    append(cache, 3)
    assert cache.length == 303


def test_other_devices_take_pages_as_they_like_them(monkeypatch: pytest.MonkeyPatch) -> None:
    like = {"cpu": NATIVE_TILES, "meta": None}
    monkeypatch.setattr(storage, "select_tiles", lambda device: like[device.type])
    cache = grown("affine8", NATIVE_TILES)
    nbytes = cache.nbytes
    cache.move("meta")
    view = cache[0].view()
    assert (view.keys.tiles, view.keys.sealed["codes"].device.type) == (None, "meta")
    assert cache.nbytes == nbytes


@pytest.mark.skipif(get_library().functions is None, reason="no native library")
def test_what_comes_from_a_gpu_is_read_natively() -> None:
    cache = grown("affine8", None)
    assert "sealed pages that lie otherwise" in str(explain(cache[0].view()))
    cache.move("cpu")
    assert explain(cache[0].view()).backend == "native"


@needed
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")
def test_what_comes_from_a_cpu_is_read_by_kernels_for_gpus() -> None:
    cache, q = grown("affine8", NATIVE_TILES), torch.randn(2, 4, 1, 32)
    expected = attend(q, cache[0].view(), backend="reference")
    move(cache, None)
    assert torch.allclose(attend(q, cache[0].view(), backend="interpreted"), expected, atol=1e-5)


def test_a_move_goes_on_counting() -> None:
    recurs = CacheSpec((layer("affine8"), RecurrentSpec()))
    cache = Cache(None, recurs)
    forward(cache, 3, upto=1)
    cache.rollback()
    new = rows(0, 3)
    cache[0].append(new, new)
    cache[1].append(3, {"x": torch.zeros(1, 2)})
    changes, stats = cache.num_changes, cache.stats()
    assert stats["abandoned"] == 1 and stats["appends"] == 3
    cache.move("cpu")
    assert cache.stats() == stats
    assert cache.num_changes >= changes

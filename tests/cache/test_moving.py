"""Test moves between devices with different page layouts: equal rows, readable there."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from attention.kernels import needed
from cache.tagged import assert_same, forward, make_layer, make_rows
from cache.tiled import Tiled, make_selecting_cache
from kvant import Cache, CacheSpec, RecurrentSpec, attend, explain
from kvant.attention.native import NATIVE_TILES
from kvant.cache import layout
from kvant.contracts import Tiles
from kvant.native import get_library
from kvant.pages import storage

TEXTS = (
    "raw",
    "affine8",
    "affine4/turbo3,tail=3",
    "turbo4v2,window=100,sinks=4",
    "affine8,window=200,sinks=0",
    "affine4,capacity=900",
    "affine8/raw,sinks=3",
)


DEVICE_TILES: list[Tiles | None] = []  # the last one is in force


def get_device_tiles(device: torch.device) -> Tiles | None:
    return DEVICE_TILES[-1] if DEVICE_TILES else layout.select_tiles(device)


@contextmanager
def set_device_layout(tiles: Tiles | None) -> Iterator[None]:
    """Set the page layout of every device: `None` is the layout of a GPU."""
    DEVICE_TILES.append(tiles)
    try:
        yield
    finally:
        DEVICE_TILES.pop()


def make_cache(
    text: str, tiles: Tiles | None, count: int = 300, initial_tiles: Tiles | None = None
) -> Cache:
    """Return a cache with fixed rows on a device that stores pages in `tiles`."""
    torch.manual_seed(1)
    cache = make_selecting_cache(1, text, lambda device: initial_tiles or get_device_tiles(device))
    with set_device_layout(tiles):
        append_rows(cache, 150)
        append_rows(cache, count - 150)
    return cache


def append_rows(cache: Cache, count: int) -> None:
    """Append rows under the prefill rule, so that the chunk size does not matter."""
    batch = cache.batch or 2
    rows = torch.randn(batch, 2, count, 32), torch.randn(batch, 2, count, 48)
    cache[0].append(*rows, start=None if cache.length else [0, 9], prefill="stored")


def assert_same_layout(cache: Cache, expected: Cache) -> None:
    """Assert equal caches, byte for byte and in layout."""
    assert_same(cache.snapshot(), expected.snapshot())
    ours, theirs = cache[0].view(), expected[0].view()
    assert (ours.keys.tiles, cache.nbytes) == (theirs.keys.tiles, expected.nbytes)
    for side, other in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
        for name, field in side.sealed.items():
            slots = (torch.from_numpy(v.page_table.list_sealed_slots()) for v in (ours, theirs))
            pages = field[next(slots)], other.sealed[name][next(slots)]
            assert torch.equal(*pages), name


def move_cache(cache: Cache, tiles: Tiles | None) -> None:
    with set_device_layout(tiles):
        cache.move("cpu")


@pytest.mark.parametrize("at_once", [1, 3, 32])
@pytest.mark.parametrize(
    "way", [(NATIVE_TILES, None), (None, NATIVE_TILES)], ids=["from a CPU", "to a CPU"]
)
@pytest.mark.parametrize("text", TEXTS)
def test_moved_pages_equal_pages_built_on_the_target(
    text: str, way: tuple[Tiles | None, Tiles | None], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_PAGES_PER_MOVE", at_once)
    cache, target = (make_cache(text, tiles) for tiles in way)
    before = cache.snapshot()
    move_cache(cache, way[1])
    assert_same(cache.snapshot(), before)
    assert_same_layout(cache, target)


def test_compared_targets_differ_in_layout() -> None:
    ours, theirs = (
        make_cache("affine8", tiles)[0].view().keys.sealed for tiles in (NATIVE_TILES, None)
    )
    assert not torch.equal(ours["codes"][0], theirs["codes"][0])


@pytest.mark.parametrize("text", TEXTS)
def test_cache_continues_after_a_move(text: str) -> None:
    """Appends that seal pages, rewinds, forks, selections, another recipe, restores."""
    cache, reference = make_cache(text, NATIVE_TILES), make_cache(text, None)
    move_cache(cache, None)
    with set_device_layout(None):
        for copy_ in (cache, reference):
            torch.manual_seed(2)
            append_rows(copy_, 100)
            copy_.rewind(copy_.length - 5)
            append_rows(copy_, 90)
        assert_same_layout(cache, reference)
        q = torch.randn(2, 4, 1, 32)
        outs = [attend(q, copy_[0].view(), backend="reference") for copy_ in (cache, reference)]
        assert torch.equal(*outs)
        target = make_cache(text, None)
        target.restore(cache.snapshot())
        for copy_ in (cache.fork(), target):
            assert_same(copy_.snapshot(), reference.snapshot())
        for copy_ in (cache, reference):
            copy_.select(torch.tensor([1, 1, 0]))
            if "capacity" not in text:
                copy_.recode("affine8,window=90,sinks=0")
            torch.manual_seed(3)
            append_rows(copy_, 70)
        assert_same_layout(cache, reference)


def test_round_trip_restores_everything() -> None:
    cache, reference = (
        make_cache("affine4/turbo3", NATIVE_TILES),
        make_cache("affine4/turbo3", NATIVE_TILES),
    )
    for tiles in (None, NATIVE_TILES):
        move_cache(cache, tiles)
    assert_same_layout(cache, reference)


def test_moved_forward_can_be_rolled_back() -> None:
    cache = make_selecting_cache(2, "affine8,prefill=stored", get_device_tiles)
    rows = torch.randn(2, 1, 2, 100, 32)
    with set_device_layout(NATIVE_TILES):
        for state in cache:
            state.append(*rows)
        before = cache.snapshot()
        cache[0].append(*rows)  # seals pages
    with set_device_layout(None):
        cache[0].move(torch.device("cpu"))
        assert (cache[0].length, cache[0].view().keys.tiles) == (200, None)
        cache.rollback()
        assert (cache[0].length, cache[0].view().keys.tiles) == (100, None)
    assert_same(cache.snapshot(), before)


def test_requested_tiles_survive_a_move() -> None:
    cache = make_cache("affine8", NATIVE_TILES, initial_tiles=Tiled())
    before = cache[0].view().keys.sealed["codes"]
    move_cache(cache, None)
    assert cache[0].view().keys.tiles == Tiled()
    assert torch.equal(cache[0].view().keys.sealed["codes"][:2], before[:2])


def test_pages_move_in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all pages would exist three times."""
    cache, batch_sizes = make_cache("affine8", NATIVE_TILES, 64 * 40), []
    swap = storage.retile

    def record_batch(name, pages, old, new):
        batch_sizes.append(len(pages))
        return swap(name, pages, old, new)

    monkeypatch.setattr(storage, "retile", record_batch)
    move_cache(cache, None)
    assert (
        max(batch_sizes)
        == storage.MAX_PAGES_PER_MOVE
        < len(cache[0].view().page_table.list_sealed_slots())
    )


def test_device_may_be_named_by_its_type() -> None:
    """Later rows determine the device index."""
    cache = make_cache("affine8", NATIVE_TILES)
    cache.move("cpu:0")  # its tensors report "cpu"
    append_rows(cache, 3)
    assert cache.length == 303


def test_other_devices_choose_their_own_page_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    like = {"cpu": NATIVE_TILES, "meta": None}
    monkeypatch.setattr(layout, "select_tiles", lambda device: like[device.type])
    cache = make_selecting_cache(1, "affine8", layout.select_tiles)
    append_rows(cache, 300)
    nbytes = cache.nbytes
    cache.move("meta")
    view = cache[0].view()
    assert (view.keys.tiles, view.keys.sealed["codes"].device.type) == (None, "meta")
    assert cache.nbytes == nbytes


@pytest.mark.skipif(get_library().functions is None, reason="no native library")
def test_cache_from_a_gpu_is_read_by_cpu_kernels() -> None:
    cache = make_cache("affine8", None)
    assert "sealed pages in another arrangement" in str(explain(cache[0].view()))
    cache.move("cpu")
    assert explain(cache[0].view()).backend == "native"


@needed
@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter is off")
def test_cache_from_a_cpu_is_read_by_gpu_kernels() -> None:
    cache, q = make_cache("affine8", NATIVE_TILES), torch.randn(2, 4, 1, 32)
    expected = attend(q, cache[0].view(), backend="reference")
    move_cache(cache, None)
    assert torch.allclose(attend(q, cache[0].view(), backend="interpreted"), expected, atol=1e-5)


def test_move_keeps_the_counters() -> None:
    recurs = CacheSpec((make_layer("affine8"), RecurrentSpec()))
    cache = Cache(None, recurs)
    forward(cache, 3, num_appended=1)
    cache.rollback()
    new = make_rows(0, 3)
    cache[0].append(new, new)
    cache[1].append(3, {"x": torch.zeros(1, 2)})
    changes, stats = cache.holder.num_changes, cache.stats()
    assert stats["abandoned"] == 1 and stats["appends"] == 3
    cache.move("cpu")
    assert cache.stats() == stats
    assert cache.holder.num_changes >= changes


def test_move_frees_the_old_tensors() -> None:
    """Regression: the last forward kept them until the next one."""
    cache, rows = Cache(2, "affine8"), torch.randn(1, 2, 100, 32)
    for layer in cache:
        layer.append(rows, rows)
    old = [weakref.ref(layer.storage.sides["keys"].open) for layer in cache]
    cache[0].move(torch.device("meta"))
    assert old[0]() is None and old[1]() is not None
    cache.move("meta")
    assert old[1]() is None

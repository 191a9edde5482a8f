"""Test forged files with a valid checksum: refused before anything is allocated."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forged
from cache.tagged import assert_same, forward, make_layer, make_recipe, read_tags
from kvant import (
    Cache,
    CacheFileError,
    CacheSpec,
    RecurrentSpec,
    SharedSpec,
    SnapshotMismatch,
    load,
    save,
)
from kvant.codecs import Affine
from kvant.page_table import FIRST_OPEN, LENGTH
from kvant.pages import storage
from kvant.recipes import EmptySpec
from kvant.retention import KeepAll
from kvant.spec import language


def assert_refused(
    cache: Cache, edit: Callable[[dict[str, Any]], object], folder: Path, match: str
) -> None:
    save(cache, folder / "a")
    forged_file = forged.forge((folder / "a").read_bytes(), lambda entry, outer: edit(entry))
    (folder / "b").write_bytes(forged_file)
    with pytest.raises(CacheFileError, match=match):
        load(folder / "b")


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.laws)])
def test_forged_headers_are_refused_or_load_a_valid_cache(count: int) -> None:
    """In a separate process with bounded memory; a crash would end it, too."""
    run = [sys.executable, forged.__file__, "--count", str(count)]
    process = subprocess.run(run, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-3000:]
    outcomes = json.loads(process.stdout.splitlines()[-1])
    assert outcomes["refused"] > 0.4 * count and outcomes["taken"] > 0.04 * count, outcomes


def test_a_capacity_below_the_rows_of_the_file_is_refused(tmp_path: Path) -> None:
    """Regression: up to 16 rows were written past the end of a buffer of one."""
    cache = Cache(1, "raw,capacity=16")
    forward(cache, 16)
    assert_refused(
        cache,
        lambda entry: entry["spec"]["layers"][0].update(capacity=1),
        tmp_path,
        "16 tokens for a capacity of 1",
    )


@pytest.mark.parametrize("text", ["raw,capacity=3", "affine4,capacity=70"])
def test_a_snapshot_of_more_than_the_capacity_is_refused_and_changes_nothing(text: str) -> None:
    """Regression: rows were written past the buffer before the capacity was checked."""
    long, short = Cache(1, text.partition(",")[0]), Cache(1, text)
    forward(long, 100)
    forward(short, 2)
    before = short.snapshot()
    with pytest.raises(SnapshotMismatch, match="100 tokens for a capacity of"):
        short.restore(long.snapshot())
    assert_same(before, short.snapshot())


@pytest.mark.parametrize("count", [10_000_000, 2**31 - 1])
def test_missing_sinks_in_a_file_allocate_nothing(count: int, tmp_path: Path) -> None:
    """Regression: 5 GiB were allocated and cleared for a file of 111 KiB."""
    cache = Cache(1, "affine4,sinks=4,tail=0")
    forward(cache, 200)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert_refused(
        cache,
        lambda entry: entry["spec"]["layers"][0]["retention"].update(sinks=count),
        tmp_path,
        "open rows, for|keys.open is",
    )
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10, f"{grown} KiB"


def test_capacity_in_a_header_is_not_allocated_by_loading(tmp_path: Path) -> None:
    cache = Cache(1, "raw")
    forward(cache, 3)
    save(cache, tmp_path / "a")

    def edit(entry: Any, outer: Any) -> None:
        entry["spec"]["layers"][0]["capacity"] = 2**31 - 1

    (tmp_path / "b").write_bytes(forged.forge((tmp_path / "a").read_bytes(), edit))
    loaded = load(tmp_path / "b")
    assert loaded.nbytes_used == cache.nbytes_used <= loaded.nbytes <= cache.nbytes


def test_a_huge_step_in_a_header_is_refused(tmp_path: Path) -> None:
    """Regression: a rewind of the loaded cache allocated 549 GB, or failed to."""
    cache = Cache(1, "raw,step=64")
    forward(cache, 100)
    assert_refused(
        cache,
        lambda entry: entry["spec"]["layers"][0].update(step=2**31 - 1),
        tmp_path,
        "step is 2147483647; allowed: 1 to 65536",
    )


def test_pages_starting_out_of_range_are_refused(tmp_path: Path) -> None:
    """Regression: no further page was sealed, and attention missed the oldest ones."""
    cache = Cache(1, "affine4")
    forward(cache, 130)
    snapshot = cache.snapshot()
    snapshot.tensors["0/numbers"][0, 2:4] = 2**52
    with pytest.raises(SnapshotMismatch, match="sealed"):
        cache.restore(snapshot)


@pytest.mark.parametrize(("page", "batch"), [(2**24, 1), (2**23, 3), (2**40, 1)])
def test_length_with_a_huge_page_table_is_refused(page: int, batch: int) -> None:
    """Regression: a window of 70 rows with an entry per earlier page: gigabytes for 15 KB."""
    cache = Cache(1, "raw,window=70,sinks=0")
    forward(cache, 300, batch=batch)
    snapshot = cache.snapshot()
    numbers = snapshot.tensors["0/numbers"]
    shift = page - numbers[0, FIRST_OPEN]
    numbers[0, FIRST_OPEN] += shift
    numbers[0, LENGTH] += shift * 64
    with pytest.raises(SnapshotMismatch, match=r"tables of \d+ pages.*16777216 at most"):
        cache.restore(snapshot)
    assert read_tags(cache[0]) == list(range(230, 300))


@pytest.mark.parametrize("page", [2**23, 2**31 - 64])
@pytest.mark.parametrize("text", ["raw", "raw,sinks=4"])
def test_pages_far_beyond_the_rows_of_the_file_allocate_nothing(
    page: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: one page of 2**31 rows was reserved for 10 of them, and allocated on a GPU."""
    cache = Cache(2, text)
    forward(cache, 10, batch=2)
    monkeypatch.setattr(storage, "reserve_tensor", None)

    def edit(entry: dict[str, Any]) -> None:
        for spec in entry["spec"]["layers"]:
            spec["page"] = page

    assert_refused(
        cache, edit, tmp_path, f"page={page}.* bytes for .* of rows, .* at most.* smaller page"
    )


def test_file_that_runs_out_of_memory_is_refused_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise MemoryError("2 bytes are not to be had")

    cache = Cache(1, "raw")
    forward(cache, 10)
    monkeypatch.setattr(storage, "_map_memory", none)
    monkeypatch.setattr(storage, "MIN_MAPPING_BYTES", 0)
    save(cache, tmp_path / "a")
    with pytest.raises(CacheFileError, match=f"{tmp_path / 'a'}.*2 bytes are not to be had"):
        load(tmp_path / "a")


@pytest.mark.parametrize("page", [4096, 2**16])
def test_large_pages_with_few_rows_round_trip(page: int, tmp_path: Path) -> None:
    cache = Cache(1, make_recipe(Affine(8), KeepAll(), page=page))
    forward(cache, 1, batch=3)
    save(cache, tmp_path / "a")
    assert_same(load(tmp_path / "a").snapshot(), cache.snapshot())


def test_zero_byte_rows_do_not_determine_a_frame_width() -> None:
    """[0, 1, 2**40] needs no byte of a file; its signs would need terabytes."""
    cache = Cache(1, "turbo4")
    forward(cache, 1)
    snapshot = cache.snapshot()
    for name in ("0/keys.open", "0/values.open"):
        snapshot.tensors[name] = torch.empty(0, 1, 2**40)  # type: ignore[index]
    with pytest.raises(SnapshotMismatch, match="is needed"):
        cache.restore(snapshot)


def test_header_layers_are_checked_without_quadratic_copies() -> None:
    """Regression: the work was quadratic: 300,000 layers in a file of 7 MB took minutes."""

    class Layers(tuple[Any, ...]):
        def __getitem__(self, key: Any) -> Any:
            assert not isinstance(key, slice), "a copy for every layer"
            return super().__getitem__(key)

    spec = CacheSpec(Layers([make_layer("raw"), EmptySpec(), SharedSpec(0)]))
    assert language.check_spec(spec) is spec


def test_header_layer_count_is_limited_like_a_spec(tmp_path: Path) -> None:
    cache = Cache(1, "raw")
    forward(cache, 1)
    assert_refused(
        cache,
        lambda entry: entry["spec"]["layers"].extend([{"kind": "empty"}] * language.MAX_LAYERS),
        tmp_path,
        f"allowed: at most {language.MAX_LAYERS}",
    )


def make_checksum(raw: bytes) -> bytes:
    position = raw.index(forged.MARK) + len(forged.MARK)
    return raw[position : position + 64]


def test_duplicate_tensor_name_is_refused(tmp_path: Path) -> None:
    cache = Cache(None, CacheSpec((make_layer("raw"), RecurrentSpec())))
    cache[0].append(*torch.randn(2, 1, 1, 3, 8))
    cache[1].append(3, {"x": torch.zeros(1, 2)})
    save(cache, tmp_path / "a")
    raw = (tmp_path / "a").read_bytes()
    stop = 8 + int.from_bytes(raw[:8], "little")
    header, body = raw[8:stop].replace(make_checksum(raw), b"0" * 64), raw[stop:]
    length, start = rb"\"1/now\": 3", b'"0/numbers":'
    for old, new in ((length, length + b", " + length), (start, start + b"0," + start)):
        assert header.count(old) == 1
        (tmp_path / "b").write_bytes(forged.sign(header.replace(old, new), body))
        with pytest.raises(CacheFileError, match="occurs twice"):
            load(tmp_path / "b")

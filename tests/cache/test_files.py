"""Test a cache in a file: saved caches round-trip; anything else is refused before it is loaded."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

import kvant.cache.files
from cache.tagged import assert_same, forward, make_layer, read_tags
from cache.tiled import Tiled, make_tiled_cache
from kvant import (
    Cache,
    CacheFileError,
    CacheSpec,
    GroupSpec,
    RecurrentSpec,
    SharedSpec,
    attend,
    load,
    save,
)

SPECS = (
    "raw",
    "raw,sinks=3",
    "bf16",
    "affine8",
    "affine4,rotate",
    "turbo4v2",
    "raw/affine8",
    "fp8/affine4",
    "affine8,window=70,sinks=4",
    "raw,window=9,sinks=0,capacity=500",
    "affine8,start=400",
    "affine8,edge=1:raw",
)


def make_filled_cache(text: str, count: int = 200, batch: int = 2, padded: bool = False) -> Cache:
    cache = Cache(3, text)
    start = [0, 70][:batch] if padded else None
    for state in cache:
        keys, values = torch.randn(2, batch, 2, count, 32)
        state.append(keys, values, start=start)
    return cache


def make_hybrid() -> Cache:
    group = GroupSpec((("rows", make_layer("affine8")), ("memory", RecurrentSpec(4))))
    cache = Cache(None, CacheSpec((make_layer("raw"), group, RecurrentSpec(), SharedSpec(0))))
    for count in (70, 60):
        cache[0].append(*torch.randn(2, 1, 1, count, 8))
        cache[1]["rows"].append(*torch.randn(2, 1, 1, count, 8))
        cache[1]["memory"].append(count, {"x": torch.randn(1, 3), "n": torch.tensor([count])})
        cache[2].append(count, {"conv": torch.randn(1, 4, 2)})
        cache.checkpoint()
    return cache


def round_trip(cache: Cache, folder: Path) -> Cache:
    save(cache, folder / "a.kv")
    return load(folder / "a.kv")


@pytest.mark.parametrize("text", SPECS)
@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_loaded_cache_equals_the_saved_one_and_continues_like_it(
    text: str, padded: bool, tmp_path: Path
) -> None:
    cache = make_filled_cache(text, padded=padded)
    loaded = round_trip(cache, tmp_path)
    assert loaded.spec == cache.spec
    assert (loaded.length, loaded.num_rows) == (cache.length, cache.num_rows)
    # A header states the growth policy, not the allocation: whole pages of the stored rows.
    assert loaded.nbytes_used == cache.nbytes_used <= loaded.nbytes <= cache.nbytes
    assert_same(cache.snapshot(), loaded.snapshot())
    for count in (1, 100, 1):
        keys, values = torch.randn(2, 2, 2, count, 32)
        q = torch.randn(2, 4, count, 32)
        for first, second in zip(cache, loaded, strict=True):
            outs = [attend(q, state.append(keys, values)) for state in (first, second)]
            assert torch.equal(*outs)
    assert_same(cache.snapshot(), loaded.snapshot())
    assert loaded.nbytes <= cache.nbytes
    loaded.state.pools.check()


def test_rewind_reaches_equally_far_in_a_loaded_cache(tmp_path: Path) -> None:
    for text in ("affine8", "affine8,window=70,sinks=0", "raw,window=70,sinks=0"):
        cache = make_filled_cache(text)
        loaded = round_trip(cache, tmp_path)
        for each in (cache, loaded):
            each.rewind(184)
        assert_same(cache.snapshot(), loaded.snapshot())


def test_empty_cache_round_trips(tmp_path: Path) -> None:
    loaded = round_trip(Cache(2, "affine8"), tmp_path)
    assert (loaded.length, loaded.nbytes, len(loaded)) == (0, 0, 2)
    forward(loaded, 3)
    assert read_tags(loaded[1]) == [0, 1, 2]


def test_recurrent_grouped_and_shared_layers_round_trip(tmp_path: Path) -> None:
    """Regression: a checkpoint at the current length shares its tensors, which could not be
    saved.
    """
    cache = make_hybrid()
    loaded = round_trip(cache, tmp_path)
    assert_same(cache.snapshot(), loaded.snapshot())
    assert loaded[3] is loaded[0]
    for each in (cache, loaded):
        each.rewind(70)
    assert_same(cache.snapshot(), loaded.snapshot())


def test_tiled_pages_round_trip(tmp_path: Path) -> None:
    plain, tiled = Cache(1, "affine8"), make_tiled_cache(1, "affine8", Tiled())
    rows = torch.randn(1, 2, 200, 32)
    for cache in (plain, tiled):
        cache[0].append(rows, rows)
    assert_same(plain.snapshot(), round_trip(tiled, tmp_path).snapshot())


def test_extracted_sequence_saves_its_rows_only(tmp_path: Path) -> None:
    """Such rows are a contiguous slice of a larger buffer."""
    cache = Cache(1, "raw,capacity=10000")
    forward(cache, 3)
    assert read_tags(round_trip(cache, tmp_path)[0]) == [0, 1, 2]
    assert (tmp_path / "a.kv").stat().st_size < 2500


def test_the_same_cache_gives_the_same_bytes(tmp_path: Path) -> None:
    cache = make_filled_cache("affine8,window=70,sinks=4")
    files = [tmp_path / name for name in "abcd"]
    for path in files:
        save(cache, path)
    assert len({path.read_bytes() for path in files}) == 1


def test_only_committed_tokens_are_saved(tmp_path: Path) -> None:
    cache = make_filled_cache("raw")
    before = cache.snapshot()
    cache[0].append(*torch.randn(2, 2, 2, 5, 32))
    assert_same(before, round_trip(cache, tmp_path).snapshot())


def test_a_loaded_cache_does_not_need_its_file(tmp_path: Path) -> None:
    cache = make_filled_cache("raw")
    loaded = round_trip(cache, tmp_path)
    path = tmp_path / "a.kv"
    path.write_bytes(b"\0" * path.stat().st_size)
    path.unlink()
    assert_same(cache.snapshot(), loaded.snapshot())


def test_path_may_be_a_string(tmp_path: Path) -> None:
    save(make_filled_cache("raw"), str(tmp_path / "a.kv"))
    assert load(str(tmp_path / "a.kv")).length == 200


def assert_refused(path: Path, problem: str = "") -> None:
    """Assert that loading raises one line that names the file and the problem."""
    with pytest.raises(CacheFileError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    assert re.search(problem, message)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "a.kv"
    torch.manual_seed(0)
    save(make_filled_cache("affine8,window=70,sinks=4", 150, batch=1), path)
    return path.read_bytes()


def test_a_file_cut_short_is_refused(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.kv"
    for size in range(0, len(good), 97):
        path.write_bytes(good[:size])
        assert_refused(path)
    path.write_bytes(good[:-1])
    assert_refused(path, "corrupt")


def test_file_with_trailing_bytes_is_refused(good: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.kv").write_bytes(good + b"\0")
    assert_refused(tmp_path / "a.kv", "corrupt")


def test_any_changed_byte_is_detected(good: bytes, tmp_path: Path) -> None:
    path, draw = tmp_path / "a.kv", random.Random(0)
    header = 8 + int.from_bytes(good[:8], "little")
    places = [draw.randrange(header) for _ in range(150)]
    places += [draw.randrange(header, len(good)) for _ in range(150)]
    for place in places:
        data = bytearray(good)
        data[place] ^= 1 << draw.randrange(8)
        path.write_bytes(data)
        assert_refused(path)


FOREIGN: dict[str, bytes] = {
    "an empty file": b"",
    "text": b"Once upon a time there was a cache.\n" * 50,
    "zeros": b"\0" * 500,
    "a long header": b"\xff" * 8 + b"{}",
    "a header that is no JSON": (9).to_bytes(8, "little") + b"{not JSON" + b"\0" * 9,
    "a header that is a list": (2).to_bytes(8, "little") + b"[]",
    "an empty header": (2).to_bytes(8, "little") + b"{}",
    "a deep header": (200000).to_bytes(8, "little") + b'{"a":' * 40000,
    "metadata that is a number": (18).to_bytes(8, "little") + b'{"__metadata__":7}',
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_file_of_another_format_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.kv").write_bytes(data)
    assert_refused(tmp_path / "a.kv", "not a kvant cache")


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}], ids=["plain", "with metadata"])
def test_foreign_safetensors_file_is_refused(metadata: Any, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors", metadata=metadata)
    assert_refused(tmp_path / "model.safetensors", "not a kvant cache")


def test_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.kv"):
        load(tmp_path / "none.kv")


def forge(
    good: bytes,
    path: Path,
    entry: Callable[[dict], Any] = lambda entry: None,
    tensors: Callable[[dict], Any] = lambda tensors: None,
) -> None:
    """Write a file with an edited header and a valid checksum."""
    source = path.with_suffix(".source")
    source.write_bytes(good)
    with kvant.cache.files.safe_open(source, framework="pt") as file:
        parts = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        header = json.loads(file.metadata()[kvant.cache.files.METADATA_KEY])
    entry(header)
    tensors(parts)
    header["checksum"] = kvant.cache.files.BLANK_CHECKSUM
    kvant.cache.files._write_file(parts, path, header)


def test_forged_file_without_edits_loads(good: bytes, tmp_path: Path) -> None:
    """Otherwise the tests below could not fail."""
    forge(good, tmp_path / "a.kv")
    assert load(tmp_path / "a.kv").length == 150


def put(*path: Any) -> Callable[[Any], None]:
    """`put("a", 0, "b", value)` sets [a][0][b]."""
    *way, last, value = path

    def edit(target: Any) -> None:
        for step in way:
            target = target[step]
        target[last] = value

    return edit


@pytest.mark.parametrize("version", [0, 1, 3, "2", None, [2]])
def test_another_version_is_refused(version: Any, good: bytes, tmp_path: Path) -> None:
    forge(good, tmp_path / "a.kv", put("version", version))
    assert_refused(
        tmp_path / "a.kv", "version .* of the format, 2 is needed: .* save the new cache$"
    )


HEADERS: dict[str, Callable[[dict], Any]] = {
    "another format": put("spec", "layers", 0, "keys", "bits", 4),
    "another group": put("spec", "layers", 0, "values", "group", 16),
    "another page": put("spec", "layers", 0, "page", 128),
    "another window": put("spec", "layers", 0, "retention", "window", 140),
    "no window": put("spec", "layers", 0, "retention", {"name": "all", "sinks": 4}),
    "no sinks": put("spec", "layers", 0, "retention", "sinks", 0),
    "sinks of more pages": put("spec", "layers", 0, "retention", "sinks", 70),
    "another dtype": put("spec", "layers", 0, "dtype", "bfloat16"),
    "values inside keys": put("spec", "layers", 0, "value_dim", 8),
    "a capacity it is past": put("spec", "layers", 0, "capacity", 100),
    "a codec nobody knows": put("spec", "layers", 0, "keys", "name", "os.system"),
    "a field nobody knows": put("spec", "layers", 0, "other", 1),
    "a window of text": put("spec", "layers", 0, "retention", "window", "70"),
    "no layers": put("spec", "layers", []),
    "fewer layers": lambda entry: entry["spec"]["layers"].pop(),
    "more layers": lambda entry: entry["spec"]["layers"].append(entry["spec"]["layers"][0]),
    "another kind of layer": put("spec", "layers", 0, {"kind": "recurrent"}),
    "a shared layer": put("spec", "layers", 2, {"kind": "shared", "layer": 0}),
    "a spec of text": put("spec", "raw"),
    "a spec of nothing": put("spec", None),
    "no spec": lambda entry: entry.pop("spec"),
    "no numbers": lambda entry: entry.pop("numbers"),
    "numbers in a list": put("numbers", []),
    "an unknown number": put("numbers", "0/other", 1),
    "a number of nobody": put("numbers", "9/length", 1),
}


@pytest.mark.parametrize("edit", HEADERS.values(), ids=HEADERS)
def test_a_header_that_does_not_fit_the_tensors_is_refused(
    edit: Callable[[dict], Any], good: bytes, tmp_path: Path
) -> None:
    forge(good, tmp_path / "a.kv", edit)
    assert_refused(tmp_path / "a.kv", "not a cache that can be restored")


LENGTH, PADDING, FIRST_SEALED, STOP_SEALED, FIRST_OPEN, BEGINS = range(6)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *((LENGTH, n) for n in (-1, 0, 7, 149, 151, 2**31, 2**62)),
        *((PADDING, n) for n in (-1, 2**62)),
        *((FIRST_SEALED, n) for n in (-1, 0, 2, 7, 2**31, 2**62)),
        *((STOP_SEALED, n) for n in (-1, 0, 1, 3, 2**31, 2**62)),
        *((FIRST_OPEN, n) for n in (-1, 0, 1, 3, 2**31, 2**62)),
        *((BEGINS, n) for n in (-1, 81, 2**31, 2**62)),
    ],
)
def test_numbers_out_of_range_are_refused(
    column: int, value: int, good: bytes, tmp_path: Path
) -> None:
    def edit(tensors: dict) -> None:
        numbers = tensors["0/numbers"].clone()
        assert numbers.tolist() == [[150, 0, 1, 2, 2, 0]]
        numbers[0, column] = value
        tensors["0/numbers"] = numbers

    forge(good, tmp_path / "a.kv", tensors=edit)
    assert_refused(tmp_path / "a.kv", "not a cache that can be restored")


@pytest.mark.parametrize("value", [-1, 2**64, 10**30, 1.5, "150", None, True, [150]])
def test_numbers_of_the_header_out_of_range_are_refused(value: Any, tmp_path: Path) -> None:
    save(make_hybrid(), tmp_path / "good.kv")
    good = (tmp_path / "good.kv").read_bytes()
    forge(good, tmp_path / "a.kv", put("numbers", "2/now", value))
    assert_refused(tmp_path / "a.kv", "not a cache that can be restored")


def test_a_length_beyond_what_tensors_count_is_refused(tmp_path: Path) -> None:
    """Regression: under a window such numbers are consistent, and failed at the next append."""
    cache = Cache(1, "raw,window=9,sinks=0")
    forward(cache, 100)
    save(cache, tmp_path / "good.kv")

    def shift(tensors: dict) -> None:
        numbers = tensors["0/numbers"].clone()
        numbers[:, LENGTH] += 64 << 50
        numbers[:, FIRST_OPEN] += 1 << 50
        tensors["0/numbers"] = numbers

    forge((tmp_path / "good.kv").read_bytes(), tmp_path / "a.kv", tensors=shift)
    assert_refused(tmp_path / "a.kv", "numbers")


TENSORS: dict[str, Callable[[dict], Any]] = {
    "one missing": lambda t: t.pop("1/keys.codes"),
    "one too many": put("1/other", torch.zeros(1)),
    "one of nobody": put("7/numbers", torch.zeros(1, 6, dtype=torch.int64)),
    "another batch": lambda t: t.update({"0/numbers": t["0/numbers"].repeat(2, 1)}),
    "another layer's length": lambda t: t.update({"0/numbers": t["0/numbers"] + 1}),
    "integers for open rows": lambda t: t.update({"0/keys.open": t["0/keys.open"].int()}),
    "fewer open rows": lambda t: t.update({"0/keys.open": t["0/keys.open"][1:].clone()}),
    "no open rows": lambda t: t.update({"0/keys.open": t["0/keys.open"][:0].clone()}),
    "no heads": lambda t: t.update({"0/keys.open": t["0/keys.open"][:, :0].clone()}),
    "no channels": lambda t: t.update({"0/keys.open": t["0/keys.open"][..., :0].clone()}),
    "fewer pages": lambda t: t.update({"0/keys.codes": t["0/keys.codes"][1:].clone()}),
    "shorter pages": lambda t: t.update({"0/keys.codes": t["0/keys.codes"][:, :, 1:].clone()}),
    "narrower codes": lambda t: t.update({"0/keys.codes": t["0/keys.codes"][..., 1:].clone()}),
    "no dimensions": lambda t: t.update(
        {name: torch.zeros((), dtype=t[name].dtype) for name in ("0/keys.open", "0/numbers")}
    ),
    "scales of another type": lambda t: t.update({"0/keys.scale": t["0/keys.scale"].float()}),
}


@pytest.mark.parametrize("edit", TENSORS.values(), ids=TENSORS)
def test_tensors_that_do_not_fit_are_refused(
    edit: Callable[[dict], Any], good: bytes, tmp_path: Path
) -> None:
    forge(good, tmp_path / "a.kv", tensors=edit)
    assert_refused(tmp_path / "a.kv", "not a cache that can be restored")


@pytest.mark.parametrize("part", [1, 2], ids=["heads", "channels"])
def test_raw_rows_without_page_table_are_refused(part: int, tmp_path: Path) -> None:
    """No codec checks raw rows. Regression: rows without heads loaded as an unreadable cache."""
    cache = Cache(1, "raw")
    forward(cache, 3)
    save(cache, tmp_path / "good.kv")
    shape = [3, 1, 8]
    shape[part] = 0

    def edit(tensors: dict) -> None:
        tensors.update({f"0/{side}.open": torch.zeros(shape) for side in ("keys", "values")})

    forge((tmp_path / "good.kv").read_bytes(), tmp_path / "a.kv", tensors=edit)
    assert_refused(tmp_path / "a.kv", "not a cache that can be restored")


ERRORS = (OSError(28, "No space left on device"), SafetensorError("mid-way"), KeyboardInterrupt())


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_failed_write_leaves_only_the_older_file(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = make_filled_cache("raw", 10), make_filled_cache("raw", 20)
    save(old, tmp_path / "a.kv")
    before = (tmp_path / "a.kv").read_bytes()

    def fails(tensors: dict, path: Path, metadata: dict) -> None:
        save_file(tensors, path, metadata=metadata)
        Path(path).write_bytes(Path(path).read_bytes()[:100])
        raise error

    monkeypatch.setattr(kvant.cache.files, "save_file", fails)
    with pytest.raises((OSError, KeyboardInterrupt)):
        save(new, tmp_path / "a.kv")
    assert [path.name for path in tmp_path.iterdir()] == ["a.kv"]
    assert (tmp_path / "a.kv").read_bytes() == before
    assert_same(old.snapshot(), load(tmp_path / "a.kv").snapshot())


def test_failed_first_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(kvant.cache.files, "save_file", fails)
    with pytest.raises(OSError, match="no space"):
        save(make_filled_cache("raw"), tmp_path / "a.kv")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_full_disk_error_names_the_requested_path(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os_message = f"Error while serializing: I/O error: {os.strerror(number)} (os error {number})"

    def fails(tensors: dict, path: Path, metadata: dict) -> None:
        raise SafetensorError(os_message)

    monkeypatch.setattr(kvant.cache.files, "save_file", fails)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        save(make_filled_cache("raw"), tmp_path / "a.kv")
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "a.kv"))
    assert list(tmp_path.iterdir()) == []


def test_file_size_limit_error_names_the_requested_path(
    tmp_path: Path,
) -> None:
    """The kernel enforces the limit: no file of this process may exceed 4 KB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as caught:
            save(make_filled_cache("raw", 200), tmp_path / "a.kv")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(tmp_path / "a.kv")
    assert list(tmp_path.iterdir()) == []


def test_read_only_disk_error_names_the_requested_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Path, *args: Any, **more: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "touch", refuses)
    monkeypatch.setattr(Path, "unlink", refuses)
    with pytest.raises(OSError, match="Read-only") as caught:
        save(make_filled_cache("raw"), tmp_path / "a.kv")
    assert caught.value.filename == str(tmp_path / "a.kv")


def test_missing_folder_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        save(make_filled_cache("raw"), tmp_path / "none" / "a.kv")
    assert list(tmp_path.iterdir()) == []


def test_an_older_file_is_replaced(tmp_path: Path) -> None:
    save(make_filled_cache("raw", 10), tmp_path / "a.kv")
    save(make_filled_cache("affine8", 20), tmp_path / "a.kv")
    assert load(tmp_path / "a.kv").length == 20
    assert [path.name for path in tmp_path.iterdir()] == ["a.kv"]


def test_open_rows_that_start_after_the_sealed_pages_are_refused(tmp_path: Path) -> None:
    """Regression: rows between the two are not stored; a rewind read uninitialized memory."""
    cache = Cache(1, "affine8,window=64,sinks=0,tail=128,slack=256")
    for _ in range(10):
        cache[0].append(*torch.randn(2, 1, 1, 100, 8))
    save(cache, tmp_path / "good")
    first = int(cache.shared_snapshot().tensors["0/numbers"][0, FIRST_OPEN])

    def cut(parts: dict) -> None:
        numbers = parts["0/numbers"].clone()
        numbers[0, FIRST_OPEN] = 15
        parts["0/numbers"] = numbers
        for name in ("0/keys.open", "0/values.open"):
            parts[name] = parts[name][64 * (15 - first) :].clone()

    forge((tmp_path / "good").read_bytes(), tmp_path / "bad", tensors=cut)
    with pytest.raises(CacheFileError, match="open pages from 15 on, 13 are due at 1000"):
        load(tmp_path / "bad")


def test_missing_sealed_pages_are_refused(tmp_path: Path) -> None:
    save(make_filled_cache("affine8", 200, 1), tmp_path / "good")

    def drop(parts: dict) -> None:
        for name in [name for name in parts if name.endswith((".codes", ".scale", ".bias"))]:
            parts[name] = parts[name][:0].clone()
        for name in [name for name in parts if name.endswith("numbers")]:
            parts[name] = parts[name].clone()
            parts[name][:, STOP_SEALED] = 0

    forge((tmp_path / "good").read_bytes(), tmp_path / "bad", tensors=drop)
    with pytest.raises(CacheFileError, match="no sealed pages, 3 are due"):
        load(tmp_path / "bad")


def test_a_frame_of_another_width_is_refused(tmp_path: Path) -> None:
    """Regression: it loaded, and failed at the first attention."""
    save(make_filled_cache("affine8", 70, 1), tmp_path / "good")
    frame = {"name": "diagonal", "scale": [[1.0, 2.0]]}

    def scale(entry: dict) -> None:
        entry["spec"]["layers"][0]["keys"]["frame"] = frame

    forge((tmp_path / "good").read_bytes(), tmp_path / "bad", scale)
    with pytest.raises(CacheFileError):
        load(tmp_path / "bad")


def test_rows_without_tokens_are_refused(tmp_path: Path) -> None:
    save(make_filled_cache("raw", 5, 1), tmp_path / "good")

    def forget(parts: dict) -> None:
        parts.update({name: parts[name] * 0 for name in parts if name.endswith("numbers")})

    forge((tmp_path / "good").read_bytes(), tmp_path / "bad", tensors=forget)
    with pytest.raises(CacheFileError, match=r"keys\.open is .* \[5, 2, 32\], .* \[0, 2, 32\] is"):
        load(tmp_path / "bad")


def test_batch_within_its_padding_round_trips(tmp_path: Path) -> None:
    """Regression: a file of a padded batch during prefill could be written and not read."""
    cache = Cache(1, "raw")
    cache[0].append(*torch.randn(2, 2, 1, 4, 8), start=[0, 10])
    save(cache, tmp_path / "early")
    assert_same(cache.snapshot(), load(tmp_path / "early").snapshot())


def test_file_has_default_permissions(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    save(make_filled_cache("raw", 5), tmp_path / "cache")
    assert (tmp_path / "cache").stat().st_mode == (tmp_path / "plain").stat().st_mode

"""Test the law of all stores: a put blob stays until it is dropped; invalid names are refused."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256

import pytest
import torch

from kvant.errors import StoreError
from kvant.stores import Blob, BlobPayload, Store, Tiers, open_store
from kvant.stores.contract import HEAD, MAGIC

SIZES = (1, 100_000, 6_000_000)
NO_PAGES = (
    *("", "/", "ab", "ab/", "/00000000", "ab/0000000", "ab/0000000g", "ab/000000000/0"),
    *("../00000000", "ab/../00000000", "ab/00000000\n", "AB/00000000", "ab/" + "0" * 129),
    *("a*b/00000000", "ab/0000000٣", "a_b/00000000", "ab//00000000", "./00000000"),
)
NO_PARTS = (
    "",
    ".",
    "..",
    "k0.part",
    "K0",
    "0k",
    "-k",
    "k/0",
    "../k0",
    "k 0",
    "k0\n",
    "k*",
    "k٣",
    "k" * 129,
)


def page_key(number: int, test: str = "") -> str:
    """Return a page key unique to a test."""
    return f"ab-{number % 3}/" + sha256(f"{test} {number}".encode()).hexdigest()


def make_blob(name: str, part: str = "k0-1", seed: int = 0) -> Blob:
    rows = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(seed))
    payload = BlobPayload.from_fields({"0/keys.open": rows})
    metadata = {"model": "llama", "spec": "raw"}
    return Blob(name, part, page_key(99), (1, 2, 3), payload, {"n": 5}, 3, metadata)


@pytest.mark.parametrize("buffer_type", [bytes, bytearray])
@pytest.mark.parametrize("size", SIZES)
def test_blob_stays_until_it_is_dropped(
    store: Store, size: int, buffer_type: type[bytes] | type[bytearray]
) -> None:
    first_, other, third = (page_key(number, f"put {size} {buffer_type}") for number in range(3))
    head = HEAD.pack(MAGIC, 1, 1)  # a store reads a large blob only if its head is valid
    first, second = buffer_type(head + b"\x00\xff" * size), buffer_type(head + b"other" * size)
    store.put(first_, "k0-1", first)
    store.put(first_, "a-0123456789abcdef-64", second)
    store.put(third, "k1-12", first)
    parts = frozenset({"k0-1", "a-0123456789abcdef-64"})
    assert store.has([first_, other, third, first_]) == [parts, frozenset(), {"k1-12"}, parts]
    assert store.get(first_, "k0-1") == first and store.get(third, "k1-12") == first
    assert store.get(first_, "a-0123456789abcdef-64") == second
    assert store.get(first_, "k1-12") is None and store.get(other, "k0-1") is None
    store.drop(first_, "k0-1")
    assert store.get(first_, "k0-1") is None
    assert store.has([first_]) == [{"a-0123456789abcdef-64"}]
    store.drop(first_, "a-0123456789abcdef-64")
    store.drop(third, "k1-12")
    assert store.has([first_, third]) == [frozenset(), frozenset()]


def test_missing_blob_raises_nothing(store: Store) -> None:
    name = page_key(0, "absent")
    assert store.has([]) == []
    assert store.has([name]) == [frozenset()]
    assert store.get(name, "k0-1") is None
    store.drop(name, "k0-1")


def test_existing_blob_is_not_overwritten(store: Store) -> None:
    name = page_key(0, "stays")
    store.put(name, "k0-1", b"first")
    store.put(name, "k0-1", b"second")
    assert store.get(name, "k0-1") == b"first"


def test_many_pages_are_written_and_read_at_once(store: Store) -> None:
    pages = [page_key(number, "many") for number in range(100)]
    for name in pages[::3]:
        store.put(name, "k0-1", b"x")
    has = [frozenset({"k0-1"} if number % 3 == 0 else ()) for number in range(100)]
    assert store.has(pages) == has


def test_many_threads_write_the_same_blob(store: Store) -> None:
    pages = [page_key(number, "threads") for number in range(6)]
    blobs = {name: name.encode() * 5000 for name in pages}

    def write(turn: int) -> None:
        for number in range(len(pages)):
            name = pages[(number + turn) % len(pages)]
            store.put(name, "k0-1", blobs[name])
            assert store.get(name, "k0-1") == blobs[name]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    assert store.has(pages) == [{"k0-1"}] * len(pages)


def test_invalid_page_key_is_refused(store: Store) -> None:
    for name in NO_PAGES:
        for call in (
            lambda name: store.has([page_key(0), name]),
            lambda name: store.get(name, "k0-1"),
            lambda name: store.put(name, "k0-1", b"x"),
            lambda name: store.drop(name, "k0-1"),
        ):
            with pytest.raises(StoreError, match="is not a page name"):
                call(name)


def test_invalid_part_name_is_refused(store: Store) -> None:
    for part in NO_PARTS:
        for call in (
            lambda part: store.get(page_key(0), part),
            lambda part: store.put(page_key(0), part, b"x"),
            lambda part: store.drop(page_key(0), part),
        ):
            with pytest.raises(StoreError, match="is not a part name"):
                call(part)


@pytest.mark.parametrize("secret", [None, b"known to all who share the store"])
def test_blob_round_trips(store: Store, secret: bytes | None) -> None:
    tiers = Tiers([store], secret)
    blob = make_blob(page_key(0, f"blob {secret!r}"))
    tiers.put(blob)
    actual = tiers.get(blob.page, blob.part)
    assert actual is not None and torch.equal(actual.payload.data, blob.payload.data)
    assert actual.payload.layout == blob.payload.layout
    assert replace(actual, payload=blob.payload) == blob
    (stats,) = tiers.stats()["stores"]
    assert (stats["written"], stats["hits"], stats["errors"]) == (1, 1, 0)


def test_corrupt_blob_is_dropped(store: Store) -> None:
    name = page_key(0, "damaged")
    tiers = Tiers([store])
    store.put(name, "k0-1", b"kvantpg1, but no more of it")
    assert tiers.get(name, "k0-1") is None
    assert store.has([name]) == [frozenset()]
    assert tiers.stats()["stores"][0]["damaged"] == 1


def test_second_instance_finds_the_blob(url: str) -> None:
    if url == "memory://":
        pytest.skip("memory is for nobody else")
    name = page_key(0, "another")
    open_store(url).put(name, "k0-1", b"x")
    assert open_store(url).get(name, "k0-1") == b"x"

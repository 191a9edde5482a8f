"""The law of all stores: what is put is there, until it is dropped; other names are refused."""

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
NO_PARTS = ("", ".", "..", "k0.part", "K0", "0k", "-k", "k/0", "../k0", "k 0", "k0\n", "k*", "k٣")


def page(number: int, test: str = "") -> str:
    """A page that no other test has."""
    return f"ab-{number % 3}/" + sha256(f"{test} {number}".encode()).hexdigest()


def blob(name: str, part: str = "k0-1", seed: int = 0) -> Blob:
    rows = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(seed))
    held = BlobPayload.from_fields({"0/keys.open": rows})
    told = {"model": "llama", "spec": "raw"}
    return Blob(name, part, page(99), (1, 2, 3), held, {"n": 5}, 3, told)


@pytest.mark.parametrize("kind", [bytes, bytearray])
@pytest.mark.parametrize("size", SIZES)
def test_what_is_put_is_there_until_it_is_dropped(
    store: Store, size: int, kind: type[bytes] | type[bytearray]
) -> None:
    one, other, third = (page(number, f"put {size} {kind}") for number in range(3))
    head = HEAD.pack(MAGIC, 1, 1)  # a store reads a large blob only if it begins as one
    first, second = kind(head + b"\x00\xff" * size), kind(head + b"other" * size)
    store.put(one, "k0-1", first)
    store.put(one, "a-0123456789abcdef-64", second)
    store.put(third, "k1-12", first)
    both = frozenset({"k0-1", "a-0123456789abcdef-64"})
    assert store.has([one, other, third, one]) == [both, frozenset(), {"k1-12"}, both]
    assert store.get(one, "k0-1") == first and store.get(third, "k1-12") == first
    assert store.get(one, "a-0123456789abcdef-64") == second
    assert store.get(one, "k1-12") is None and store.get(other, "k0-1") is None
    store.drop(one, "k0-1")
    assert store.get(one, "k0-1") is None
    assert store.has([one]) == [{"a-0123456789abcdef-64"}]
    store.drop(one, "a-0123456789abcdef-64")
    store.drop(third, "k1-12")
    assert store.has([one, third]) == [frozenset(), frozenset()]


def test_what_is_not_there_is_no_error(store: Store) -> None:
    name = page(0, "absent")
    assert store.has([]) == []
    assert store.has([name]) == [frozenset()]
    assert store.get(name, "k0-1") is None
    store.drop(name, "k0-1")


def test_what_is_there_stays(store: Store) -> None:
    name = page(0, "stays")
    store.put(name, "k0-1", b"first")
    store.put(name, "k0-1", b"second")
    assert store.get(name, "k0-1") == b"first"


def test_many_pages_at_once(store: Store) -> None:
    pages = [page(number, "many") for number in range(100)]
    for name in pages[::3]:
        store.put(name, "k0-1", b"x")
    has = [frozenset({"k0-1"} if number % 3 == 0 else ()) for number in range(100)]
    assert store.has(pages) == has


def test_many_threads_write_the_same(store: Store) -> None:
    pages = [page(number, "threads") for number in range(6)]
    blobs = {name: name.encode() * 5000 for name in pages}

    def write(turn: int) -> None:
        for number in range(len(pages)):
            name = pages[(number + turn) % len(pages)]
            store.put(name, "k0-1", blobs[name])
            assert store.get(name, "k0-1") == blobs[name]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(write, range(8)))
    assert store.has(pages) == [{"k0-1"}] * len(pages)


def test_what_names_no_page_is_refused(store: Store) -> None:
    for name in NO_PAGES:
        for call in (
            lambda name: store.has([page(0), name]),
            lambda name: store.get(name, "k0-1"),
            lambda name: store.put(name, "k0-1", b"x"),
            lambda name: store.drop(name, "k0-1"),
        ):
            with pytest.raises(StoreError, match="names no page"):
                call(name)


def test_what_names_no_part_is_refused(store: Store) -> None:
    for part in NO_PARTS:
        for call in (
            lambda part: store.get(page(0), part),
            lambda part: store.put(page(0), part, b"x"),
            lambda part: store.drop(page(0), part),
        ):
            with pytest.raises(StoreError, match="names no part"):
                call(part)


@pytest.mark.parametrize("secret", [None, b"known to all who share the store"])
def test_a_blob_comes_back(store: Store, secret: bytes | None) -> None:
    tiers = Tiers([store], secret)
    told = blob(page(0, f"blob {secret!r}"))
    tiers.put(told)
    found = tiers.get(told.page, told.part)
    assert found is not None and torch.equal(found.payload.data, told.payload.data)
    assert found.payload.layout == told.payload.layout
    assert replace(found, payload=told.payload) == told
    (stats,) = tiers.stats()["stores"]
    assert (stats["written"], stats["hits"], stats["errors"]) == (1, 1, 0)


def test_what_is_damaged_is_dropped(store: Store) -> None:
    name = page(0, "damaged")
    tiers = Tiers([store])
    store.put(name, "k0-1", b"kvantpg1, but no more of it")
    assert tiers.get(name, "k0-1") is None
    assert store.has([name]) == [frozenset()]
    assert tiers.stats()["stores"][0]["damaged"] == 1


def test_another_one_opened_finds_it(url: str) -> None:
    if url == "memory://":
        pytest.skip("memory is for nobody else")
    name = page(0, "another")
    open_store(url).put(name, "k0-1", b"x")
    assert open_store(url).get(name, "k0-1") == b"x"

"""Test the quota of a folder for large blobs and undeletable blobs."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvant.errors import StoreError
from kvant.stores import FolderStore


def page_key(number: int) -> str:
    return f"ab/{number:08x}"


def forbid_deletion(
    monkeypatch: pytest.MonkeyPatch, store: FolderStore, pages: set[str], code: int
) -> None:
    """Make the deletion of blobs of these pages fail."""
    drop = store.drop

    def checked_drop(name: str, part: str) -> None:
        if name in pages:
            raise OSError(code, os.strerror(code))
        drop(name, part)

    monkeypatch.setattr(store, "drop", checked_drop)


def fill_store(store: FolderStore, count: int) -> None:
    for number in range(count):
        store.put(page_key(number), "k0-1", bytes(1000))
        path = store.path / "ab" / "00" / f"{number:06x}" / "k0-1"
        os.utime(path, (600 * number, 600 * number))


def test_undeletable_blobs_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a folder with a quota of 10,000 bytes held 14,000."""
    store = FolderStore(tmp_path, max_bytes=10_000, min_free=0)
    fill_store(store, 10)
    forbid_deletion(monkeypatch, store, {page_key(number) for number in range(10)}, errno.EACCES)
    for number in range(10, 14):
        with pytest.raises(StoreError, match=r"the quota is 9.77 KiB, 9.77 KiB are used"):
            store.put(page_key(number), "k0-1", bytes(1000))
    assert sum(entry.nbytes for entry in store) == 10_000


def test_other_blobs_are_deleted_in_place_of_undeletable_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, max_bytes=10_000, min_free=0)
    fill_store(store, 10)
    forbid_deletion(monkeypatch, store, {page_key(number) for number in range(5)}, errno.EPERM)
    store.put(page_key(10), "k0-1", bytes(1000))
    assert sorted(entry.page for entry in store) == [page_key(n) for n in (*range(5), 7, 8, 9, 10)]


def test_disk_failure_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path, max_bytes=10_000, min_free=0)
    fill_store(store, 10)
    forbid_deletion(monkeypatch, store, {page_key(0)}, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        store.put(page_key(10), "k0-1", bytes(1000))
    assert sum(entry.nbytes for entry in store) == 10_000


def test_blob_larger_than_the_quota_is_refused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, max_bytes=1000, min_free=0)
    store.put(page_key(0), "k0-1", bytes(900))
    with pytest.raises(StoreError, match="the quota is 1000 B"):
        store.put(page_key(1), "k0-1", bytes(1001))
    assert [entry.page for entry in store] == [page_key(0)]

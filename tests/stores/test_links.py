"""Test symlinks inside a store folder: nothing outside of the store is touched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvant.stores import FolderStore, Tiers, pack_blob
from stores.writer import PAGES, make_blob

PAGE = PAGES[0]
LEVELS = (PAGE[:2], PAGE[3:5], PAGE[5:])  # namespace, two digits, page
STALE = "0123456789abcdef.part"


def read_state(path: Path) -> dict[str, tuple[int, int, bytes]]:
    """Return the inode, time and bytes of each file below a folder."""
    entries = {}
    for file in [path, *sorted(path.rglob("*"))]:
        status = file.lstat()
        data = b"" if file.is_dir() else file.read_bytes()
        entries[str(file)] = (status.st_ino, status.st_mtime_ns, data)
    return entries


@pytest.mark.parametrize("level", range(3), ids=["namespace", "two-digit", "page"])
def test_symlinked_folder_reads_empty_and_is_not_written(tmp_path: Path, level: int) -> None:
    """Regression: a put over the quota deleted files outside of the store through such a link."""
    outside, path = tmp_path / "outside", tmp_path / "store"
    victim = outside.joinpath(*LEVELS[level + 1 :])
    victim.mkdir(parents=True)
    (victim / "k0-1").write_bytes(pack_blob(make_blob(PAGE)))
    (victim / "notes").write_bytes(b"x" * 5000)
    (victim / STALE).write_bytes(b"half")
    for file in victim.iterdir():
        os.utime(file, (1, 1))
    link = path.joinpath(*LEVELS[: level + 1])
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    before = read_state(outside)

    store = FolderStore(path, max_bytes=4000, min_free=0)
    assert list(store) == [] and store.delete_unfinished() == 0 and store.shrink(0) == []
    assert store.has([PAGE]) == [frozenset()]
    assert store.get(PAGE, "k0-1") is None and store.read(PAGE, "k0-1") is None
    store.drop(PAGE, "k0-1")
    for part in ("k0-1", "k0-2"):
        with pytest.raises(NotADirectoryError, match=str(link)):
            store.put(PAGE, part, b"x")
    store.put("cd/00000001", "k0-1", bytes(3000))  # counts the stored bytes
    store.put("cd/00000002", "k0-1", bytes(3000))  # evicts the least recently used
    assert [entry.page for entry in store] == ["cd/00000002"]
    assert read_state(outside) == before and link.is_symlink()


def test_empty_folder_behind_a_symlink_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / LEVELS[2]).mkdir(parents=True)
    link = tmp_path.joinpath("store", *LEVELS[:2])
    link.parent.mkdir(parents=True)
    link.symlink_to(outside)
    tiers = Tiers([FolderStore(tmp_path / "store", min_free=0)])
    assert not tiers.put(make_blob(PAGE))
    tiers.drop(PAGE, "k0-1")
    assert (outside / LEVELS[2]).is_dir()


def test_store_folder_may_be_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to("disk")
    store = FolderStore(tmp_path / "store", min_free=0)
    store.put(PAGE, "k0-1", b"x")
    assert store.get(PAGE, "k0-1") == b"x"
    assert [entry.page for entry in store] == [PAGE]

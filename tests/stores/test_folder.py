"""Test that a folder survives killed writers, disk errors and clock changes."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch

from kvant.errors import StoreError
from kvant.stores import BlobInfo, FolderStore, Tiers, pack_blob
from kvant.stores import folder as folders
from kvant.stores.contract import MAGIC
from stores.writer import PAGES, make_blob, start_writers

DAY = 86_400.0


def page_key(number: int, space: str = "ab") -> str:
    return f"{space}/{number:08x}"


def stored_nbytes(store: FolderStore) -> int:
    return sum(entry.nbytes for entry in store)


def list_pages(store: FolderStore) -> list[str]:
    return sorted(entry.page for entry in store)


def list_temporary_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.part"))


def set_last_use(store: FolderStore, name: str, seconds: float, part: str = "k0-1") -> None:
    """Set the last use of a blob to that many seconds ago."""
    space, _, key = name.partition("/")
    timestamp = time.time() - seconds
    os.utime(store.path / space / key[:2] / key[2:] / part, (timestamp, timestamp))


# ---- killed writers


@pytest.mark.parametrize("kills", [30, pytest.param(200, marks=pytest.mark.laws)])
def test_killed_writer_leaves_a_valid_file_or_none(tmp_path: Path, kills: int) -> None:
    random, num_blobs, left, max_delay = Random(kills), 0, 0, 0.05
    with start_writers(tmp_path) as process:
        for _ in range(kills):
            child = process.start(0)
            time.sleep(random.uniform(0.005, max_delay))
            os.kill(child, signal.SIGKILL)
            assert process.wait() == [-signal.SIGKILL]
            left += len(list_temporary_files(tmp_path))
            num_blobs += check_all_blobs(tmp_path)
            if not num_blobs:  # on a busy machine, a child starts late
                max_delay = min(1.5 * max_delay, 2.0)
    assert left and num_blobs  # it was killed in the middle of a write, and after one


def check_all_blobs(path: Path) -> int:
    """Return the number of blobs: unreadable ones would count as corrupt."""
    tiers = Tiers([FolderStore(path, min_free=0)])
    count = 0
    for name in PAGES:
        (parts,) = tiers.has([name])
        blob = tiers.get(name, "k0-1")
        assert (blob is not None) == bool(parts)
        if blob is not None:
            assert torch.equal(blob.payload.data, make_blob(name).payload.data)
            count += 1
    (stats,) = tiers.stats()["stores"]
    assert (stats["damaged"], stats["errors"]) == (0, 0)
    return count


def test_two_processes_write_the_same_blob(tmp_path: Path) -> None:
    with start_writers(tmp_path) as process:
        for _ in range(3):
            process.start(30)
        assert process.wait() == [0, 0, 0]
    assert check_all_blobs(tmp_path) == len(PAGES)
    assert not list_temporary_files(tmp_path)


def test_temporary_files_are_deleted_after_an_hour(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, min_free=0)
    store.put(page_key(1), "k0-1", b"x")
    other_folder = tmp_path / "ab" / "00" / "000001"
    # seconds ago: whether the file stays
    names = {0.0: True, 3500.0: True, 3700.0: False, -3700.0: False}
    for number, seconds in enumerate(names):
        file = other_folder / f"{number:016x}.part"
        file.write_bytes(b"half")
        os.utime(file, (time.time() - seconds, time.time() - seconds))
    foreign = other_folder / "notes.part"
    foreign.write_bytes(b"of somebody else")
    os.utime(foreign, (0, 0))
    assert store.has([page_key(1)]) == [{"k0-1"}] and len(list(store)) == 1
    FolderStore(tmp_path, min_free=0).put(page_key(2), "k0-1", b"x")  # the first write of a process
    stays = [f"{number:016x}.part" for number, stay in enumerate(names.values()) if stay]
    assert [file.name for file in list_temporary_files(tmp_path)] == [*stays, "notes.part"]


def test_file_being_written_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path, min_free=0)
    write = os.write

    def half(file: int, data: memoryview) -> int:
        count = write(file, data[: len(data) // 2 + 1])
        assert (
            FolderStore(tmp_path).delete_unfinished() == 0
            and len(list_temporary_files(tmp_path)) == 1
        )
        return count

    monkeypatch.setattr(os, "write", half)
    store.put(page_key(1), "k0-1", b"many bytes")
    assert store.get(page_key(1), "k0-1") == b"many bytes"
    assert not list_temporary_files(tmp_path)


def test_deleted_folder_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path / "store", min_free=0)
    make, deleted = os.mkdir, list[str]()

    def make_and_delete(name: str, *args: int, dir_fd: int | None = None) -> None:
        make(name, *args, dir_fd=dir_fd)
        if not deleted and name == "000001":
            deleted.append(name)
            os.rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", make_and_delete)
    store.put(page_key(1), "k0-1", b"x")
    assert deleted and store.get(page_key(1), "k0-1") == b"x"
    shutil.rmtree(store.path)
    assert store.get(page_key(1), "k0-1") is None
    store.put(page_key(1), "k0-1", b"x")
    assert store.get(page_key(1), "k0-1") == b"x"


# ---- the disk


def test_full_disk_in_the_middle_of_a_file_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = Tiers([FolderStore(tmp_path, min_free=0)])
    tiers.put(make_blob(PAGES[0]))
    write, calls = os.write, []

    def full(file: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) % 2 == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:1000])

    monkeypatch.setattr(os, "write", full)
    tiers.put(make_blob(PAGES[1]))
    assert len(calls) == 2
    (stats,) = tiers.stats()["stores"]
    assert (stats["errors"], stats["written"]) == (1, 1)
    assert tiers.get(PAGES[1], "k0-1") is None and tiers.get(PAGES[0], "k0-1") is not None
    assert not list_temporary_files(tmp_path)
    assert not (tmp_path / "ab" / "00" / PAGES[1][5:]).exists()
    monkeypatch.undo()
    tiers.put(make_blob(PAGES[1]))
    assert tiers.get(PAGES[1], "k0-1") is not None


def test_file_size_limit_leaves_no_file(tmp_path: Path) -> None:
    """The kernel enforces the limit: no file of this process may exceed 100 KB."""
    tiers = Tiers([FolderStore(tmp_path, min_free=0)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        tiers.put(make_blob(PAGES[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (stats,) = tiers.stats()["stores"]
    assert (stats["errors"], stats["written"]) == (1, 0)
    assert tiers.get(PAGES[1], "k0-1") is None and not list_temporary_files(tmp_path)


@contextmanager
def unprivileged() -> Iterator[None]:
    """Drop root privileges, which allow every write."""
    if os.geteuid():
        yield
        return
    try:
        os.seteuid(65534)
    except OSError:
        pytest.skip("only as root here, who may write everywhere")
    try:
        yield
    finally:
        os.seteuid(0)


def test_read_only_folder_is_readable() -> None:
    with TemporaryDirectory(prefix="kvant") as name:  # a folder that every user may enter
        path = Path(name)
        Tiers([FolderStore(path, min_free=0)]).put(make_blob(PAGES[0]))
        every = [path, *path.rglob("*")]
        for path_ in every:
            path_.chmod(0o555 if path_.is_dir() else 0o444)
        tiers = Tiers([FolderStore(path, min_free=0)])
        try:
            with unprivileged():
                assert tiers.get(PAGES[0], "k0-1") is not None
                tiers.put(make_blob(PAGES[1]))
                tiers.drop(PAGES[0], "k0-1")
        finally:
            for path_ in every:
                path_.chmod(0o755)
        (stats,) = tiers.stats()["stores"]
        assert (stats["hits"], stats["written"], stats["errors"]) == (1, 0, 2)
        assert tiers.has(PAGES[:2]) == [{"k0-1"}, frozenset()]


def simulate_disk(
    monkeypatch: pytest.MonkeyPatch, store: Callable[[], FolderStore], nbytes: int
) -> None:
    """Simulate a disk of a given size that holds only a store."""

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=nbytes - stored_nbytes(store()))

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_free_disk_space_stays_above_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, min_free=4000)
    simulate_disk(monkeypatch, lambda: store, 10_000)
    for number in range(20):
        store.put(page_key(number), "k0-1", bytes(1000))
        set_last_use(store, page_key(number), 600 * (20 - number))
        assert stored_nbytes(store) <= 6000
    assert page_key(19) in list_pages(store) and page_key(0) not in list_pages(store)
    with pytest.raises(StoreError, match=r"no room for 6.84 KiB: .* 3.91 KiB must stay free"):
        store.put(page_key(99), "k0-1", bytes(7000))
    assert list_pages(store)  # nothing was deleted for an impossible request


def test_disk_filled_by_others_stops_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, min_free=4000)
    simulate_disk(monkeypatch, lambda: store, 100_000)
    for number in range(10):
        store.put(page_key(number), "k0-1", bytes(1000))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    store.put(page_key(10), "k0-1", bytes(1000))  # 3,000 bytes too few are free
    assert stored_nbytes(store) <= 7000 and page_key(10) in list_pages(store)


# ---- the quota


def test_quota_is_never_exceeded_and_the_oldest_blobs_are_evicted(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, max_bytes=10_000, min_free=0)
    for number in range(30):
        store.put(page_key(number), "k0-1", bytes(900))
        set_last_use(store, page_key(number), 600 * (30 - number))
        assert stored_nbytes(store) <= 10_000
    left = list_pages(store)
    assert left == [page_key(number) for number in range(30 - len(left), 30)] and len(left) > 7


def test_used_blobs_stay(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, max_bytes=10_000, min_free=0)
    for number in range(10):
        store.put(page_key(number), "k0-1", bytes(1000))
        set_last_use(store, page_key(number), 600 * (30 - number))
    assert store.get(page_key(0), "k0-1") and store.read(
        page_key(1), "k0-1"
    )  # a listing counts as no use
    store.put(page_key(10), "k0-1", bytes(1000))
    assert page_key(0) in list_pages(store) and page_key(1) not in list_pages(store)


def test_suffixes_are_evicted_before_prefixes_used_within_a_minute(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, min_free=0)
    now = 60.0 * (time.time() // 60) + 30  # the middle of a minute
    for number, part in enumerate(("k0-2", "k0-10", "k1-1", "a-0123456789abcdef-64", "k0")):
        store.put(page_key(number), part, bytes(100))
        set_last_use(store, page_key(number), time.time() - now + number - 3600 * 24, part)
        set_last_use(store, page_key(number), time.time() - now + number, part)
    evicted = store.shrink(100)
    assert [entry.part for entry in evicted] == ["a-0123456789abcdef-64", "k0-10", "k0-2", "k1-1"]
    assert list_pages(store) == [page_key(4)]


def test_two_processes_write_different_blobs(tmp_path: Path) -> None:
    """Each process knows only its own writes since its last count: a sixteenth above the quota."""
    first, second = (FolderStore(tmp_path, max_bytes=160_000, min_free=0) for _ in range(2))
    peak = 0
    for number in range(120):
        first.put(page_key(2 * number), "k0-1", bytes(1000))
        for _ in range(1 + 5 * (number % 3 == 0)):
            second.put(page_key(2 * number + 1), "k0-1", bytes(1000))
        peak = max(peak, stored_nbytes(first))
    assert 140_000 < peak <= 170_000


# ---- the clock


def test_future_timestamps_are_ignored(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, min_free=0)
    for number in range(4):
        store.put(page_key(number), "k0-1", bytes(100))
    set_last_use(store, page_key(0), 10 * DAY)
    set_last_use(store, page_key(1), -10 * DAY)
    set_last_use(store, page_key(2), -30.0)  # the clock of another machine is slightly ahead
    set_last_use(store, page_key(3), 600.0)
    assert [entry.page for entry in store.shrink(0)] == [
        page_key(number) for number in (1, 0, 3, 2)
    ]


def test_clock_set_back_is_handled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path, max_bytes=3000, min_free=0)
    for number in range(3):
        store.put(page_key(number), "k0-1", bytes(1000))
    now = time.time() - 365 * DAY
    monkeypatch.setattr(folders.time, "time", lambda: now)
    assert store.get(page_key(1), "k0-1") is not None
    set_last_use(
        store, page_key(1), 10.0
    )  # the system clock was not set back with the process clock
    store.put(page_key(3), "k0-1", bytes(1000))
    assert list_pages(store) == [page_key(1), page_key(3)]


# ---- entries that are no blobs


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as unix_socket:
        unix_socket.bind(os.path.relpath(path))  # names are limited to 108 bytes


def make_link(path: Path) -> None:
    secret = path.with_name("secret.txt")
    secret.write_bytes(pack_blob(make_blob(PAGES[0])))
    path.symlink_to(secret)


def make_loop(path: Path) -> None:
    path.symlink_to(path)


def make_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(3 << 30)


def make_holes_after_a_magic(path: Path) -> None:
    make_holes(path)
    with path.open("r+b") as file:
        file.write(MAGIC)


def make_holes_after_a_head(path: Path) -> None:
    """Replace all of a blob but its head by holes."""
    data = pack_blob(make_blob(PAGES[0]))
    make_holes(path)
    with path.open("r+b") as file:
        file.write(data[:4096])


HOLES = (make_holes, make_holes_after_a_magic, make_holes_after_a_head)
NO_BLOBS = (make_pipe, make_socket, make_link, make_loop, make_device, Path.mkdir, *HOLES)


@pytest.mark.parametrize("make", NO_BLOBS, ids=lambda make: make.__name__)
def test_non_regular_file_is_corrupt_and_rewritten(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a pipe in place of a blob blocked its reader for ever."""
    monkeypatch.chdir(tmp_path)
    store = FolderStore(tmp_path, min_free=0)
    tiers = Tiers([store])
    tiers.put(make_blob(PAGES[0]))
    (path,) = tmp_path.rglob("k0-1")
    tracemalloc.start()
    for wrong in ("read", "written over"):
        path.unlink()
        make(path)
        assert list_pages(store) == [PAGES[0]]
        if wrong == "read":
            assert tiers.get(PAGES[0], "k0-1") is None
            assert not os.path.lexists(path)
        tiers.put(make_blob(PAGES[0]))
        (stats,) = tiers.stats()["stores"]
        if wrong == "read" or make not in HOLES:  # the type is right: only a read detects it
            assert path.is_file() and not path.is_symlink()
            assert tiers.get(PAGES[0], "k0-1") is not None
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert (stats["damaged"], stats["errors"], stats["unwritten"]) == (1, 0, 0)
    assert not list_temporary_files(tmp_path)


def test_folder_in_place_of_a_blob_is_read_once(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, max_bytes=2_000_000, min_free=0)
    tiers = Tiers([store])
    tiers.put(make_blob(PAGES[0]))
    (path,) = tmp_path.rglob("k0-1")
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("foreign")
    for _ in range(3):
        assert tiers.get(PAGES[0], "k0-1") is None
        assert tiers.has(PAGES[:1]) == [frozenset()]
    (stats,) = tiers.stats()["stores"]
    assert (stats["damaged"], stats["misses"], stats["errors"]) == (1, 2, 1)
    tiers.put(make_blob(PAGES[0]))
    with pytest.raises(OSError, match="k0-1"):
        store.put(PAGES[0], "k0-1", b"x")
    tiers.put(make_blob(PAGES[1]))
    assert tiers.get(PAGES[1], "k0-1") is not None
    assert store.shrink(0) and (path / "notes.txt").exists()
    (stats,) = tiers.stats()["stores"]
    assert (stats["written"], stats["unwritten"]) == (2, 1)


@pytest.mark.parametrize("make", [make_pipe, make_loop], ids=lambda make: make.__name__)
def test_non_folder_in_place_of_a_page_has_no_blobs(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    store = FolderStore(tmp_path, min_free=0)
    (tmp_path / "ab" / "00").mkdir(parents=True)
    make(tmp_path / "ab" / "00" / "000001")
    assert store.has([page_key(1)]) == [frozenset()]
    assert list(store) == [] and store.delete_unfinished() == 0
    assert Tiers([store]).get(page_key(1), "k0-1") is None
    with pytest.raises(OSError, match="000001"):
        store.put(page_key(1), "k0-1", b"x")


# ---- paths that are no store


def test_nothing_is_created_before_the_first_write(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "a" / "b")
    assert store.has([page_key(1)]) == [frozenset()] and store.get(page_key(1), "k0-1") is None
    assert list(store) == [] and store.delete_unfinished() == 0 and store.shrink(0) == []
    store.drop(page_key(1), "k0-1")
    assert list(tmp_path.iterdir()) == []


def test_file_as_a_store_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(StoreError, match="a file, a folder is needed"):
        FolderStore(file)


def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    foreign_files = [
        "notes.txt",
        "ab/notes.txt",
        "ab/00/notes.txt",
        "AB/00/000001/k0-1",
        "ab/cd/ef/k0-1",
    ]
    foreign_files += ["ab/000/00001/k0-1", "ab/00/000001/K0-1", "ab/00/000001/.hidden"]
    for name in foreign_files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    store = FolderStore(tmp_path, min_free=0)
    store.put(page_key(1), "k0-1", b"mine")
    store.put(page_key(2), "k0-1", pack_blob(make_blob(PAGES[0])))
    assert sorted(store) == [
        BlobInfo(page_key(1), "k0-1", 4, pytest.approx(time.time(), abs=1000)),
        BlobInfo(
            page_key(2),
            "k0-1",
            len(pack_blob(make_blob(PAGES[0]))),
            pytest.approx(time.time(), abs=1000),
        ),
    ]
    assert len(store.shrink(0)) == 2
    assert all((tmp_path / name).exists() for name in foreign_files)


def test_store_with_a_relative_path_survives_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = FolderStore("store", min_free=0)
    store.put(page_key(1), "k0-1", b"x")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.get(page_key(1), "k0-1") == b"x"

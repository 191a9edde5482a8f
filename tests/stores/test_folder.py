"""A folder survives whatever happens to who writes there, to its disk and to its clock."""

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
from stores.writer import PAGES, blob, writers

DAY = 86_400.0


def page(number: int, space: str = "ab") -> str:
    return f"{space}/{number:08x}"


def held(store: FolderStore) -> int:
    return sum(entry.nbytes for entry in store)


def kept(store: FolderStore) -> list[str]:
    return sorted(entry.page for entry in store)


def unfinished(path: Path) -> list[Path]:
    return sorted(path.rglob("*.part"))


def used(store: FolderStore, name: str, seconds: float, part: str = "k0-1") -> None:
    """Somebody used a blob so long ago."""
    space, _, key = name.partition("/")
    then = time.time() - seconds
    os.utime(store.path / space / key[:2] / key[2:] / part, (then, then))


# ---- whoever writes is killed


@pytest.mark.parametrize("kills", [30, pytest.param(200, marks=pytest.mark.laws)])
def test_whoever_is_killed_while_writing_leaves_what_is_right_or_nothing(
    tmp_path: Path, kills: int
) -> None:
    random, found, left, most = Random(kills), 0, 0, 0.05
    with writers(tmp_path) as process:
        for _ in range(kills):
            child = process.start(0)
            time.sleep(random.uniform(0.005, most))
            os.kill(child, signal.SIGKILL)
            assert process.wait() == [-signal.SIGKILL]
            left += len(unfinished(tmp_path))
            found += all_are_right(tmp_path)
            if not found:  # where others compute, a child begins late
                most = min(1.5 * most, 2.0)
    assert left and found  # it was in the middle of writing, and behind it


def all_are_right(path: Path) -> int:
    """How many there are: what cannot be opened would count as damaged."""
    tiers = Tiers([FolderStore(path, min_free=0)])
    count = 0
    for name in PAGES:
        (parts,) = tiers.has([name])
        again = tiers.get(name, "k0-1")
        assert (again is not None) == bool(parts)
        if again is not None:
            assert torch.equal(again.payload.data, blob(name).payload.data)
            count += 1
    (stats,) = tiers.stats()["stores"]
    assert (stats["damaged"], stats["errors"]) == (0, 0)
    return count


def test_two_processes_write_the_same(tmp_path: Path) -> None:
    with writers(tmp_path) as process:
        for _ in range(3):
            process.start(30)
        assert process.wait() == [0, 0, 0]
    assert all_are_right(tmp_path) == len(PAGES)
    assert not unfinished(tmp_path)


def test_what_killed_writers_left_goes_after_an_hour(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, min_free=0)
    store.put(page(1), "k0-1", b"x")
    beside = tmp_path / "ab" / "00" / "000001"
    names = {0.0: True, 3500.0: True, 3700.0: False, -3700.0: False}  # seconds ago: does it stay
    for number, seconds in enumerate(names):
        file = beside / f"{number:016x}.part"
        file.write_bytes(b"half")
        os.utime(file, (time.time() - seconds, time.time() - seconds))
    foreign = beside / "notes.part"
    foreign.write_bytes(b"of somebody else")
    os.utime(foreign, (0, 0))
    assert store.has([page(1)]) == [{"k0-1"}] and len(list(store)) == 1
    FolderStore(tmp_path, min_free=0).put(page(2), "k0-1", b"x")  # the first that a process writes
    stays = [f"{number:016x}.part" for number, stay in enumerate(names.values()) if stay]
    assert [file.name for file in unfinished(tmp_path)] == [*stays, "notes.part"]


def test_a_file_that_is_being_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path, min_free=0)
    write = os.write

    def half(file: int, data: memoryview) -> int:
        count = write(file, data[: len(data) // 2 + 1])
        assert FolderStore(tmp_path).delete_unfinished() == 0 and len(unfinished(tmp_path)) == 1
        return count

    monkeypatch.setattr(os, "write", half)
    store.put(page(1), "k0-1", b"many bytes")
    assert store.get(page(1), "k0-1") == b"many bytes"
    assert not unfinished(tmp_path)


def test_a_folder_that_somebody_deletes_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderStore(tmp_path / "store", min_free=0)
    make, gone = os.mkdir, list[str]()

    def made(name: str, *args: int, dir_fd: int | None = None) -> None:
        make(name, *args, dir_fd=dir_fd)
        if not gone and name == "000001":
            gone.append(name)
            os.rmdir(name, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", made)
    store.put(page(1), "k0-1", b"x")
    assert gone and store.get(page(1), "k0-1") == b"x"
    shutil.rmtree(store.path)
    assert store.get(page(1), "k0-1") is None
    store.put(page(1), "k0-1", b"x")
    assert store.get(page(1), "k0-1") == b"x"


# ---- the disk


def test_a_disk_that_is_full_in_the_middle_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = Tiers([FolderStore(tmp_path, min_free=0)])
    tiers.put(blob(PAGES[0]))
    write, calls = os.write, []

    def full(file: int, data: memoryview) -> int:
        calls.append(len(data))
        if len(calls) % 2 == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data[:1000])

    monkeypatch.setattr(os, "write", full)
    tiers.put(blob(PAGES[1]))
    assert len(calls) == 2
    (stats,) = tiers.stats()["stores"]
    assert (stats["errors"], stats["written"]) == (1, 1)
    assert tiers.get(PAGES[1], "k0-1") is None and tiers.get(PAGES[0], "k0-1") is not None
    assert not unfinished(tmp_path)
    assert not (tmp_path / "ab" / "00" / PAGES[1][5:]).exists()
    monkeypatch.undo()
    tiers.put(blob(PAGES[1]))
    assert tiers.get(PAGES[1], "k0-1") is not None


def test_a_file_that_the_system_lets_grow_no_more(tmp_path: Path) -> None:
    """The kernel itself cuts it off: no file of this process may have more than 100 KB."""
    tiers = Tiers([FolderStore(tmp_path, min_free=0)])
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        tiers.put(blob(PAGES[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (stats,) = tiers.stats()["stores"]
    assert (stats["errors"], stats["written"]) == (1, 0)
    assert tiers.get(PAGES[1], "k0-1") is None and not unfinished(tmp_path)


@contextmanager
def nobody() -> Iterator[None]:
    """Not root, who may write everywhere."""
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


def test_a_folder_that_may_only_be_read() -> None:
    with TemporaryDirectory(prefix="kvant") as name:  # where everybody comes through
        path = Path(name)
        Tiers([FolderStore(path, min_free=0)]).put(blob(PAGES[0]))
        every = [path, *path.rglob("*")]
        for one in every:
            one.chmod(0o555 if one.is_dir() else 0o444)
        tiers = Tiers([FolderStore(path, min_free=0)])
        try:
            with nobody():
                assert tiers.get(PAGES[0], "k0-1") is not None
                tiers.put(blob(PAGES[1]))
                tiers.drop(PAGES[0], "k0-1")
        finally:
            for one in every:
                one.chmod(0o755)
        (stats,) = tiers.stats()["stores"]
        assert (stats["hits"], stats["written"], stats["errors"]) == (1, 0, 2)
        assert tiers.has(PAGES[:2]) == [{"k0-1"}, frozenset()]


def disk(monkeypatch: pytest.MonkeyPatch, store: Callable[[], FolderStore], nbytes: int) -> None:
    """A disk of so many bytes, on which there is nothing but a store."""

    def usage(path: Path) -> SimpleNamespace:
        return SimpleNamespace(free=nbytes - held(store()))

    monkeypatch.setattr(shutil, "disk_usage", usage)


def test_so_much_of_the_disk_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path, min_free=4000)
    disk(monkeypatch, lambda: store, 10_000)
    for number in range(20):
        store.put(page(number), "k0-1", bytes(1000))
        used(store, page(number), 600 * (20 - number))
        assert held(store) <= 6000
    assert page(19) in kept(store) and page(0) not in kept(store)
    with pytest.raises(StoreError, match=r"no room for 6.84 KiB: .* of which 3.91 KiB are to stay"):
        store.put(page(99), "k0-1", bytes(7000))
    assert kept(store)  # nothing was deleted for what cannot be had


def test_others_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path, min_free=4000)
    disk(monkeypatch, lambda: store, 100_000)
    for number in range(10):
        store.put(page(number), "k0-1", bytes(1000))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    store.put(page(10), "k0-1", bytes(1000))  # 3,000 too few are free
    assert held(store) <= 7000 and page(10) in kept(store)


# ---- the quota


def test_the_quota_is_never_exceeded_and_the_oldest_go_first(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, max_bytes=10_000, min_free=0)
    for number in range(30):
        store.put(page(number), "k0-1", bytes(900))
        used(store, page(number), 600 * (30 - number))
        assert held(store) <= 10_000
    left = kept(store)
    assert left == [page(number) for number in range(30 - len(left), 30)] and len(left) > 7


def test_what_is_used_stays(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, max_bytes=10_000, min_free=0)
    for number in range(10):
        store.put(page(number), "k0-1", bytes(1000))
        used(store, page(number), 600 * (30 - number))
    assert store.get(page(0), "k0-1") and store.read(page(1), "k0-1")  # who looks uses nothing
    store.put(page(10), "k0-1", bytes(1000))
    assert page(0) in kept(store) and page(1) not in kept(store)


def test_ends_go_before_beginnings_of_what_was_used_within_a_minute(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, min_free=0)
    now = 60.0 * (time.time() // 60) + 30  # the middle of a minute
    for number, part in enumerate(("k0-2", "k0-10", "k1-1", "a-0123456789abcdef-64", "k0")):
        store.put(page(number), part, bytes(100))
        used(store, page(number), time.time() - now + number - 3600 * 24, part)
        used(store, page(number), time.time() - now + number, part)
    gone = store.shrink(100)
    assert [entry.part for entry in gone] == ["a-0123456789abcdef-64", "k0-10", "k0-2", "k1-1"]
    assert kept(store) == [page(4)]


def test_two_processes_write_different_blobs(tmp_path: Path) -> None:
    """Each knows only what it wrote since it counted: so a sixteenth of the quota more."""
    one, other = (FolderStore(tmp_path, max_bytes=160_000, min_free=0) for _ in range(2))
    most = 0
    for number in range(120):
        one.put(page(2 * number), "k0-1", bytes(1000))
        for _ in range(1 + 5 * (number % 3 == 0)):
            other.put(page(2 * number + 1), "k0-1", bytes(1000))
        most = max(most, held(one))
    assert 140_000 < most <= 170_000


# ---- the clock


def test_times_that_are_still_to_come_tell_nothing(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, min_free=0)
    for number in range(4):
        store.put(page(number), "k0-1", bytes(100))
    used(store, page(0), 10 * DAY)
    used(store, page(1), -10 * DAY)
    used(store, page(2), -30.0)  # another machine's clock is a little ahead
    used(store, page(3), 600.0)
    assert [entry.page for entry in store.shrink(0)] == [page(one) for one in (1, 0, 3, 2)]


def test_a_clock_that_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderStore(tmp_path, max_bytes=3000, min_free=0)
    for number in range(3):
        store.put(page(number), "k0-1", bytes(1000))
    now = time.time() - 365 * DAY
    monkeypatch.setattr(folders.time, "time", lambda: now)
    assert store.get(page(1), "k0-1") is not None
    used(store, page(1), 10.0)  # the system's clock was not set back with ours
    store.put(page(3), "k0-1", bytes(1000))
    assert kept(store) == [page(1), page(3)]


# ---- what is no blob


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))  # a name of 108 bytes at most


def make_link(path: Path) -> None:
    secret = path.with_name("secret.txt")
    secret.write_bytes(pack_blob(blob(PAGES[0])))
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
    """All of a blob but its tensors."""
    data = pack_blob(blob(PAGES[0]))
    make_holes(path)
    with path.open("r+b") as file:
        file.write(data[:4096])


HOLES = (make_holes, make_holes_after_a_magic, make_holes_after_a_head)
NO_BLOBS = (make_pipe, make_socket, make_link, make_loop, make_device, Path.mkdir, *HOLES)


@pytest.mark.parametrize("make", NO_BLOBS, ids=lambda make: make.__name__)
def test_what_is_no_regular_file_is_damaged_and_written_anew(
    make: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe in place of a blob blocked its reader for ever."""
    monkeypatch.chdir(tmp_path)
    store = FolderStore(tmp_path, min_free=0)
    tiers = Tiers([store])
    tiers.put(blob(PAGES[0]))
    (path,) = tmp_path.rglob("k0-1")
    tracemalloc.start()
    for wrong in ("read", "written over"):
        path.unlink()
        make(path)
        assert kept(store) == [PAGES[0]]
        if wrong == "read":
            assert tiers.get(PAGES[0], "k0-1") is None
            assert not os.path.lexists(path)
        tiers.put(blob(PAGES[0]))
        (stats,) = tiers.stats()["stores"]
        if wrong == "read" or make not in HOLES:  # of the right kind: a read finds it
            assert path.is_file() and not path.is_symlink()
            assert tiers.get(PAGES[0], "k0-1") is not None
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert (stats["damaged"], stats["errors"], stats["unwritten"]) == (1, 0, 0)
    assert not unfinished(tmp_path)


def test_a_folder_with_files_in_place_of_a_blob_is_read_once(tmp_path: Path) -> None:
    store = FolderStore(tmp_path, max_bytes=2_000_000, min_free=0)
    tiers = Tiers([store])
    tiers.put(blob(PAGES[0]))
    (path,) = tmp_path.rglob("k0-1")
    path.unlink()
    path.mkdir()
    (path / "notes.txt").write_text("foreign")
    for _ in range(3):
        assert tiers.get(PAGES[0], "k0-1") is None
        assert tiers.has(PAGES[:1]) == [frozenset()]
    (stats,) = tiers.stats()["stores"]
    assert (stats["damaged"], stats["misses"], stats["errors"]) == (1, 2, 1)
    tiers.put(blob(PAGES[0]))
    with pytest.raises(OSError, match="k0-1"):
        store.put(PAGES[0], "k0-1", b"x")
    tiers.put(blob(PAGES[1]))
    assert tiers.get(PAGES[1], "k0-1") is not None
    assert store.shrink(0) and (path / "notes.txt").exists()
    (stats,) = tiers.stats()["stores"]
    assert (stats["written"], stats["unwritten"]) == (2, 1)


@pytest.mark.parametrize("make", [make_pipe, make_loop], ids=lambda make: make.__name__)
def test_what_is_no_folder_in_place_of_a_page_has_no_blobs(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    store = FolderStore(tmp_path, min_free=0)
    (tmp_path / "ab" / "00").mkdir(parents=True)
    make(tmp_path / "ab" / "00" / "000001")
    assert store.has([page(1)]) == [frozenset()]
    assert list(store) == [] and store.delete_unfinished() == 0
    assert Tiers([store]).get(page(1), "k0-1") is None
    with pytest.raises(OSError, match="000001"):
        store.put(page(1), "k0-1", b"x")


# ---- what is no store


def test_nothing_is_made_before_something_is_written(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "a" / "b")
    assert store.has([page(1)]) == [frozenset()] and store.get(page(1), "k0-1") is None
    assert list(store) == [] and store.delete_unfinished() == 0 and store.shrink(0) == []
    store.drop(page(1), "k0-1")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(StoreError, match="a file, a folder is needed"):
        FolderStore(file)


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    others = ["notes.txt", "ab/notes.txt", "ab/00/notes.txt", "AB/00/000001/k0-1", "ab/cd/ef/k0-1"]
    others += ["ab/000/00001/k0-1", "ab/00/000001/K0-1", "ab/00/000001/.hidden"]
    for name in others:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    store = FolderStore(tmp_path, min_free=0)
    store.put(page(1), "k0-1", b"mine")
    store.put(page(2), "k0-1", pack_blob(blob(PAGES[0])))
    assert sorted(store) == [
        BlobInfo(page(1), "k0-1", 4, pytest.approx(time.time(), abs=1000)),
        BlobInfo(
            page(2), "k0-1", len(pack_blob(blob(PAGES[0]))), pytest.approx(time.time(), abs=1000)
        ),
    ]
    assert len(store.shrink(0)) == 2
    assert all((tmp_path / name).exists() for name in others)


def test_a_store_goes_on_where_its_name_was_relative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = FolderStore("store", min_free=0)
    store.put(page(1), "k0-1", b"x")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.get(page(1), "k0-1") == b"x"

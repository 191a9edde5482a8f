"""A folder as a store: its files are all there is, so it outlives whoever wrote it.

    folder/<namespace>/<2 digits of a key>/<the others>/<part>

A file is written beside its name and moved there when it is whole. The time of a file is when it
was used last, and what was not used for longest goes first where room is needed: of what was used
within the same minute, the ends of sequences before their beginnings. A time that is still to come,
since a clock was set back, tells nothing: such a file goes before all others. Two processes may
have one folder: equal names are equal bytes, and what one deletes is a miss for the other.

Only regular files are read. A pipe would block the reader, and a link may lead anywhere: these are
damaged blobs, which a write replaces.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from kvant.errors import BlobError, StoreError
from kvant.sizes import format_size
from kvant.stores.contract import (
    MAGIC,
    PAGE,
    Bytes,
    checked_page,
    checked_part,
    checked_size,
    parts_among,
)

UNFINISHED = re.compile(r"[0-9a-f]{16}\.part")  # the name of a file that is being written
STALE = 3600.0  # seconds after which nobody writes to such a file any more
SPARED = 0.9  # of the quota: so much is left once something had to go
TRIES = 5  # to write into a folder that others delete as often
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
LARGE = 1 << 20  # bytes, beyond which a file is read only where it begins as a blob
UNCOUNTED = 16  # part of the quota that is written before all files are counted again


class Entry(NamedTuple):
    """A blob, as the folder tells of it."""

    page: str
    part: str
    nbytes: int
    used: float  # when, in seconds since 1970


class Folder:
    """Blobs in files, within a quota."""

    def __init__(
        self, path: str | os.PathLike[str], max_bytes: int | None = None, min_free: int = 1 << 30
    ) -> None:
        """At most `max_bytes`, and only while the disk has `min_free` bytes more."""
        self.path = Path(path).expanduser().absolute()
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path}: a file, a folder is needed")
        self.max_bytes = max_bytes
        self.min_free = min_free
        self._lock = Lock()
        self._left: int | None = None  # bytes to write until all files are counted again

    @property
    def url(self) -> str:
        return str(self.path)

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        """Whoever asks for pages uses them, though some may be in memory already."""
        found = [parts_among(_names(self._folder(page))) for page in pages]
        for page, parts in zip(pages, found, strict=True):
            for part in parts:
                _touch(self._folder(page) / part)
        return found

    def get(self, page: str, part: str) -> Bytes | None:
        data = self.read(page, part)
        if data is not None:
            _touch(self._file(page, part))
        return data

    def read(self, page: str, part: str) -> Bytes | None:
        """A blob, for somebody who only looks: it is not used."""
        path = self._file(page, part)
        try:
            _check_regular(path.lstat(), path)
            file = os.open(path, READ)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return _read_all(file, path)
        finally:
            os.close(file)

    def put(self, page: str, part: str, blob: Bytes) -> None:
        path = self._file(page, part)
        with suppress(FileNotFoundError, NotADirectoryError):
            if stat.S_ISREG(path.lstat().st_mode):
                return
            self.drop(page, part)
        self._make_room(len(blob))
        beside = path.with_name(f"{secrets.token_hex(8)}.part")
        for left in reversed(range(TRIES)):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with beside.open("xb", buffering=0) as file:
                    _write_all(file.fileno(), blob)
                beside.replace(path)
                return
            except (FileNotFoundError, FileExistsError):  # somebody deletes the folder, if empty
                if not left:
                    raise
            finally:
                self._unlink(beside)

    def drop(self, page: str, part: str) -> None:
        path = self._file(page, part)
        with suppress(FileNotFoundError, NotADirectoryError):
            if stat.S_ISDIR(path.lstat().st_mode):
                path.rmdir()
            self._unlink(path)

    # ---- what people ask

    def __iter__(self) -> Iterator[Entry]:
        """All blobs, as they are found."""
        for page in self._pages():
            folder = self._folder(page)
            for name in parts_among(_names(folder)):
                with suppress(OSError):  # it may go at any time
                    told = (folder / name).lstat()
                    nbytes = told.st_size if stat.S_ISREG(told.st_mode) else 0
                    yield Entry(page, name, nbytes, told.st_mtime)

    def shrink(self, nbytes: int) -> list[Entry]:
        """Delete what was not used for longest, until so many bytes are left; what that was."""
        gone = []
        for entry in surplus(self, nbytes):
            with suppress(OSError):  # a folder in place of a blob that is not empty
                self.drop(entry.page, entry.part)
                gone.append(entry)
        return gone

    def tidy(self) -> int:
        """Delete what writers left that were killed; how many files."""
        count = 0
        for page in self._pages():
            folder = self._folder(page)
            for name in filter(UNFINISHED.fullmatch, _names(folder)):
                with suppress(OSError):
                    if abs(time.time() - (folder / name).lstat().st_mtime) > STALE:
                        self._unlink(folder / name)
                        count += 1
        return count

    # ---- within

    def _pages(self) -> Iterator[str]:
        """The names of all folders that are pages."""
        for space in _names(self.path):
            for two in _names(self.path / space):
                for rest in _names(self.path / space / two):
                    page = f"{space}/{two}{rest}"
                    if len(two) == 2 and PAGE.fullmatch(page):
                        yield page

    def _make_room(self, nbytes: int) -> None:
        """Let go of old blobs for a new one, or raise."""
        with self._lock:
            self.path.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free - self.min_free
            if self._left is None or nbytes > min(self._left, free):
                self._left = self._counted(nbytes)
            self._left -= nbytes

    def _counted(self, nbytes: int) -> int:
        """Let go of old blobs for a new one; bytes to write until it is time to count again.

        Others write here, too, and know as little of this process.
        """
        self.tidy()
        held = sum(one.nbytes for one in self)
        free = shutil.disk_usage(self.path).free
        most = held + free - self.min_free
        if self.max_bytes is not None:
            most = min(self.max_bytes, most)
        if nbytes > most:
            raise StoreError(
                f"{self.path}: no room for {format_size(nbytes)}: {format_size(free)} are free "
                f"of which {format_size(self.min_free)} are to stay, the quota is "
                f"{'none' if self.max_bytes is None else format_size(self.max_bytes)}"
            )
        if held + nbytes > most:
            self.shrink(max(0, int(SPARED * most) - nbytes))
            held = sum(one.nbytes for one in self)
        return max(nbytes, min(most - held, most // UNCOUNTED))

    def _unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty
            path.parent.rmdir()

    def _folder(self, page: str) -> Path:
        space, _, key = checked_page(page).partition("/")
        return self.path / space / key[:2] / key[2:]

    def _file(self, page: str, part: str) -> Path:
        return self._folder(page) / checked_part(part)


def surplus(entries: Iterable[Entry], nbytes: int) -> list[Entry]:
    """What has to go, so that so many bytes are left: what was not used for longest comes first."""
    now = time.time()
    found = sorted(entries, key=lambda one: _age(one, now))
    over, gone = sum(one.nbytes for one in found) - nbytes, []
    for entry in found:
        if over <= 0:
            break
        over -= entry.nbytes
        gone.append(entry)
    return gone


def _age(entry: Entry, now: float) -> tuple[int, int]:
    """The minute of its use, unless that is still to come; then what ends last comes first."""
    used = entry.used if entry.used < now + STALE else 0.0
    number = re.match(r"\d*", entry.part.rpartition("-")[2])
    return int(used // 60), -int(f"0{number[0]}" if number else 0)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link to itself is no folder either
            raise
        return []


def _touch(path: Path) -> None:
    """Note that a blob was used."""
    with suppress(OSError):  # a folder that is only read has its uses, too
        os.utime(path, follow_symlinks=False)


def _check_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise BlobError(f"{path}: {stat.filemode(found.st_mode)}, a regular file is needed")


def _read_all(file: int, path: Path) -> bytearray:
    """The bytes of a file, if a blob may have them."""
    found = os.fstat(file)
    _check_regular(found, path)  # it may have been replaced since it was opened
    size = checked_size(found.st_size, str(path))
    if size > LARGE and os.pread(file, len(MAGIC), 0) != MAGIC:
        raise BlobError(f"{path}: {size} bytes that do not begin as a blob")
    data = bytearray(size)
    view, read = memoryview(data), 0
    while read < len(data) and (count := os.readv(file, [view[read:]])):
        read += count
    return data[:read] if read < len(data) else data


def _write_all(file: int, data: Bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]

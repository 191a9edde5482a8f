"""A folder as a store: its files are all there is, so it outlives whoever wrote it.

    folder/<namespace>/<2 digits of a key>/<the others>/<part>

A file is written beside its name and moved there when it is whole. The time of a file is when it
was used last, and what was not used for longest goes first where room is needed: of what was used
within the same minute, the ends of sequences before their beginnings. Two processes may have one
folder: equal names are equal bytes, and what one deletes is a miss for the other.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from kvant.errors import StoreError
from kvant.sizes import format_size
from kvant.stores.contract import Bytes

PAGE = re.compile(r"[0-9a-z-]+/[0-9a-f]{8,128}", re.ASCII)
PART = re.compile(r"[a-z][0-9a-z-]*", re.ASCII)
UNFINISHED = ".part"  # how the name of a file ends that is being written
STALE = 3600.0  # seconds after which nobody writes to such a file any more
SPARED = 0.9  # of the quota: so much is left once something had to go
MAX_BLOB = 1 << 32


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
        self.path = Path(path).expanduser()
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path}: a file, a folder is needed")
        self.max_bytes = max_bytes
        self.min_free = min_free
        self._lock = Lock()
        self._nbytes: int | None = None  # of all files, as far as this process knows

    @property
    def url(self) -> str:
        return str(self.path)

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        return [frozenset(filter(PART.fullmatch, _names(self._folder(page)))) for page in pages]

    def get(self, page: str, part: str) -> Bytes | None:
        path = self._file(page, part)
        try:
            with path.open("rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size > MAX_BLOB:
                    raise StoreError(f"{path}: {size} bytes, {MAX_BLOB} at most")
                data = bytearray(size)
                view, read = memoryview(data), 0
                while read < size and (count := file.readinto(view[read:])):
                    read += count
        except FileNotFoundError:
            return None
        with suppress(OSError):  # a folder that is only read has its uses, too
            os.utime(path)
        return data[:read] if read < size else data

    def put(self, page: str, part: str, blob: Bytes) -> None:
        path = self._file(page, part)
        if path.exists():
            return
        self._make_room(len(blob))
        beside = path.with_name(f"{secrets.token_hex(8)}{UNFINISHED}")
        for again in (True, False):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with beside.open("xb", buffering=0) as file:
                    _write_all(file.fileno(), blob)
                beside.replace(path)
                break
            except FileNotFoundError:  # somebody deleted the folder, which was empty
                if not again:
                    raise
            finally:
                beside.unlink(missing_ok=True)
        with self._lock:
            if self._nbytes is not None:
                self._nbytes += len(blob)

    def drop(self, page: str, part: str) -> None:
        self._unlink(self._file(page, part))

    # ---- what people ask

    def __iter__(self) -> Iterator[Entry]:
        """All blobs, as they are found."""
        for space in _folders(self.path):
            for two in _folders(self.path / space):
                for rest in _folders(self.path / space / two):
                    page = f"{space}/{two}{rest}"
                    if PAGE.fullmatch(page):
                        yield from self._entries(page)

    def shrink(self, nbytes: int) -> list[Entry]:
        """Delete what was not used for longest, until so many bytes are left; what that was."""
        entries = sorted(self, key=_age)
        over, gone = sum(one.nbytes for one in entries) - nbytes, []
        for entry in entries:
            if over <= 0:
                break
            self.drop(entry.page, entry.part)
            over -= entry.nbytes
            gone.append(entry)
        return gone

    def tidy(self) -> int:
        """Delete what writers left that were killed; how many files."""
        count = 0
        for path in self.path.glob(f"*/*/*/*{UNFINISHED}"):
            with suppress(OSError):
                if abs(time.time() - path.stat().st_mtime) > STALE:
                    self._unlink(path)
                    count += 1
        return count

    # ---- within

    def _entries(self, page: str) -> Iterator[Entry]:
        folder = self._folder(page)
        for name in _names(folder):
            with suppress(OSError):  # it may go at any time
                if PART.fullmatch(name):
                    told = (folder / name).stat()
                    yield Entry(page, name, told.st_size, told.st_mtime)

    def _make_room(self, nbytes: int) -> None:
        """Let go of old blobs for a new one, or raise."""
        with self._lock:
            if self._nbytes is None:  # the first one that is written
                self.path.mkdir(parents=True, exist_ok=True)
                self.tidy()
                self._nbytes = sum(one.nbytes for one in self)
            free = shutil.disk_usage(self.path).free
            allowed = self._nbytes + free - self.min_free
            most = allowed if self.max_bytes is None else min(self.max_bytes, allowed)
            if self._nbytes + nbytes <= most:
                return
            if nbytes > most:
                raise StoreError(
                    f"{self.path}: no room for {format_size(nbytes)}: {format_size(free)} are free "
                    f"of which {format_size(self.min_free)} are to stay, the quota is "
                    f"{'none' if self.max_bytes is None else format_size(self.max_bytes)}"
                )
            self.shrink(max(0, int(SPARED * most) - nbytes))
            self._nbytes = sum(one.nbytes for one in self)  # others write here, too

    def _unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # it is not empty
            path.parent.rmdir()

    def _folder(self, page: str) -> Path:
        if not PAGE.fullmatch(page):
            raise StoreError(f"{page!r} names no page")
        space, _, key = page.partition("/")
        return self.path / space / key[:2] / key[2:]

    def _file(self, page: str, part: str) -> Path:
        if not PART.fullmatch(part):
            raise StoreError(f"{part!r} names no part of a page")
        return self._folder(page) / part


def _age(entry: Entry) -> tuple[int, int]:
    """What is to go first comes first: by the minute of its use, then those that end last."""
    number = int("0" + re.sub(r"\D.*", "", entry.part.rpartition("-")[2]))
    return int(entry.used // 60), -number


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _folders(path: Path) -> list[str]:
    return sorted(name for name in _names(path) if not name.startswith("."))


def _write_all(file: int, data: Bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]

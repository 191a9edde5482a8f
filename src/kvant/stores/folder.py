"""A folder as a store: its files are all there is, so it outlives whoever wrote it.

    folder/<namespace>/<2 digits of a key>/<the others>/<part>

A file is written beside its name and moved there when it is whole. The time of a file is when it
was used last, and what was not used for longest goes first where room is needed: of what was used
within the same minute, the ends of sequences before their beginnings. A time that is still to come,
since a clock was set back, tells nothing: such a file goes before all others. Two processes may
have one folder: equal names are equal bytes, and what one deletes is a miss for the other.

Only regular files are read. A pipe would block the reader, and a link may lead anywhere: these are
damaged blobs, which a write replaces. A link in place of a folder below the store's own is never
followed: reads find an empty folder there, and writes fail.
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
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from kvant.errors import BlobError, StoreError
from kvant.sizes import format_size
from kvant.stores.contract import (
    HEAD,
    PAGE_NAME,
    Bytes,
    check_blob_size,
    check_page_name,
    check_part_name,
    filter_part_names,
    read_head,
)

UNFINISHED_NAME = re.compile(r"[0-9a-f]{16}\.part")  # the name of a file that is being written
STALE_AFTER_S = 3600.0  # seconds after which nobody writes to such a file any more
LOW_WATERMARK = 0.9  # of the quota: so much is left once something had to go
MAX_WRITE_TRIES = 5  # to write into a folder that others delete as often
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
LARGE = 1 << 20  # bytes, beyond which a file is checked before memory is allocated for it
UNDELETABLE = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EEXIST, errno.ENOTEMPTY)
RECOUNT_DIVISOR = 16  # part of the quota that is written before all files are counted again


class BlobInfo(NamedTuple):
    """A blob, as the folder tells of it."""

    page: str
    part: str
    nbytes: int
    last_used: float  # when, in seconds since 1970


class FolderStore:
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
        self._bytes_until_recount: int | None = (
            None  # bytes to write until all files are counted again
        )

    @property
    def url(self) -> str:
        return str(self.path)

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        """Whoever asks for pages uses them, though some may be in memory already."""
        found = []
        for page in pages:
            with self._open_page_folder(*_levels(page)) as folder:
                found.append(filter_part_names(_list_names(folder)))
                for part in found[-1]:
                    _touch(part, folder)
        return found

    def get(self, page: str, part: str) -> Bytes | None:
        with self._open_page_folder(*_levels(page)) as folder:
            data = _read(folder, part, self._blob_file(page, part))
            if data is not None:
                _touch(part, folder)
        return data

    def read(self, page: str, part: str) -> Bytes | None:
        """A blob, for somebody who only looks: it is not used."""
        with self._open_page_folder(*_levels(page)) as folder:
            return _read(folder, part, self._blob_file(page, part))

    def put(self, page: str, part: str, blob: Bytes) -> None:
        check_part_name(part)
        with self._open_page_folder(*_levels(page)) as folder:
            status = _lstat(part, folder)
        if status is not None:
            if stat.S_ISREG(status.st_mode):
                return
            self.drop(page, part)
        self._reserve_bytes(len(blob))
        for left in reversed(range(MAX_WRITE_TRIES)):
            try:
                self._write(page, part, blob)
                return
            except (FileNotFoundError, FileExistsError):  # somebody deletes the folder, if empty
                if not left:
                    raise
            finally:
                self._remove_empty(page)

    def drop(self, page: str, part: str) -> None:
        check_part_name(part)
        with self._open_page_folder(*_levels(page)) as folder, suppress(FileNotFoundError):
            if (status := _lstat(part, folder)) is None:
                return
            remove = os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink
            remove(part, dir_fd=folder)
        self._remove_empty(page)

    # ---- what people ask

    def __iter__(self) -> Iterator[BlobInfo]:
        """All blobs, as they are found."""
        for page in self._list_pages():
            with self._open_page_folder(*_levels(page)) as folder:
                blobs = [
                    (part, _lstat(part, folder)) for part in filter_part_names(_list_names(folder))
                ]
            for part, status in blobs:
                if status is not None:  # it may go at any time
                    nbytes = status.st_size if stat.S_ISREG(status.st_mode) else 0
                    yield BlobInfo(page, part, nbytes, status.st_mtime)

    def shrink(self, nbytes: int) -> list[BlobInfo]:
        """Delete the least recently used blobs until `nbytes` bytes are left; return them.

        A blob that cannot be deleted is skipped, and the next one is deleted in its place.
        """
        entries, gone = list(self), []
        over = sum(entry.nbytes for entry in entries) - nbytes
        for entry in choose_evictions(entries, 0):
            if over <= 0:
                break
            try:
                self.drop(entry.page, entry.part)
            except OSError as error:
                if error.errno not in UNDELETABLE:
                    raise
            else:
                over -= entry.nbytes
                gone.append(entry)
        return gone

    def delete_unfinished(self) -> int:
        """Delete what writers left that were killed; how many files."""
        count = 0
        for page in self._list_pages():
            before = count
            with self._open_page_folder(*_levels(page)) as folder:
                for name in filter(UNFINISHED_NAME.fullmatch, _list_names(folder)):
                    status = _lstat(name, folder)
                    if status is None or abs(time.time() - status.st_mtime) <= STALE_AFTER_S:
                        continue
                    with suppress(OSError):
                        os.unlink(name, dir_fd=folder)
                        count += 1
            if count > before:
                self._remove_empty(page)
        return count

    # ---- within

    def _list_pages(self) -> Iterator[str]:
        """The names of all folders that are pages."""
        for space in self._list():
            for two in self._list(space):
                for rest in self._list(space, two):
                    page = f"{space}/{two}{rest}"
                    if len(two) == 2 and PAGE_NAME.fullmatch(page):
                        yield page

    def _reserve_bytes(self, nbytes: int) -> None:
        """Let go of old blobs for a new one, or raise."""
        with self._lock:
            self.path.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free - self.min_free
            if self._bytes_until_recount is None or nbytes > min(self._bytes_until_recount, free):
                self._bytes_until_recount = self._recount(nbytes)
            self._bytes_until_recount -= nbytes

    def _recount(self, nbytes: int) -> int:
        """Let go of old blobs for a new one; bytes to write until it is time to count again.

        Others write here, too, and know as little of this process.
        """
        self.delete_unfinished()
        held = sum(one.nbytes for one in self)
        free = shutil.disk_usage(self.path).free
        most = held + free - self.min_free
        if self.max_bytes is not None:
            most = min(self.max_bytes, most)
        if held + nbytes > most >= nbytes:
            self.shrink(max(0, int(LOW_WATERMARK * most) - nbytes))
            held = sum(one.nbytes for one in self)
        if held + nbytes > most:  # too large, or blobs could not be deleted
            raise StoreError(
                f"{self.path}: no room for {format_size(nbytes)}: {format_size(free)} are free "
                f"of which {format_size(self.min_free)} are to stay, the quota is "
                f"{'none' if self.max_bytes is None else format_size(self.max_bytes)}, "
                f"{format_size(held)} are held"
            )
        return max(nbytes, min(most - held, most // RECOUNT_DIVISOR))

    def _write(self, page: str, part: str, blob: Bytes) -> None:
        """Write a blob to a file of another name, and move it to its own."""
        self.path.mkdir(parents=True, exist_ok=True)
        folder = self._open(*_levels(page), make=True)
        unfinished = f"{secrets.token_hex(8)}.part"
        try:
            file = os.open(unfinished, CREATE, 0o666, dir_fd=folder)
            try:
                _write_all(file, blob)
            finally:
                os.close(file)
            os.replace(unfinished, part, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=folder)
            os.close(folder)

    def _remove_empty(self, page: str) -> None:
        """Remove the folder of a page if it is empty."""
        *parents, name = _levels(page)
        with self._open_page_folder(*parents) as folder, suppress(OSError):  # it is not empty
            if folder is not None:
                os.rmdir(name, dir_fd=folder)

    def _list(self, *levels: str) -> list[str]:
        with self._open_page_folder(*levels) as folder:
            return _list_names(folder)

    @contextmanager
    def _open_page_folder(self, *levels: str) -> Iterator[int | None]:
        """Open a folder below the store's own; None where a level is missing or no folder."""
        try:
            folder = self._open(*levels)
        except (FileNotFoundError, NotADirectoryError):
            yield None
            return
        try:
            yield folder
        finally:
            os.close(folder)

    def _open(self, *levels: str, make: bool = False) -> int:
        """Open a folder level by level, and follow no link below the store's own."""
        path, folder = self.path, os.open(self.path, DIRECTORY)
        for name in levels:
            path /= name
            try:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=folder)
                below = os.open(name, DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            except OSError as error:  # of a link, ELOOP on some systems
                code = errno.ENOTDIR if error.errno == errno.ELOOP else error.errno
                raise OSError(code, os.strerror(code or 0), str(path)) from None
            finally:
                os.close(folder)
            folder = below
        return folder

    def _blob_file(self, page: str, part: str) -> Path:
        return self.path.joinpath(*_levels(page), check_part_name(part))


def choose_evictions(entries: Iterable[BlobInfo], nbytes: int) -> list[BlobInfo]:
    """What has to go, so that so many bytes are left: what was not used for longest comes first."""
    now = time.time()
    found = sorted(entries, key=lambda one: _eviction_key(one, now))
    over, gone = sum(one.nbytes for one in found) - nbytes, []
    for entry in found:
        if over <= 0:
            break
        over -= entry.nbytes
        gone.append(entry)
    return gone


def _eviction_key(entry: BlobInfo, now: float) -> tuple[int, int]:
    """The minute of its use, unless that is still to come; then what ends last comes first."""
    used = entry.last_used if entry.last_used < now + STALE_AFTER_S else 0.0
    number = re.match(r"\d*", entry.part.rpartition("-")[2])
    return int(used // 60), -int(f"0{number[0]}" if number else 0)


def _levels(page: str) -> tuple[str, str, str]:
    """The folders of a page, each in the one before."""
    space, _, key = check_page_name(page).partition("/")
    return space, key[:2], key[2:]


def _list_names(folder: int | None) -> list[str]:
    return [] if folder is None else os.listdir(folder)


def _lstat(name: str, folder: int | None) -> os.stat_result | None:
    """The state of a file or a link in an open folder; None where it is missing."""
    if folder is None:
        return None
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _touch(name: str, folder: int | None) -> None:
    """Note that a blob was used."""
    with suppress(OSError):  # a folder that is only read has its uses, too
        os.utime(name, dir_fd=folder, follow_symlinks=False)


def _read(folder: int | None, part: str, path: Path) -> bytearray | None:
    """The bytes of a blob in an open folder; None where there is none."""
    if (status := _lstat(part, folder)) is None:
        return None
    _check_regular(status, path)
    try:
        file = os.open(part, READ, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        return _read_all(file, path)
    finally:
        os.close(file)


def _check_regular(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise BlobError(f"{path}: {stat.filemode(found.st_mode)}, a regular file is needed")


def _read_all(file: int, path: Path) -> bytearray:
    """The bytes of a file, if a blob may have them."""
    found = os.fstat(file)
    _check_regular(found, path)  # it may have been replaced since it was opened
    size = check_blob_size(found.st_size, str(path))
    if size > LARGE:
        _check_large(file, path, size)
    data = bytearray(size)
    view, read = memoryview(data), 0
    while read < len(data) and (count := os.readv(file, [view[read:]])):
        read += count
    return data[:read] if read < len(data) else data


def _check_large(file: int, path: Path, size: int) -> None:
    """Refuse a file that does not begin as a blob, or has a hole in its first half.

    A sparse file takes little of a disk, and all of its size in memory. Writers leave no holes,
    but a file system may make some of zeros: then most of a blob is still data.
    """
    try:
        read_head(os.pread(file, HEAD.size, 0), size)
    except BlobError as error:
        raise BlobError(f"{path}: {size} bytes that do not begin as a blob: {error}") from None
    hole = os.lseek(file, 0, os.SEEK_HOLE)  # the end of the file where there is none
    os.lseek(file, 0, os.SEEK_SET)
    if hole < size // 2:
        raise BlobError(f"{path}: a sparse file: {size} bytes with a hole at {hole}")


def _write_all(file: int, data: Bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]

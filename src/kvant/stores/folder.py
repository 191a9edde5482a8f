"""Store blobs as files of a folder, within a quota; the files are the only state.

    folder/<namespace>/<first 2 digits of a key>/<the other digits>/<part>

A file is written under a temporary name in the same folder and renamed when complete. Its
modification time is its last use; an eviction deletes the least recently used blobs. Among blobs
used in the same minute, it deletes the ends of sequences before their beginnings. A time in the
future (a clock was set back) counts as the oldest. Processes may share a folder: equal names have
equal bytes, and a file that another process deleted is a miss.

Only regular files are read. A pipe would block the reader, and a link may lead anywhere: both are
corrupt blobs, which a write replaces. A link in place of a folder below the store's own is never
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
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import NamedTuple

from kvant.errors import BlobError, StoreError
from kvant.platform.paths import expand_path
from kvant.platform.sizes import format_size
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

UNFINISHED_NAME = re.compile(r"[0-9a-f]{16}\.part")  # of a file that is being written
STALE_AFTER_S = 3600.0  # age of an unfinished file whose writer is dead
LOW_WATERMARK = 0.9  # an eviction leaves this part of the quota
MAX_WRITE_TRIES = 5  # into a page folder that other processes remove while it is empty
READ_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
MAX_UNCHECKED_BYTES = 1 << 20  # larger files are checked before memory is allocated
UNDELETABLE_ERRNOS = (errno.EACCES, errno.EPERM, errno.EBUSY, errno.EEXIST, errno.ENOTEMPTY)
RECOUNT_DIVISOR = 16  # all files are counted again after writing 1 / 16 of the quota


class BlobInfo(NamedTuple):
    """A blob in the listing of a folder."""

    page: str
    part: str
    nbytes: int
    last_used: float  # seconds since 1970


class FolderStore:
    """A store of blobs in files, within a quota."""

    def __init__(
        self, path: str | os.PathLike[str], max_bytes: int | None = None, min_free: int = 1 << 30
    ) -> None:
        """Bound the blobs to `max_bytes`, and leave `min_free` bytes of the disk free."""
        try:
            self.path = expand_path(path).absolute()
        except ValueError as error:
            raise StoreError(str(error)) from error
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"{self.path} is a file, a folder is needed")
        self._folders = PageFolders(self.path)
        self.max_bytes = max_bytes
        self.min_free = min_free
        self._lock = Lock()
        self._bytes_until_recount: int | None = None  # None: not counted yet

    @property
    def url(self) -> str:
        return str(self.path)

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        """Return the stored parts of each page, and mark them as used."""
        parts_of = []
        for page in pages:
            with self._folders.open_page(page) as folder:
                parts_of.append(filter_part_names(_list_names(folder)))
                for part in parts_of[-1]:
                    _touch(part, folder)
        return parts_of

    def get(self, page: str, part: str) -> Bytes | None:
        return self.read(page, part, mark_used=True)

    def read(self, page: str, part: str, *, mark_used: bool = False) -> Bytes | None:
        """Return a blob, by default without marking it as used."""
        path = self.path.joinpath(*_levels(page), check_part_name(part))
        with self._folders.open_page(page) as folder:
            data = _read(folder, part, path)
            if mark_used and data is not None:
                _touch(part, folder)
        return data

    def put(self, page: str, part: str, blob: Bytes) -> None:
        check_part_name(part)
        with self._folders.open_page(page) as folder:
            status = _lstat(part, folder)
        if status is not None:
            if stat.S_ISREG(status.st_mode):
                return
            self.drop(page, part)
        self._reserve_bytes(len(blob))
        for tries_left in reversed(range(MAX_WRITE_TRIES)):
            try:
                self._folders.write(page, part, blob)
                return
            except (FileNotFoundError, FileExistsError):  # another process removed the folder
                if not tries_left:
                    raise
            finally:
                self._folders.remove_empty(page)

    def drop(self, page: str, part: str) -> None:
        check_part_name(part)
        with self._folders.open_page(page) as folder, suppress(FileNotFoundError):
            if (status := _lstat(part, folder)) is None:
                return
            remove = os.rmdir if stat.S_ISDIR(status.st_mode) else os.unlink
            remove(part, dir_fd=folder)
        self._folders.remove_empty(page)

    def __iter__(self) -> Iterator[BlobInfo]:
        """Yield all blobs, in no order."""
        for page in self._folders.list_pages():
            with self._folders.open_page(page) as folder:
                blobs = [
                    (part, _lstat(part, folder)) for part in filter_part_names(_list_names(folder))
                ]
            for part, status in blobs:
                if status is not None:  # None: deleted since
                    nbytes = status.st_size if stat.S_ISREG(status.st_mode) else 0
                    yield BlobInfo(page, part, nbytes, status.st_mtime)

    def shrink(self, nbytes: int) -> list[BlobInfo]:
        """Delete the least recently used blobs until `nbytes` bytes are left; return them.

        A blob that cannot be deleted is skipped.
        """
        entries, deleted = list(self), []
        excess = sum(entry.nbytes for entry in entries) - nbytes
        for entry in choose_evictions(entries, 0):  # all, least recently used first
            if excess <= 0:
                break
            try:
                self.drop(entry.page, entry.part)
            except OSError as error:
                if error.errno not in UNDELETABLE_ERRNOS:
                    raise
            else:
                excess -= entry.nbytes
                deleted.append(entry)
        return deleted

    def delete_unfinished(self) -> int:
        """Delete unfinished files of killed writers; return their number."""
        count = 0
        for page in self._folders.list_pages():
            count_before = count
            with self._folders.open_page(page) as folder:
                for name in filter(UNFINISHED_NAME.fullmatch, _list_names(folder)):
                    status = _lstat(name, folder)
                    if status is None or abs(time.time() - status.st_mtime) <= STALE_AFTER_S:
                        continue
                    with suppress(OSError):
                        os.unlink(name, dir_fd=folder)
                        count += 1
            if count > count_before:
                self._folders.remove_empty(page)
        return count

    def _reserve_bytes(self, nbytes: int) -> None:
        """Evict old blobs for a new one of `nbytes` bytes; raise if it does not fit."""
        with self._lock:
            self.path.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path).free - self.min_free
            if self._bytes_until_recount is None or nbytes > min(self._bytes_until_recount, free):
                self._bytes_until_recount = self._recount(nbytes)
            self._bytes_until_recount -= nbytes

    def _recount(self, nbytes: int) -> int:
        """Count all blobs and evict old ones; return the bytes to write until the next count.

        Until then, what other processes write is not counted.
        """
        self.delete_unfinished()
        used = sum(entry.nbytes for entry in self)
        free = shutil.disk_usage(self.path).free
        limit = used + free - self.min_free
        if self.max_bytes is not None:
            limit = min(self.max_bytes, limit)
        if used + nbytes > limit >= nbytes:
            self.shrink(max(0, int(LOW_WATERMARK * limit) - nbytes))
            used = sum(entry.nbytes for entry in self)
        if used + nbytes > limit:  # too large, or blobs could not be deleted
            quota = "none" if self.max_bytes is None else format_size(self.max_bytes)
            raise StoreError(
                f"{self.path}: no room for {format_size(nbytes)}: {format_size(free)} are free, "
                f"{format_size(self.min_free)} must stay free, the quota is {quota}, "
                f"{format_size(used)} are used"
            )
        return max(nbytes, min(limit - used, limit // RECOUNT_DIVISOR))


class PageFolders:
    """The folders of a store, one a page; below the root no link is followed."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def open_page(self, page: str) -> AbstractContextManager[int | None]:
        """Open the folder of a page; None if it is missing."""
        return self._open_folder(*_levels(page))

    def list_pages(self) -> Iterator[str]:
        """Yield the names of all pages."""
        for namespace in self._list_names():
            for head in self._list_names(namespace):
                for tail in self._list_names(namespace, head):
                    page = f"{namespace}/{head}{tail}"
                    if len(head) == 2 and PAGE_NAME.fullmatch(page):
                        yield page

    def write(self, page: str, part: str, blob: Bytes) -> None:
        """Write a blob to a temporary file and rename it."""
        self.root.mkdir(parents=True, exist_ok=True)
        folder = self._open(*_levels(page), make=True)
        unfinished = f"{secrets.token_hex(8)}.part"
        try:
            file = os.open(unfinished, CREATE_FLAGS, 0o666, dir_fd=folder)
            try:
                _write_all(file, blob)
            finally:
                os.close(file)
            os.replace(unfinished, part, src_dir_fd=folder, dst_dir_fd=folder)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(unfinished, dir_fd=folder)
            os.close(folder)

    def remove_empty(self, page: str) -> None:
        """Remove the folder of a page if it is empty."""
        *parents, name = _levels(page)
        with self._open_folder(*parents) as folder, suppress(OSError):  # it is not empty
            if folder is not None:
                os.rmdir(name, dir_fd=folder)

    def _list_names(self, *levels: str) -> list[str]:
        with self._open_folder(*levels) as folder:
            return _list_names(folder)

    @contextmanager
    def _open_folder(self, *levels: str) -> Iterator[int | None]:
        """Open a folder below the store's own; None if a level is missing or not a folder."""
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
        path, folder = self.root, os.open(self.root, DIRECTORY_FLAGS)
        for name in levels:
            path /= name
            try:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, dir_fd=folder)
                below = os.open(name, DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=folder)
            except OSError as error:  # for a link, ELOOP on some systems
                code = errno.ENOTDIR if error.errno == errno.ELOOP else error.errno
                raise OSError(code, os.strerror(code or 0), str(path)) from None
            finally:
                os.close(folder)
            folder = below
        return folder


def choose_evictions(entries: Iterable[BlobInfo], nbytes: int) -> list[BlobInfo]:
    """Return the least recently used blobs to delete so that `nbytes` are left."""
    now = time.time()
    ordered = sorted(entries, key=lambda entry: _eviction_key(entry, now))
    excess, evictions = sum(entry.nbytes for entry in ordered) - nbytes, []
    for entry in ordered:
        if excess <= 0:
            break
        excess -= entry.nbytes
        evictions.append(entry)
    return evictions


def _eviction_key(entry: BlobInfo, now: float) -> tuple[int, int]:
    """Return a sort key: minute of the last use, then later pages first.

    The minute is 0 for a time in the future and for a file without bytes, which is no blob.
    """
    is_valid = entry.nbytes > 0 and entry.last_used < now + STALE_AFTER_S
    number = re.match(r"\d*", entry.part.rpartition("-")[2])  # of the page, or a length
    return int(entry.last_used // 60) if is_valid else 0, -int(f"0{number[0]}" if number else 0)


def _levels(page: str) -> tuple[str, str, str]:
    """Return the nested folders of a page."""
    namespace, _, key = check_page_name(page).partition("/")
    return namespace, key[:2], key[2:]


def _list_names(folder: int | None) -> list[str]:
    return [] if folder is None else os.listdir(folder)


def _lstat(name: str, folder: int | None) -> os.stat_result | None:
    """Return the status of a file or a link in an open folder; None if it is missing."""
    if folder is None:
        return None
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def _touch(name: str, folder: int | None) -> None:
    """Mark a blob as used."""
    with suppress(OSError):  # e.g. a read-only folder
        os.utime(name, dir_fd=folder, follow_symlinks=False)


def _read(folder: int | None, part: str, path: Path) -> bytearray | None:
    """Read a blob in an open folder; None if it is missing."""
    if (status := _lstat(part, folder)) is None:
        return None
    _check_regular(status, path)
    try:
        file = os.open(part, READ_FLAGS, dir_fd=folder)
    except FileNotFoundError:
        return None
    try:
        return _read_all(file, path)
    finally:
        os.close(file)


def _check_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise BlobError(f"{path}: {stat.filemode(status.st_mode)}, a regular file is needed")


def _read_all(file: int, path: Path) -> bytearray:
    """Read an open file; raise if it cannot be a blob."""
    status = os.fstat(file)
    _check_regular(status, path)  # it may have been replaced before it was opened
    size = check_blob_size(status.st_size, str(path))
    if size > MAX_UNCHECKED_BYTES:
        _check_large(file, path, size)
    data = bytearray(size)
    view, read = memoryview(data), 0
    while read < len(data) and (count := os.readv(file, [view[read:]])):
        read += count
    return data[:read] if read < len(data) else data


def _check_large(file: int, path: Path, size: int) -> None:
    """Raise for a file without the head of a blob, or with a hole in its first half.

    A sparse file is small on disk and large in memory. Writers leave no holes, but a file system
    may turn zeros into holes; most of a blob is data even then.
    """
    try:
        read_head(os.pread(file, HEAD.size, 0), size)
    except BlobError as error:
        raise BlobError(f"{path}: {size} bytes without the head of a blob: {error}") from None
    hole = os.lseek(file, 0, os.SEEK_HOLE)  # the end of the file if it has no hole
    os.lseek(file, 0, os.SEEK_SET)
    if hole < size // 2:
        raise BlobError(f"{path}: a sparse file: {size} bytes with a hole at {hole}")


def _write_all(file: int, data: Bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]

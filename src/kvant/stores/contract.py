"""Where pages are kept outside of this process: blobs that never change, by page and part.

A page is named by a path of two words, a namespace and a key; its parts by a word each. Both are
made of letters, digits and `-`; other names are refused. A store may forget anything at any time.
Whatever goes wrong, it raises: `Tiers`, through which all others ask, makes a miss of it.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvant.errors import BlobError, StoreError

Bytes = bytes | bytearray
PAGE_NAME = re.compile(r"[0-9a-z-]+/[0-9a-f]{8,128}", re.ASCII)
PART_NAME = re.compile(r"[a-z][0-9a-z-]*", re.ASCII)
MAX_BLOB_BYTES = 1 << 32
MAGIC = b"kvantpg2"  # what a blob begins with
HEAD = struct.Struct("<8sQQ")  # magic | length of the header | length of the layout
MAX_HEADER, MAX_LAYOUT = 1 << 24, 1 << 18


class Store(Protocol):
    """Blobs by page and part, for any number of threads, processes and machines."""

    @property
    def url(self) -> str:
        """What names it, without what is secret."""

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        """The parts that there are of each page."""

    def get(self, page: str, part: str) -> Bytes | None:
        """A blob, which is used now; None where there is none.

        A `BlobError` says that something lies there which can be no blob: it is dropped.
        """

    def put(self, page: str, part: str, blob: Bytes) -> None:
        """Keep a blob; one of that name is the same."""

    def drop(self, page: str, part: str) -> None:
        """Forget a blob, if it is there."""


def check_page_name(page: str) -> str:
    """The name of a page, if it is one."""
    if not PAGE_NAME.fullmatch(page):
        raise StoreError(f"{page!r} names no page")
    return page


def check_part_name(part: str) -> str:
    """The name of a part, if it is one."""
    if not PART_NAME.fullmatch(part):
        raise StoreError(f"{part!r} names no part of a page")
    return part


def filter_part_names(names: Iterable[str]) -> frozenset[str]:
    """Those of the names that a part may have."""
    return frozenset(filter(PART_NAME.fullmatch, names))


def check_blob_size(nbytes: int, source: str) -> int:
    """So many bytes, if a blob may have them: asked before they are read."""
    if nbytes > MAX_BLOB_BYTES:
        raise BlobError(f"{source}: {nbytes} bytes, {MAX_BLOB_BYTES} at most")
    return nbytes


def read_head(data: Bytes, nbytes: int) -> tuple[int, int]:
    """Return the lengths of header and layout if a blob of `nbytes` bytes can begin with `data`."""
    if nbytes < HEAD.size or len(data) < HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise BlobError("not a page of kvant, or cut short")
    _, header, layout = HEAD.unpack_from(data)
    fits = 0 < header <= MAX_HEADER and 0 < layout <= MAX_LAYOUT
    if not fits or header + layout > nbytes - HEAD.size:
        raise BlobError(f"a header of {header} and {layout} bytes in {nbytes}")
    return header, layout


def redact_url(url: str) -> str:
    """A URL without what may be secret: who asks, and what follows a `?` or a `#`."""
    scheme, mark, rest = url.partition("://")
    return scheme + mark + re.split("[?#]", rest.rpartition("@")[2])[0]

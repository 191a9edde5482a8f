"""The interface of stores: immutable blobs outside this process, named by page and part.

    page   <namespace>/<key>, as [0-9a-z-]+/[0-9a-f]+
    part   a word of [0-9a-z-] that starts with a letter: KV of a layer group, or a tail state

A store may drop any blob at any time. It raises on every failure; `Tiers`, through which all code
calls stores, turns failures into misses.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from typing import Protocol

from kvant.errors import BlobError, StoreError

Bytes = bytes | bytearray
PAGE_NAME = re.compile(r"[0-9a-z-]+/[0-9a-f]{8,128}", re.ASCII)
PART_NAME = re.compile(r"[a-z][0-9a-z-]{0,127}", re.ASCII)
MAX_BLOB_BYTES = 1 << 32
MAGIC = b"kvantpg2"  # first bytes of a blob
# A blob: head | header (JSON: names, tokens) | layout (JSON: dtypes, shapes) | tensors | checksum
HEAD = struct.Struct("<8sQQ")  # magic | bytes of the header | bytes of the layout
MAX_HEADER, MAX_LAYOUT = 1 << 24, 1 << 18  # bytes


class Store(Protocol):
    """Blobs by page and part, shared by any number of threads, processes and machines."""

    @property
    def url(self) -> str:
        """The address of the store without secrets."""

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        """Return the stored parts of each page."""

    def get(self, page: str, part: str) -> Bytes | None:
        """Return a blob and mark it as used; None if it is missing.

        Raise a `BlobError` for stored data that cannot be a blob: the caller drops it.
        """

    def put(self, page: str, part: str, blob: Bytes) -> None:
        """Store a blob. Blobs of one name are equal, so an existing one may stay."""

    def drop(self, page: str, part: str) -> None:
        """Delete a blob if it exists."""


def check_page_name(page: str) -> str:
    """Return `page`; raise if it is not a page name."""
    if not PAGE_NAME.fullmatch(page):
        raise StoreError(f"{page!r} is not a page name")
    return page


def check_part_name(part: str) -> str:
    """Return `part`; raise if it is not a part name."""
    if not PART_NAME.fullmatch(part):
        raise StoreError(f"{part!r} is not a part name")
    return part


def filter_part_names(names: Iterable[str]) -> frozenset[str]:
    """Return the names that are valid part names."""
    return frozenset(filter(PART_NAME.fullmatch, names))


def check_blob_size(nbytes: int, source: str) -> int:
    """Return `nbytes`, the size of a blob to read; raise if it is too large."""
    if nbytes > MAX_BLOB_BYTES:
        raise BlobError(f"{source}: {nbytes} bytes, {MAX_BLOB_BYTES} at most")
    return nbytes


def read_head(data: Bytes, nbytes: int) -> tuple[int, int]:
    """Return the lengths of header and layout; raise if no blob of `nbytes` begins like `data`."""
    if nbytes < HEAD.size or len(data) < HEAD.size or data[: len(MAGIC)] != MAGIC:
        raise BlobError("not a page of kvant, or truncated")
    _, header, layout = HEAD.unpack_from(data)
    fits = 0 < header <= MAX_HEADER and 0 < layout <= MAX_LAYOUT
    if not fits or header + layout > nbytes - HEAD.size:
        raise BlobError(f"a header of {header} bytes and a layout of {layout} in {nbytes} bytes")
    return header, layout


def redact_url(url: str) -> str:
    """Return a URL without parts that may be secret: user, password, query and fragment."""
    scheme, separator, rest = url.partition("://")
    return scheme + separator + re.split("[?#]", rest.rpartition("@")[2])[0]

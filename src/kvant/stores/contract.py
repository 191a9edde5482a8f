"""Where pages are kept outside of this process: blobs that never change, by page and part.

A page is named by a path of two words, a namespace and a key; its parts by a word each. Both are
made of letters, digits and `-`. A store may forget anything at any time. Whatever goes wrong, it
raises: `Tiers`, through which all others ask, makes a miss of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Bytes = bytes | bytearray


class Store(Protocol):
    """Blobs by page and part, for any number of threads, processes and machines."""

    @property
    def url(self) -> str:
        """What names it, without what is secret."""

    def has(self, pages: Sequence[str]) -> list[frozenset[str]]:
        """The parts that there are of each page."""

    def get(self, page: str, part: str) -> Bytes | None:
        """A blob, which is used now; None where there is none."""

    def put(self, page: str, part: str, blob: Bytes) -> None:
        """Keep a blob; one of that name is the same."""

    def drop(self, page: str, part: str) -> None:
        """Forget a blob, if it is there."""

"""A store by its name, a folder or a URL; several by a list of names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from kvant.errors import StoreError
from kvant.sizes import as_bytes
from kvant.stores import object_store as objects
from kvant.stores import redis as servers
from kvant.stores.contract import Store, redact_url
from kvant.stores.folder import FolderStore

if TYPE_CHECKING:  # a name is checked without torch
    from kvant.stores.tiers import Tiers

StoreName = str | os.PathLike[str]


def _parse_file_url(url: str) -> str:
    """The path that a URL tells."""
    split = urlsplit(url)
    if split.netloc or not split.path.startswith("/") or split.query or split.fragment:
        raise StoreError(f"{redact_url(url)}: file:///path is allowed")
    return unquote(split.path)


STORE_TYPES: dict[str, Callable[[str], Store]] = {  # by what stands before ://, beside file
    **dict.fromkeys(servers.SCHEMES, servers.RedisStore),
    **dict.fromkeys(objects.SCHEMES, objects.ObjectStore),
}


def open_store(name: StoreName, max_bytes: int | str | None = None) -> Store:
    """The store of a name: `~/.cache/kvant`, `file:///var/kvant`, `redis://host`, `s3://bucket/a`.

    `max_bytes` bounds a folder: what was not used for longest goes first.
    """
    most = None if max_bytes is None else as_bytes(max_bytes)
    text = os.fspath(name)
    check_name(text)
    scheme = _parse_scheme(text)
    if scheme is None:
        return FolderStore(text, most)
    if scheme == "file":
        return FolderStore(_parse_file_url(text), most)
    if most is not None:
        raise StoreError(
            f"{redact_url(text)}: max_bytes is of a folder; here the server is told that"
        )
    return STORE_TYPES[scheme](text)


def check_name(text: str) -> None:
    """Refuse an empty name, and a URL of an unknown scheme, before anything is opened."""
    if not text:
        raise StoreError("a store without a name: a folder, or a URL")
    scheme = _parse_scheme(text)
    if scheme in (None, "file"):
        return
    if scheme not in STORE_TYPES or not text.startswith(f"{scheme}://"):
        known = ", ".join(f"{one}://" for one in sorted(["file", *STORE_TYPES]))
        raise StoreError(f"{redact_url(text)}: {known} or a folder is needed")


def open_tiers(
    store: StoreName | Store | Sequence[StoreName | Store],
    secret: bytes | None = None,
    max_bytes: int | str | None = None,
) -> Tiers:
    """Stores as one, the nearest first, by their names or themselves.

    `max_bytes` bounds each folder that is named.
    """
    from kvant.stores.tiers import Tiers

    listed = [*store] if isinstance(store, Sequence) and not isinstance(store, str) else [store]
    bounded = 0
    opened: list[Store] = []
    for one in listed:
        if not isinstance(one, str | os.PathLike):
            opened.append(one)
        elif _parse_scheme(os.fspath(one)) in (None, "file"):
            opened.append(open_store(one, max_bytes))
            bounded += 1
        else:
            opened.append(open_store(one))
    if max_bytes is not None and not bounded:
        raise StoreError("max_bytes is of a folder, and none is named")
    return Tiers(opened, secret)


def _parse_scheme(text: str) -> str | None:
    """What stands before `://`, or before the `:` of a known one; None of a path."""
    found = re.match(r"([A-Za-z][\w+.-]*):(//)?", text)
    if found is None or (found[2] is None and found[1] not in ("file", *STORE_TYPES)):
        return None
    return found[1]

"""Open stores by name: a folder, a URL, or a list of these."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from kvant.errors import CacheError, ExtensionError, StoreError
from kvant.platform.extensions import ExtensionTable
from kvant.platform.sizes import as_bytes
from kvant.stores.contract import Store, redact_url
from kvant.stores.folder import FolderStore
from kvant.stores.remote import OBJECT_STORE_SCHEMES, REDIS_SCHEMES, ObjectStore, RedisStore

if TYPE_CHECKING:  # checking a name must not import torch
    from kvant.stores.tiers import Tiers

StoreName = str | os.PathLike[str]


def _parse_file_url(url: str) -> str:
    """Return the path of a file URL."""
    split = urlsplit(url)
    if split.netloc or not split.path.startswith("/") or split.query or split.fragment:
        raise StoreError(f"{redact_url(url)}: file:///path is allowed")
    return unquote(split.path)


STORE_TYPES: dict[str, Callable[[str], Store]] = {  # kvant's own, by scheme, except file
    **dict.fromkeys(REDIS_SCHEMES, RedisStore),
    **dict.fromkeys(OBJECT_STORE_SCHEMES, ObjectStore),
}
STORE_MEMBERS = ("url", "has", "get", "put", "drop")
SCHEME = re.compile("[a-z][a-z0-9+.-]{0,63}", re.ASCII)


def _check_opener(scheme: str, opener: Callable[[str], Store]) -> None:
    if not callable(opener):
        raise ExtensionError(f"the store {scheme!r}: {opener!r} takes no URL and returns no store")


STORE_TABLE: ExtensionTable[Callable[[str], Store]] = ExtensionTable(
    "store", STORE_TYPES, _check_opener, SCHEME, lambda: {"file"}
)


def register_store(scheme: str, opener: Callable[[str], Store]) -> None:
    """Make URLs `scheme://...` names of stores; `opener(url)` returns a `kvant.types.Store`.

    >>> class Nowhere:
    ...     url = "nowhere://"
    ...     def has(self, pages):
    ...         return [frozenset() for page in pages]
    ...     def get(self, page, part):
    ...         return None
    ...     def put(self, page, part, blob):
    ...         pass
    ...     def drop(self, page, part):
    ...         pass
    >>> kvant.register_store("nowhere", lambda url: Nowhere())
    >>> prefixes = kvant.Prefixes(store="nowhere://")
    """
    STORE_TABLE.register(scheme, opener)


def open_store(name: StoreName, max_bytes: int | str | None = None) -> Store:
    """Open a store by name: `~/.cache/kvant`, `file:///var/kvant`, `redis://host`, `s3://bucket/a`.

    `max_bytes` bounds a folder, which evicts its least recently used blobs first.
    """
    quota = None if max_bytes is None else as_bytes(max_bytes)
    text = os.fspath(name)
    check_name(text)
    scheme = _parse_scheme(text)
    if scheme is None:
        return FolderStore(text, quota)
    if scheme == "file":
        return FolderStore(_parse_file_url(text), quota)
    if quota is not None:
        raise StoreError(
            f"{redact_url(text)}: max_bytes is for folders; set the limit in the store itself"
        )
    try:
        store = STORE_TABLE[scheme](text)
    except CacheError:
        raise
    except Exception as error:  # the opener of a package may raise anything
        raise StoreError(f"{redact_url(text)}: {type(error).__name__}: {error}") from error
    missing = [name for name in STORE_MEMBERS if getattr(store, name, None) is None]
    if missing:  # later, `Tiers` would take each call as a failure of the store
        raise ExtensionError(
            f"the store {scheme!r}: {type(store).__name__} has no {', '.join(missing)}:"
            " kvant.types.Store describes one"
        )
    return store


def check_name(text: str) -> None:
    """Raise for an empty name or an unknown scheme; opens nothing."""
    if not text:
        raise StoreError("a store without a name: give a folder or a URL")
    scheme = _parse_scheme(text)
    if scheme in (None, "file"):
        return
    if scheme not in STORE_TABLE or not text.startswith(f"{scheme}://"):
        schemes = ", ".join(f"{name}://" for name in sorted(["file", *STORE_TABLE]))
        raise StoreError(f"{redact_url(text)}: {schemes} or a folder is needed")


def open_tiers(
    store: StoreName | Store | Sequence[StoreName | Store],
    secret: bytes | None = None,
    max_bytes: int | str | None = None,
) -> Tiers:
    """Open stores by name and combine them with given ones, nearest first.

    `max_bytes` bounds each folder that is opened by name.
    """
    from kvant.stores.tiers import Tiers

    sources = [*store] if isinstance(store, Sequence) and not isinstance(store, str) else [store]
    num_folders = 0
    stores: list[Store] = []
    for source in sources:
        if not isinstance(source, str | os.PathLike):
            stores.append(source)
        elif _parse_scheme(os.fspath(source)) in (None, "file"):
            stores.append(open_store(source, max_bytes))
            num_folders += 1
        else:
            stores.append(open_store(source))
    if max_bytes is not None and not num_folders:
        raise StoreError("max_bytes is for folders, and no folder is named")
    return Tiers(stores, secret)


def _parse_scheme(text: str) -> str | None:
    """Return the scheme of a URL; None for a path. A known scheme may lack the `//`."""
    match = re.match(r"([A-Za-z][\w+.-]*):(//)?", text)
    if match is None:
        return None
    is_scheme = match[2] is not None or match[1] == "file" or match[1] in STORE_TABLE
    return match[1] if is_scheme else None

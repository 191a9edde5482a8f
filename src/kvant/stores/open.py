"""A store by its name: a folder, or a URL."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvant.errors import StoreError
from kvant.sizes import parse_size
from kvant.stores.contract import Store
from kvant.stores.folder import Folder
from kvant.stores.tiers import Tiers


def _folder(url: str, max_bytes: int | None) -> Store:
    return Folder(url.removeprefix("file://"), max_bytes)


STORES: dict[str, Callable[[str, int | None], Store]] = {  # by what stands before ://
    "file": _folder,
}


def open_store(url: str, max_bytes: int | str | None = None) -> Store:
    """The store of a name: `~/.cache/kvant`, `file:///var/kvant`.

    `max_bytes` bounds a folder: what was not used for longest goes first.
    """
    most = parse_size(max_bytes) if isinstance(max_bytes, str) else max_bytes
    scheme, mark, _ = url.partition("://")
    if not url:
        raise StoreError("a store without a name: a folder, or a URL")
    if not mark:
        return _folder(url, most)
    if scheme not in STORES:
        raise StoreError(f"{url}: {scheme}:// is none of {', '.join(sorted(STORES))}; or a folder")
    return STORES[scheme](url, most)


def open_tiers(
    store: str | Store | Sequence[str | Store],
    secret: bytes | None = None,
    max_bytes: int | str | None = None,
) -> Tiers:
    """One store, or several of them, the nearest first; `max_bytes` bounds each folder."""
    several = [store] if isinstance(store, str) or not isinstance(store, Sequence) else store
    found = [open_store(one, max_bytes) if isinstance(one, str) else one for one in several]
    return Tiers(found, secret)

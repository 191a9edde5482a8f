"""Where prefixes outlive a process: a folder, a Redis, an object store, or several of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvant.lazy import lazy_names

if TYPE_CHECKING:
    from kvant.stores.blob import Blob, Layout, Payload, about, opened, opened_as, packed
    from kvant.stores.contract import Bytes, Store
    from kvant.stores.folder import Entry, Folder, surplus
    from kvant.stores.object import Objects
    from kvant.stores.open import STORES, open_store, open_tiers
    from kvant.stores.redis import Redis
    from kvant.stores.tiers import Tiers

__all__ = [
    "STORES",
    "Blob",
    "Bytes",
    "Entry",
    "Folder",
    "Layout",
    "Objects",
    "Payload",
    "Redis",
    "Store",
    "Tiers",
    "about",
    "open_store",
    "open_tiers",
    "opened",
    "opened_as",
    "packed",
    "surplus",
]

if not TYPE_CHECKING:  # or any name would be a good one
    __getattr__ = lazy_names(
        __name__,
        {
            "Blob": "kvant.stores.blob",
            "Bytes": "kvant.stores.contract",
            "Entry": "kvant.stores.folder",
            "Folder": "kvant.stores.folder",
            "Layout": "kvant.stores.blob",
            "Objects": "kvant.stores.object",
            "Payload": "kvant.stores.blob",
            "Redis": "kvant.stores.redis",
            "STORES": "kvant.stores.open",
            "Store": "kvant.stores.contract",
            "Tiers": "kvant.stores.tiers",
            "about": "kvant.stores.blob",
            "open_store": "kvant.stores.open",
            "open_tiers": "kvant.stores.open",
            "opened": "kvant.stores.blob",
            "opened_as": "kvant.stores.blob",
            "packed": "kvant.stores.blob",
            "surplus": "kvant.stores.folder",
        },
    )

"""Where prefixes outlive a process: a folder, a Redis, an object store, or several of them."""

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

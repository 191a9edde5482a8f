"""Where prefixes outlive a process: a folder, a Redis, an object store, or several of them."""

from kvant.stores.blob import Blob, about, opened, opened_as, packed
from kvant.stores.contract import Bytes, Store
from kvant.stores.folder import Entry, Folder, surplus
from kvant.stores.open import STORES, open_store
from kvant.stores.tiers import Tiers

__all__ = [
    "STORES",
    "Blob",
    "Bytes",
    "Entry",
    "Folder",
    "Store",
    "Tiers",
    "about",
    "open_store",
    "opened",
    "opened_as",
    "packed",
    "surplus",
]

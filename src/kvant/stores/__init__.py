"""Where prefixes outlive a process: a folder, a Redis, an object store, or several of them."""

from kvant.stores.blob import Blob, opened, packed
from kvant.stores.contract import Bytes, Store
from kvant.stores.folder import Folder
from kvant.stores.open import STORES, open_store, open_tiers
from kvant.stores.tiers import Tiers

__all__ = [
    "STORES",
    "Blob",
    "Bytes",
    "Folder",
    "Store",
    "Tiers",
    "open_store",
    "open_tiers",
    "opened",
    "packed",
]

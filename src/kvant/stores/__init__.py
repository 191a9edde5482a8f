"""Persist prefixes in a folder, a Redis, an object store, or several of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvant.lazy import lazy_names

if TYPE_CHECKING:
    from kvant.stores.blob import (
        Blob,
        BlobLayout,
        BlobPayload,
        pack_blob,
        parse_blob,
        parse_named_blob,
        read_metadata,
    )
    from kvant.stores.contract import Bytes, Store
    from kvant.stores.folder import BlobInfo, FolderStore, choose_evictions
    from kvant.stores.object_store import ObjectStore
    from kvant.stores.open import STORE_TYPES, open_store, open_tiers
    from kvant.stores.redis import RedisStore
    from kvant.stores.tiers import Tiers

__all__ = [
    "STORE_TYPES",
    "Blob",
    "BlobInfo",
    "BlobLayout",
    "BlobPayload",
    "Bytes",
    "FolderStore",
    "ObjectStore",
    "RedisStore",
    "Store",
    "Tiers",
    "choose_evictions",
    "open_store",
    "open_tiers",
    "pack_blob",
    "parse_blob",
    "parse_named_blob",
    "read_metadata",
]

if not TYPE_CHECKING:  # mypy would accept any name
    __getattr__ = lazy_names(
        __name__,
        {
            "Blob": "kvant.stores.blob",
            "BlobInfo": "kvant.stores.folder",
            "BlobLayout": "kvant.stores.blob",
            "BlobPayload": "kvant.stores.blob",
            "Bytes": "kvant.stores.contract",
            "FolderStore": "kvant.stores.folder",
            "ObjectStore": "kvant.stores.object_store",
            "RedisStore": "kvant.stores.redis",
            "STORE_TYPES": "kvant.stores.open",
            "Store": "kvant.stores.contract",
            "Tiers": "kvant.stores.tiers",
            "choose_evictions": "kvant.stores.folder",
            "open_store": "kvant.stores.open",
            "open_tiers": "kvant.stores.open",
            "pack_blob": "kvant.stores.blob",
            "parse_blob": "kvant.stores.blob",
            "parse_named_blob": "kvant.stores.blob",
            "read_metadata": "kvant.stores.blob",
        },
    )

"""Persist prefixes in a folder, a Redis, an object store, or several of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvant.lazy import lazy_names
from kvant.stores.contract import Bytes, Store
from kvant.stores.folder import BlobInfo, FolderStore, choose_evictions
from kvant.stores.open import STORE_TYPES, open_store, open_tiers, register_store
from kvant.stores.remote import ObjectStore, RedisStore

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
    "register_store",
]

if not TYPE_CHECKING:  # mypy would accept any name
    __getattr__ = lazy_names(  # these import torch
        __name__,
        {
            "kvant.stores.blob": (
                "Blob BlobLayout BlobPayload pack_blob parse_blob parse_named_blob read_metadata"
            ),
            "kvant.stores.tiers": "Tiers",
        },
    )

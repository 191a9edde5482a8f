"""The exception tree, and what a `Cache` refuses: value, limit and way out in every message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex


class CacheError(Exception):
    """Anything kvant refuses to do. What it was asked of is left unchanged."""


class SpecError(CacheError, ValueError):
    """A spec that cannot be read, or that contradicts itself."""


class PromptError(CacheError, ValueError):
    """A message that a model cannot be shown: by its template, or by the tokens it comes to."""


class GrammarError(CacheError, ValueError):
    """A grammar that cannot be read, or followed."""


class CapacityError(CacheError):
    """More tokens than a fixed capacity has room for."""


class UnknownSequence(CacheError, LookupError):
    """An id that no sequence has: it never was, was removed, or was evicted."""


class RewindError(CacheError):
    """A length that a layer cannot go back to."""


class SnapshotMismatch(CacheError, ValueError):
    """A snapshot of another cache, or one whose parts do not fit together."""


class CacheFileError(CacheError, ValueError):
    """A file that is not a kvant cache, is damaged, or is of another version."""


class StoreError(CacheError):
    """A store that cannot be had, or has no room."""


class BlobError(CacheError, ValueError):
    """Bytes of a store that are not what was written, or not by somebody who may."""


class UnsupportedView(CacheError):
    """A view that the backend asked for by name does not read."""


class EngineError(CacheError):
    """The engine that served a request ended by an error which is not of that request."""


class Refusals:
    """Says in one line what to write instead."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a cache is not pickled: kvant.save(cache, path) and kvant.load(path) write and read "
            "one, cache.fork() is a copy"
        )

    if not TYPE_CHECKING:  # or any name would be a good one

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"kvant.Cache has no {name!r}; a model of transformers takes kvant.cache_for(model,"
                " spec), or kvant.load(path, model)"
            )

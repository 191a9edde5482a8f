"""What others ask of a `Cache` that it is not: a pickle, and a cache of transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex


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

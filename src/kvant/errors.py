"""The exception tree, and what a `Cache` refuses: value, limit and way out in every message."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex


class CacheError(Exception):
    """Anything kvant refuses to do. What it was asked of is left unchanged.

    >>> try:
    ...     kvant.Cache(num_layers=1, spec="affine9")
    ... except kvant.CacheError as error:  # of whatever kind
    ...     print(type(error).__name__)
    SpecError
    """


class SpecError(CacheError, ValueError):
    """A spec that cannot be read, or that contradicts itself.

    >>> kvant.parse("affine9", num_layers=32)
    Traceback (most recent call last):
    ...
    kvant.errors.SpecError: format 'affine9' is not known; allowed: ...; nearest: affine8
    """


class PromptError(CacheError, ValueError):
    """A message that a model cannot be shown: by its template, or by the tokens it comes to.

    >>> kvant.generate(model, tokenizer, [])
    Traceback (most recent call last):
    ...
    kvant.errors.PromptError: the prompt has no tokens: give at least one
    """


class GrammarError(CacheError, ValueError):
    """A grammar that cannot be read, or followed.

    >>> kvant.generate(model, tokenizer, "size = ", grammar=kvant.Grammar.regex("[0-9"))
    Traceback (most recent call last):
    ...
    kvant.errors.GrammarError: a grammar that cannot be followed: ...
    """


class CapacityError(CacheError):
    """More tokens than a fixed capacity has room for.

    >>> kvant.Cache(1, "raw,capacity=8")[0].append(*torch.randn(2, 1, 2, 9, 64))
    Traceback (most recent call last):
    ...
    kvant.errors.CapacityError: 9 tokens for a capacity of 8: ...
    """


class ContextError(CapacityError):
    """A prompt too long for the context, or for the memory, that it would have.

    >>> kvant.generate(model, tokenizer, [1] * 5000)
    Traceback (most recent call last):
    ...
    kvant.errors.ContextError: a prompt of 5000 tokens for a context of 2048: ...
    """


class UnknownSequence(CacheError, LookupError):
    """An id that no sequence has: it never was, was removed, or was evicted.

    >>> kvant.Sequences(num_layers=1).get("chat-1", 0, 0, 10)
    Traceback (most recent call last):
    ...
    kvant.errors.UnknownSequence: sequence 'chat-1' is not there: ...
    """


class RewindError(CacheError):
    """A length that a layer cannot go back to.

    >>> cache, rows = kvant.Cache(1, "raw,window=4,slack=0"), torch.zeros(1, 2, 99, 64)
    >>> view = cache[0].append(rows, rows)
    >>> cache.rewind(50)
    Traceback (most recent call last):
    ...
    kvant.errors.RewindError: layer 0: length 50 cannot be reached from 99: ...
    """


class SnapshotMismatch(CacheError, ValueError):
    """A snapshot of another cache, or one whose parts do not fit together.

    >>> cache = kvant.Cache(1, "raw")
    >>> view = cache[0].append(*torch.randn(2, 1, 2, 10, 64))
    >>> kvant.Cache(1, "affine8").restore(cache.snapshot())
    Traceback (most recent call last):
    ...
    kvant.errors.SnapshotMismatch: layer 0: keys.codes is missing
    """


class CacheFileError(CacheError, ValueError):
    """A file that is not a kvant cache, is damaged, or is of another version.

    >>> from pathlib import Path
    >>> size = Path("notes.txt").write_text("not a cache")
    >>> kvant.load("notes.txt")
    Traceback (most recent call last):
    ...
    kvant.errors.CacheFileError: notes.txt: not a kvant cache, or cut short in its header
    """


class StoreError(CacheError):
    """A store that cannot be had, or has no room."""


class BlobError(CacheError, ValueError):
    """Bytes of a store that are not what was written, or not by somebody who may."""


class UnsupportedView(CacheError):
    """A view that the backend asked for by name does not read.

    >>> view = kvant.Cache(1)[0].append(*torch.randn(2, 1, 2, 10, 64))
    >>> kvant.attend(torch.randn(1, 8, 1, 64, dtype=torch.float64), view, backend="native")
    Traceback (most recent call last):
    ...
    kvant.errors.UnsupportedView: backend 'native' does not read this view: ...
    """


class EngineError(CacheError):
    """The engine that served a request ended by an error which is not of that request.

    >>> import sys
    >>> with kvant.Engine(model, tokenizer) as engine:  # sys.exit ends its thread
    ...     engine.submit("import ", on_step=sys.exit).result()
    Traceback (most recent call last):
    ...
    kvant.errors.EngineError: the engine ended: SystemExit(...)
    """


@contextmanager
def name_path(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let errors of the system within name `path`, and not a temporary file or no file at all."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise OSError(f"{error}: '{os.fspath(path)}'") from error
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


class UsageHints:
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

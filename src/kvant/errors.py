"""The exceptions and warnings of kvant. Each names the value, the limit and the way out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex


class CacheError(Exception):
    """The base of all errors of kvant. An operation that raises one has changed nothing.

    >>> try:
    ...     kvant.Cache(num_layers=1, spec="affine9")
    ... except kvant.CacheError as error:
    ...     print(type(error).__name__)
    SpecError
    """


class SpecError(CacheError, ValueError):
    """A spec that cannot be parsed, or that contradicts itself.

    >>> kvant.parse("affine9", num_layers=32)
    Traceback (most recent call last):
    ...
    kvant.errors.SpecError: format 'affine9' is not known; allowed: ...; nearest: affine8
    """


class PromptError(CacheError, ValueError):
    """A prompt that the chat template or the model cannot take.

    >>> kvant.generate(model, tokenizer, [])
    Traceback (most recent call last):
    ...
    kvant.errors.PromptError: the prompt has no tokens: give at least one
    """


class GrammarError(CacheError, ValueError):
    """A grammar that cannot be compiled, or that allows no next token.

    >>> kvant.generate(model, tokenizer, "size = ", grammar=kvant.Grammar.regex("[0-9"))
    Traceback (most recent call last):
    ...
    kvant.errors.GrammarError: a grammar that cannot be compiled: ...
    """


class CapacityError(CacheError):
    """More tokens than a fixed capacity.

    >>> kvant.Cache(1, "raw,capacity=8")[0].append(*torch.randn(2, 1, 2, 9, 64))
    Traceback (most recent call last):
    ...
    kvant.errors.CapacityError: 9 tokens for a capacity of 8: ...
    """


class ContextError(CapacityError):
    """A prompt that is too long for the context or for the memory limit.

    >>> kvant.generate(model, tokenizer, [1] * 5000)
    Traceback (most recent call last):
    ...
    kvant.errors.ContextError: a prompt of 5000 tokens for a context of 2048 ...
    """


class UnknownSequence(CacheError, LookupError):
    """An id without a sequence: never created, removed, or evicted.

    >>> kvant.Sequences(num_layers=1).get("chat-1", 0, 0, 10)
    Traceback (most recent call last):
    ...
    kvant.errors.UnknownSequence: unknown sequence 'chat-1': ...
    """


class RewindError(CacheError):
    """A length to which a layer cannot rewind.

    >>> cache, rows = kvant.Cache(1, "raw,window=4,slack=0"), torch.zeros(1, 2, 99, 64)
    >>> view = cache[0].append(rows, rows)
    >>> cache.rewind(50)
    Traceback (most recent call last):
    ...
    kvant.errors.RewindError: layer 0: cannot rewind from 99 to 50: ...
    """


class SnapshotMismatch(CacheError, ValueError):
    """A snapshot of a different cache, or one whose parts are inconsistent.

    >>> cache = kvant.Cache(1, "raw")
    >>> view = cache[0].append(*torch.randn(2, 1, 2, 10, 64))
    >>> kvant.Cache(1, "affine8").restore(cache.snapshot())
    Traceback (most recent call last):
    ...
    kvant.errors.SnapshotMismatch: layer 0: keys.codes is missing
    """


class CacheFileError(CacheError, ValueError):
    """A file that is no kvant cache, is corrupt, or has another format version.

    >>> from pathlib import Path
    >>> size = Path("notes.txt").write_text("not a cache")
    >>> kvant.load("notes.txt")
    Traceback (most recent call last):
    ...
    kvant.errors.CacheFileError: notes.txt: not a kvant cache, or truncated in its header
    """


class StoreError(CacheError):
    """A store that cannot be opened, or has no space."""


class BlobError(CacheError, ValueError):
    """A blob of a store that is corrupt, or not signed with the secret."""


class AdapterError(CacheError, ValueError):
    """An adapter whose files are invalid, or that does not fit the model."""


class ExtensionError(CacheError, ValueError):
    """A codec, a score, a retention rule or a store that cannot be registered or loaded.

    >>> kvant.register_codec("raw", object)
    Traceback (most recent call last):
    ...
    kvant.errors.ExtensionError: the codec 'raw': kvant has a codec of this name: choose another
    """


class UnsupportedView(CacheError):
    """A view that the requested backend does not support.

    >>> view = kvant.Cache(1)[0].append(*torch.randn(2, 1, 2, 10, 64))
    >>> kvant.attend(torch.randn(1, 8, 1, 64, dtype=torch.float64), view, backend="native")
    Traceback (most recent call last):
    ...
    kvant.errors.UnsupportedView: backend 'native' does not read this view: ...
    """


class EngineError(CacheError):
    """The engine ended with an error that this request did not cause.

    >>> import sys
    >>> with kvant.Engine(model, tokenizer) as engine:  # sys.exit ends its thread
    ...     engine.submit("import ", on_step=sys.exit).result()
    Traceback (most recent call last):
    ...
    kvant.errors.EngineError: the engine ended: SystemExit(...)
    """


@contextmanager
def name_path(path: str | os.PathLike[str]) -> Iterator[None]:
    """Make an `OSError` raised within name `path` in place of a temporary file or no file."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise OSError(f"{error}: '{os.fspath(path)}'") from error
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


class UsageHints:
    """Error messages that name the call to use instead."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "a cache is not pickled: kvant.save(cache, path) and kvant.load(path) write and read "
            "one, cache.fork() is a copy"
        )

    if not TYPE_CHECKING:  # a type checker would accept any name

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"kvant.Cache has no {name!r}; a model of transformers takes kvant.cache_for(model,"
                " spec), or kvant.load(path, model)"
            )


class RenamedAttribute:
    """An old attribute name, which works for one release, with a `DeprecationWarning`.

    A class declares `old = RenamedAttribute("new")`. Reading `old` warns and returns `new`.
    """

    def __init__(self, new_name: str) -> None:
        self.new_name = new_name

    def __set_name__(self, owner: type, old_name: str) -> None:
        self.old_name = old_name

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warnings.warn(
            f"{type(instance).__name__}.{self.old_name} is now {self.new_name}; the next release "
            "removes the old name",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(instance, self.new_name)

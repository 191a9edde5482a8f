"""The client's side of any request: its outcome, error, usage and timeline.

The engine's thread puts results into a future; any thread or event loop waits for them.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from threading import Condition
from typing import Any, Generic, Literal, TypeVar

from kvant.engine.timeline import Timeline
from kvant.prefixes.tree import PrefixMiss

log = logging.getLogger("kvant")

Outcome = Literal["finished", "cancelled", "failed"]
ItemT = TypeVar("ItemT", contravariant=True)


@dataclass(frozen=True)
class Usage:
    """Token counts of a request.

    >>> with kvant.Engine(model, tokenizer) as engine:
    ...     usage = engine.submit([5, 6, 7], max_new_tokens=4, ignore_end=True).result().usage
    >>> usage.prompt_tokens, usage.completion_tokens, usage.total_tokens
    (3, 4, 7)
    """

    prompt_tokens: int
    completion_tokens: int = 0  # of all continuations; in a `Result`, of that continuation
    cached_tokens: int = 0  # prompt tokens taken from a cached prefix, not prefilled
    restored_tokens: int = 0  # cached tokens that came from a store
    describe_miss: Callable[[], str] | None = field(default=None, repr=False, compare=False)

    @cached_property
    def prefix_lost(self) -> str | None:
        """A text that names the token and chat message where the prompt leaves the cached prefixes.

        If prefixes are not cached for the model, the text says why. The first access encodes the
        prompt again; it takes milliseconds per 1,000 tokens.
        """
        return None if self.describe_miss is None else self.describe_miss()

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle the text, without the tokenizer and the prompt that it is made of."""
        return self.__dict__ | {"prefix_lost": self.prefix_lost, "describe_miss": None}

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class RequestFuture(ABC, Generic[ItemT]):
    """The client's side of a request, which receives items until it is done."""

    def __init__(
        self, prompt: Sequence[int], cancel: Callable[[], None], timeline: Timeline
    ) -> None:
        self.prompt = tuple(prompt)
        self.timeline = timeline  # complete once the request has ended
        self._prefix_counts = (0, 0)  # cached_tokens and restored_tokens of `Usage`
        self._miss: PrefixMiss | None = None
        self._cancel = cancel
        self._final_texts: Mapping[int, str] = {}  # by choice
        self._is_done = False  # no item follows
        self._done_callbacks: list[Callable[[], object]] = []
        self._error: BaseException | None = None
        self._changed = Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def cancel(self) -> None:
        """End the request after its current forward; steps so far stay readable."""
        self._cancel()

    @property
    def done(self) -> bool:
        """Whether the request ended; unread items may be left."""
        return self._is_done

    @property
    def outcome(self) -> Outcome | None:
        """How the request ended; None while it is open."""
        if not self._is_done:
            return None
        if self._error is not None:
            return "failed"
        return "finished" if self._is_complete else "cancelled"

    @property
    def error(self) -> BaseException | None:
        """The error that failed the request."""
        return self._error

    @property
    @abstractmethod
    def _is_complete(self) -> bool:
        """Whether everything that was requested has arrived."""

    @property
    def usage(self) -> Usage:
        """Token counts so far, over all continuations."""
        return Usage(len(self.prompt), 0, *self._prefix_counts)

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` in the engine's thread when the request ends, or now if it has."""
        with self._changed:
            if not self._is_done:
                self._done_callbacks.append(callback)
                return
        callback()

    # ---- for the engine's thread

    @abstractmethod
    def put(self, item: ItemT) -> None:
        """Add an item; an exception fails the request."""

    def set_prefix_usage(self, num_cached: int, restored: range, miss: PrefixMiss | None) -> None:
        """Set what `Usage` reports; `restored` is the range of prompt tokens from a store."""
        num_restored = len(range(restored.start, min(restored.stop, num_cached)))
        self._prefix_counts, self._miss = (num_cached, num_restored), miss

    def finish(
        self, error: BaseException | None = None, final_texts: Mapping[int, str] | None = None
    ) -> None:
        """End the request; what is not complete counts as cancelled.

        `final_texts` maps each unfinished choice to the text that its detokenizer held back.
        """
        if isinstance(error, StopIteration | StopAsyncIteration):  # readers would just stop
            error = RuntimeError(repr(error))
        self.timeline.end_all_phases()
        with self._changed:
            self._is_done, self._error = True, error
            self._final_texts = final_texts or {}
            callbacks, self._done_callbacks = self._done_callbacks, []
            self._wake_waiters()
        for callback in callbacks:
            try:
                callback()
            except Exception:  # a failing callback must not fail the request
                log.exception("a done callback of a request failed")

    # ---- internals

    def _wait_until_done(self, timeout: float | None) -> None:
        """Wait for the end; raise the error of a failed request."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_done, timeout):
                raise TimeoutError(f"no result after {timeout} seconds")
        if self._error is not None:
            raise self._error

    def _add_waiter(self) -> asyncio.Future[None]:
        """Return a future that the next change completes; called with the lock."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.append((loop, waiter))
        return waiter

    def _wake_waiters(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, waiter in waiters:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_wake_waiter, waiter)


def _wake_waiter(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

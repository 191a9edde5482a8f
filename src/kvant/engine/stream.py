"""The client's side of a request: tokens as they arrive, and the result.

The engine's thread writes to a stream; any thread or event loop reads it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from threading import Condition
from typing import Literal

from kvant.engine.timeline import Timeline
from kvant.generation.loop import FinishReason, Step
from kvant.prefixes.tree import PrefixLoss

log = logging.getLogger("kvant")

Outcome = Literal["finished", "cancelled", "failed"]


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
    loss: PrefixLoss | None = field(default=None, repr=False)
    explain_loss: Callable[[PrefixLoss], str] = field(default=str, repr=False, compare=False)

    @cached_property
    def prefix_lost(self) -> str | None:
        """Where the prompt diverges from the cached prefixes, as text: the message and the token.

        The first access encodes the prompt again; it takes milliseconds per 1,000 tokens.
        """
        return None if self.loss is None else self.explain_loss(self.loss)

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Result:
    """One continuation of a prompt.

    >>> options = {"max_new_tokens": 4, "ignore_end": True, "quiet": True}
    >>> [result] = kvant.generate_many(model, tokenizer, ["import "], **options)
    >>> len(result.tokens), result.finish_reason
    (4, 'length')
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    usage: Usage


class Stream(Iterator[Step], AsyncIterator[Step]):
    """The reply to a request; steps of several continuations are interleaved, see `Step.choice`.

    >>> with kvant.Engine(model, tokenizer) as engine:
    ...     stream = engine.submit("import ", max_new_tokens=4, ignore_end=True)
    ...     texts = [step.text for step in stream]
    >>> len(texts), stream.done
    (4, True)
    """

    def __init__(
        self,
        prompt: Sequence[int],
        num_choices: int,
        cancel: Callable[[], None],
        timeline: Timeline,
        explain_loss: Callable[[PrefixLoss], str],
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self.prompt = tuple(prompt)
        self.timeline = timeline  # complete once the request has ended
        # cached_tokens, restored_tokens and loss of `Usage`
        self._prefix_usage: tuple[int, int, PrefixLoss | None] = (0, 0, None)
        self._explain_loss = explain_loss
        self._steps: list[list[Step]] = [[] for _ in range(num_choices)]
        self._cancel = cancel
        self._on_step = on_step
        self._unread: deque[Step] = deque()
        self._final_texts: Mapping[int, str] = {}  # by choice
        self._is_done = False  # no step follows
        self._done_callbacks: list[Callable[[], object]] = []
        self._error: BaseException | None = None
        self._changed = Condition()
        self._waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def __next__(self) -> Step:
        with self._changed:
            while (step := self._take_step()) is None:
                self._changed.wait()
        return step

    async def __anext__(self) -> Step:
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                try:
                    if (step := self._take_step()) is not None:
                        return step
                except StopIteration:
                    raise StopAsyncIteration from None
                future = loop.create_future()
                self._waiters.append((loop, future))
            await future

    def cancel(self) -> None:
        """Stop generating after the current token; the steps so far stay readable."""
        self._cancel()

    @property
    def done(self) -> bool:
        """Whether the request ended; unread steps may be left."""
        return self._is_done

    @property
    def outcome(self) -> Outcome | None:
        """How the request ended; None while it is open."""
        if not self._is_done:
            return None
        if self._error is not None:
            return "failed"
        return "finished" if all(self.finish_reasons) else "cancelled"

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """Why each continuation ended; None if it is open, was cancelled or failed."""
        return [steps[-1].finish_reason if steps else None for steps in self._steps]

    @property
    def error(self) -> BaseException | None:
        """The error that failed the request."""
        return self._error

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call `callback` in the engine's thread when the request ends, or now if it has."""
        with self._changed:
            if not self._is_done:
                self._done_callbacks.append(callback)
                return
        callback()

    @property
    def usage(self) -> Usage:
        """Token counts so far, over all continuations."""
        return self._make_usage(sum(map(len, self._steps)))

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end of the request and return the first continuation."""
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[Result]:
        """Wait for the end of the request and return every continuation."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_done, timeout):
                raise TimeoutError(f"no result after {timeout} seconds")
        if self._error is not None:
            raise self._error
        return [
            Result(
                "".join(step.text for step in steps) + self._final_texts.get(choice, ""),
                tuple(step.token for step in steps),
                tuple(step.logprob for step in steps),
                finish_reason or "cancelled",
                self._make_usage(len(steps)),
            )
            for choice, (steps, finish_reason) in enumerate(
                zip(self._steps, self.finish_reasons, strict=True)
            )
        ]

    # ---- for the engine's thread

    def put_step(self, step: Step) -> None:
        """Append a step and call `on_step`, whose error fails the request."""
        with self._changed:
            self._steps[step.choice].append(step)
            self._unread.append(step)
            self._wake_waiters()
        if self._on_step is not None:
            self._on_step(step)

    def set_prefix_usage(self, num_cached: int, restored: range, loss: PrefixLoss | None) -> None:
        """Set what `Usage` reports; `restored` is the range of prompt tokens from a store."""
        num_restored = len(range(restored.start, min(restored.stop, num_cached)))
        self._prefix_usage = num_cached, num_restored, loss

    def finish(
        self, error: BaseException | None = None, final_texts: Mapping[int, str] | None = None
    ) -> None:
        """End the stream; continuations without a finish reason count as cancelled.

        `final_texts` has, by choice, the text that the detokenizer of a cancelled one held back.
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
                log.exception("a done callback of a stream failed")

    # ---- internals

    def _make_usage(self, num_tokens: int) -> Usage:
        return Usage(len(self.prompt), num_tokens, *self._prefix_usage, self._explain_loss)

    def _take_step(self) -> Step | None:
        """Return the next unread step; None if one may follow later."""
        if self._unread:
            return self._unread.popleft()
        if not self._is_done:
            return None
        if self._error is not None:
            raise self._error
        raise StopIteration

    def _wake_waiters(self) -> None:
        self._changed.notify_all()
        waiters, self._waiters = self._waiters, []
        for loop, future in waiters:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(_wake_future, future)


def _wake_future(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

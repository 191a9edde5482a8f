"""What somebody holds who asked an engine for something: steps as they come, and the whole of it.

The engine's thread writes, any thread or event loop reads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition
from typing import Literal

from kvant.generation.loop import FinishReason, Step

log = logging.getLogger("kvant")

Outcome = Literal["finished", "cancelled", "failed"]


@dataclass(frozen=True)
class Usage:
    """Tokens that a request took.

    >>> with kvant.Engine(model, tokenizer) as engine:
    ...     usage = engine.submit([5, 6, 7], max_new_tokens=4, ignore_end=True).result().usage
    >>> usage.prompt_tokens, usage.completion_tokens, usage.total_tokens
    (3, 4, 7)
    """

    prompt_tokens: int
    completion_tokens: int = 0  # of all continuations
    cached_tokens: int = 0  # of the prompt, that were not read again,
    restored_tokens: int = 0  # and of those, that a store had
    prefix_lost: str | None = None  # where the prompt left what is kept, in words

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Result:
    """One continuation of a prompt.

    >>> asked = {"max_new_tokens": 4, "ignore_end": True, "quiet": True}
    >>> [result] = kvant.generate_many(model, tokenizer, ["import "], **asked)
    >>> len(result.tokens), result.finish_reason
    (4, 'length')
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    usage: Usage


class Stream(Iterator[Step], AsyncIterator[Step]):
    """The reply to a request. Steps of several continuations come mixed; `choice` tells them.

    >>> with kvant.Engine(model, tokenizer) as engine:
    ...     stream = engine.submit("import ", max_new_tokens=4, ignore_end=True)
    ...     said = [step.text for step in stream]
    >>> len(said), stream.done
    (4, True)
    """

    def __init__(
        self,
        prompt: Sequence[int],
        num_choices: int,
        cancel: Callable[[], None],
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self.prompt = tuple(prompt)
        self._prefix_usage: tuple[int, int, str | None] = (0, 0, None)
        self._steps: list[list[Step]] = [[] for _ in range(num_choices)]
        self._cancel = cancel
        self._on_step = on_step
        self._unread: deque[Step] = deque()
        self._final_texts = [
            ""
        ] * num_choices  # texts that were held back when a request was cancelled
        self._is_done = False  # does nothing come any more?
        self._done_callbacks: list[Callable[[], object]] = []  # once it is over
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
                woken = loop.create_future()
                self._waiters.append((loop, woken))
            await woken

    def __aiter__(self) -> Stream:
        return self

    def cancel(self) -> None:
        """Say no more, from the next token on; what was said stays."""
        self._cancel()

    @property
    def done(self) -> bool:
        """Does nothing come any more? There may still be steps to read."""
        return self._is_done

    @property
    def outcome(self) -> Outcome | None:
        """How the request ended; None before it did."""
        if not self._is_done:
            return None
        if self._error is not None:
            return "failed"
        ended = all(steps and steps[-1].finish_reason for steps in self._steps)
        return "finished" if ended else "cancelled"

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call this once nothing comes any more, in the engine's thread, or now if it is so."""
        with self._changed:
            if not self._is_done:
                self._done_callbacks.append(callback)
                return
        callback()

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt), sum(map(len, self._steps)), *self._prefix_usage)

    def result(self, timeout: float | None = None) -> Result:
        """The first continuation, once all of it is there."""
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[Result]:
        """Every continuation, once all of them are there."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_done, timeout):
                raise TimeoutError(f"no result after {timeout} seconds")
        if self._error is not None:
            raise self._error
        return [self._make_result(*one) for one in zip(self._steps, self._final_texts, strict=True)]

    # ---- what the engine calls, in its thread

    def put_step(self, step: Step) -> None:
        """A step; an error of somebody who is told of it is an error of this request."""
        with self._changed:
            self._steps[step.choice].append(step)
            self._unread.append(step)
            self._wake_waiters()
        if self._on_step is not None:
            self._on_step(step)

    def set_prefix_usage(self, num_cached: int, restored: range, mismatch: str | None) -> None:
        """So many tokens of the prompt were there, and which from a store; where it left them."""
        self._prefix_usage = (
            num_cached,
            len(range(restored.start, min(restored.stop, num_cached))),
            mismatch,
        )

    def set_final_text(self, choice: int, text: str) -> None:
        """What was held back of a continuation that is cancelled."""
        self._final_texts[choice] = text

    def finish(self, error: BaseException | None = None) -> None:
        """Nothing comes any more; continuations without an end of their own were cancelled."""
        if isinstance(error, StopIteration | StopAsyncIteration):  # would be taken for the end
            error = RuntimeError(repr(error))
        with self._changed:
            self._is_done, self._error = True, error
            told, self._done_callbacks = self._done_callbacks, []
            self._wake_waiters()
        for tell in told:
            try:
                tell()
            except Exception:  # who is told late is nobody's request
                log.exception("a callback of a stream that is over")

    # ---- within

    def _take_step(self) -> Step | None:
        """None where there may be one later."""
        if self._unread:
            return self._unread.popleft()
        if not self._is_done:
            return None
        if self._error is not None:
            raise self._error
        raise StopIteration

    def _wake_waiters(self) -> None:
        self._changed.notify_all()
        waiting, self._waiters = self._waiters, []
        for loop, woken in waiting:
            with suppress(RuntimeError):  # of a loop that is closed
                loop.call_soon_threadsafe(_wake_future, woken)

    def _make_result(self, steps: list[Step], final_text: str) -> Result:
        text = "".join(step.text for step in steps) + final_text
        reason = (steps[-1].finish_reason if steps else None) or "cancelled"
        tokens, logprobs = tuple(s.token for s in steps), tuple(s.logprob for s in steps)
        usage = Usage(len(self.prompt), len(steps), *self._prefix_usage)
        return Result(text, tokens, logprobs, reason, usage)


def _wake_future(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

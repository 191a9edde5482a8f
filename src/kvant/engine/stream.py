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
        choices: int,
        cancel: Callable[[], None],
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        self.prompt = tuple(prompt)
        self._found: tuple[int, int, str | None] = (0, 0, None)
        self._said: list[list[Step]] = [[] for _ in range(choices)]
        self._cancel = cancel
        self._on_step = on_step
        self._unread: deque[Step] = deque()
        self._rests = [""] * choices  # texts that were held back when a request was cancelled
        self._over = False  # does nothing come any more?
        self._told: list[Callable[[], object]] = []  # once it is over
        self._error: BaseException | None = None
        self._changed = Condition()
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def __next__(self) -> Step:
        with self._changed:
            while (step := self._next()) is None:
                self._changed.wait()
        return step

    async def __anext__(self) -> Step:
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                try:
                    if (step := self._next()) is not None:
                        return step
                except StopIteration:
                    raise StopAsyncIteration from None
                woken = loop.create_future()
                self._waiting.append((loop, woken))
            await woken

    def __aiter__(self) -> Stream:
        return self

    def cancel(self) -> None:
        """Say no more, from the next token on; what was said stays."""
        self._cancel()

    @property
    def done(self) -> bool:
        """Does nothing come any more? There may still be steps to read."""
        return self._over

    @property
    def outcome(self) -> Outcome | None:
        """How the request ended; None before it did."""
        if not self._over:
            return None
        if self._error is not None:
            return "failed"
        ended = all(steps and steps[-1].finish_reason for steps in self._said)
        return "finished" if ended else "cancelled"

    def add_done_callback(self, tell: Callable[[], object]) -> None:
        """Call this once nothing comes any more, in the engine's thread, or now if it is so."""
        with self._changed:
            if not self._over:
                self._told.append(tell)
                return
        tell()

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt), sum(map(len, self._said)), *self._found)

    def result(self, timeout: float | None = None) -> Result:
        """The first continuation, once all of it is there."""
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[Result]:
        """Every continuation, once all of them are there."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._over, timeout):
                raise TimeoutError(f"no result after {timeout} seconds")
        if self._error is not None:
            raise self._error
        return [self._result(*one) for one in zip(self._said, self._rests, strict=True)]

    # ---- what the engine calls, in its thread

    def put(self, step: Step) -> None:
        """A step; an error of somebody who is told of it is an error of this request."""
        with self._changed:
            self._said[step.choice].append(step)
            self._unread.append(step)
            self._wake()
        if self._on_step is not None:
            self._on_step(step)

    def found(self, tokens: int, came: range, lost: str | None) -> None:
        """So many tokens of the prompt were there, and which from a store; where it left them."""
        self._found = tokens, len(range(came.start, min(came.stop, tokens))), lost

    def hold(self, choice: int, text: str) -> None:
        """What was held back of a continuation that is cancelled."""
        self._rests[choice] = text

    def end(self, error: BaseException | None = None) -> None:
        """Nothing comes any more; continuations without an end of their own were cancelled."""
        if isinstance(error, StopIteration | StopAsyncIteration):  # would be taken for the end
            error = RuntimeError(repr(error))
        with self._changed:
            self._over, self._error = True, error
            told, self._told = self._told, []
            self._wake()
        for tell in told:
            try:
                tell()
            except Exception:  # who is told late is nobody's request
                log.exception("a callback of a stream that is over")

    # ---- within

    def _next(self) -> Step | None:
        """None where there may be one later."""
        if self._unread:
            return self._unread.popleft()
        if not self._over:
            return None
        if self._error is not None:
            raise self._error
        raise StopIteration

    def _wake(self) -> None:
        self._changed.notify_all()
        waiting, self._waiting = self._waiting, []
        for loop, woken in waiting:
            with suppress(RuntimeError):  # of a loop that is closed
                loop.call_soon_threadsafe(_tell, woken)

    def _result(self, steps: list[Step], rest: str) -> Result:
        text = "".join(step.text for step in steps) + rest
        reason = (steps[-1].finish_reason if steps else None) or "cancelled"
        tokens, logprobs = tuple(s.token for s in steps), tuple(s.logprob for s in steps)
        usage = Usage(len(self.prompt), len(steps), *self._found)
        return Result(text, tokens, logprobs, reason, usage)


def _tell(woken: asyncio.Future[None]) -> None:
    if not woken.done():
        woken.set_result(None)

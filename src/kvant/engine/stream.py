"""The client's side of a request for text: tokens as they arrive, and the result.

The engine's thread writes to a stream; any thread or event loop reads it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from kvant.engine.future import RequestFuture, Usage
from kvant.engine.timeline import Timeline
from kvant.generation.loop import FinishReason, Step
from kvant.prefixes.tree import PrefixMiss


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


class Stream(RequestFuture[Step], Iterator[Step], AsyncIterator[Step]):
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
        describe_miss: Callable[[PrefixMiss], str],
        on_step: Callable[[Step], None] | None = None,
    ) -> None:
        super().__init__(prompt, cancel, timeline)
        self._describe_miss = describe_miss
        self._steps: list[list[Step]] = [[] for _ in range(num_choices)]
        self._on_step = on_step
        self._unread: deque[Step] = deque()

    def __next__(self) -> Step:
        with self._changed:
            while (step := self._take_step()) is None:
                self._changed.wait()
        return step

    async def __anext__(self) -> Step:
        while True:
            with self._changed:
                try:
                    if (step := self._take_step()) is not None:
                        return step
                except StopIteration:
                    raise StopAsyncIteration from None
                waiter = self._add_waiter()
            await waiter

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """Why each continuation ended; None if it is open, was cancelled or failed."""
        return [steps[-1].finish_reason if steps else None for steps in self._steps]

    @property
    def _is_complete(self) -> bool:
        return all(self.finish_reasons)

    @property
    def usage(self) -> Usage:
        """Token counts so far, over all continuations."""
        return self._make_usage(sum(map(len, self._steps)))

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the end of the request and return the first continuation."""
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[Result]:
        """Wait for the end of the request and return every continuation."""
        self._wait_until_done(timeout)
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

    def put(self, item: Step) -> None:
        """Append a step and call `on_step`, whose error fails the request."""
        with self._changed:
            self._steps[item.choice].append(item)
            self._unread.append(item)
            self._wake_waiters()
        if self._on_step is not None:
            self._on_step(item)

    # ---- internals

    def _make_usage(self, num_tokens: int) -> Usage:
        describe = None if self._miss is None else partial(self._describe_miss, self._miss)
        return Usage(len(self.prompt), num_tokens, *self._prefix_counts, describe)

    def _take_step(self) -> Step | None:
        """Return the next unread step; None if one may follow later."""
        if self._unread:
            return self._unread.popleft()
        if not self._is_done:
            return None
        if self._error is not None:
            raise self._error
        raise StopIteration

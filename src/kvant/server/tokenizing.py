"""Encode prompts beside the event loop: short ones at once, long ones one by one.

A long prompt takes a tokenizer for seconds. Long ones wait for each other, a tenant's turn after
another's; short ones have threads of their own and never wait for a long one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from kvant.errors import CacheError
from kvant.generation import Messages

SHORT = 16 << 10  # characters, which take a few milliseconds
MAX_WAITING = 32 << 20  # characters of long prompts that wait
RETRY = 2  # seconds

Prompt = str | list[int] | Messages
Result = TypeVar("Result")


class Busy(CacheError):
    """More waits than may wait."""

    def __init__(self, seconds: int, what: str = "requests") -> None:
        super().__init__(f"too many {what} wait: try again later")
        self.seconds = seconds


class Tokenizing:
    """The threads in which prompts are encoded, and the queue of long ones."""

    def __init__(self) -> None:
        self._short = ThreadPoolExecutor(2, "kvant-short-prompts")
        self._long = ThreadPoolExecutor(1, "kvant-long-prompts")
        self._encoding = False  # whether a long prompt has its turn
        self._characters = 0  # of long prompts that wait or have their turn
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by tenant, the next one first

    async def run(self, prompt: Prompt, tenant: str, encode: Callable[[], Result]) -> Result:
        """Return what `encode` makes of a prompt, once it is its turn."""
        size, loop = characters(prompt), asyncio.get_running_loop()
        if size <= SHORT:
            return await loop.run_in_executor(self._short, encode)
        if self._characters and self._characters + size > MAX_WAITING:
            raise Busy(RETRY, "long prompts")
        self._characters += size
        try:
            async with self._turn(tenant):
                return await loop.run_in_executor(self._long, encode)
        finally:
            self._characters -= size

    @asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        if self._encoding:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # its turn had come
                    self._pass_on()
                raise
        self._encoding = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give the turn to the tenant that waits longest for one; it goes behind the others."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = deque(turn for turn in self._waiting.pop(tenant) if not turn.done())
            if turns:
                turns.popleft().set_result(None)
                self._waiting |= {tenant: turns} if turns else {}
                return
        self._encoding = False


def characters(prompt: Prompt) -> int:
    """Count the characters that a tokenizer reads of a prompt; of token ids, none."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):
        return 0
    shown = (*prompt.messages, *prompt.tools, prompt.options)
    return sum(len(str(value)) for one in shown for value in one.values())

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

MAX_SHORT_CHARACTERS = 16 << 10  # characters, which take a few milliseconds
MAX_WAITING_CHARACTERS = 32 << 20  # characters of long prompts that wait
RETRY_AFTER_S = 2  # seconds

Prompt = str | list[int] | Messages
ResultT = TypeVar("ResultT")


class ServerBusy(CacheError):
    """More waits than may wait."""

    def __init__(self, retry_seconds: int, subject: str = "requests") -> None:
        super().__init__(f"too many {subject} wait: try again later")
        self.retry_seconds = retry_seconds


class TokenizerPool:
    """The threads in which prompts are encoded, and the queue of long ones."""

    def __init__(self) -> None:
        self._short_executor = ThreadPoolExecutor(2, "kvant-short-prompts")
        self._long_executor = ThreadPoolExecutor(1, "kvant-long-prompts")
        self._is_encoding_long = False  # whether a long prompt has its turn
        self._num_long_characters = 0  # of long prompts that wait or have their turn
        self._waiting_turns: dict[
            str, deque[asyncio.Future[None]]
        ] = {}  # by tenant, the next one first

    async def run(self, prompt: Prompt, tenant: str, encode: Callable[[], ResultT]) -> ResultT:
        """Return what `encode` makes of a prompt, once it is its turn."""
        size, loop = count_characters(prompt), asyncio.get_running_loop()
        if size <= MAX_SHORT_CHARACTERS:
            return await loop.run_in_executor(self._short_executor, encode)
        if self._num_long_characters and self._num_long_characters + size > MAX_WAITING_CHARACTERS:
            raise ServerBusy(RETRY_AFTER_S, "long prompts")
        self._num_long_characters += size
        try:
            async with self._take_turn(tenant):
                return await loop.run_in_executor(self._long_executor, encode)
        finally:
            self._num_long_characters -= size

    @asynccontextmanager
    async def _take_turn(self, tenant: str) -> AsyncIterator[None]:
        if self._is_encoding_long:
            turn = asyncio.get_running_loop().create_future()
            self._waiting_turns.setdefault(tenant, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # its turn had come
                    self._pass_turn()
                raise
        self._is_encoding_long = True
        try:
            yield
        finally:
            self._pass_turn()

    def _pass_turn(self) -> None:
        """Give the turn to the tenant that waits longest for one; it goes behind the others."""
        while self._waiting_turns:
            tenant = next(iter(self._waiting_turns))
            turns = deque(turn for turn in self._waiting_turns.pop(tenant) if not turn.done())
            if turns:
                turns.popleft().set_result(None)
                self._waiting_turns |= {tenant: turns} if turns else {}
                return
        self._is_encoding_long = False


def count_characters(prompt: Prompt) -> int:
    """Count the characters that a tokenizer reads of a prompt; of token ids, none."""
    if isinstance(prompt, str):
        return len(prompt)
    if isinstance(prompt, list):
        return 0
    shown = (*prompt.messages, *prompt.tools, prompt.options)
    return sum(len(str(value)) for one in shown for value in one.values())

"""Encode prompts in threads: short ones at once, long ones and those with grammars in turn."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from kvant.generation import Messages
from kvant.platform.c_libraries import use_one_thread
from kvant.server.errors import ServerBusy
from kvant.vision.processing import has_images

MAX_SHORT_CHARACTERS = 16 << 10  # of a short prompt: encoding takes a few milliseconds
MAX_WAITING_CHARACTERS = 32 << 20  # of all waiting long prompts
RETRY_AFTER_S = 2

Prompt = str | list[int] | Messages
ResultT = TypeVar("ResultT")


class TokenizerPool:
    """Threads that encode prompts: short ones at once, long ones and images one at a time.

    A long prompt occupies the tokenizer for seconds. Long prompts share one thread, and tenants
    take turns at it; short prompts have their own threads and never wait for a long one. Short
    prompts with a grammar, which may take a second to compile, share a thread in the same way.
    """

    def __init__(self) -> None:
        # Processors of images may use torch, which would start threads for each of these.
        self._short_executor = ThreadPoolExecutor(2, "kvant-short-prompts", use_one_thread)
        self._long_executor = ThreadPoolExecutor(1, "kvant-long-prompts", use_one_thread)
        self._grammar_executor = ThreadPoolExecutor(1, "kvant-grammars", use_one_thread)
        self._long_turns, self._grammar_turns = _Turns(), _Turns()
        self._num_long_characters = 0  # of long prompts, waiting or being encoded

    async def run(
        self,
        prompt: Prompt,
        tenant: str,
        encode: Callable[[], ResultT],
        *,
        has_grammar: bool = False,
    ) -> ResultT:
        """Run `encode` in a thread and return its result; a long prompt waits for its turn.

        With `has_grammar`, `encode` also compiles a grammar.
        """
        size, loop = count_characters(prompt), asyncio.get_running_loop()
        reads_images = isinstance(prompt, Messages) and has_images(prompt.messages)
        if size <= MAX_SHORT_CHARACTERS and not reads_images:
            if not has_grammar:
                return await loop.run_in_executor(self._short_executor, encode)
            async with self._grammar_turns.take(tenant):
                return await loop.run_in_executor(self._grammar_executor, encode)
        if self._num_long_characters and self._num_long_characters + size > MAX_WAITING_CHARACTERS:
            raise ServerBusy(RETRY_AFTER_S, "long prompts")
        self._num_long_characters += size
        try:
            async with self._long_turns.take(tenant):
                return await loop.run_in_executor(self._long_executor, encode)
        finally:
            self._num_long_characters -= size


class _Turns:
    """Turns at one thread; tenants alternate."""

    def __init__(self) -> None:
        self._is_taken = False
        # By tenant, in the order of their turns.
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def take(self, tenant: str) -> AsyncIterator[None]:
        """Wait for a turn, and pass it on at the end."""
        if self._is_taken:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(tenant, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # the turn was passed to it: pass it on
                    self._pass_on()
                raise
        self._is_taken = True
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Pass the turn to the first tenant in the queue, and move that tenant to the end."""
        while self._waiting:
            tenant = next(iter(self._waiting))
            turns = deque(turn for turn in self._waiting.pop(tenant) if not turn.done())
            if turns:
                turns.popleft().set_result(None)
                self._waiting |= {tenant: turns} if turns else {}
                return
        self._is_taken = False


def count_characters(prompt: Prompt) -> int:
    """Return the size of a prompt: its characters, or its token ids."""
    if isinstance(prompt, str | list):
        return len(prompt)
    return sum(map(_count_value, (prompt.messages, prompt.tools, prompt.options)))


def _count_value(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_count_value, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_count_value, value))
    return len(value if isinstance(value, str) else str(value))

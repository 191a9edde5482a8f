"""Test when prompts are tokenized: short ones at once, long ones in turn, too long ones partly."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2 as httpx
import pytest

from kvant import ContextError
from kvant.generation import Messages
from kvant.generation.conversation import encode_text
from kvant.server.errors import ServerBusy
from kvant.server.tokenizing import (
    MAX_SHORT_CHARACTERS,
    MAX_WAITING_CHARACTERS,
    TokenizerPool,
    count_characters,
)
from server.conftest import serve_model

LONG = "a" * (MAX_SHORT_CHARACTERS + 1)


def test_tenants_alternate_with_long_prompts() -> None:
    """Prompts of one tenant do not wait for all prompts of another."""
    order: list[str] = []

    async def main() -> None:
        queue, gate = TokenizerPool(), threading.Event()
        first = asyncio.create_task(queue.run(LONG, "a", gate.wait))
        await asyncio.sleep(0)
        tasks = [
            asyncio.create_task(queue.run(LONG, name[0], lambda name=name: order.append(name)))
            for name in ("a1", "a2", "a3", "b1", "c1", "b2")
        ]
        await asyncio.sleep(0)
        tasks[1].cancel()
        gate.set()
        await asyncio.gather(first, *tasks, return_exceptions=True)

    asyncio.run(main())
    assert order == ["a1", "b1", "c1", "a3", "b2"]


def test_cancelled_turn_is_passed_on() -> None:
    async def main() -> list[Any]:
        queue, gate = TokenizerPool(), threading.Event()
        first = asyncio.create_task(queue.run(LONG, "", gate.wait))
        await asyncio.sleep(0)
        second = asyncio.create_task(queue.run(LONG, "", lambda: 2))
        third = asyncio.create_task(queue.run(LONG, "", lambda: 3))
        await asyncio.sleep(0)
        first.add_done_callback(lambda _: second.cancel())
        gate.set()
        return await asyncio.gather(first, second, third, return_exceptions=True)

    first, second, third = asyncio.run(main())
    assert first is True and third == 3
    assert second == 2 or isinstance(second, asyncio.CancelledError)


def test_short_prompts_do_not_wait_for_grammars() -> None:
    """Requests with a grammar share one thread, and tenants take turns at it."""
    order: list[str] = []

    async def main() -> None:
        queue, gate = TokenizerPool(), threading.Event()
        first = asyncio.create_task(queue.run("x", "a", gate.wait, has_grammar=True))
        await asyncio.sleep(0)
        tasks = [
            asyncio.create_task(
                queue.run("x", name[0], lambda name=name: order.append(name), has_grammar=True)
            )
            for name in ("a1", "a2", "a3", "b1")
        ]
        await asyncio.sleep(0)
        assert await queue.run("short", "", lambda: "at once") == "at once"
        assert await queue.run(LONG, "", lambda: "at once") == "at once"
        assert not order
        gate.set()
        await asyncio.gather(first, *tasks)

    asyncio.run(main())
    assert order == ["a1", "b1", "a2", "a3"]


def test_queued_long_prompts_are_bounded_in_characters() -> None:
    async def main() -> None:
        queue, gate = TokenizerPool(), threading.Event()
        first = asyncio.create_task(queue.run("a" * MAX_WAITING_CHARACTERS, "", gate.wait))
        await asyncio.sleep(0)
        with pytest.raises(ServerBusy, match="too many long prompts are waiting"):
            await queue.run(LONG, "", lambda: None)
        assert await queue.run("short", "", lambda: "at once") == "at once"
        gate.set()
        await first
        await queue.run(LONG, "", lambda: None)

    asyncio.run(main())


def test_characters_of_messages_count_all_their_fields() -> None:
    tools = [{"type": "function", "function": {"name": "f" * 100}}]
    messages = Messages([{"role": "user", "content": "x" * 50}], tools)
    assert 150 < count_characters(messages) < 250
    assert count_characters("abc") == 3 and count_characters([1, 2, 3]) == 3


def test_overlong_text_is_refused_by_its_start(bundled_model: tuple[Any, Any]) -> None:
    tokenizer, calls = bundled_model[1], []

    class Counting:
        def encode(self, text: str, **options: Any) -> list[int]:
            calls.append(len(text))
            return list(tokenizer.encode(text, **options))

    with pytest.raises(
        ContextError, match="a prompt of 2000000 characters: its first 8448 have 2048 tokens"
    ):
        encode_text(Counting(), "a " * 1_000_000, 2048)
    assert sum(calls) < 20_000
    text = "import os\n" * 600
    for max_tokens in (None, 10_000, len(tokenizer.encode(text)) + 1):
        assert encode_text(Counting(), text, max_tokens) == tokenizer.encode(text)


def test_prompt_longer_than_the_context_can_be_counted(
    running: tuple[Any, str],
) -> None:
    def count(prompt: str) -> httpx.Response:
        return httpx.post(f"{running[1]}/tokenize", json={"prompt": prompt}, timeout=60)

    assert count("a b " * 10_000).json()["count"] > 2 * 2048
    num_tokens = count("a b " * 200_000)
    assert (
        num_tokens.status_code == 400
        and "131072 tokens or more" in num_tokens.json()["error"]["message"]
    )


def test_short_request_never_queues_after_a_long_prompt(
    bundled_model: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    with (
        serve_model(*bundled_model, max_sequences=2) as (service, url),
        ThreadPoolExecutor(8) as threads,
    ):
        tokens_of = service.engine.encode_prompt

        def slow(prompt: Any, limit: int | None = None) -> list[int]:
            if len(prompt) > MAX_SHORT_CHARACTERS:
                assert gate.wait(60)
            return list(tokens_of(prompt, limit))

        monkeypatch.setattr(service.engine, "encode_prompt", slow)

        def ask(prompt: str, path: str = "/v1/completions", **more: Any) -> httpx.Response:
            return httpx.post(f"{url}{path}", json={"prompt": prompt, **more}, timeout=90)

        long = [threads.submit(ask, "a b " * MAX_SHORT_CHARACTERS, max_tokens=1) for _ in range(6)]
        long += [threads.submit(ask, "a b " * MAX_SHORT_CHARACTERS, "/tokenize") for _ in range(2)]
        assert ask("import os", max_tokens=1).status_code == 200
        assert ask("import os", "/tokenize").status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200
        assert not any(future.done() for future in long)
        gate.set()
        assert [future.result().status_code for future in long] == [400] * 6 + [200] * 2

"""Test that a lost prefix names the message from which on a prompt differs."""

from __future__ import annotations

import pickle
from copy import deepcopy
from typing import Any

import pytest

import kvant
from generation.speakers import DEMO, model_of, tokenizer_of
from generation.test_tools_as_text import ALTERNATING, CHATML
from kvant.prefixes import Prefixes

ROLES = ("system", "user", "assistant", "user", "assistant", "user")
TEXT = "def read(self, count):\n    return self.buffer[:count]\n"
SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search a text.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}


def make_messages(*roles: str, changed: int | None = None) -> list[dict[str, str]]:
    return [
        {"role": role, "content": f"{number} {'changed ' * (number == changed)}{TEXT * 2}"}
        for number, role in enumerate(roles, start=1)
    ]


@pytest.fixture
def chat_tokenizer() -> Any:
    tokenizer = deepcopy(tokenizer_of(DEMO))  # which other tests share
    tokenizer.chat_template = CHATML
    return tokenizer


def find_loss(tokenizer: Any, first: Any, second: Any) -> str | None:
    """Return what the engine says about the second prompt after the first."""
    options: Any = {"max_new_tokens": 1, "ignore_end": True}
    with kvant.Engine(model_of(DEMO), tokenizer, "raw", prefixes=Prefixes()) as engine:
        engine.submit(first, **options).result()
        return engine.submit(second, **options).result().usage.prefix_lost


@pytest.mark.parametrize("changed", range(1, 7))
def test_changed_message_is_named(changed: int, chat_tokenizer: Any) -> None:
    first, second = make_messages(*ROLES), make_messages(*ROLES, changed=changed)
    loss = find_loss(chat_tokenizer, first, second)
    assert loss is not None and f", message {changed} ({ROLES[changed - 1]}): " in loss
    assert "'changed" in loss.partition("the prompt has")[2].replace("' ", "'")


@pytest.mark.parametrize("changed", [2, 4])
def test_message_is_named_if_the_template_rejects_some_heads(
    changed: int, chat_tokenizer: Any
) -> None:
    """Heads that end with an assistant are refused by some templates, as here."""
    chat_tokenizer.chat_template = CHATML.replace(
        "{% if add_generation_prompt %}",
        "{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}"
        "{% if add_generation_prompt %}",
    )
    first, second = make_messages(*ROLES), make_messages(*ROLES, changed=changed)
    loss = find_loss(chat_tokenizer, first, second)
    assert loss is not None and f", message {changed} (user): " in loss


def test_message_is_counted_as_sent_if_results_of_tools_are_joined(chat_tokenizer: Any) -> None:
    """Without roles for tools, results and the next message become one turn of the user."""
    chat_tokenizer.chat_template = ALTERNATING
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    head = [
        {"role": "user", "content": TEXT},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": TEXT},
    ]
    first, second = (
        kvant.Messages([*head, {"role": "user", "content": text + TEXT}], [SEARCH])
        for text in ("one", "two")
    )
    loss = find_loss(chat_tokenizer, first, second)
    assert loss is not None and ", message 4 (user): " in loss


def test_difference_after_the_last_message(chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template += "{% if hint %}{{ hint }}{% endif %}" * 2
    messages = make_messages(*ROLES)
    first, second = (kvant.Messages(messages, options={"hint": hint}) for hint in ("ab", "cd"))
    loss = find_loss(chat_tokenizer, first, second)
    assert loss is not None and ", after message 6: 'abab' is cached" in loss


def test_text_has_no_message(chat_tokenizer: Any) -> None:
    loss = find_loss(chat_tokenizer, TEXT * 8 + "one", TEXT * 8 + "two")
    assert loss is not None and "message" not in loss.partition("is cached")[0]
    assert find_loss(chat_tokenizer, TEXT * 8, TEXT * 9) is None


def test_usage_is_small_and_independent_of_the_prompt(chat_tokenizer: Any) -> None:
    """Regression: usages held the tokenizer, and the messages as their owner changed them."""
    options: Any = {"max_new_tokens": 1, "ignore_end": True}
    first, second = make_messages(*ROLES), make_messages(*ROLES, changed=2)
    with kvant.Engine(model_of(DEMO), chat_tokenizer, "raw", prefixes=Prefixes()) as engine:
        hit = engine.submit(first, **options).result().usage
        usage = engine.submit(second, **options).result().usage
    second.clear()
    copied = pickle.loads(pickle.dumps(usage))
    assert ", message 2 (user): " in copied.prefix_lost == usage.prefix_lost
    assert hit.describe_miss is None and len(pickle.dumps(usage)) < 1000
    assert copied == usage


def test_session_names_its_message(chat_tokenizer: Any) -> None:
    prefixes = Prefixes()
    for text in ("one", "two"):
        session = kvant.Session(
            model_of(DEMO), chat_tokenizer, "raw", system=TEXT * 3, prefixes=prefixes
        )
        list(session.send(text + TEXT, max_new_tokens=1, ignore_end=True))
    assert ", message 2 (user): 'one" in session.stats()["prefix_lost"]

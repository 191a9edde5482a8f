"""Tools of a model whose chat template knows none, by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import httpx2 as httpx
import pytest

from generation.test_tools_as_text import CHATML
from server.conftest import served
from server.speaking import speaker
from server.test_tools import CALL, FLAT, TOOLS, chat, client_of

openai = pytest.importorskip("openai")

LISTED = f"[{CALL}]"
ONE: Any = {"type": "function", "function": {"name": "weather"}}


@contextmanager
def saying(*pieces: str, template: str = CHATML) -> Iterator[Any]:
    """A client of a model that replies with these pieces to anything."""
    model, tokenizer = speaker(*pieces)
    tokenizer.chat_template = template
    with client_of(model, tokenizer) as client:
        yield client


@pytest.fixture(scope="module")
def free(inside: tuple[Any, Any]) -> Iterator[Any]:
    """The model inside, which says anything."""
    tokenizer = deepcopy(inside[1])
    tokenizer.chat_template = CHATML
    with client_of(inside[0], tokenizer) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", ONE], ids=["required", "named"])
def test_a_call_is_forced(free: Any, choice: Any, stream: bool) -> None:
    for seed in range(2):
        asked = {"tools": TOOLS, "tool_choice": choice, "temperature": 1, "seed": seed}
        given = {
            "model": "inside",
            "max_tokens": 400,
            "messages": [{"role": "user", "content": "?"}],
        }
        if stream:
            with free.chat.completions.stream(**given, **asked) as events:
                (found,) = events.get_final_completion().choices
        else:
            (found,) = free.chat.completions.create(**given, **asked).choices
        assert found.finish_reason == "tool_calls" and not found.message.content
        for call in found.message.tool_calls:
            json.loads(call.function.arguments)
            assert call.function.name in (["weather", "now"] if choice == "required" else "weather")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_a_response_is_forced_to_call(free: Any, choice: Any, stream: bool) -> None:
    asked = {"model": "inside", "input": "?", "tools": FLAT, "tool_choice": choice}
    if stream:
        with free.responses.stream(**asked) as events:
            reply = events.get_final_response()
    else:
        reply = free.responses.create(**asked)
    assert reply.output and {item.type for item in reply.output} == {"function_call"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", [LISTED, f" [ {CALL},\n{CALL} ]"])
def test_a_reply_in_the_described_form_is_calls(said: str, stream: bool) -> None:
    half = len(said) // 2
    with saying(said[:half], said[half:]) as client:
        if stream:
            given = {"model": "inside", "messages": [{"role": "user", "content": "?"}]}
            with client.chat.completions.stream(**given, tools=TOOLS, temperature=0) as events:
                (found,) = events.get_final_completion().choices
        else:
            (found,) = chat(client, tools=TOOLS).choices
        single = chat(client, tools=TOOLS, parallel_tool_calls=False).choices[0].message
        response = client.responses.create(model="inside", input="?", tools=FLAT, temperature=0)
        (plain,) = chat(client).choices
    calls = [(one.function.name, one.function.arguments) for one in found.message.tool_calls]
    assert calls == [("weather", '{"city": "Rome"}')] * said.count("name")
    assert found.finish_reason == "tool_calls" and not found.message.content
    assert len(single.tool_calls) == 1
    assert [item.type for item in response.output] == ["function_call"] * len(calls)
    assert plain.message.content.strip() == said.strip() and not plain.message.tool_calls


def test_half_a_surrogate_pair_in_a_call_stays_escaped() -> None:
    """It is no Unicode text, so no reply can hold it otherwise."""
    arguments = r'{"city": "\ud800"}'
    with saying(f'[{{"name": "weather", "arguments": {arguments}}}]') as client:
        (whole,) = chat(client, tools=TOOLS).choices
        chunks = list(chat(client, tools=TOOLS, stream=True))
        response = client.responses.create(model="inside", input="?", tools=FLAT, temperature=0)
    (call,) = whole.message.tool_calls
    streamed = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
    assert "".join(one.function.arguments or "" for one in streamed) == arguments
    assert call.function.arguments == response.output[0].arguments == arguments


@pytest.mark.parametrize(
    "said",
    [
        "It rains.",
        "[1] It rains.",
        LISTED[:-1],  # cut short
        LISTED + " Done.",
        CALL,
        "[]",
        '[{"name": "rain", "arguments": {}}]',  # none of the tools
        '[{"name": "weather", "arguments": "Rome"}]',
        '[{"name": ["weather"], "arguments": {}}]',
        '[{"name": "weather"}]',
        f"[{CALL}, 3]",
        '[{"name": "weather", "arguments": {"city": NaN}}]',
        '[{"name": "weather", "arguments": {"city": 1e999}}]',
        '[{"name":' + "[" * 900,
    ],
)
def test_any_other_reply_is_content(said: str) -> None:
    with saying(said[:3], said[3:]) as client:
        (found,) = chat(client, tools=TOOLS).choices
        chunks = list(chat(client, tools=TOOLS, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert found.message.content == streamed == said
    assert not found.message.tool_calls and found.finish_reason == "stop"


def test_text_is_streamed_as_it_comes() -> None:
    with saying("It", " rains.", " Take", " care.") as client:
        chunks = list(chat(client, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta.content for chunk in chunks]
    assert [one for one in deltas if one] == ["It", " rains.", " Take", " care."]


def test_an_agent_loops_and_its_prompts_are_read_once(free: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Rome? " * 9}]
    given = {"model": "inside", "tools": TOOLS, "max_tokens": 400, "temperature": 0}
    said = free.chat.completions.create(**given, messages=messages, tool_choice=ONE)
    call = said.choices[0].message.tool_calls[0]
    messages.append(said.choices[0].message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "It rains."})
    more = free.chat.completions.create(**given, messages=messages)
    assert more.choices[0].finish_reason in ("stop", "length")
    cached = more.usage.prompt_tokens_details.cached_tokens
    assert cached >= said.usage.prompt_tokens // 64 * 64 > 0
    other = [{"role": "user", "content": "And in Oslo?"}]
    again = free.chat.completions.create(**given, messages=other, tool_choice="required")
    assert again.usage.prompt_tokens_details.cached_tokens >= 64  # the description


@pytest.fixture
def without_response_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of most models: neither their tokenizer nor transformers knows how they write calls."""
    monkeypatch.setattr("kvant.server.service.find_template", lambda model, tokenizer: None)


@pytest.mark.usefixtures("without_response_template")
def test_a_template_that_knows_tools_names_a_way_that_works(inside: tuple[Any, Any]) -> None:
    """Its calls cannot be read; a call that is forced can."""
    tokenizer = deepcopy(inside[1])
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + CHATML
    with client_of(inside[0], tokenizer) as client:
        with pytest.raises(openai.BadRequestError, match="tool_choice required"):
            chat(client, tools=TOOLS)
        (found,) = chat(client, tools=TOOLS, tool_choice="required").choices
    assert found.finish_reason == "tool_calls"


@pytest.mark.usefixtures("without_response_template")
@pytest.mark.parametrize(("said", "calls"), [(LISTED, 1), ("It rains.", 0), (LISTED + "!", 0)])
def test_a_reply_is_read_without_a_response_template(said: str, calls: int) -> None:
    with saying(said) as client:
        (found,) = chat(client, tools=TOOLS).choices
    assert len(found.message.tool_calls or ()) == calls
    assert found.message.content == (None if calls else said)


def test_thoughts_are_apart_from_calls() -> None:
    with saying("<think>", "Rome.", "</think>", LISTED) as client:
        (found,) = chat(client, tools=TOOLS).choices
    assert found.message.reasoning_content == "Rome." and not found.message.content
    assert [call.function.name for call in found.message.tool_calls] == ["weather"]


def test_the_prompt_of_tools_can_be_counted(inside: tuple[Any, Any]) -> None:
    tokenizer = deepcopy(inside[1])
    tokenizer.chat_template = CHATML
    with served(inside[0], tokenizer) as (_, url):
        asked = {"messages": [{"role": "user", "content": "?"}]}
        without = httpx.post(f"{url}/tokenize", json=asked).json()["count"]
        described = httpx.post(f"{url}/tokenize", json=asked | {"tools": TOOLS}).json()["count"]
    assert described > without + 50

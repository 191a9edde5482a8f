"""Test tools for models without tool support in the chat template, with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import httpx2 as httpx
import pytest

from generation.test_tools_as_text import CHATML
from server.conftest import serve_model
from server.speaking import make_speaker
from server.test_tools import CALL, FLAT, TOOLS, send_chat, serve_client

openai = pytest.importorskip("openai")

LISTED = f"[{CALL}]"
ONE: Any = {"type": "function", "function": {"name": "weather"}}


@contextmanager
def serve_reply(*pieces: str, template: str = CHATML) -> Iterator[Any]:
    """Return a client of a model that replies with these pieces to anything."""
    model, tokenizer = make_speaker(*pieces)
    tokenizer.chat_template = template
    with serve_client(model, tokenizer) as client:
        yield client


@pytest.fixture(scope="module")
def free_client(bundled_model: tuple[Any, Any]) -> Iterator[Any]:
    """Return the bundled model, which generates arbitrary text."""
    tokenizer = deepcopy(bundled_model[1])
    tokenizer.chat_template = CHATML
    with serve_client(bundled_model[0], tokenizer) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", ONE], ids=["required", "named"])
def test_tool_call_can_be_forced(free_client: Any, choice: Any, stream: bool) -> None:
    for seed in range(2):
        body = {"tools": TOOLS, "tool_choice": choice, "temperature": 1, "seed": seed}
        options = {
            "model": "inside",
            "max_tokens": 400,
            "messages": [{"role": "user", "content": "?"}],
        }
        if stream:
            with free_client.chat.completions.stream(**options, **body) as events:
                (choice_,) = events.get_final_completion().choices
        else:
            (choice_,) = free_client.chat.completions.create(**options, **body).choices
        assert choice_.finish_reason == "tool_calls" and not choice_.message.content
        for call in choice_.message.tool_calls:
            json.loads(call.function.arguments)
            assert call.function.name in (["weather", "now"] if choice == "required" else "weather")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}])
def test_response_can_be_forced_to_call(free_client: Any, choice: Any, stream: bool) -> None:
    body = {"model": "inside", "input": "?", "tools": FLAT, "tool_choice": choice}
    if stream:
        with free_client.responses.stream(**body) as events:
            reply = events.get_final_response()
    else:
        reply = free_client.responses.create(**body)
    assert reply.output and {item.type for item in reply.output} == {"function_call"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("message", [LISTED, f" [ {CALL},\n{CALL} ]"])
def test_reply_in_the_described_form_is_parsed_as_calls(message: str, stream: bool) -> None:
    half = len(message) // 2
    with serve_reply(message[:half], message[half:]) as client:
        if stream:
            options = {"model": "inside", "messages": [{"role": "user", "content": "?"}]}
            with client.chat.completions.stream(**options, tools=TOOLS, temperature=0) as events:
                (choice,) = events.get_final_completion().choices
        else:
            (choice,) = send_chat(client, tools=TOOLS).choices
        single = send_chat(client, tools=TOOLS, parallel_tool_calls=False).choices[0].message
        response = client.responses.create(model="inside", input="?", tools=FLAT, temperature=0)
        (plain,) = send_chat(client).choices
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert calls == [("weather", '{"city": "Rome"}')] * message.count("name")
    assert choice.finish_reason == "tool_calls" and not choice.message.content
    assert len(single.tool_calls) == 1
    assert [item.type for item in response.output] == ["function_call"] * len(calls)
    assert plain.message.content.strip() == message.strip() and not plain.message.tool_calls


def test_lone_surrogate_in_a_call_stays_escaped() -> None:
    """It is no valid Unicode text, so a reply can only contain it escaped."""
    arguments = r'{"city": "\ud800"}'
    with serve_reply(f'[{{"name": "weather", "arguments": {arguments}}}]') as client:
        (whole,) = send_chat(client, tools=TOOLS).choices
        chunks = list(send_chat(client, tools=TOOLS, stream=True))
        response = client.responses.create(model="inside", input="?", tools=FLAT, temperature=0)
    (call,) = whole.message.tool_calls
    streamed = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert "".join(call.function.arguments or "" for call in streamed) == arguments
    assert call.function.arguments == response.output[0].arguments == arguments


@pytest.mark.parametrize(
    "message",
    [
        "It rains.",
        "[1] It rains.",
        LISTED[:-1],  # cut short
        LISTED + " Done.",
        CALL,
        "[]",
        '[{"name": "rain", "arguments": {}}]',  # not an offered tool
        '[{"name": "weather", "arguments": "Rome"}]',
        '[{"name": ["weather"], "arguments": {}}]',
        '[{"name": "weather"}]',
        f"[{CALL}, 3]",
        '[{"name": "weather", "arguments": {"city": NaN}}]',
        '[{"name": "weather", "arguments": {"city": 1e999}}]',
        '[{"name":' + "[" * 900,
    ],
)
def test_any_other_reply_is_content(message: str) -> None:
    with serve_reply(message[:3], message[3:]) as client:
        (choice,) = send_chat(client, tools=TOOLS).choices
        chunks = list(send_chat(client, tools=TOOLS, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert choice.message.content == streamed == message
    assert not choice.message.tool_calls and choice.finish_reason == "stop"


def test_text_is_streamed_as_it_is_generated() -> None:
    with serve_reply("It", " rains.", " Take", " care.") as client:
        chunks = list(send_chat(client, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta.content for chunk in chunks]
    assert [delta for delta in deltas if delta] == ["It", " rains.", " Take", " care."]


def test_agent_loop_prefills_each_prompt_once(free_client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": "How is the weather in Rome? " * 9}]
    options = {"model": "inside", "tools": TOOLS, "max_tokens": 400, "temperature": 0}
    reply = free_client.chat.completions.create(**options, messages=messages, tool_choice=ONE)
    call = reply.choices[0].message.tool_calls[0]
    messages.append(reply.choices[0].message)
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "It rains."})
    more = free_client.chat.completions.create(**options, messages=messages)
    assert more.choices[0].finish_reason in ("stop", "length")
    cached = more.usage.prompt_tokens_details.cached_tokens
    assert cached >= reply.usage.prompt_tokens // 64 * 64 > 0
    other = [{"role": "user", "content": "And in Oslo?"}]
    second = free_client.chat.completions.create(**options, messages=other, tool_choice="required")
    assert second.usage.prompt_tokens_details.cached_tokens >= 64  # the description


@pytest.fixture
def without_response_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop the response template: most tokenizers do not define how calls are written."""
    monkeypatch.setattr("kvant.server.service.find_template", lambda model, tokenizer: None)


@pytest.mark.usefixtures("without_response_template")
def test_template_with_tools_names_a_working_alternative(bundled_model: tuple[Any, Any]) -> None:
    """Its calls cannot be parsed; a forced call can."""
    tokenizer = deepcopy(bundled_model[1])
    tokenizer.chat_template = "{{ tools | tojson if tools else '' }}" + CHATML
    with serve_client(bundled_model[0], tokenizer) as client:
        with pytest.raises(openai.BadRequestError, match="tool_choice required"):
            send_chat(client, tools=TOOLS)
        (choice,) = send_chat(client, tools=TOOLS, tool_choice="required").choices
    assert choice.finish_reason == "tool_calls"


@pytest.mark.usefixtures("without_response_template")
@pytest.mark.parametrize(("message", "calls"), [(LISTED, 1), ("It rains.", 0), (LISTED + "!", 0)])
def test_reply_is_parsed_without_a_response_template(message: str, calls: int) -> None:
    with serve_reply(message) as client:
        (choice,) = send_chat(client, tools=TOOLS).choices
    assert len(choice.message.tool_calls or ()) == calls
    assert choice.message.content == (None if calls else message)


def test_reasoning_is_separate_from_calls() -> None:
    with serve_reply("<think>", "Rome.", "</think>", LISTED) as client:
        (choice,) = send_chat(client, tools=TOOLS).choices
    assert choice.message.reasoning_content == "Rome." and not choice.message.content
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]


def test_prompt_with_tools_can_be_counted(bundled_model: tuple[Any, Any]) -> None:
    tokenizer = deepcopy(bundled_model[1])
    tokenizer.chat_template = CHATML
    with serve_model(bundled_model[0], tokenizer) as (_, url):
        body = {"messages": [{"role": "user", "content": "?"}]}
        without = httpx.post(f"{url}/tokenize", json=body).json()["count"]
        described = httpx.post(f"{url}/tokenize", json=body | {"tools": TOOLS}).json()["count"]
    assert described > without + 50

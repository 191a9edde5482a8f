"""Calls of tools, thoughts, and replies of a form, by OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from server.conftest import served
from server.speaking import TEMPLATE, speaker

openai = pytest.importorskip("openai")

WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "What time it is."}},
]
FLAT: list[Any] = [{"type": "function"} | tool["function"] for tool in TOOLS]
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
CALL = '{"name": "weather", "arguments": {"city": "Rome"}}'
SPEECH = ("<think>", "It may ", "rain.", "</think>", "I ", "look.", "<tool_call>", CALL)
SPEECH = (*SPEECH, "</tool_call>")


class City(BaseModel):
    name: Literal["Rome", "Oslo"]
    people: Literal[3, 5]


@contextmanager
def client_of(model: Any, tokenizer: Any) -> Iterator[Any]:
    with (
        served(model, tokenizer, max_sequences=4, max_bytes="64MiB", pack=False) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def speaking() -> Iterator[Any]:
    """A model that thinks, says something, and calls a tool."""
    with client_of(*speaker(*SPEECH)) as client:
        yield client


@pytest.fixture(scope="module")
def free(inside: tuple[Any, Any]) -> Iterator[Any]:
    """The model inside, which says anything, with a template that knows tools."""

    tokenizer = deepcopy(inside[1])
    tokenizer.chat_template = TEMPLATE
    with client_of(inside[0], tokenizer) as client:
        yield client


def chat(client: Any, **given: Any) -> Any:
    asked = {"model": "inside", "messages": ASKED, "temperature": 0, "max_tokens": 400}
    return client.chat.completions.create(**asked | given)


def test_a_reply_is_thoughts_content_and_calls(speaking: Any) -> None:
    (choice,) = chat(speaking, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "It may rain."
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather" and call.id.startswith("call_")
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_a_stream_has_the_same_parts(speaking: Any) -> None:
    asked = {"model": "inside", "messages": ASKED, "temperature": 0, "tools": TOOLS}
    with speaking.chat.completions.stream(**asked) as stream:
        events = list(stream)
        (choice,) = stream.get_final_completion().choices
    assert choice.message.content == "I look." and choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    deltas = [one.chunk.choices[0].delta for one in events if one.type == "chunk"]
    thought = [one.reasoning_content for one in deltas if hasattr(one, "reasoning_content")]
    assert thought == ["It may ", "rain."]
    assert len([one.content for one in deltas if one.content]) == 2


def test_what_is_said_does_not_begin_with_empty_lines() -> None:
    """Neither behind thoughts, nor where the prompt ended them."""
    pieces = ("<think>\n", "Hm.", "\n</think>", "\n\n", "Yes.")
    with client_of(*speaker(*pieces)) as client:
        (choice,) = chat(client).choices
        assert choice.message.content == "Yes."
        assert choice.message.reasoning_content.startswith("Hm.")
    with client_of(*speaker("\n\n\n", "Yes.")) as client:
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        assert chat(client, extra_body=off).choices[0].message.content == "Yes."


@pytest.mark.parametrize("told", ['{"name": "now"}', '{"name": "now", "arguments": {}}'])
def test_a_call_may_have_no_arguments(told: str) -> None:
    with client_of(*speaker("<tool_call>", told, "</tool_call>")) as client:
        (call,) = chat(client, tools=TOOLS).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("now", "{}")


def test_without_tools_a_call_is_text(speaking: Any) -> None:
    (choice,) = chat(speaking).choices
    assert choice.message.content == f"I look.<tool_call>{CALL}</tool_call>"
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"
    (none,) = chat(speaking, tools=TOOLS, tool_choice="none").choices
    assert none.message.content == choice.message.content


def test_a_call_that_is_cut_short_is_text(speaking: Any) -> None:
    (choice,) = chat(speaking, tools=TOOLS, max_tokens=7).choices
    assert choice.finish_reason == "length" and not choice.message.tool_calls
    assert choice.message.content == "I look.<tool_call>"


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_cannot_be_read_is_text(stream: bool) -> None:
    pieces = ("Well.", "<tool_call>", '{"name": weather', "</tool_call>", " Done.")
    with client_of(*speaker(*pieces)) as client:
        reply = chat(client, tools=TOOLS, stream=stream)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
        else:
            text = reply.choices[0].message.content
    assert text == "".join(pieces)


def test_several_calls_are_numbered() -> None:
    one, two = CALL, CALL.replace("Rome", "Oslo")
    pieces = ("<tool_call>", one, "</tool_call>\n<tool_call>", two, "</tool_call>")
    with client_of(*speaker(*pieces)) as client:
        whole = chat(client, tools=TOOLS).choices[0].message
        chunks = [chunk.choices[0].delta for chunk in chat(client, tools=TOOLS, stream=True)]
        single = chat(client, tools=TOOLS, parallel_tool_calls=False).choices[0].message
    cities = [json.loads(call.function.arguments)["city"] for call in whole.tool_calls]
    assert cities == ["Rome", "Oslo"] and whole.content is None
    assert len(single.tool_calls) == 1
    places = [call.index for delta in chunks for call in delta.tool_calls or ()]
    assert places == [0, 1]


def test_what_a_tool_gave_is_shown_to_the_model(speaking: Any) -> None:
    """And messages as replies have them are taken back as they are."""
    said = chat(speaking, tools=TOOLS).choices[0].message
    call = said.tool_calls[0]
    messages = [
        *ASKED,
        said.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "It rains."},
    ]
    more = chat(speaking, messages=messages, tools=TOOLS)
    alone = chat(speaking, tools=TOOLS)
    shown = f"<|im_start|>assistant\nI look.<tool_call>{CALL}</tool_call><|im_end|>\n"
    shown += "<|im_start|>tool\nIt rains.<|im_end|>\n"
    special = len("<|im_start|><|im_end|>") - 2  # each of these is one token
    added = more.usage.prompt_tokens - alone.usage.prompt_tokens
    assert added == len(shown) - 2 * special


def test_messages_are_taken_as_clients_keep_them(speaking: Any) -> None:
    asked = {"model": "inside", "messages": ASKED, "temperature": 0, "tools": TOOLS}
    with speaking.chat.completions.stream(**asked) as stream:
        said = stream.get_final_completion().choices[0].message
    more = [*ASKED, said, {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "a"}]
    assert chat(speaking, messages=more, tools=TOOLS).choices[0].message.content == "I look."
    deep = said.model_dump(exclude_none=True)
    deep["tool_calls"][0]["function"]["arguments"] = "[" * 100_000
    with pytest.raises(openai.BadRequestError, match="context"):
        chat(speaking, messages=[*ASKED, deep], tools=TOOLS)


def test_options_reach_the_template(speaking: Any) -> None:
    """It begins the reply itself: thoughts that are closed already are none of the reply."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    more = chat(speaking, extra_body=off).usage.prompt_tokens - chat(speaking).usage.prompt_tokens
    assert more == len("<think>\n\n</think>\n\n")
    with pytest.raises(openai.BadRequestError, match="'tokenize' is no option"):
        chat(speaking, extra_body={"chat_template_kwargs": {"tokenize": True}})


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_can_be_forced(free: Any, stream: bool) -> None:
    """Whatever the model would rather say, and however it writes calls itself."""
    one: Any = {"type": "function", "function": {"name": "weather"}}
    for choice, names in ((one, {"weather"}), ("required", {"weather", "now"})):
        for seed in range(3):
            asked = {"tools": TOOLS, "tool_choice": choice, "temperature": 1, "seed": seed}
            if stream:
                given = {"model": "inside", "messages": ASKED, "max_tokens": 400}
                with free.chat.completions.stream(**given, **asked) as events:
                    (found,) = events.get_final_completion().choices
            else:
                (found,) = chat(free, **asked).choices
            assert found.finish_reason == "tool_calls" and not found.message.content
            assert choice == "required" or len(found.message.tool_calls) == 1
            for call in found.message.tool_calls:
                arguments = json.loads(call.function.arguments)
                assert call.function.name in names
                assert call.function.name == "now" or arguments["city"] in ("Rome", "Oslo")


def test_one_call_where_several_are_not_wanted(free: Any) -> None:
    for seed in range(4):
        asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        (found,) = chat(free, **asked, temperature=1.5, seed=seed).choices
        assert len(found.message.tool_calls) == 1


def test_a_reply_of_a_schema_is_parsed(free: Any) -> None:
    asked = {"model": "inside", "messages": ASKED, "temperature": 1, "max_tokens": 200}
    for seed in range(3):
        reply = free.chat.completions.parse(**asked, seed=seed, response_format=City)
        assert isinstance(reply.choices[0].message.parsed, City)
    reply = free.responses.parse(model="inside", input="A city?", text_format=City)
    assert isinstance(reply.output_parsed, City)


def test_any_json_object(free: Any) -> None:
    told = chat(free, response_format={"type": "json_object"}, max_tokens=400).choices[0]
    assert told.message.content.startswith("{")
    if told.finish_reason == "stop":
        json.loads(told.message.content)


# ---- /v1/responses


def test_a_response_has_items(speaking: Any) -> None:
    reply = speaking.responses.create(model="inside", input="How?", tools=FLAT, temperature=0)
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
    thought, message, call = reply.output
    assert thought.content[0].text == "It may rain." and reply.output_text == "I look."
    assert message.role == "assistant" and call.name == "weather"
    assert json.loads(call.arguments) == {"city": "Rome"}
    assert reply.status == "completed" and reply.object == "response"
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert reply.usage.output_tokens_details.reasoning_tokens == 2


def test_a_response_as_events(speaking: Any) -> None:
    asked = {"model": "inside", "input": "How?", "tools": FLAT, "temperature": 0}
    with speaking.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    item = ["output_item.added", "content_part.added"]
    closed = ["content_part.done", "output_item.done"]
    text = ["output_text.delta", "output_text.delta", "output_text.done"]
    thought = ["reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"]
    call = ["function_call_arguments.delta", "function_call_arguments.done"]
    assert kinds == [
        *["created", "in_progress"],
        *[*item, *thought, *closed],
        *[*item, *text, *closed],
        *["output_item.added", *call, "output_item.done"],
        "completed",
    ]
    assert final.output_text == "I look."
    assert [one.type for one in final.output] == ["reasoning", "message", "function_call"]


def test_a_response_is_taken_back(speaking: Any) -> None:
    """With what the function gave, and with instructions."""
    asked = {"model": "inside", "tools": FLAT, "temperature": 0}
    first = speaking.responses.create(input="How?", **asked)
    call = next(item for item in first.output if item.type == "function_call")
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "How?"}]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "Rain."})
    more = speaking.responses.create(input=items, instructions="Be short.", **asked)
    assert more.output_text == "I look." and more.instructions == "Be short."
    assert more.usage.input_tokens > first.usage.input_tokens


def test_a_response_that_is_cut_says_so(speaking: Any) -> None:
    asked = {"model": "inside", "input": "How?", "temperature": 0, "max_output_tokens": 5}
    reply = speaking.responses.create(**asked)
    assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
    last = list(speaking.responses.create(**asked, stream=True))[-1]
    assert last.type == "response.incomplete" and last.response.output_text == "I "


# ---- what is refused

BAD: list[tuple[str, Any, str]] = [
    ("unknown schema", {"response_format": {"type": "json_schema"}}, "json_schema"),
    (
        "no schema",
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        "Invalid type: x",
    ),
    ("kind", {"response_format": {"type": "xml"}}, "response_format"),
    ("name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
    ("no tools", {"tool_choice": "required"}, "there are no tools"),
    (
        "which",
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
        "x",
    ),
    (
        "both",
        {"tools": TOOLS, "response_format": {"type": "json_object"}},
        "response_format beside tools",
    ),
    ("tool", {"messages": [{"role": "tool", "content": "a"}]}, "tool_call_id"),
    ("nothing", {"messages": [{"role": "user", "content": None}]}, "content"),
    ("logprobs", {"top_logprobs": 2}, "logprobs is needed"),
    (
        "large",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"enum": ["x" * 70_000]}},
            }
        },
        "65536 at most",
    ),
    (
        "end",
        {"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}},
        "end",
    ),
]


@pytest.mark.parametrize(("given", "why"), [one[1:] for one in BAD], ids=[one[0] for one in BAD])
def test_what_is_wrong_is_said(free: Any, given: Any, why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why):
        chat(free, **given)


def test_a_model_without_a_template_has_no_tools(running: tuple[Any, str]) -> None:
    with openai.OpenAI(base_url=f"{running[1]}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="tools for a tokenizer without a chat"):
            chat(client, tools=TOOLS)
        with pytest.raises(openai.BadRequestError, match="without a chat template"):
            chat(client, tools=TOOLS, tool_choice="required")
        with pytest.raises(openai.BadRequestError, match="input"):
            client.responses.create(model="inside", input=[])
        with pytest.raises(openai.BadRequestError, match="400 - tool_choice: there are no"):
            client.responses.create(model="inside", input="a", tool_choice="required")

"""Test tool calls, reasoning, and structured replies, with OpenAI's client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from kvant.server.output_parsing import TemplateParser, find_template
from server.conftest import serve_model
from server.speaking import TEMPLATE, make_speaker

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
def serve_client(model: Any, tokenizer: Any) -> Iterator[Any]:
    with (
        serve_model(model, tokenizer, max_sequences=4, max_bytes="64MiB", pack=False) as (_, url),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def speaking_client() -> Iterator[Any]:
    """Return a model that reasons, says something, and calls a tool."""
    with serve_client(*make_speaker(*SPEECH)) as client:
        yield client


@pytest.fixture(scope="module")
def free_client(bundled_model: tuple[Any, Any]) -> Iterator[Any]:
    """Return the bundled model, which generates arbitrary text, with a template that supports
    tools.
    """

    tokenizer = deepcopy(bundled_model[1])
    tokenizer.chat_template = TEMPLATE
    with serve_client(bundled_model[0], tokenizer) as client:
        yield client


def send_chat(client: Any, **options: Any) -> Any:
    body = {"model": "inside", "messages": ASKED, "temperature": 0, "max_tokens": 400}
    return client.chat.completions.create(**body | options)


def test_reply_is_split_into_reasoning_content_and_calls(speaking_client: Any) -> None:
    (choice,) = send_chat(speaking_client, tools=TOOLS).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.reasoning_content == "It may rain."
    assert choice.message.content == "I look."
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather" and call.id.startswith("call_")
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def test_stream_has_the_same_parts(speaking_client: Any) -> None:
    options = {"model": "inside", "messages": ASKED, "temperature": 0, "tools": TOOLS}
    with speaking_client.chat.completions.stream(**options) as stream:
        events = list(stream)
        (choice,) = stream.get_final_completion().choices
    assert choice.message.content == "I look." and choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    deltas = [event.chunk.choices[0].delta for event in events if event.type == "chunk"]
    thought = [event.reasoning_content for event in deltas if hasattr(event, "reasoning_content")]
    assert thought == ["It may ", "rain."]
    assert len([event.content for event in deltas if event.content]) == 2


def test_content_has_no_leading_empty_lines() -> None:
    """Neither after reasoning, nor if the prompt closed it."""
    pieces = ("<think>\n", "Hm.", "\n</think>", "\n\n", "Yes.")
    with serve_client(*make_speaker(*pieces)) as client:
        (choice,) = send_chat(client).choices
        assert choice.message.content == "Yes."
        assert choice.message.reasoning_content.startswith("Hm.")
    with serve_client(*make_speaker("\n\n\n", "Yes.")) as client:
        off = {"chat_template_kwargs": {"enable_thinking": False}}
        assert send_chat(client, extra_body=off).choices[0].message.content == "Yes."


@pytest.mark.parametrize("call_text", ['{"name": "now"}', '{"name": "now", "arguments": {}}'])
def test_call_may_have_no_arguments(call_text: str) -> None:
    with serve_client(*make_speaker("<tool_call>", call_text, "</tool_call>")) as client:
        (call,) = send_chat(client, tools=TOOLS).choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("now", "{}")


def test_call_without_tools_is_text(speaking_client: Any) -> None:
    (choice,) = send_chat(speaking_client).choices
    assert choice.message.content == f"I look.<tool_call>{CALL}</tool_call>"
    assert choice.message.tool_calls is None and choice.finish_reason == "stop"
    (none,) = send_chat(speaking_client, tools=TOOLS, tool_choice="none").choices
    assert none.message.content == choice.message.content


def test_truncated_call_is_text(speaking_client: Any) -> None:
    (choice,) = send_chat(speaking_client, tools=TOOLS, max_tokens=7).choices
    assert choice.finish_reason == "length" and not choice.message.tool_calls
    assert choice.message.content == "I look.<tool_call>"


@pytest.mark.parametrize("stream", [False, True])
def test_malformed_call_is_text(stream: bool) -> None:
    pieces = ("Well.", "<tool_call>", '{"name": weather', "</tool_call>", " Done.")
    with serve_client(*make_speaker(*pieces)) as client:
        reply = send_chat(client, tools=TOOLS, stream=stream)
        if stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in reply)
        else:
            text = reply.choices[0].message.content
    assert text == "".join(pieces)


def test_malformed_call_keeps_text_that_repeats() -> None:
    """Regression: text up to the last copy of what was already returned was lost."""
    model, tokenizer = make_speaker(*SPEECH)
    template = find_template(model, tokenizer)
    assert template is not None
    parser = TemplateParser(template, "<|im_start|>assistant\n", TOOLS)
    parts = [*parser.feed("a<tool_call>a bad"), *parser.finish()]
    assert "".join(part.text for part in parts) == "a<tool_call>a bad"


def test_several_calls_are_numbered() -> None:
    first, two = CALL, CALL.replace("Rome", "Oslo")
    pieces = ("<tool_call>", first, "</tool_call>\n<tool_call>", two, "</tool_call>")
    with serve_client(*make_speaker(*pieces)) as client:
        whole = send_chat(client, tools=TOOLS).choices[0].message
        chunks = [chunk.choices[0].delta for chunk in send_chat(client, tools=TOOLS, stream=True)]
        single = send_chat(client, tools=TOOLS, parallel_tool_calls=False).choices[0].message
    cities = [json.loads(call.function.arguments)["city"] for call in whole.tool_calls]
    assert cities == ["Rome", "Oslo"] and whole.content is None
    assert len(single.tool_calls) == 1
    places = [call.index for delta in chunks for call in delta.tool_calls or ()]
    assert places == [0, 1]


def test_tool_result_is_shown_to_the_model(speaking_client: Any) -> None:
    """Messages in the form of replies are accepted unchanged."""
    message = send_chat(speaking_client, tools=TOOLS).choices[0].message
    call = message.tool_calls[0]
    messages = [
        *ASKED,
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "It rains."},
    ]
    more = send_chat(speaking_client, messages=messages, tools=TOOLS)
    single = send_chat(speaking_client, tools=TOOLS)
    expected_text = f"<|im_start|>assistant\nI look.<tool_call>{CALL}</tool_call><|im_end|>\n"
    expected_text += "<|im_start|>tool\nIt rains.<|im_end|>\n"
    special = len("<|im_start|><|im_end|>") - 2  # each of these is one token
    added = more.usage.prompt_tokens - single.usage.prompt_tokens
    assert added == len(expected_text) - 2 * special


def test_messages_are_accepted_in_the_form_clients_store(speaking_client: Any) -> None:
    options = {"model": "inside", "messages": ASKED, "temperature": 0, "tools": TOOLS}
    with speaking_client.chat.completions.stream(**options) as stream:
        message = stream.get_final_completion().choices[0].message
    more = [
        *ASKED,
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a"},
    ]
    assert (
        send_chat(speaking_client, messages=more, tools=TOOLS).choices[0].message.content
        == "I look."
    )
    deep = message.model_dump(exclude_none=True)
    deep["tool_calls"][0]["function"]["arguments"] = "[" * 100_000
    with pytest.raises(openai.BadRequestError, match="context"):
        send_chat(speaking_client, messages=[*ASKED, deep], tools=TOOLS)


def test_options_reach_the_template(speaking_client: Any) -> None:
    """The template opens the reply: reasoning that is already closed is not part of it."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    more = (
        send_chat(speaking_client, extra_body=off).usage.prompt_tokens
        - send_chat(speaking_client).usage.prompt_tokens
    )
    assert more == len("<think>\n\n</think>\n\n")
    with pytest.raises(openai.BadRequestError, match="'tokenize' is not an option"):
        send_chat(speaking_client, extra_body={"chat_template_kwargs": {"tokenize": True}})


@pytest.mark.parametrize("stream", [False, True])
def test_tool_can_be_forced(free_client: Any, stream: bool) -> None:
    """Whatever the model prefers, and whatever its own call syntax is."""
    function: Any = {"type": "function", "function": {"name": "weather"}}
    for choice, names in ((function, {"weather"}), ("required", {"weather", "now"})):
        for seed in range(3):
            options = {"tools": TOOLS, "tool_choice": choice, "temperature": 1, "seed": seed}
            if stream:
                options_ = {"model": "inside", "messages": ASKED, "max_tokens": 400}
                with free_client.chat.completions.stream(**options_, **options) as events:
                    (choice_,) = events.get_final_completion().choices
            else:
                (choice_,) = send_chat(free_client, **options).choices
            assert choice_.finish_reason == "tool_calls" and not choice_.message.content
            assert choice == "required" or len(choice_.message.tool_calls) == 1
            for call in choice_.message.tool_calls:
                arguments = json.loads(call.function.arguments)
                assert call.function.name in names
                assert call.function.name == "now" or arguments["city"] in ("Rome", "Oslo")


def test_parallel_calls_can_be_disabled(free_client: Any) -> None:
    for seed in range(4):
        options = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
        (choice,) = send_chat(free_client, **options, temperature=1.5, seed=seed).choices
        assert len(choice.message.tool_calls) == 1


def test_schema_reply_is_parsed(free_client: Any) -> None:
    options = {"model": "inside", "messages": ASKED, "temperature": 1, "max_tokens": 200}
    for seed in range(3):
        reply = free_client.chat.completions.parse(**options, seed=seed, response_format=City)
        assert isinstance(reply.choices[0].message.parsed, City)
    reply = free_client.responses.parse(model="inside", input="A city?", text_format=City)
    assert isinstance(reply.output_parsed, City)


def test_json_object_mode(free_client: Any) -> None:
    content = send_chat(
        free_client, response_format={"type": "json_object"}, max_tokens=400
    ).choices[0]
    assert content.message.content.startswith("{")
    if content.finish_reason == "stop":
        json.loads(content.message.content)


# ---- /v1/responses


def test_a_response_has_items(speaking_client: Any) -> None:
    reply = speaking_client.responses.create(
        model="inside", input="How?", tools=FLAT, temperature=0
    )
    assert [item.type for item in reply.output] == ["reasoning", "message", "function_call"]
    thought, message, call = reply.output
    assert thought.content[0].text == "It may rain." and reply.output_text == "I look."
    assert message.role == "assistant" and call.name == "weather"
    assert json.loads(call.arguments) == {"city": "Rome"}
    assert reply.status == "completed" and reply.object == "response"
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert reply.usage.output_tokens_details.reasoning_tokens == 2


def test_a_response_as_events(speaking_client: Any) -> None:
    options = {"model": "inside", "input": "How?", "tools": FLAT, "temperature": 0}
    with speaking_client.responses.stream(**options) as stream:
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
    assert [output.type for output in final.output] == ["reasoning", "message", "function_call"]


def test_response_can_be_deleted(speaking_client: Any) -> None:
    """With the result of the function, and with instructions."""
    options = {"model": "inside", "tools": FLAT, "temperature": 0}
    first = speaking_client.responses.create(input="How?", **options)
    call = next(item for item in first.output if item.type == "function_call")
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "How?"}]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "Rain."})
    more = speaking_client.responses.create(input=items, instructions="Be short.", **options)
    assert more.output_text == "I look." and more.instructions == "Be short."
    assert more.usage.input_tokens > first.usage.input_tokens


def test_truncated_response_is_marked_incomplete(speaking_client: Any) -> None:
    options = {"model": "inside", "input": "How?", "temperature": 0, "max_output_tokens": 5}
    reply = speaking_client.responses.create(**options)
    assert reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens"
    last = list(speaking_client.responses.create(**options, stream=True))[-1]
    assert last.type == "response.incomplete" and last.response.output_text == "I "


# ---- refusals

# llguidance would take minutes and gigabytes.
MANY_PATTERNS = {
    "allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{count}}}"} for count in range(5, 25)]
}
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
        "response_format with tools",
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
        "at most 65536",
    ),
    (
        "patterns",
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": MANY_PATTERNS},
            }
        },
        "20 of one string",
    ),
    (
        "patterns of arguments",
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": MANY_PATTERNS}}],
            "tool_choice": "required",
        },
        "20 of one string",
    ),
    (
        "end",
        {"response_format": {"type": "json_object"}, "extra_body": {"ignore_eos": True}},
        "end",
    ),
]


@pytest.mark.parametrize(
    ("options", "message"), [entry[1:] for entry in BAD], ids=[entry[0] for entry in BAD]
)
def test_invalid_requests_are_explained(free_client: Any, options: Any, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        send_chat(free_client, **options)


def test_a_model_without_a_template_has_no_tools(running: tuple[Any, str]) -> None:
    with openai.OpenAI(base_url=f"{running[1]}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="tools for a tokenizer without a chat"):
            send_chat(client, tools=TOOLS)
        with pytest.raises(openai.BadRequestError, match="without a chat template"):
            send_chat(client, tools=TOOLS, tool_choice="required")
        with pytest.raises(openai.BadRequestError, match="input"):
            client.responses.create(model="inside", input=[])
        with pytest.raises(openai.BadRequestError, match="400 - tool_choice: there are no"):
            client.responses.create(model="inside", input="a", tool_choice="required")

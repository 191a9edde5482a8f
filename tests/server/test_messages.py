"""Test Anthropic's client against a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import httpx2
import pytest

from kvant.generation import Messages
from kvant.generation.conversation import encode_messages, find_branch_points
from kvant.server import ApiKeys
from kvant.server.messages_api import MessagesRequest
from kvant.server.output_parsing import CallPart
from kvant.server.response_writers import parse_arguments
from server.conftest import generate_alone, serve_model
from server.speaking import TEMPLATE, make_speaker
from server.test_tools import CALL, SPEECH, WEATHER

anthropic = pytest.importorskip("anthropic")

TOOLS: list[Any] = [
    {"name": "weather", "description": "Tells the weather.", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]
ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
PROMPT = "import os\n\ndef read(path):\n"
MARK = {"cache_control": {"type": "ephemeral"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
USE = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome"}}


@contextmanager
def open_client(url: str, key: str = "none") -> Iterator[Any]:
    with anthropic.Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        yield client


@contextmanager
def serve_client(model: Any, tokenizer: Any) -> Iterator[Any]:
    options: dict[str, Any] = {"max_sequences": 4, "max_bytes": "64MiB", "pack": False}
    with serve_model(model, tokenizer, **options) as (_, url), open_client(url) as client:
        yield client


@pytest.fixture(scope="module")
def client(running: tuple[Any, str]) -> Iterator[Any]:
    with open_client(running[1]) as client:
        yield client


@pytest.fixture(scope="module")
def speaking_client() -> Iterator[Any]:
    """Yield a client of a model that reasons, says something, and calls a tool."""
    with serve_client(*make_speaker(*SPEECH)) as client:
        yield client


@pytest.fixture(scope="module")
def free_client(bundled_model: tuple[Any, Any]) -> Iterator[Any]:
    """Yield a client of the bundled model with a template that supports tools."""
    tokenizer = deepcopy(bundled_model[1])
    tokenizer.chat_template = TEMPLATE
    with serve_client(bundled_model[0], tokenizer) as client:
        yield client


GREEDY: dict[str, Any] = {"temperature": 0}  # the client has no argument for it


def send(client: Any, extra_body: Any = None, **options: Any) -> Any:
    body: dict[str, Any] = {"model": "inside", "messages": ASKED, "max_tokens": 400}
    return client.messages.create(**body | options, extra_body=GREEDY | (extra_body or {}))


def test_reply_equals_the_model_output(client: Any, bundled_model: tuple[Any, Any]) -> None:
    system, text = PROMPT[:10], PROMPT[10:]
    reply = send(
        client,
        system=[{"type": "text", "text": system}],
        messages=[{"role": "user", "content": [{"type": "text", "text": text}]}],
        max_tokens=12,
    )
    assert reply.content[0].text == generate_alone(bundled_model, PROMPT, 12)
    assert (reply.role, reply.model, reply.stop_reason) == ("assistant", "inside", "max_tokens")
    assert reply.usage.output_tokens == 12 and reply.stop_sequence is None


def test_stream_gives_the_same_message(client: Any) -> None:
    options: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12}
    whole = send(client, **options)
    stop = whole.content[0].text[-3:]
    with client.messages.stream(
        model="inside", extra_body=GREEDY, stop_sequences=["zzz", stop], **options
    ) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    text = whole.content[0].text
    assert final.content[0].text == text[: text.index(stop)]
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    assert events[0] == "message_start" and events[-1] == "message_stop"
    assert events.count("content_block_start") == events.count("content_block_stop") == 1


def test_reply_is_split_into_thinking_text_and_calls(speaking_client: Any) -> None:
    reply = send(speaking_client, tools=TOOLS)
    assert [block.type for block in reply.content] == ["thinking", "text", "tool_use"]
    thinking, text, call = reply.content
    assert (thinking.thinking, text.text) == ("It may rain.", "I look.")
    assert (call.name, call.input) == ("weather", {"city": "Rome"})
    assert call.id.startswith("toolu_") and reply.stop_reason == "tool_use"


def test_thinking_can_be_omitted(speaking_client: Any) -> None:
    thinking = {"type": "adaptive", "display": "omitted"}
    reply = send(speaking_client, tools=TOOLS, thinking=thinking)
    assert [block.type for block in reply.content] == ["text", "tool_use"]


def test_streamed_blocks_are_those_of_a_whole_reply(speaking_client: Any) -> None:
    whole = send(speaking_client, tools=TOOLS)
    with speaking_client.messages.stream(
        model="inside", messages=ASKED, extra_body=GREEDY, max_tokens=400, tools=TOOLS
    ) as stream:
        types = [event.type for event in stream]
        final = stream.get_final_message()
    ignored = {"content": {-1: {"id"}}}
    assert final.model_dump(include={"content", "stop_reason"}, exclude=ignored) == (
        whole.model_dump(include={"content", "stop_reason"}, exclude=ignored)
    )
    assert types.count("content_block_stop") == 3
    assert final.usage == whole.usage.model_copy(
        update={
            "input_tokens": final.usage.input_tokens,
            "cache_read_input_tokens": final.usage.cache_read_input_tokens,
        }
    )


def test_conversation_is_rendered_as_the_template_does(speaking_client: Any) -> None:
    """Blocks become the messages of a chat, with results before the user's text."""
    messages: list[Any] = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE]},
        {
            "role": "user",
            "content": [
                RESULT | {"content": [{"type": "text", "text": "No city."}], "is_error": True},
                {"type": "text", "text": "And "},
                {"type": "text", "text": "now?"},
            ],
        },
    ]
    request = MessagesRequest(model="inside", max_tokens=8, messages=messages, tools=TOOLS)
    assert [m.template_dict for m in request.chat_request.messages] == [
        ASKED[0],
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": "toolu_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"city": "Rome"}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Error: No city."},
        {"role": "user", "content": "And now?"},
    ]
    counted = speaking_client.messages.count_tokens(model="inside", messages=messages, tools=TOOLS)
    reply = send(speaking_client, messages=messages, tools=TOOLS)
    used = reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    assert counted.input_tokens == used


def test_reply_continues_the_last_message_of_the_assistant(
    free_client: Any, bundled_model: tuple[Any, Any]
) -> None:
    tokenizer = deepcopy(bundled_model[1])
    tokenizer.chat_template = TEMPLATE
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2,"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert text.endswith("1, 2,")
    reply = send(free_client, messages=messages, max_tokens=8)
    assert reply.content[0].text == generate_alone(bundled_model, text, 8)


def test_thinking_is_an_option_of_the_template(speaking_client: Any) -> None:
    count = speaking_client.messages.count_tokens
    on, off = ({"type": "enabled", "budget_tokens": 2048}, {"type": "disabled"})
    counts = [
        count(model="inside", messages=ASKED, thinking=thinking).input_tokens
        for thinking in (on, {"type": "adaptive"}, off)
    ]
    assert counts[0] == counts[1] < counts[2]  # the template adds an empty thought


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any", "disable_parallel_tool_use": True}, {"weather", "now"}),
        ({"type": "tool", "name": "weather"}, {"weather"}),
    ],
)
def test_calls_can_be_forced(free_client: Any, choice: Any, names: set[str]) -> None:
    reply = send(free_client, tools=TOOLS, tool_choice=choice, extra_body={"temperature": 1})
    assert reply.stop_reason == "tool_use"
    (call,) = reply.content
    assert call.name in names
    if call.name == "weather":
        assert call.input["city"] in ("Rome", "Oslo")


def test_tool_choice_none_gives_text(speaking_client: Any) -> None:
    reply = send(speaking_client, tools=TOOLS, tool_choice={"type": "none"})
    assert reply.content[-1].text == f"I look.<tool_call>{CALL}</tool_call>"
    assert reply.stop_reason == "end_turn"


def test_output_format_forces_json(free_client: Any) -> None:
    config = {"format": {"type": "json_schema", "schema": WEATHER}}
    reply = send(free_client, output_config=config, extra_body={"temperature": 1})
    assert json.loads(reply.content[0].text)["city"] in ("Rome", "Oslo")


def test_usage_counts_tokens_read_from_and_written_to_the_cache(client: Any) -> None:
    text = PROMPT * 20
    plain, marked = (
        [{"role": "user", "content": [{"type": "text", "text": f"# {name}\n{text}"} | mark]}]
        for name, mark in (("plain", {}), ("marked", MARK))
    )
    first = send(client, messages=plain, max_tokens=2).usage
    assert first.cache_creation_input_tokens == 0 and first.input_tokens > 128
    again = send(client, messages=plain, max_tokens=2).usage
    assert again.cache_read_input_tokens >= 128
    assert again.input_tokens + again.cache_read_input_tokens == (
        first.input_tokens + first.cache_read_input_tokens
    )
    created = send(client, messages=marked, max_tokens=2).usage
    assert created.input_tokens == 0 and created.cache_creation_input_tokens > 128
    with client.messages.stream(model="inside", messages=marked, max_tokens=2) as stream:
        started = next(event for event in stream if event.type == "message_start")
    assert started.message.usage.cache_read_input_tokens >= 128  # known at the first token


def test_marks_are_branch_points(bundled_model: tuple[Any, Any]) -> None:
    """Models that cannot resume at every page can resume after a marked message."""
    tokenizer = deepcopy(bundled_model[1])
    tokenizer.chat_template = TEMPLATE
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "One."} | MARK]},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Three."},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "Five."},
    ]
    request = MessagesRequest(
        model="inside", max_tokens=8, messages=messages, system="Be brief.", tools=TOOLS
    )
    prompt = request.add_marks(request.chat_request.template_messages)
    assert prompt.marks == [2]  # after the system message and the first one
    tokens = encode_messages(tokenizer, prompt)
    ends = [len(_encode_head(tokenizer, prompt, count)) for count in (1, 2, 5)]
    assert find_branch_points(tokenizer, prompt, tokens) == ends


def _encode_head(tokenizer: Any, prompt: Messages, count: int) -> list[int]:
    text = prompt.render_text(tokenizer, prompt.messages[:count])
    return list(tokenizer.encode(text, add_special_tokens=False))


def test_keys_are_sent_in_either_header(bundled_model: tuple[Any, Any]) -> None:
    with serve_model(*bundled_model, ApiKeys(["secret-key"])) as (_, url):
        with open_client(url, "secret-key") as client:
            assert client.models.list().data[0].id == "inside"
            assert send(client, max_tokens=1).usage.output_tokens == 1
        token = anthropic.Anthropic(base_url=url, auth_token="secret-key", max_retries=0)
        with token as client:
            assert send(client, max_tokens=1).usage.output_tokens == 1
        with (
            open_client(url, "another-key") as client,
            pytest.raises(anthropic.AuthenticationError, match="authentication_error"),
        ):
            send(client)


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/a.png"}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.*image"),
        ({"messages": [{"role": "user", "content": [USE]}]}, "type tool_use with role user"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0"),
        ({"tool_choice": {"type": "tool", "name": "none"}, "tools": TOOLS}, "none of the tools"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "tool"}}, "name: required with type tool"),
        ({"extra_body": {"mcp_servers": [{"url": "http://x"}]}}, "mcp_servers"),
        ({"extra_body": {"container": "a"}}, "container: "),
        ({"extra_body": {"unknown": 1}}, "unknown: the server has no such field"),
        ({"messages": [*ASKED, {"role": "assistant", "content": [USE]}]}, "results are missing"),
        ({"max_tokens": 0}, "max_tokens: "),
        ({"system": [{"type": "text", "text": "a"} | MARK] * 5}, "5 blocks have it, at most 4"),
        ({"messages": []}, "messages: "),
    ],
)
def test_invalid_requests_name_the_field(client: Any, options: Any, message: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=message) as caught:
        send(client, **options)
    assert caught.value.body["error"]["type"] == "invalid_request_error"


def test_other_errors_have_anthropics_types(client: Any) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not_found_error"):
        send(client, model="claude")
    long = [{"role": "user", "content": "word " * 20_000}]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        send(client, messages=long)


MALFORMED = {
    '"Rome"': {"arguments": "Rome"},
    "[1]": {"arguments": [1]},
    '{"x": NaN, "y": 1e999}': {"x": "NaN", "y": "1e999"},
    '{"x": "\\ud800"}': {"x": "\ufffd"},
}


@pytest.mark.parametrize("text", MALFORMED)
def test_arguments_are_always_an_object(text: str) -> None:
    """Whatever the model writes, the reply is JSON that clients can read."""
    assert parse_arguments(CallPart("weather", text)) == MALFORMED[text]
    json.dumps(MALFORMED[text], ensure_ascii=False, allow_nan=False).encode()


def test_a_call_that_is_no_object_is_streamed(bundled_model: tuple[Any, Any]) -> None:
    pieces = ("<tool_call>", '{"name": "now", "arguments": "Rome"}', "</tool_call>")
    with (
        serve_client(*make_speaker(*pieces)) as client,
        client.messages.stream(
            model="inside", messages=ASKED, extra_body=GREEDY, max_tokens=40, tools=TOOLS
        ) as stream,
    ):
        (call,) = stream.get_final_message().content
    assert (call.name, call.input) == ("now", {"arguments": "Rome"})


def test_deep_bodies_are_refused(running: tuple[Any, str]) -> None:
    """Whichever function first exceeds Python's recursion limit."""
    messages = [{"role": "assistant", "content": [USE]}, *ASKED]
    body = json.dumps({"model": "inside", "max_tokens": 1, "messages": messages})
    headers = {"content-type": "application/json"}
    statuses = set()
    for depth in range(880, 1020, 3):
        inner = '{"a":' * depth + "1" + "}" * depth
        text = body.replace('{"city": "Rome"}', inner)
        answer = httpx2.post(f"{running[1]}/v1/messages", content=text, headers=headers)
        statuses.add(answer.status_code)
        assert answer.status_code == 200 or answer.json()["type"] == "error"
    assert statuses == {200, 400}


def test_what_a_client_sends_back_is_accepted(speaking_client: Any) -> None:
    reply = send(speaking_client, tools=TOOLS)
    blocks = [block.model_dump() for block in reply.content]
    result = {"type": "tool_result", "tool_use_id": blocks[-1]["id"], "content": "Rain."}
    messages = [
        *ASKED,
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]
    assert send(speaking_client, messages=messages, tools=TOOLS).stop_reason == "tool_use"


def test_hints_change_nothing(client: Any) -> None:
    """Fields that agents send and that no reply depends on."""
    options: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 6}
    hints: dict[str, Any] = {
        "metadata": {"user_id": "someone"},
        "service_tier": "auto",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "high"},
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "extra_headers": {"anthropic-beta": "interleaved-thinking-2025-05-14"},
        "extra_body": {
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "mcp_servers": [],
            "container": None,
        },
    }
    assert send(client, **options, **hints).content == send(client, **options).content

"""Test Ollama's client against a running server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest

from kvant import checkpoints
from kvant.native import get_library
from kvant.server import ApiKeys
from kvant.server.ollama_api import OllamaChatRequest
from kvant.weights.packing import count_weight_nbytes
from server.conftest import generate_alone, serve_model
from server.speaking import TEMPLATE, make_speaker
from server.test_tools import CALL, SPEECH, TOOLS, WEATHER

ollama = pytest.importorskip("ollama")

ASKED: list[Any] = [{"role": "user", "content": "How is the weather in Rome?"}]
PROMPT = "import os\n\ndef read(path):\n"
GREEDY: dict[str, Any] = {"temperature": 0}


@contextmanager
def open_client(url: str) -> Iterator[Any]:
    with ollama.Client(host=url) as client:
        yield client


@contextmanager
def serve_client(model: Any, tokenizer: Any, keys: ApiKeys | None = None) -> Iterator[Any]:
    options: dict[str, Any] = {"max_sequences": 4, "max_bytes": "64MiB", "pack": False}
    with serve_model(model, tokenizer, keys, **options) as (_, url), open_client(url) as client:
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


def chat(client: Any, messages: Any = ASKED, options: Any = None, **fields: Any) -> Any:
    options = GREEDY | (options or {})
    return client.chat(model="inside", messages=messages, options=options, **fields)


def generate(client: Any, prompt: str, options: Any = None, **fields: Any) -> Any:
    options = GREEDY | (options or {})
    return client.generate(model="inside", prompt=prompt, options=options, **fields)


def test_reply_equals_the_model_output(client: Any, bundled_model: tuple[Any, Any]) -> None:
    expected = generate_alone(bundled_model, PROMPT, 12)
    reply = generate(client, PROMPT, {"num_predict": 12}, raw=True)
    assert reply.response == expected and reply.done and reply.done_reason == "length"
    assert reply.eval_count == 12 and reply.prompt_eval_count > 0
    durations = reply.prompt_eval_duration, reply.eval_duration
    assert all(durations) and sum(durations) == pytest.approx(reply.total_duration, abs=10)
    assert reply.eval_duration > 1e5  # eleven forwards of a model take longer
    messages = [{"role": "user", "content": PROMPT}]
    assert chat(client, messages, {"num_predict": 12}).message.content == expected


def test_lines_join_to_the_whole_reply(client: Any) -> None:
    options = {"num_predict": 12}
    whole = generate(client, PROMPT, options)
    *lines, last = generate(client, PROMPT, options, stream=True)
    assert "".join(line.response for line in lines) == whole.response and not last.response
    assert not any(line.done for line in lines) and last.done
    assert (last.eval_count, last.context) == (12, whole.context)
    *lines, last = chat(client, [{"role": "user", "content": PROMPT}], options, stream=True)
    assert "".join(line.message.content for line in lines) == whole.response
    assert last.done_reason == "length"


def test_stop_strings_end_a_reply(client: Any) -> None:
    text = generate(client, PROMPT, {"num_predict": 12}).response
    reply = generate(client, PROMPT, {"num_predict": 12, "stop": [text[-3:]]})
    assert reply.response == text[: text.index(text[-3:])] and reply.done_reason == "stop"


def test_context_continues_an_earlier_reply(client: Any, bundled_model: tuple[Any, Any]) -> None:
    first = generate(client, PROMPT, {"num_predict": 8})
    tokenizer = bundled_model[1]
    assert first.context == [*tokenizer.encode(PROMPT), *first.context[-8:]]
    assert generate(client, PROMPT, {"num_predict": 8}, context=[]).context == first.context
    more = "\n\nclass A:\n"
    second = generate(client, more, {"num_predict": 8}, context=first.context)
    tokens = [*first.context, *tokenizer.encode(more)]
    assert second.response == generate_alone(bundled_model, tokens, 8)


def test_reply_has_thinking_content_and_calls(speaking_client: Any) -> None:
    message = chat(speaking_client, tools=TOOLS).message
    assert (message.thinking, message.content) == ("It may rain.", "I look.")
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    lines = [line.message for line in chat(speaking_client, tools=TOOLS, stream=True)]
    assert "".join(line.thinking or "" for line in lines) == "It may rain."
    (call,) = [call for line in lines for call in line.tool_calls or ()]
    assert call.function.arguments == {"city": "Rome"}
    assert "tools" in speaking_client.show("inside").capabilities
    without = chat(speaking_client).message
    assert without.content == f"I look.<tool_call>{CALL}</tool_call>" and not without.tool_calls


def test_line_separators_do_not_end_a_line() -> None:
    """Regression: the client splits lines at U+2028, U+2029 and U+0085 too."""
    pieces = ("one", "\u2028two", "\x85three", "\u2029four")
    with serve_client(*make_speaker(*pieces)) as client:
        lines = [line.message.content for line in chat(client, stream=True)]
    assert "".join(lines) == "".join(pieces)


def test_results_belong_to_the_calls_before_them(speaking_client: Any) -> None:
    def call(name: str) -> dict[str, Any]:
        return {
            "type": "function",
            "index": 0,
            "function": {"name": name, "arguments": {"city": "Rome"}},
        }

    messages: list[Any] = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call("weather")]},  # without a result
        *ASKED,
        {"role": "assistant", "thinking": "Hm.", "tool_calls": [call("weather"), call("now")]},
        {"role": "tool", "content": "Noon.", "tool_name": "now"},
        {"role": "tool", "content": "Rain."},
    ]
    request = OllamaChatRequest(model="inside", messages=messages)
    *_, reply, first, second = [m.template_dict for m in request.chat_request.messages]
    assert [one["id"] for one in reply["tool_calls"]] == ["call_1", "call_2"]
    assert reply["reasoning_content"] == "Hm."
    assert (first["tool_call_id"], first["name"]) == ("call_2", "now")
    assert second["tool_call_id"] == "call_1"
    assert chat(speaking_client, messages).done_reason == "stop"


def test_think_is_an_option_of_the_template(speaking_client: Any) -> None:
    counts = [
        chat(speaking_client, think=think).prompt_eval_count for think in (True, "high", False)
    ]
    assert counts[0] == counts[1] < counts[2]  # the template adds an empty thought


def test_format_forces_json(free_client: Any) -> None:
    text = chat(free_client, options={"temperature": 1}, format=WEATHER).message.content
    assert json.loads(text)["city"] in ("Rome", "Oslo")
    reply = generate(free_client, "A city", {"num_predict": 60}, format="json")
    assert reply.response.lstrip().startswith("{")


def test_logprobs_are_those_of_the_tokens(client: Any) -> None:
    reply = generate(client, PROMPT, {"num_predict": 4}, logprobs=True, top_logprobs=2)
    assert len(reply.logprobs) == 4
    for token in reply.logprobs:
        best = token.top_logprobs[0]
        assert len(token.top_logprobs) == 2
        assert (best.token, best.logprob) == (token.token, pytest.approx(token.logprob, abs=1e-3))


def test_the_model_is_described(client: Any, bundled_model: tuple[Any, Any]) -> None:
    model = bundled_model[0]
    (listed,) = client.list().models
    (running,) = client.ps().models
    shown = client.show("inside:latest")
    options = GREEDY | {"num_predict": 1}
    assert client.generate("inside:latest", PROMPT, options=options).eval_count == 1
    assert client.chat("inside:latest", ASKED, options=options).eval_count == 1
    assert listed.model == running.name == "inside" and listed.digest == running.digest
    assert int(listed.size) == sum(weight.nbytes for weight in model.parameters())
    assert listed.details.family == model.config.model_type == "qwen3"
    assert running.context_length == 2048 and shown.modelinfo["qwen3.context_length"] == 2048
    assert shown.capabilities == ["completion"]  # no template renders tools


@pytest.mark.skipif(get_library().functions is None, reason="the native library is not here")
def test_rounded_weights_are_described_as_codes() -> None:
    model, tokenizer = checkpoints.load(None, weights="affine4")
    with serve_client(model, tokenizer) as client:
        (listed,) = client.list().models
    assert listed.details.quantization_level == "affine4"
    assert int(listed.size) == count_weight_nbytes(model) - sum(x.nbytes for x in model.buffers())


def test_empty_requests_load_the_model(client: Any) -> None:
    assert client.generate(model="inside", keep_alive=-1).done_reason == "load"
    assert client.chat(model="inside").done_reason == "load"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mirostat": 2}, "options.mirostat"),
        ({"repeat_last_n": 64}, "options.repeat_last_n"),
        ({"typical_p": 0.5}, "options.typical_p"),
        ({"temperatur": 1}, "temperatur: the server has no such field"),
        ({"num_predict": -3}, "options.num_predict"),
    ],
)
def test_options_that_would_change_a_reply_are_not_ignored(
    client: Any, options: Any, message: str
) -> None:
    with pytest.raises(ollama.ResponseError, match=message) as caught:
        generate(client, PROMPT, options)
    assert caught.value.status_code == 400


def test_hints_change_nothing(client: Any) -> None:
    hints = {"num_ctx": 8192, "num_gpu": 1, "num_thread": 4, "use_mmap": True, "num_keep": 4}
    plain = generate(client, PROMPT, {"num_predict": 6})
    hinted = generate(client, PROMPT, {"num_predict": 6} | hints, keep_alive="5m", think=True)
    assert hinted.response == plain.response


def test_other_errors_have_ollamas_shape(client: Any, bundled_model: tuple[Any, Any]) -> None:
    with pytest.raises(ollama.ResponseError, match="this server has 'inside'") as caught:
        client.generate(model="llama3", prompt=PROMPT)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="raw: not with format"):
        generate(client, PROMPT, raw=True, format="json")
    with pytest.raises(ollama.ResponseError, match="top_logprobs: logprobs is needed"):
        generate(client, PROMPT, top_logprobs=2)
    with pytest.raises(ollama.ResponseError) as caught:
        client.pull("llama3")
    assert caught.value.status_code == 404
    with (
        serve_client(*bundled_model, ApiKeys(["secret-key"])) as locked,
        pytest.raises(ollama.ResponseError, match="API key"),
    ):
        generate(locked, PROMPT)

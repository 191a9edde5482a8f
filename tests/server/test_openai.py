"""Test OpenAI's client against a running server."""

from __future__ import annotations

from typing import Any

import pytest

from server.conftest import generate_alone

openai = pytest.importorskip("openai")
PROMPT = "import os\n\ndef read(path):\n"


@pytest.fixture
def client(running: tuple[Any, str]) -> Any:
    with openai.OpenAI(base_url=f"{running[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "inside" and client.models.retrieve("inside").id == "inside"
    with pytest.raises(openai.NotFoundError, match="this server has 'inside'"):
        client.models.retrieve("gpt-5")


def test_completion_equals_the_model_output(client: Any, bundled_model: tuple[Any, Any]) -> None:
    reply = client.completions.create(model="inside", prompt=PROMPT, max_tokens=12, temperature=0)
    (choice,) = reply.choices
    assert (
        choice.text == generate_alone(bundled_model, PROMPT, 12)
        and choice.finish_reason == "length"
    )
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12


def test_stream_gives_the_same_text(client: Any, bundled_model: tuple[Any, Any]) -> None:
    chunks = list(
        client.completions.create(
            model="inside",
            prompt=PROMPT,
            max_tokens=12,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == generate_alone(
        bundled_model, PROMPT, 12
    )
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 12
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_chat_works_whole_and_streamed(client: Any, bundled_model: tuple[Any, Any]) -> None:
    """Without a template, messages are concatenated."""
    options: dict[str, Any] = {
        "model": "inside",
        "messages": [
            {"role": "system", "content": "import os\n"},
            {"role": "user", "content": [{"type": "text", "text": "\ndef read(path):\n"}]},
        ],
        "max_completion_tokens": 10,
        "temperature": 0,
    }
    expected = generate_alone(bundled_model, PROMPT, 10)
    whole = client.chat.completions.create(**options)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].message.role == "assistant"
    stop = expected[-3:]  # the client raises on a truncated reply
    with client.chat.completions.stream(**options, stop=stop) as stream:
        streamed_text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion().choices[0]
    assert streamed_text == final.message.content == expected[: expected.index(stop)]
    assert final.finish_reason == "stop"


def test_reply_becomes_a_message_of_the_next_turn(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    options: dict[str, Any] = {"model": "inside", "max_tokens": 70, "temperature": 0}
    first = client.chat.completions.create(messages=messages, **options)
    messages += [first.choices[0].message, {"role": "user", "content": "\n\nclass A:\n"}]
    second = client.chat.completions.create(messages=messages, **options)
    assert second.usage.prompt_tokens_details.cached_tokens >= 64


def test_cached_turns_are_not_prefilled_again(client: Any) -> None:
    prompt = PROMPT * 20
    used = [
        client.completions.create(model="inside", prompt=prompt, max_tokens=2).usage
        for _ in range(2)
    ]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in used]
    assert cached[1] >= used[0].prompt_tokens // 64 * 64 > cached[0]


def test_several_prompts_and_continuations(client: Any, bundled_model: tuple[Any, Any]) -> None:
    prompts = [PROMPT, "class Tree:\n"]
    reply = client.completions.create(
        model="inside", prompt=prompts, n=2, max_tokens=6, temperature=0
    )
    expected = [generate_alone(bundled_model, prompt, 6) for prompt in prompts for _ in range(2)]
    assert [choice.text for choice in reply.choices] == expected
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]


def test_token_ids_are_a_prompt(client: Any, running: tuple[Any, str]) -> None:
    import httpx2 as httpx

    ids = httpx.post(f"{running[1]}/tokenize", json={"prompt": PROMPT}).json()["tokens"]
    texts = {
        client.completions.create(model="inside", prompt=prompt, max_tokens=6, temperature=0)
        .choices[0]
        .text
        for prompt in (PROMPT, ids)
    }
    assert len(texts) == 1


def test_logprobs_are_returned(client: Any) -> None:
    options: dict[str, Any] = {"model": "inside", "max_tokens": 4, "temperature": 0}
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": PROMPT}], logprobs=True, top_logprobs=3, **options
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 4
    for entry in content:
        assert len(entry.top_logprobs) == 3 and entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token  # at temperature 0
        assert bytes(entry.bytes).decode() == entry.token
    plain = client.completions.create(prompt=PROMPT, logprobs=2, **options)
    plain_logprobs = plain.choices[0].logprobs
    assert plain_logprobs.tokens == [entry.token for entry in content]
    assert plain_logprobs.token_logprobs == pytest.approx(
        [entry.logprob for entry in content], abs=1e-3
    )
    assert all(len(entry) == 2 for entry in plain_logprobs.top_logprobs)


def test_same_seed_gives_the_same_text(client: Any) -> None:
    """For a prompt prefilled in the same chunks: other chunks round differently."""

    def complete(seed: int) -> str:
        options = {"model": "inside", "prompt": PROMPT, "max_tokens": 12, "temperature": 1.5}
        return str(client.completions.create(seed=seed, **options).choices[0].text)

    complete(7)  # caches the prompt
    assert complete(7) == complete(7)
    assert len({complete(seed) for seed in range(4)}) > 1


def test_biases_and_penalties_apply(client: Any, running: tuple[Any, str]) -> None:
    options: dict[str, Any] = {"model": "inside", "prompt": PROMPT, "temperature": 0}
    first = client.completions.create(max_tokens=1, logprobs=0, **options).choices[0]
    ids = running[0].engine.tokenizer.encode(first.text, add_special_tokens=False)
    other = client.completions.create(max_tokens=1, logit_bias={str(ids[0]): -100}, **options)
    assert other.choices[0].text != first.text
    only = client.completions.create(max_tokens=5, logit_bias={str(ids[0]): 100}, **options)
    assert only.choices[0].text == first.text * 5
    options |= {"logit_bias": {str(ids[0]): 100}, "frequency_penalty": 2, "presence_penalty": 2}
    turned = client.completions.create(max_tokens=5, **options)
    assert turned.choices[0].text == only.choices[0].text  # 100 is more than 2 + 2 * 4


def test_stop_string_is_hidden(client: Any) -> None:
    options: dict[str, Any] = {"model": "inside", "prompt": PROMPT, "temperature": 0}
    whole = client.completions.create(max_tokens=20, **options).choices[0].text
    stop = whole.strip()[2:5]
    cut = client.completions.create(max_tokens=20, stop=[stop], **options).choices[0]
    assert cut.finish_reason == "stop" and cut.text == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("best_of", 3, "best_of: the server has no such field"),
        ("suffix", "end", "suffix: the server has no such field"),
        ("temperature", 3.0, "temperature: "),
        ("max_tokens", 0, "max_tokens: "),
        ("n", 9, "n=9 with max_sequences=8"),
        ("logit_bias", {"x": 1}, "'x' is not a token id"),
        ("logit_bias", {"99999999": 1}, "logit_bias of token 99999999"),
    ],
)
def test_invalid_request_is_a_400_that_names_the_field(
    client: Any, field: str, value: Any, message: str
) -> None:
    options = {"model": "inside", "prompt": PROMPT, "extra_body": {field: value}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**options)
    assert message in caught.value.message
    assert caught.value.type == "invalid_request_error"

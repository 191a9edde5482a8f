"""OpenAI's own client against a running server."""

from __future__ import annotations

from typing import Any

import pytest

import kvant

openai = pytest.importorskip("openai")
PROMPT = "import os\n\ndef read(path):\n"


@pytest.fixture
def client(running: tuple[Any, str]) -> Any:
    with openai.OpenAI(base_url=f"{running[1]}/v1", api_key="none", max_retries=0) as client:
        yield client


def alone(inside: tuple[Any, Any], prompt: str, count: int) -> str:
    steps = kvant.generate(*inside, prompt, kv_cache="affine8", max_new_tokens=count)
    return "".join(step.text for step in steps)


def test_models_are_told(client: Any) -> None:
    (model,) = client.models.list().data
    assert model.id == "inside" and client.models.retrieve("inside").id == "inside"
    with pytest.raises(openai.NotFoundError, match="this server has 'inside'"):
        client.models.retrieve("gpt-5")


def test_a_completion_is_what_the_model_says(client: Any, inside: tuple[Any, Any]) -> None:
    reply = client.completions.create(model="inside", prompt=PROMPT, max_tokens=12, temperature=0)
    (choice,) = reply.choices
    assert choice.text == alone(inside, PROMPT, 12) and choice.finish_reason == "length"
    assert reply.usage.completion_tokens == 12
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + 12


def test_a_stream_says_the_same(client: Any, inside: tuple[Any, Any]) -> None:
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
    assert "".join(c.choices[0].text for c in chunks if c.choices) == alone(inside, PROMPT, 12)
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 12
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_a_chat_whole_and_as_it_comes(client: Any, inside: tuple[Any, Any]) -> None:
    """Without a template messages stand one behind the other."""
    asked: dict[str, Any] = {
        "model": "inside",
        "messages": [
            {"role": "system", "content": "import os\n"},
            {"role": "user", "content": [{"type": "text", "text": "\ndef read(path):\n"}]},
        ],
        "max_completion_tokens": 10,
        "temperature": 0,
    }
    expected = alone(inside, PROMPT, 10)
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].message.role == "assistant"
    stop = expected[-3:]  # the client takes a reply that was cut for an error
    with client.chat.completions.stream(**asked, stop=stop) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion().choices[0]
    assert said == final.message.content == expected[: expected.index(stop)]
    assert final.finish_reason == "stop"


def test_a_reply_is_a_message_of_the_next_turn(client: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": PROMPT}]
    asked: dict[str, Any] = {"model": "inside", "max_tokens": 70, "temperature": 0}
    first = client.chat.completions.create(messages=messages, **asked)
    messages += [first.choices[0].message, {"role": "user", "content": "\n\nclass A:\n"}]
    second = client.chat.completions.create(messages=messages, **asked)
    assert second.usage.prompt_tokens_details.cached_tokens >= 64


def test_what_was_asked_before_is_not_read_again(client: Any) -> None:
    prompt = PROMPT * 20
    used = [
        client.completions.create(model="inside", prompt=prompt, max_tokens=2).usage
        for _ in range(2)
    ]
    cached = [one.prompt_tokens_details.cached_tokens for one in used]
    assert cached[1] >= used[0].prompt_tokens // 64 * 64 > cached[0]


def test_several_prompts_and_continuations(client: Any, inside: tuple[Any, Any]) -> None:
    prompts = [PROMPT, "class Tree:\n"]
    reply = client.completions.create(
        model="inside", prompt=prompts, n=2, max_tokens=6, temperature=0
    )
    expected = [alone(inside, prompt, 6) for prompt in prompts for _ in range(2)]
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


def test_logprobs(client: Any) -> None:
    asked: dict[str, Any] = {"model": "inside", "max_tokens": 4, "temperature": 0}
    chat = client.chat.completions.create(
        messages=[{"role": "user", "content": PROMPT}], logprobs=True, top_logprobs=3, **asked
    )
    told = chat.choices[0].logprobs.content
    assert len(told) == 4
    for one in told:
        assert len(one.top_logprobs) == 3 and one.logprob <= 0
        assert one.top_logprobs[0].token == one.token  # at temperature 0
        assert bytes(one.bytes).decode() == one.token
    plain = client.completions.create(prompt=PROMPT, logprobs=2, **asked)
    found = plain.choices[0].logprobs
    assert found.tokens == [one.token for one in told]
    assert found.token_logprobs == pytest.approx([one.logprob for one in told], abs=1e-3)
    assert all(len(one) == 2 for one in found.top_logprobs)


def test_the_same_seed_says_the_same(client: Any) -> None:
    """Of a prompt that is read in the same way: what is read in other parts rounds differently."""

    def said(seed: int) -> str:
        asked = {"model": "inside", "prompt": PROMPT, "max_tokens": 12, "temperature": 1.5}
        return str(client.completions.create(seed=seed, **asked).choices[0].text)

    said(7)  # from now on the prompt is there
    assert said(7) == said(7)
    assert len({said(seed) for seed in range(4)}) > 1


def test_biases_and_penalties(client: Any, running: tuple[Any, str]) -> None:
    asked: dict[str, Any] = {"model": "inside", "prompt": PROMPT, "temperature": 0}
    first = client.completions.create(max_tokens=1, logprobs=0, **asked).choices[0]
    ids = running[0].engine.tokenizer.encode(first.text, add_special_tokens=False)
    other = client.completions.create(max_tokens=1, logit_bias={str(ids[0]): -100}, **asked)
    assert other.choices[0].text != first.text
    only = client.completions.create(max_tokens=5, logit_bias={str(ids[0]): 100}, **asked)
    assert only.choices[0].text == first.text * 5
    asked |= {"logit_bias": {str(ids[0]): 100}, "frequency_penalty": 2, "presence_penalty": 2}
    turned = client.completions.create(max_tokens=5, **asked)
    assert turned.choices[0].text == only.choices[0].text  # 100 is more than 2 + 2 * 4


def test_a_stop_string_is_not_said(client: Any) -> None:
    asked: dict[str, Any] = {"model": "inside", "prompt": PROMPT, "temperature": 0}
    whole = client.completions.create(max_tokens=20, **asked).choices[0].text
    stop = whole.strip()[2:5]
    cut = client.completions.create(max_tokens=20, stop=[stop], **asked).choices[0]
    assert cut.finish_reason == "stop" and cut.text == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("best_of", 3, "best_of: not supported"),
        ("suffix", "end", "suffix: not supported"),
        ("temperature", 3.0, "temperature: "),
        ("max_tokens", 0, "max_tokens: "),
        ("n", 9, "n=9 with max_sequences=8"),
        ("logit_bias", {"x": 1}, "'x' is no token id"),
        ("logit_bias", {"99999999": 1}, "logit_bias of token 99999999"),
    ],
)
def test_what_is_wrong_is_a_400_that_names_it(
    client: Any, field: str, value: Any, told: str
) -> None:
    asked = {"model": "inside", "prompt": PROMPT, "extra_body": {field: value}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**asked)
    assert told in caught.value.message
    assert caught.value.type == "invalid_request_error"

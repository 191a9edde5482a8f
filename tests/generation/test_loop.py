"""Test the generation loop: tokens of transformers' generate, a consistent cache, and stop
conditions.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import kvant
from generation.speakers import (
    DEMO,
    FAMILIES,
    NEW,
    PROMPT,
    Numbers,
    expected_tokens,
    generate_tokens,
    model_of,
    prompt_of,
    start_generation,
    tokenizer_of,
)
from kvant.generation import Sampling, Step, generate


@pytest.mark.parametrize("name", [DEMO, *FAMILIES])
def test_greedy_tokens_equal_those_of_transformers(name: str) -> None:
    assert generate_tokens(name) == expected_tokens(name)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("name", [DEMO, *FAMILIES])
def test_chunked_prompt_gives_the_same_tokens(name: str, chunk: int) -> None:
    assert generate_tokens(name, prefill_chunk=chunk) == expected_tokens(name)


@pytest.mark.parametrize("count", [1, 2, 9, NEW])
@pytest.mark.parametrize("name", [DEMO, *FAMILIES])
def test_cache_is_one_token_short_of_the_output(name: str, count: int) -> None:
    cache = kvant.cache_for(model_of(name), "raw")
    steps = start_generation(name, kv_cache=cache)
    assert cache.length == 0, "read before the first step is asked for"
    assert len(list(islice(steps, count))) == count
    assert cache.length == len(prompt_of(name)) + count - 1


@pytest.mark.parametrize("spec", ["raw", "affine8", "affine4"])
def test_text_and_token_prompts_start_alike(spec: str) -> None:
    tokenizer, model = tokenizer_of(DEMO), model_of(DEMO)
    first = list(generate(model, tokenizer, PROMPT, kv_cache=spec, max_new_tokens=4))
    assert first == list(start_generation(DEMO, kv_cache=spec, ignore_end=False, max_new_tokens=4))


def test_streamed_text_equals_the_decoded_tokens() -> None:
    steps = list(start_generation(DEMO))
    expected = tokenizer_of(DEMO).decode([step.token for step in steps])
    assert "".join(step.text for step in steps) == expected


def test_logprobs_equal_those_of_the_model() -> None:
    steps = list(start_generation(DEMO))
    ids = [*prompt_of(DEMO), *(step.token for step in steps)]
    with torch.no_grad():
        logprobs = model_of(DEMO)(torch.tensor([ids])).logits[0].log_softmax(-1)
    first = len(prompt_of(DEMO)) - 1
    for position, step in enumerate(steps, first):
        assert step.logprob == pytest.approx(float(logprobs[position, step.token]), abs=1e-3)


def test_same_seed_gives_the_same_tokens() -> None:
    hot = {"temperature": 1.5, "max_new_tokens": 8}
    assert generate_tokens("llama", seed=3, **hot) == generate_tokens("llama", seed=3, **hot)
    assert generate_tokens("llama", seed=3, **hot) != generate_tokens("llama", seed=4, **hot)


def test_options_replace_the_fields_of_sampling() -> None:
    hot, count = Sampling(temperature=1.5, seed=3), {"max_new_tokens": 8}
    expected = [generate_tokens("llama", temperature=1.5, seed=seed, **count) for seed in (3, 4)]
    assert generate_tokens("llama", sampling=hot, **count) == expected[0]
    assert generate_tokens("llama", sampling=hot, seed=4, **count) == expected[1]


def test_biased_token_is_sampled() -> None:
    assert generate_tokens("llama", logit_bias={9: 1e4}, max_new_tokens=3) == [9] * 3
    with pytest.raises(ValueError, match="token 128: the vocabulary has 128"):
        generate_wrongly(logit_bias={128: 1.0})


def test_unknown_option_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'temprature'"):
        generate_wrongly(temprature=1.0)


def test_max_new_tokens_ends_generation() -> None:
    reasons = [step.finish_reason for step in start_generation("llama", max_new_tokens=5)]
    assert reasons == [None] * 4 + ["length"]


def test_context_limit_ends_generation() -> None:
    full = len(prompt_of("llama")) + 3
    reasons = [step.finish_reason for step in start_generation("llama", max_context=full)]
    assert reasons == [None] * 2 + ["length"]


def test_model_context_ends_generation() -> None:
    steps = list(generate(model_of("llama"), Numbers(), [5] * 509, max_new_tokens=50))
    assert len(steps) == 512 - 509
    assert steps[-1].finish_reason == "length"


def test_stop_string_ends_generation_and_is_hidden() -> None:
    tokens = expected_tokens("llama")
    stop = f"><{tokens[4]}>"
    whole = Numbers().decode(tokens)
    steps = list(start_generation("llama", stop=[stop]))
    assert steps[-1].finish_reason == "stop"
    assert all(step.finish_reason is None for step in steps[:-1])
    assert "".join(step.text for step in steps) == whole[: whole.index(stop)]
    assert len(steps) <= 5


def test_text_withheld_for_a_stop_string_is_released_at_the_limit() -> None:
    tokens = expected_tokens("llama")[:3]
    steps = list(start_generation("llama", stop=[f"<{tokens[2]}>never"], max_new_tokens=3))
    assert "".join(step.text for step in steps) == Numbers().decode(tokens)
    assert steps[-1].finish_reason == "length"


@pytest.mark.parametrize("several", [False, True])
def test_end_token_ends_generation_and_is_hidden(
    several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = expected_tokens("llama")
    position = next(
        position for position in range(3, NEW) if tokens[position] not in tokens[:position]
    )
    end, unused = tokens[position], min(set(range(3, 128)) - set(tokens))
    config = model_of("llama").generation_config
    monkeypatch.setattr(config, "eos_token_id", [end, unused] if several else end)
    steps = list(start_generation("llama", ignore_end=False))
    assert [step.token for step in steps] == tokens[: position + 1]
    assert steps[-1].finish_reason == "stop"
    assert "".join(step.text for step in steps) == Numbers().decode(tokens[:position])
    assert generate_tokens("llama") == tokens, "an end token that is ignored"


@pytest.mark.parametrize("chunk", [1, 7, 17, 100])
def test_progress_callback_gets_growing_counts(chunk: int) -> None:
    messages: list[tuple[int, int]] = []
    next(
        start_generation(
            "llama", prefill_chunk=chunk, progress=lambda *counts: messages.append(counts)
        )
    )
    assert messages == [(min(position, 17), 17) for position in range(chunk, 17 + chunk, chunk)]


def generate_wrongly(prompt: Any = (5, 6), **options: Any) -> Iterator[Step]:
    return generate(model_of("llama"), Numbers(), prompt, **options)


def test_an_empty_prompt_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        generate_wrongly([])
    with pytest.raises(ValueError, match="no tokens"):
        generate(model_of(DEMO), tokenizer_of(DEMO), "")


def test_a_prompt_longer_than_the_context_is_refused_at_once() -> None:
    with pytest.raises(kvant.CapacityError, match="600 tokens for a context of 512"):
        generate_wrongly([5] * 600)
    with pytest.raises(kvant.CapacityError, match="4 tokens for a context of 4"):
        generate_wrongly([5] * 4, max_context=4)


def test_nonempty_cache_is_refused_at_once() -> None:
    cache = kvant.cache_for(model_of("llama"), "raw")
    next(generate_wrongly(kv_cache=cache))
    with pytest.raises(ValueError, match="a cache of 2 tokens"):
        generate_wrongly(kv_cache=cache)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"kv_cache": "nonsense"}, "nonsense"),
        ({"prefill_chunk": 0}, "^prefill_chunk=0"),
        ({"max_context": 0}, "max_context=0"),
        ({"seed": 1 << 65}, "seed="),
        ({"prompt": (5, 128)}, "0 to 127 is needed"),
        ({"prompt": (5, -1)}, "0 to 127 is needed"),
        ({"stop": [""]}, "an empty string"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate_wrongly(**options)


class SmallModel(nn.Module):
    """A custom model: an embedding and one attention layer."""

    def __init__(self, heads: int = 2, width: int = 16, vocabulary: int = 32) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, heads * width)
        self.qkv = nn.Linear(heads * width, 3 * heads * width)

    def _projected(self, ids: Tensor) -> list[Tensor]:
        split = self.qkv(self.embedding(ids)).chunk(3, -1)
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in split]

    def _logits(self, attended: Tensor) -> Tensor:
        return attended.transpose(1, 2).flatten(2) @ self.embedding.weight.T

    def forward(self, ids: Tensor, cache: kvant.Cache) -> Tensor:
        q, k, v = self._projected(ids)
        return self._logits(kvant.attend(q, cache[0].append(k, v)))

    def without(self, ids: Tensor) -> Tensor:
        """Compute the same without a cache."""
        attention = nn.functional.scaled_dot_product_attention
        return self._logits(attention(*self._projected(ids), is_causal=True))


@pytest.mark.parametrize("chunk", [2, 512])
def test_plain_callable_may_own_its_cache(chunk: int) -> None:
    model, cache, ids = SmallModel(), kvant.Cache(1), [1, 2, 3, 4, 5]
    steps = list(
        generate(model, Numbers(), ids, kv_cache=cache, max_new_tokens=NEW, prefill_chunk=chunk)
    )
    for step in steps:
        with torch.no_grad():
            logits = model.without(torch.tensor([ids]))[0, -1]
        assert step.token == int(logits.argmax())
        assert step.logprob == pytest.approx(float(logits.log_softmax(-1)[step.token]), abs=1e-4)
        ids.append(step.token)
    assert cache.length == 5 + NEW - 1


def test_plain_function_is_accepted() -> None:
    def next_number(ids: Tensor, cache: kvant.Cache) -> Tensor:
        row = torch.zeros(1, ids.shape[1], 1, 4).transpose(1, 2)
        cache[0].append(row, row)
        return nn.functional.one_hot(ids + 1, 32).float()

    steps = generate(next_number, Numbers(), [3], kv_cache=kvant.Cache(1), max_new_tokens=4)
    assert [step.token for step in steps] == [4, 5, 6, 7]


@pytest.mark.parametrize("options", [{}, {"kv_cache": "affine8"}], ids=str)
def test_spec_for_a_plain_callable_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"kvant\.Cache"):
        generate(SmallModel(), Numbers(), [1, 2], **options)


def test_foreign_cache_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="a cache of kvant's"):
        generate_wrongly(kv_cache=DynamicCache())


def test_unfinished_steps_are_silent_when_python_ends() -> None:
    """Then the modules that closing them needs are gone."""
    code = (
        "import kvant; from kvant.checkpoints import load; model, tokenizer = load(None)\n"
        "steps = kvant.generate(model, tokenizer, 'import ', max_new_tokens=9); next(steps)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 0 and "Error" not in ended.stderr

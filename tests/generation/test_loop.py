"""The loop says what the host's own generate says, keeps its cache in step, and ends as told."""

from __future__ import annotations

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
    begin,
    expected_of,
    model_of,
    prompt_of,
    said,
    tokenizer_of,
)
from kvant.generation import Step, generate


@pytest.mark.parametrize("name", [DEMO, *FAMILIES])
def test_greedy_tokens_are_those_of_the_host(name: str) -> None:
    assert said(name) == expected_of(name)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("name", [DEMO, *FAMILIES])
def test_a_prompt_in_pieces_gives_the_same_tokens(name: str, chunk: int) -> None:
    assert said(name, prefill_chunk=chunk) == expected_of(name)


@pytest.mark.parametrize("count", [1, 2, 9, NEW])
@pytest.mark.parametrize("name", [DEMO, *FAMILIES])
def test_the_cache_is_one_token_behind(name: str, count: int) -> None:
    memory = kvant.cache_for(model_of(name), "raw")
    steps = begin(name, kv_cache=memory)
    assert memory.length == 0, "read before the first step is asked for"
    assert len(list(islice(steps, count))) == count
    assert memory.length == len(prompt_of(name)) + count - 1


@pytest.mark.parametrize("spec", ["raw", "affine8", "affine4"])
def test_a_text_and_its_tokens_begin_alike(spec: str) -> None:
    tokenizer, model = tokenizer_of(DEMO), model_of(DEMO)
    first = list(generate(model, tokenizer, PROMPT, kv_cache=spec, max_new_tokens=4))
    assert first == list(begin(DEMO, kv_cache=spec, ignore_end=False, max_new_tokens=4))


def test_the_pieces_are_the_text_of_the_tokens() -> None:
    steps = list(begin(DEMO))
    expected = tokenizer_of(DEMO).decode([step.token for step in steps])
    assert "".join(step.text for step in steps) == expected


def test_logprobs_are_those_of_the_model() -> None:
    steps = list(begin(DEMO))
    ids = [*prompt_of(DEMO), *(step.token for step in steps)]
    with torch.no_grad():
        logprobs = model_of(DEMO)(torch.tensor([ids])).logits[0].log_softmax(-1)
    first = len(prompt_of(DEMO)) - 1
    for at, step in enumerate(steps, first):
        assert step.logprob == pytest.approx(float(logprobs[at, step.token]), abs=1e-3)


def test_the_same_seed_says_the_same() -> None:
    hot = {"temperature": 1.5, "max_new_tokens": 8}
    assert said("llama", seed=3, **hot) == said("llama", seed=3, **hot)
    assert said("llama", seed=3, **hot) != said("llama", seed=4, **hot)


def test_so_many_tokens_end_it() -> None:
    reasons = [step.finish_reason for step in begin("llama", max_new_tokens=5)]
    assert reasons == [None] * 4 + ["length"]


def test_the_context_ends_it() -> None:
    full = len(prompt_of("llama")) + 3
    reasons = [step.finish_reason for step in begin("llama", max_context=full)]
    assert reasons == [None] * 2 + ["length"]


def test_the_context_of_the_model_ends_it() -> None:
    steps = list(generate(model_of("llama"), Numbers(), [5] * 509, max_new_tokens=50))
    assert len(steps) == 512 - 509
    assert steps[-1].finish_reason == "length"


def test_a_stop_string_ends_it_and_is_not_shown() -> None:
    tokens = expected_of("llama")
    stop = f"><{tokens[4]}>"
    whole = Numbers().decode(tokens)
    steps = list(begin("llama", stop=[stop]))
    assert steps[-1].finish_reason == "stop"
    assert all(step.finish_reason is None for step in steps[:-1])
    assert "".join(step.text for step in steps) == whole[: whole.index(stop)]
    assert len(steps) <= 5


def test_what_was_held_for_a_stop_string_is_said_at_the_limit() -> None:
    tokens = expected_of("llama")[:3]
    steps = list(begin("llama", stop=[f"<{tokens[2]}>never"], max_new_tokens=3))
    assert "".join(step.text for step in steps) == Numbers().decode(tokens)
    assert steps[-1].finish_reason == "length"


@pytest.mark.parametrize("several", [False, True])
def test_an_end_token_ends_it_and_is_not_shown(
    several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = expected_of("llama")
    at = next(at for at in range(3, NEW) if tokens[at] not in tokens[:at])
    end, unused = tokens[at], min(set(range(3, 128)) - set(tokens))
    config = model_of("llama").generation_config
    monkeypatch.setattr(config, "eos_token_id", [end, unused] if several else end)
    steps = list(begin("llama", ignore_end=False))
    assert [step.token for step in steps] == tokens[: at + 1]
    assert steps[-1].finish_reason == "stop"
    assert "".join(step.text for step in steps) == Numbers().decode(tokens[:at])
    assert said("llama") == tokens, "an end token that is ignored"


@pytest.mark.parametrize("chunk", [1, 7, 17, 100])
def test_progress_is_told_with_growing_counts(chunk: int) -> None:
    told: list[tuple[int, int]] = []
    next(begin("llama", prefill_chunk=chunk, progress=lambda *counts: told.append(counts)))
    assert told == [(min(at, 17), 17) for at in range(chunk, 17 + chunk, chunk)]


def wrong(prompt: Any = (5, 6), **options: Any) -> Iterator[Step]:
    return generate(model_of("llama"), Numbers(), prompt, **options)


def test_an_empty_prompt_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        wrong([])
    with pytest.raises(ValueError, match="no tokens"):
        generate(model_of(DEMO), tokenizer_of(DEMO), "")


def test_a_prompt_longer_than_the_context_is_refused_at_once() -> None:
    with pytest.raises(kvant.CapacityError, match="600 tokens for a context of 512"):
        wrong([5] * 600)
    with pytest.raises(kvant.CapacityError, match="4 tokens for a context of 4"):
        wrong([5] * 4, max_context=4)


def test_a_cache_that_holds_tokens_is_refused_at_once() -> None:
    memory = kvant.cache_for(model_of("llama"), "raw")
    next(wrong(kv_cache=memory))
    with pytest.raises(ValueError, match="a cache of 2 tokens"):
        wrong(kv_cache=memory)


@pytest.mark.parametrize(
    ("options", "told"),
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
        ({"stop": [""]}, "not empty"),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_at_once(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        wrong(**options)


class Small(nn.Module):
    """Somebody's own model: an embedding and one layer of attention."""

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
        """The same with no cache at all."""
        attention = nn.functional.scaled_dot_product_attention
        return self._logits(attention(*self._projected(ids), is_causal=True))


@pytest.mark.parametrize("chunk", [2, 512])
def test_a_plain_callable_with_a_cache_of_its_own(chunk: int) -> None:
    model, memory, ids = Small(), kvant.Cache(1), [1, 2, 3, 4, 5]
    steps = list(
        generate(model, Numbers(), ids, kv_cache=memory, max_new_tokens=NEW, prefill_chunk=chunk)
    )
    for step in steps:
        with torch.no_grad():
            logits = model.without(torch.tensor([ids]))[0, -1]
        assert step.token == int(logits.argmax())
        assert step.logprob == pytest.approx(float(logits.log_softmax(-1)[step.token]), abs=1e-4)
        ids.append(step.token)
    assert memory.length == 5 + NEW - 1


def test_a_function_is_a_callable_too() -> None:
    def next_number(ids: Tensor, cache: kvant.Cache) -> Tensor:
        row = torch.zeros(1, ids.shape[1], 1, 4).transpose(1, 2)
        cache[0].append(row, row)
        return nn.functional.one_hot(ids + 1, 32).float()

    steps = generate(next_number, Numbers(), [3], kv_cache=kvant.Cache(1), max_new_tokens=4)
    assert [step.token for step in steps] == [4, 5, 6, 7]


@pytest.mark.parametrize("options", [{}, {"kv_cache": "affine8"}], ids=str)
def test_a_spec_for_a_plain_callable_is_refused_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"kvant\.Cache"):
        generate(Small(), Numbers(), [1, 2], **options)


def test_a_cache_of_others_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="a cache of kvant's"):
        wrong(kv_cache=DynamicCache())

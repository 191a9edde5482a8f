"""Test speculation: output equals that without drafts, and caches have the right length."""

from __future__ import annotations

import copy
from collections import Counter
from functools import cache
from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

import kvant
from generation.speakers import (
    DEMO,
    NEW,
    Numbers,
    generate_tokens,
    model_of,
    prompt_of,
    start_generation,
)
from hf.zoo import build, valid_spec
from kvant.generation import Sampling, generate
from kvant.generation.sampling import DraftTarget, DraftToken, NGramDrafter, Sampler
from thin import thin_rows

SPECS = ["raw", "affine8", "affine4", "turbo4v2", "affine4,window=16,sinks=2", "raw,window=12"]
AIM = DraftTarget(Sampler(Sampling()), 128)
SPEAKERS = [DEMO, "llama", "gemma3", "falcon_h1", "qwen3_next", "mamba2"]
SPOKEN = [(name, spec) for spec in SPECS for name in SPEAKERS if valid_spec(name, spec) == spec]


@cache
def make_noisy_copy(name: str) -> Any:
    """Return a model that guesses right occasionally: the same one with noise on its weights."""
    model, generator = copy.deepcopy(model_of(name)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_((0.3 * weight.std() * noise).to(weight.dtype))
    return model


@pytest.mark.parametrize(("name", "spec"), thin_rows(SPOKEN))
def test_greedy_tokens_are_those_of_plain_decoding(name: str, spec: str) -> None:
    plain = generate_tokens(name, kv_cache=spec)
    for max_drafts in (1, 12):
        assert (
            generate_tokens(name, kv_cache=spec, draft=make_noisy_copy(name), max_drafts=max_drafts)
            == plain
        )
    assert generate_tokens(name, kv_cache=spec, draft=model_of(name)) == plain


@pytest.mark.parametrize(("name", "spec"), thin_rows(SPOKEN))
def test_n_gram_drafts_change_nothing_either(name: str, spec: str) -> None:
    twice = prompt_of(name) * 2  # repeated, so that n-grams match
    options = {"kv_cache": spec, "max_new_tokens": NEW, "ignore_end": True}
    plain = [s.token for s in generate(model_of(name), Numbers(), twice, **options)]
    steps = list(generate(model_of(name), Numbers(), twice, **options, draft="ngram"))
    assert [step.token for step in steps] == plain


def test_perfect_draft_is_accepted_whole() -> None:
    steps = list(start_generation("llama", draft=model_of("llama"), max_drafts=4))
    # The prompt gives one token, each later forward four drafts and one more.
    assert [step.drafted for step in steps] == [
        False,
        *([True] * 4 + [False]) * 3,
        *[True] * 3,
        False,
    ]


def test_poor_draft_is_accepted_occasionally() -> None:
    steps = list(start_generation(DEMO, draft=make_noisy_copy(DEMO)))
    assert 0 < sum(step.drafted for step in steps) < NEW - 3


@pytest.mark.parametrize("name", [DEMO, "falcon_h1"])
@pytest.mark.parametrize("count", range(1, 8))
def test_stopping_within_a_draft_leaves_consistent_caches(name: str, count: int) -> None:
    cache = kvant.cache_for(model_of(name), "affine8")
    steps = start_generation(name, kv_cache=cache, draft=model_of(name))
    assert len(list(islice(steps, count))) == count
    steps.close()
    expected_length = len(prompt_of(name)) + count - 1
    assert cache.length == expected_length or (name != DEMO and cache.length < expected_length)


def test_end_token_within_a_draft_ends_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = generate_tokens("llama")
    position = next(
        position for position in range(3, NEW) if tokens[position] not in tokens[:position]
    )
    monkeypatch.setattr(model_of("llama").generation_config, "eos_token_id", tokens[position])
    cache = kvant.cache_for(model_of("llama"), "affine8")
    options = {"ignore_end": False, "draft": model_of("llama"), "max_drafts": 12}
    steps = list(start_generation("llama", kv_cache=cache, **options))
    assert [step.token for step in steps] == tokens[: position + 1]
    assert steps[-1].finish_reason == "stop"
    assert cache.length == len(prompt_of("llama")) + position


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 9])
def test_drafts_do_not_exceed_max_new_tokens(num_tokens: int) -> None:
    full = len(prompt_of("llama")) + num_tokens
    for limit in ({"max_new_tokens": num_tokens}, {"max_context": full}):
        steps = list(start_generation("llama", draft=model_of("llama"), **limit))
        assert len(steps) == num_tokens
        assert steps[-1].finish_reason == "length"


@pytest.mark.parametrize("size", [64, 200])
def test_padded_vocabulary_is_accepted(size: int) -> None:
    def generate_tokens(**options: Any) -> list[int]:
        steps = generate(model_of("llama"), Numbers(), [5, 6, 7], max_new_tokens=8, **options)
        return [step.token for step in steps]

    other = build("llama", vocab_size=size)
    assert generate_tokens(draft=other) == generate_tokens()
    assert all(token < 128 for token in generate_tokens(draft=other, temperature=1.5, seed=0))


def test_draft_model_with_a_shorter_context_stops_drafting() -> None:
    short = build("gpt2", max_position_embeddings=32)
    assert generate_tokens("llama", draft=short, max_new_tokens=40) == generate_tokens(
        "llama", max_new_tokens=40
    )


def test_drafts_do_not_exceed_the_capacity() -> None:
    full = len(prompt_of("llama")) + 9
    options = {"kv_cache": f"raw,capacity={full}", "max_new_tokens": 10}
    assert generate_tokens("llama", **options, draft=model_of("llama")) == generate_tokens(
        "llama", **options
    )


def test_hybrid_that_fails_during_a_draft_can_be_forked() -> None:
    draft = build("falcon_h1")
    session = kvant.Session(model_of("llama"), Numbers(), draft=draft)
    steps = session.send([5, 6, 7], max_new_tokens=9)
    next(steps)

    def dies(*args: Any) -> None:
        raise RuntimeError("out of luck")

    hook = draft.model.layers[2].register_forward_pre_hook(dies)
    with pytest.raises(RuntimeError, match="out of luck"):
        next(steps)
    hook.remove()
    fork = session.fork()
    replies = [
        [s.token for s in session_.send([8], max_new_tokens=9)] for session_ in (session, fork)
    ]
    assert replies[0] == replies[1]


def test_an_unknown_draft_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="'ngram', a model"):
        start_generation("llama", draft="medusa")


def test_n_grams_continue_the_latest_match() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 3, 7, 8, 1, 2, 3]
    drafts = NGramDrafter().propose_drafts(tokens, 2, AIM)
    assert [draft.token for draft in drafts] == [7, 8]


def test_n_grams_follow_appends_and_rewinds() -> None:
    grams = NGramDrafter()
    text = [5, 6, 1, 5]
    assert grams.propose_drafts(text, 3, AIM) == []
    assert [d.token for d in grams.propose_drafts([*text, 6], 3, AIM)] == [1, 5, 6]
    assert [d.token for d in grams.propose_drafts([5, 6, 5, 6], 3, AIM)] == [5, 6]


def chi_square(counts: Counter[Any], expected: dict[Any, float]) -> float:
    """Compute chi-square of counts against probabilities."""
    total = sum(counts.values())
    assert set(counts) <= {key for key, share in expected.items() if share > 0}
    return sum(
        (counts[key] - total * share) ** 2 / (total * share)
        for key, share in expected.items()
        if share > 0
    )


VOCABULARY = 6
SURE = {5: 20.5, 35: 66.6}  # a chi-square above this occurs once in a thousand runs


@pytest.mark.parametrize("filtered", [{}, {"top_k": 4}, {"temperature": 0.6}, {"top_p": 0.7}])
@pytest.mark.parametrize("certain", [False, True])
def test_verified_token_follows_the_target_distribution(
    certain: bool, filtered: dict[str, Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    right, guess = torch.randn(2, VOCABULARY, generator=generator)
    sampler = Sampler(Sampling(**{"temperature": 1.0, "seed": 2} | filtered))
    counts: Counter[int] = Counter()
    for place in range(3000):
        before = [0] * place
        draft = DraftToken(2) if certain else sampler.sample_draft(guess, before)
        counts[sampler.verify_draft(right, before, draft).token] += 1
    expected = dict(enumerate(sampler.compute_logprobs(right, []).exp().tolist()))
    assert chi_square(counts, expected) < SURE[5]


def make_table_model(seed: int) -> Any:
    """Return a model whose next token depends on the last one only."""
    rows = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))

    def logits(ids: Tensor, cache: kvant.Cache) -> Tensor:
        row = torch.zeros(1, 1, ids.shape[1], 4)
        cache[0].append(row, row)
        return rows[ids]

    logits.rows = rows  # type: ignore[attr-defined]
    return logits


class TableDrafts:
    """Drafts from a table."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def propose_drafts(
        self, tokens: list[int], max_drafts: int, target: DraftTarget
    ) -> list[DraftToken]:
        text, drafts = list(tokens), list[DraftToken]()
        for _ in range(max_drafts):
            drafts.append(target.sample_draft(self.rows[text[-1]], text))
            text.append(drafts[-1].token)
        return drafts

    def fork(self) -> TableDrafts:
        return self


@pytest.mark.parametrize("count", [1000, pytest.param(3000, marks=pytest.mark.laws)])
def test_sampling_with_drafts_follows_the_model_distribution(count: int) -> None:
    model, guesses = make_table_model(0), TableDrafts(make_table_model(1).rows)
    counts: Counter[tuple[int, int]] = Counter()
    accepted = 0
    for seed in range(count):
        options = {"kv_cache": kvant.Cache(1), "temperature": 1.0, "seed": seed, "draft": guesses}
        steps = list(generate(model, Numbers(), [0], max_new_tokens=4, max_drafts=2, **options))
        counts[steps[1].token, steps[2].token] += 1  # a draft, and the token after it
        accepted += sum(step.drafted for step in steps)
    chances = model.rows.softmax(-1).double()
    first = chances[0] @ chances
    expected = {
        (a, b): float(first[a] * chances[a, b])
        for a in range(VOCABULARY)
        for b in range(VOCABULARY)
    }
    assert accepted > count // 3
    assert chi_square(counts, expected) < SURE[35]

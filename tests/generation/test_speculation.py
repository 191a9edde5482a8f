"""Speculation: what is said is as if there were no drafts, and the memory is where it should be."""

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
from generation.speakers import DEMO, NEW, Numbers, begin, model_of, prompt_of, said
from hf.zoo import build, worded
from kvant.generation import Sampling, generate
from kvant.generation.drafters import DraftTarget, NGramDrafter
from kvant.generation.sampling import DraftToken, Sampler
from thin import once

SPECS = ["raw", "affine8", "affine4", "turbo4v2", "affine4,window=16,sinks=2", "raw,window=12"]
AIM = DraftTarget(Sampler(Sampling()), 128)
SPEAKERS = [DEMO, "llama", "gemma3", "falcon_h1", "qwen3_next", "mamba2"]
SPOKEN = [(name, spec) for spec in SPECS for name in SPEAKERS if worded(name, spec) == spec]


@cache
def poorer(name: str) -> Any:
    """A model that guesses right now and then: the same with noise on its weights."""
    twin, generator = copy.deepcopy(model_of(name)), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in twin.parameters():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator)
                weight.add_((0.3 * weight.std() * noise).to(weight.dtype))
    return twin


@pytest.mark.parametrize(("name", "spec"), once(SPOKEN))
def test_greedy_tokens_are_those_of_plain_decoding(name: str, spec: str) -> None:
    plain = said(name, kv_cache=spec)
    for most in (1, 12):
        assert said(name, kv_cache=spec, draft=poorer(name), max_drafts=most) == plain
    assert said(name, kv_cache=spec, draft=model_of(name)) == plain


@pytest.mark.parametrize(("name", "spec"), once(SPOKEN))
def test_n_grams_change_nothing_either(name: str, spec: str) -> None:
    twice = prompt_of(name) * 2  # something to find
    given = {"kv_cache": spec, "max_new_tokens": NEW, "ignore_end": True}
    plain = [s.token for s in generate(model_of(name), Numbers(), twice, **given)]
    steps = list(generate(model_of(name), Numbers(), twice, **given, draft="ngram"))
    assert [step.token for step in steps] == plain


def test_a_perfect_draft_is_taken_whole() -> None:
    steps = list(begin("llama", draft=model_of("llama"), max_drafts=4))
    # The prompt gives one token, each forward behind it four drafts and one of its own.
    assert [step.drafted for step in steps] == [
        False,
        *([True] * 4 + [False]) * 3,
        *[True] * 3,
        False,
    ]


def test_a_poor_draft_is_taken_now_and_then() -> None:
    steps = list(begin(DEMO, draft=poorer(DEMO)))
    assert 0 < sum(step.drafted for step in steps) < NEW - 3


@pytest.mark.parametrize("name", [DEMO, "falcon_h1"])
@pytest.mark.parametrize("count", range(1, 8))
def test_who_stops_within_a_draft_has_a_level_memory(name: str, count: int) -> None:
    memory = kvant.cache_for(model_of(name), "affine8")
    steps = begin(name, kv_cache=memory, draft=model_of(name))
    assert len(list(islice(steps, count))) == count
    steps.close()
    most = len(prompt_of(name)) + count - 1
    assert memory.length == most or (name != DEMO and memory.length < most)


def test_an_end_token_within_a_draft_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = said("llama")
    at = next(at for at in range(3, NEW) if tokens[at] not in tokens[:at])
    monkeypatch.setattr(model_of("llama").generation_config, "eos_token_id", tokens[at])
    memory = kvant.cache_for(model_of("llama"), "affine8")
    given = {"ignore_end": False, "draft": model_of("llama"), "max_drafts": 12}
    steps = list(begin("llama", kv_cache=memory, **given))
    assert [step.token for step in steps] == tokens[: at + 1]
    assert steps[-1].finish_reason == "stop"
    assert memory.length == len(prompt_of("llama")) + at


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_drafts_do_not_pass_a_limit(most: int) -> None:
    full = len(prompt_of("llama")) + most
    for limit in ({"max_new_tokens": most}, {"max_context": full}):
        steps = list(begin("llama", draft=model_of("llama"), **limit))
        assert len(steps) == most
        assert steps[-1].finish_reason == "length"


@pytest.mark.parametrize("size", [64, 200])
def test_a_vocabulary_that_is_padded_differently(size: int) -> None:
    def answers(**given: Any) -> list[int]:
        steps = generate(model_of("llama"), Numbers(), [5, 6, 7], max_new_tokens=8, **given)
        return [step.token for step in steps]

    other = build("llama", vocab_size=size)
    assert answers(draft=other) == answers()
    assert all(token < 128 for token in answers(draft=other, temperature=1.5, seed=0))


def test_a_draft_model_with_a_shorter_context_stops_guessing() -> None:
    short = build("gpt2", max_position_embeddings=32)
    assert said("llama", draft=short, max_new_tokens=40) == said("llama", max_new_tokens=40)


def test_drafts_do_not_pass_a_capacity() -> None:
    full = len(prompt_of("llama")) + 9
    given = {"kv_cache": f"raw,capacity={full}", "max_new_tokens": 10}
    assert said("llama", **given, draft=model_of("llama")) == said("llama", **given)


def test_a_hybrid_that_dies_as_a_draft_can_be_forked() -> None:
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
    twin = session.fork()
    replies = [[s.token for s in one.send([8], max_new_tokens=9)] for one in (session, twin)]
    assert replies[0] == replies[1]


def test_an_unknown_draft_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="'ngram', a model"):
        begin("llama", draft="medusa")


def test_n_grams_continue_the_newest_copy() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 3, 7, 8, 1, 2, 3]
    drafts = NGramDrafter().propose_drafts(tokens, 2, AIM)
    assert [draft.token for draft in drafts] == [7, 8]


def test_n_grams_follow_a_text_that_grows_and_goes_back() -> None:
    grams = NGramDrafter()
    text = [5, 6, 1, 5]
    assert grams.propose_drafts(text, 3, AIM) == []
    assert [d.token for d in grams.propose_drafts([*text, 6], 3, AIM)] == [1, 5, 6]
    assert [d.token for d in grams.propose_drafts([5, 6, 5, 6], 3, AIM)] == [5, 6]


def chi_square(counts: Counter[Any], expected: dict[Any, float]) -> float:
    """Of counts against probabilities, which must hold whatever was counted."""
    total = sum(counts.values())
    assert set(counts) <= {key for key, share in expected.items() if share > 0}
    return sum(
        (counts[key] - total * share) ** 2 / (total * share)
        for key, share in expected.items()
        if share > 0
    )


VOCABULARY = 6
SURE = {5: 20.5, 35: 66.6}  # a chi-square beyond this comes once in a thousand times


@pytest.mark.parametrize("filtered", [{}, {"top_k": 4}, {"temperature": 0.6}, {"top_p": 0.7}])
@pytest.mark.parametrize("certain", [False, True])
def test_a_verified_token_is_drawn_from_the_right_distribution(
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


def table(seed: int) -> Any:
    """A model whose next token hangs on the last one alone."""
    rows = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))

    def logits(ids: Tensor, cache: kvant.Cache) -> Tensor:
        row = torch.zeros(1, 1, ids.shape[1], 4)
        cache[0].append(row, row)
        return rows[ids]

    logits.rows = rows  # type: ignore[attr-defined]
    return logits


class Guesses:
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

    def fork(self) -> Guesses:
        return self


@pytest.mark.parametrize("count", [1000, pytest.param(3000, marks=pytest.mark.laws)])
def test_what_is_sampled_with_drafts_has_the_distribution_of_the_model(count: int) -> None:
    model, guesses = table(0), Guesses(table(1).rows)
    counts: Counter[tuple[int, int]] = Counter()
    taken = 0
    for seed in range(count):
        given = {"kv_cache": kvant.Cache(1), "temperature": 1.0, "seed": seed, "draft": guesses}
        steps = list(generate(model, Numbers(), [0], max_new_tokens=4, max_drafts=2, **given))
        counts[steps[1].token, steps[2].token] += 1  # a draft, and what comes behind it
        taken += sum(step.drafted for step in steps)
    chances = model.rows.softmax(-1).double()
    first = chances[0] @ chances
    expected = {
        (a, b): float(first[a] * chances[a, b])
        for a in range(VOCABULARY)
        for b in range(VOCABULARY)
    }
    assert taken > count // 3
    assert chi_square(counts, expected) < SURE[35]

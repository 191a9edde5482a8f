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
from generation.draft_times import EvenClock
from generation.speakers import (
    DEMO,
    NEW,
    Numbers,
    generate_tokens,
    model_of,
    prompt_of,
    start_generation,
    tokenizer_of,
)
from hf.zoo import build, valid_spec
from kvant.generation import Sampling, generate
from kvant.generation.speculation import (
    Acceptance,
    AcceptanceRate,
    DraftSizer,
    DraftTarget,
    NGramDrafter,
    Proposal,
)
from thin import thin_rows

pytestmark = pytest.mark.usefixtures("every_draft_is_verified")
SPECS = ["raw", "affine8", "affine4", "turbo4v2", "affine4,window=16,sinks=2", "raw,window=12"]
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


@pytest.mark.parametrize("draft", ["medusa", lambda ids, cache: ids], ids=["word", "callable"])
def test_an_unknown_draft_is_refused_at_once(draft: Any) -> None:
    with pytest.raises(ValueError, match=r"draft=.* 'ngram', a model"):
        start_generation("llama", draft=draft)


def test_n_grams_continue_the_latest_match() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 3, 7, 8, 1, 2, 3]
    assert NGramDrafter().propose_drafts(tokens, 2) == [7, 8]


def test_n_grams_follow_appends_and_rewinds() -> None:
    grams = NGramDrafter()
    text = [5, 6, 1, 5]
    assert grams.propose_drafts(text, 3) == []
    assert grams.propose_drafts([*text, 6], 3) == [1, 5, 6]
    assert grams.propose_drafts([5, 6, 5, 6], 3) == [5, 6]


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
SURE = 66.6  # of 35 degrees of freedom: a chi-square above this occurs once in a thousand runs


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

    def propose_drafts(self, tokens: list[int], max_drafts: int, target: DraftTarget) -> list[int]:
        text = list(tokens)
        for _ in range(max_drafts):
            text.append(target.sample_draft(self.rows[text[-1]], text))
        return text[len(tokens) :]

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
    assert chi_square(counts, expected) < SURE


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 4},
        {"temperature": 0.6, "top_p": 0.7},
        {"temperature": 1.5, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    ],
    ids=str,
)
@pytest.mark.parametrize("draft", ["ngram", "table", "itself"])
def test_a_seed_gives_the_tokens_of_plain_sampling(draft: str, options: dict[str, Any]) -> None:
    model = make_table_model(0)
    drafter: Any = {
        "ngram": "ngram",
        "table": TableDrafts(make_table_model(1).rows),
        "itself": TableDrafts(model.rows),
    }[draft]
    sampling = Sampling(**{"temperature": 1.0, "seed": 5} | options)

    def start(draft: Any) -> list[kvant.Step]:
        cache = kvant.Cache(1)
        return list(
            generate(
                model,
                Numbers(),
                [0, 1],
                kv_cache=cache,
                draft=draft,
                sampling=sampling,
                max_new_tokens=60,
                max_drafts=3,
            )
        )

    plain, drafted = start(None), start(drafter)
    assert [(s.token, s.logprob) for s in drafted] == [(s.token, s.logprob) for s in plain]
    if draft == "itself":
        assert sum(step.drafted for step in drafted) > 40


@pytest.mark.parametrize("case", ["replayed", "hooked", "reference", "disabled"])
def test_n_grams_are_verified_where_they_pay(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvant.generation.loop.time", EvenClock())
    monkeypatch.setattr("kvant.generation.loop.DraftSizer", DraftSizer)
    model, options = model_of(DEMO), dict[str, Any]()
    if case == "reference":
        options["backend"] = "reference"
    if case == "disabled":
        options["strategy"] = "disabled"
    hook = model.lm_head.register_forward_pre_hook(lambda *args: None) if case == "hooked" else None
    prompt = "def read(self):\n    return self.value\n\n" * 3
    steps = list(
        generate(
            model,
            tokenizer_of(DEMO),
            prompt,
            draft="ngram",
            max_new_tokens=40,
            ignore_end=True,
            **options,
        )
    )
    if hook is not None:
        hook.remove()
    assert sum(step.drafted for step in steps) > 5


def test_acceptance_counts_proposals_that_were_not_verified() -> None:
    acceptance = Acceptance()
    assert acceptance.estimate_tokens(0) == 1
    text = [1, 2, 3]
    acceptance.record_proposal(text, [4, 5])
    first = acceptance.estimate_tokens(2)
    acceptance.record_proposal([*text, 4], [5, 6])  # all true so far: nothing is known
    assert acceptance.estimate_tokens(2) == first
    acceptance.record_proposal([*text, 4, 5], [6])
    assert acceptance.estimate_tokens(2) > first
    for length in range(5, 30):
        acceptance.record_proposal(list(range(length)), [0])
    assert 1 < acceptance.estimate_tokens(2) < 1.05


def make_proposals(count: int, *, accepted: bool) -> list[Proposal]:
    share = (100.0, 0.1) if accepted else (0.1, 100.0)
    return [Proposal(8, Acceptance(AcceptanceRate(*share))) for _ in range(count)]


def make_sizer(seconds_by_rows: dict[int, float], num_sequences: int = 1) -> DraftSizer:
    sizer = DraftSizer(8)
    for num_new, seconds in seconds_by_rows.items():
        for _ in range(3):
            sizer.record_forward(num_sequences, num_new, seconds)
    return sizer


def test_as_many_drafts_are_verified_as_pay() -> None:
    sure, wrong = make_proposals(1, accepted=True), make_proposals(1, accepted=False)
    assert DraftSizer(8).choose_num_drafts(sure, 8) == 0, "no time is known yet"
    sizer = make_sizer({1: 1.0})
    assert sizer.choose_num_drafts(sure, 8) == 8
    assert sizer.choose_num_drafts(sure, 3) == 2
    assert sizer.choose_num_drafts(wrong, 8) == 0
    assert sizer.choose_num_drafts([Proposal(0, Acceptance())], 8) == 0
    memory_bound = make_sizer({1: 1.0, 2: 1.0, 3: 1.0, 5: 1.1, 9: 3.0})
    assert memory_bound.choose_num_drafts(sure, 8) == 4
    compute_bound = make_sizer({1: 1.0, 2: 2.0, 3: 3.0, 5: 5.0, 9: 9.0})
    assert compute_bound.choose_num_drafts(sure, 8) == 0


def test_a_size_is_tried_if_the_rows_of_others_promise_a_gain() -> None:
    sizer = make_sizer({1: 1.0})
    for _ in range(3):
        sizer.record_forward(16, 1, 1.2)  # rows are cheap
    assert sizer.choose_num_drafts(make_proposals(8, accepted=True), 8) == 8
    for _ in range(5):
        sizer.record_forward(16, 1, 16.0)  # rows cost as much as forwards
    assert sizer.choose_num_drafts(make_proposals(8, accepted=True), 8) == 0


def test_decodes_without_drafts_are_measured_again() -> None:
    """They may have become faster: for shorter contexts, or with other requests gone."""
    sizer, sure = make_sizer({1: 1.0, 9: 1.0}), make_proposals(1, accepted=True)
    for _ in range(600):
        assert sizer.choose_num_drafts(sure, 8) in (0, 8)
        sizer.record_forward(1, 9, 1.0)
    assert sizer.choose_num_drafts(sure, 8) == 0
    sizer.record_forward(1, 1, 0.1)
    assert sizer.choose_num_drafts(sure, 8) == 0, "a draft now takes longer than it gains"


def test_rejections_on_recurrent_layers_cost_a_forward() -> None:
    sizer, unsure = (
        make_sizer({1: 1.0, 2: 1.2, 3: 1.3, 5: 1.4, 9: 1.5}),
        [Proposal(8, Acceptance(AcceptanceRate(1.0, 1.0)))],
    )
    assert sizer.choose_num_drafts(unsure, 8) > 0
    assert sizer.choose_num_drafts(unsure, 8, recomputes=True) == 0


def test_drafts_that_were_slow_are_tried_again() -> None:
    sizer, sure = (
        make_sizer({1: 1.0, 2: 9.0, 3: 9.0, 5: 9.0, 9: 9.0}),
        make_proposals(1, accepted=True),
    )
    assert sizer.choose_num_drafts(sure, 8) == 0
    for _ in range(600):
        sizer.record_forward(1, 1, 1.0)
    assert sizer.choose_num_drafts(sure, 8) == 8


def test_drafts_that_take_long_to_make_are_fewer() -> None:
    sizer, sure = make_sizer({1: 1.0}), make_proposals(1, accepted=True)
    counts = [
        sizer.choose_num_drafts(sure, 8, draft_seconds=seconds) for seconds in (0.0, 0.3, 1.0)
    ]
    assert counts == [8, 8, 0]
    unsure = [Proposal(8, Acceptance(AcceptanceRate(2.0, 1.0)))]
    counts = [
        sizer.choose_num_drafts(unsure, 8, draft_seconds=seconds) for seconds in (0.0, 0.2, 0.9)
    ]
    assert counts[0] > counts[1] > counts[2] == 0


def test_a_draft_that_could_not_be_made_counts_as_rejected() -> None:
    acceptance, rates = Acceptance(), list[float]()
    for _ in range(10):
        acceptance.record_rejection()
        rates.append(acceptance.rate.value)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.1


def test_a_new_sequence_starts_at_the_rate_of_all_others() -> None:
    usual_rate = AcceptanceRate(decay=0.95)
    assert Acceptance.start_from(usual_rate).estimate_tokens(8) > 2
    for _ in range(20):  # sequences that do not repeat
        Acceptance.start_from(usual_rate).record_rejection()
    first = Acceptance.start_from(usual_rate)
    assert 1 < first.estimate_tokens(8) < 1.25
    first.record_proposal([1], [2, 3, 4])
    first.record_proposal([1, 2, 3, 4], [])
    assert first.estimate_tokens(8) > 2, "its own proposals soon count more"
    assert first.estimate_tokens(8) > Acceptance.start_from(usual_rate).estimate_tokens(8)


def test_a_copy_of_a_sequence_has_an_acceptance_of_its_own() -> None:
    acceptance = Acceptance()
    acceptance.fork().record_rejection()
    assert acceptance.rate == AcceptanceRate()


def test_a_new_size_waits_until_it_would_have_saved_its_capture() -> None:
    sizer, sure = make_sizer({1: 1.0}), make_proposals(1, accepted=True)
    sizer.record_capture(2, 9, 25.0)
    counts = [sizer.choose_num_drafts(sure, 8) for _ in range(10)]
    assert counts == [0] * 3 + [8] * 7, "9 tokens take 8.6 s, or 1.8 s with drafts"
    sizer.record_capture(1, 9, 200.0)
    assert sizer.choose_num_drafts(sure, 8) == 8, "its capture has begun"
    for _ in range(3):
        sizer.record_forward(1, 9, 5.0)
    sizer.record_capture(1, 9, 1e6)  # accepted drafts of a recurrent model are computed again
    assert sizer.choose_num_drafts(sure, 8) == 8
    assert sizer.choose_num_drafts(sure, 4) == 0
    sizer.forget_captures()
    assert sizer.choose_num_drafts(sure, 8) == 0, "it must be captured again"

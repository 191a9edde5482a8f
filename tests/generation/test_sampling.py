"""Test sampling from logits: filtered tokens, drawn tokens and their reported probabilities."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kvant.generation import Sampling
from kvant.generation import sampling as drawing
from kvant.generation.sampling import Sampler, sample_batch

SHARES = [0.1, 0.5, 0.05, 0.2, 0.15]  # not in order; the likeliest is token 1


def make_logits(shares: list[float]) -> Tensor:
    """Return logits that are not normalized, like those of a model."""
    return torch.tensor(shares).log() + 3.0


def compute_logprobs(sampler: Sampler, logits: Tensor, previous_tokens: list[int]) -> Tensor:
    """Return the log-probabilities of all tokens."""
    [sampled] = sample_batch(logits[None], [sampler], [previous_tokens], [len(logits)])
    logprobs = torch.full_like(logits, -torch.inf)
    for token, logprob in sampled.top_logprobs:
        logprobs[token] = logprob
    return logprobs


def filtered_distribution(
    shares: list[float], before: list[int] | None = None, **options: Any
) -> Tensor:
    sampler = Sampler(Sampling(**{"temperature": 1.0} | options))
    return compute_logprobs(sampler, make_logits(shares), before or []).exp()


def list_drawable_tokens(shares: list[float], **options: Any) -> set[int]:
    """Return the tokens that may be drawn; the remaining mass must be spread in proportion."""
    left = filtered_distribution(shares, **options)
    tokens = set(left.nonzero().flatten().tolist())
    mass = sum(shares[token] for token in tokens)
    for token in tokens:
        assert float(left[token]) == pytest.approx(shares[token] / mass, rel=1e-5)
    return tokens


def draw_tokens(count: int, shares: list[float], **options: Any) -> list[int]:
    sampler = Sampler(Sampling(**{"temperature": 1.0} | options))
    return [sampler.sample(make_logits(shares), [1] * place).token for place in range(count)]


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 3}, {"top_p": 0.0}, {"min_p": 1.0}, {"seed": 5}], ids=str
)
def test_temperature_0_picks_the_likeliest_token(options: dict[str, Any]) -> None:
    assert draw_tokens(5, SHARES, temperature=0.0, **options) == [1] * 5


def test_temperature_0_reports_the_plain_probability() -> None:
    logprob = Sampler(Sampling()).sample(make_logits(SHARES), []).logprob
    assert logprob == pytest.approx(math.log(0.5), abs=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_is_a_power_of_the_probabilities(temperature: float) -> None:
    powers = torch.tensor(SHARES) ** (1 / temperature)
    expected = powers / powers.sum()
    torch.testing.assert_close(
        filtered_distribution(SHARES, temperature=temperature), expected, rtol=1e-5, atol=0
    )


def test_tiny_temperature_draws_the_likeliest_token() -> None:
    assert draw_tokens(20, SHARES, temperature=1e-6, seed=0) == [1] * 20


def test_the_same_seed_draws_the_same_tokens() -> None:
    assert draw_tokens(50, SHARES, seed=7) == draw_tokens(50, SHARES, seed=7)
    assert draw_tokens(50, SHARES, seed=7) != draw_tokens(50, SHARES, seed=8)


def test_missing_seed_draws_different_tokens() -> None:
    assert draw_tokens(80, SHARES) != draw_tokens(80, SHARES)


def test_sampling_leaves_the_global_rng_unchanged() -> None:
    """Without a seed one is drawn from torch's generator, so that `torch.manual_seed` applies."""
    before = torch.get_rng_state()
    draw_tokens(5, SHARES, seed=1)
    draw_tokens(5, SHARES, temperature=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    draw_tokens(5, SHARES)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.0}, {1}),
        ({"top_p": 0.3}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 0.8}, {1, 3, 4}),
        ({"top_p": 0.96}, {0, 1, 2, 3, 4}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.0}, {0, 1, 2, 3, 4}),
        ({"min_p": 0.15}, {0, 1, 3, 4}),
        ({"min_p": 0.35}, {1, 3}),
        ({"min_p": 1.0}, {1}),
        # Each filter applies after the previous one: of tokens 1, 3 and 4 the first has 0.5 / 0.85
        # = 0.59.
        ({"top_k": 3, "top_p": 0.55}, {1}),
        ({"top_k": 3, "top_p": 0.8}, {1, 3}),
        ({"top_p": 0.8, "min_p": 0.35}, {1, 3}),
    ],
    ids=str,
)
def test_filters_remove_tokens(options: dict[str, Any], tokens: set[int]) -> None:
    assert list_drawable_tokens(SHARES, **options) == tokens
    assert set(draw_tokens(60, SHARES, seed=0, **options)) <= tokens


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"top_k": 1000},
    ],
    ids=str,
)
def test_filters_that_keep_all_keep_the_least_likely_token(options: dict[str, Any]) -> None:
    """Sums of a thousand small numbers are rounded, which must not remove the last one."""
    logits = torch.linspace(0, -60, 1000)
    left = compute_logprobs(Sampler(Sampling(temperature=1.0, **options)), logits, [])
    assert left.isfinite().all()


def test_top_k_of_equals_keeps_exactly_k() -> None:
    assert len(list_drawable_tokens([0.25] * 4, top_k=2)) == 2


def test_min_p_of_equals_keeps_all() -> None:
    assert list_drawable_tokens([0.25] * 4, min_p=1.0) == {0, 1, 2, 3}


def test_temperature_applies_before_filters() -> None:
    """At 0.5 the probabilities 0.6 and 0.4 become 0.69 and 0.31, so the first alone has the
    mass.
    """
    assert filtered_distribution([0.6, 0.4], top_p=0.65, temperature=0.5).tolist() == [1.0, 0.0]
    assert filtered_distribution([0.6, 0.4], top_p=0.65, temperature=1.0)[1] > 0


def test_repeated_tokens_are_less_likely() -> None:
    sampling = Sampling(temperature=1.0, repetition_penalty=2.0)
    logits = torch.tensor([2.0, -1.0, 1.0, 0.0])
    left = compute_logprobs(Sampler(sampling), logits, [0, 1, 0])
    expected = torch.tensor([1.0, -2.0, 1.0, 0.0]).log_softmax(-1)
    torch.testing.assert_close(left, expected)
    assert logits.tolist() == [2.0, -1.0, 1.0, 0.0], "the caller's logits are changed"


def test_penalty_changes_the_choice_at_temperature_0() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0))
    logits = torch.tensor([2.0, 1.5])
    assert sampler.sample(logits, [])[0] == 0
    assert sampler.sample(logits, [0])[0] == 1


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0, "repetition_penalty": 3.0},
        {"temperature": 0.7},
        {"top_k": 2},
        {"top_p": 0.6},
        {"min_p": 0.3},
        {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3},
    ],
    ids=str,
)
def test_logprob_is_that_of_the_sampled_distribution(options: dict[str, Any]) -> None:
    sampler = Sampler(Sampling(**{"temperature": 1.0, "seed": 3} | options))
    logits, before = make_logits(SHARES), [1, 4]
    expected = compute_logprobs(sampler, logits, before)
    assert float(expected.exp().sum()) == pytest.approx(1.0)
    for place in range(20):
        token, logprob, _ = sampler.sample(logits, before * (place + 1))
        assert logprob == pytest.approx(float(expected[token]), abs=1e-6)


def test_tokens_are_drawn_at_their_probability() -> None:
    """Chi-square with 3 degrees of freedom exceeds 16.3 once in a thousand runs."""
    shares, count = [0.1, 0.2, 0.3, 0.4], 4000
    tokens = torch.tensor(draw_tokens(count, shares, seed=11))
    expected = torch.tensor(shares) * count
    counts = tokens.bincount(minlength=4)
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_logits_may_have_any_dtype(dtype: torch.dtype) -> None:
    assert Sampler(Sampling()).sample(make_logits(SHARES).to(dtype), [2])[0] == 1


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -0.1, "0 or more"),
        ("temperature", float("nan"), "0 or more"),
        ("top_p", -0.1, "0 to 1"),
        ("top_p", 1.1, "0 to 1"),
        ("top_p", float("nan"), "0 to 1"),
        ("min_p", -0.1, "0 to 1"),
        ("min_p", 1.1, "0 to 1"),
        ("top_k", 0, "1 or more"),
        ("top_k", -3, "1 or more"),
        ("repetition_penalty", 0.0, "0.01 to 100"),
        ("repetition_penalty", -1.0, "0.01 to 100"),
        ("repetition_penalty", float("nan"), "0.01 to 100"),
    ],
)
def test_invalid_value_is_named_with_its_range(name: str, value: float, allowed: str) -> None:
    with pytest.raises(ValueError) as error:
        Sampling(**{name: value})  # type: ignore[arg-type]
    assert f"{name}={value}" in str(error.value)
    assert allowed in str(error.value)


@pytest.mark.parametrize("temperature", [1e-310, 1e300])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    left = filtered_distribution(SHARES, temperature=temperature)
    expected = [1.0, 0, 0, 0, 0] if temperature < 1 else [0.2] * 5
    torch.testing.assert_close(left.sort(descending=True).values, torch.tensor(expected))
    with pytest.raises(ValueError, match="temperature=inf"):
        Sampling(temperature=float("inf"))


def test_penalties_and_biases_follow_their_formulas() -> None:
    """Presence and frequency count tokens after the prompt; a bias is added to a logit."""
    logits, text = torch.randn(3, 12), [[1, 2, 2, 5, 7, 7, 7], [3, 9], [4]]
    sampling = Sampling(
        0.7, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((2, 3.0), (7, -1.5)), seed=0
    )
    samplers = [Sampler(sampling, begin) for begin in (2, 1, 1)]
    expected = logits.clone()
    for row, tokens, sampler in zip(expected, text, samplers, strict=True):
        output_tokens = tokens[sampler.prompt_length :]
        for token in set(output_tokens):
            row[token] -= 0.5 + 0.25 * output_tokens.count(token)
        row[2] += 3.0
        row[7] -= 1.5
    likely = [12] * 3
    actual = drawing.sample_batch(logits, samplers, text, likely)
    plain = drawing.sample_batch(expected, [Sampler(Sampling(0.7, seed=0))] * 3, text, likely)
    for first, second in zip(actual, plain, strict=True):
        assert first.token == second.token
        assert dict(first.top_logprobs) == pytest.approx(dict(second.top_logprobs), abs=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"presence_penalty": float("nan")},
        {"frequency_penalty": float("inf")},
        {"logit_bias": ((3, float("-inf")),)},
    ],
)
def test_penalty_must_be_a_number(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="a number is needed"):
        Sampling(**wrong)

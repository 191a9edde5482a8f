"""Test that tuned formats are within their limit, and better than uniform formats of its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvant
from hf.zoo import build
from kvant import SpecError, demo
from kvant.models import layer_shapes
from kvant.models.shapes import LINEAR, LayerShape
from kvant.planner import plan
from kvant.probing import make_trial, measure_divergence, recommendation, resolve_auto, tuning
from kvant.probing.trials import FORMAT_LADDER
from kvant.probing.tuning import (
    BitsLimit,
    BytesLimit,
    FormatPair,
    MeasuredSpec,
    TunedSpec,
    choose_formats,
    find_best_spec,
)

MAX_BITS = 3.25


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.PATH)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tuned(model: Any, tokenizer: Any) -> TunedSpec:
    return kvant.tune(model, tokenizer, max_bits=MAX_BITS)


def test_tuned_spec_is_within_its_limit(model: Any, tuned: TunedSpec) -> None:
    planned = plan(model, tuned.spec)
    assert planned.bits_per_value == tuned.bits_per_value <= MAX_BITS
    assert tuned.bits_per_value > MAX_BITS - 0.25  # the limit is used


def test_tuned_spec_is_better_than_every_uniform_format_within_the_limit(
    model: Any, tokenizer: Any, tuned: TunedSpec
) -> None:
    pieces = [make_trial(model, tokenizer).ids]
    divergence = measure_divergence(model, pieces, tuned.spec)
    assert divergence.mean_kl == tuned.mean_kl
    uniform = [word for word in FORMAT_LADDER if plan(model, word).bits_per_value <= MAX_BITS]
    assert uniform == ["turbo2", "turbo3v2", "turbo3", "turbo4v2"]
    for word in uniform[1:]:
        assert 2 * tuned.mean_kl < measure_divergence(model, pieces, word).mean_kl, word
    assert "the best uniform format" in tuned.why
    text = str(tuned)
    assert text.startswith(f"{tuned.spec}: ") and "uniform: turbo3" in text and "by layer" in text


def test_misleading_harms_give_the_best_uniform_format(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [("affine6", "affine6"), *[("turbo2", "turbo2")] * 5]
    monkeypatch.setattr(
        tuning,
        "measure_harms",
        lambda recipes, words, measure_kl: [
            {pair: float(pair != best) for pair in product(words, words)} for best in wanted
        ],
    )
    result = kvant.tune(model, tokenizer, max_bits=MAX_BITS)
    assert result.trials[-1].spec.startswith("turbo2,layers=0:affine6")
    assert "layers=" not in result.spec and "no mixture is better" in result.why
    assert result.mean_kl == min(trial.mean_kl for trial in result.trials)
    assert [trial.is_mixture for trial in result.trials] == [*[False] * 4, True]


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_bits": 2}, "limit of 2 bits: the smallest .*, turbo2, takes 2.25 bits; allowed: "),
        ({"max_bytes": "1KiB", "context": 512}, r"limit of 1 KiB at 512 tokens: .* [0-9]+ bytes; "),
        ({}, "max_bits=None and max_bytes=None: one of the two is needed"),
        ({"max_bits": 4, "max_bytes": 1}, "max_bits=4 and max_bytes=1: one of the two"),
        ({"max_bits": float("nan")}, "max_bits=nan: a number above 0 is needed"),
        ({"max_bits": float("inf")}, "max_bits=inf: a number above 0 is needed"),
        ({"max_bytes": 1, "context": 0}, "context=0: 1 or more is needed"),
        ({"max_bits": 4, "context": 64}, "context=64: .* together with max_bytes="),
    ],
)
def test_impossible_limit_is_refused(
    limit: dict[str, Any], message: str, model: Any, tokenizer: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        kvant.tune(model, tokenizer, **limit)


def test_model_without_attention_stays_raw() -> None:
    layers = (LayerShape(kind=LINEAR),)
    limit = BitsLimit(3.25)
    assert tuning.measure_totals(layers, limit)["raw"] <= limit.compute_total(layers)


def test_named_smallest_limits_are_accepted(model: Any) -> None:
    layers = (*kvant.Shape(2, 3, 80, 48).layers, *layer_shapes(model))
    for limit in (BitsLimit(1), BytesLimit(1, 999)):
        with pytest.raises(SpecError, match="takes ") as caught:
            tuning.list_candidates(layers, limit, tuning.measure_totals(layers, limit))
        number = str(caught.value).split("takes ")[1].split()[0]
        raised = BitsLimit(float(number)) if limit == BitsLimit(1) else BytesLimit(int(number), 999)
        uniform, _ = tuning.list_candidates(layers, raised, tuning.measure_totals(layers, raised))
        assert uniform == ["turbo2"]


def test_formats_far_from_the_limit_are_not_tried() -> None:
    layers = kvant.Shape(2, 4, 64, 64, torch.float32).layers

    def list_formats(max_bits: float) -> tuple[list[str], list[str]]:
        limit = BitsLimit(max_bits)
        return tuning.list_candidates(layers, limit, tuning.measure_totals(layers, limit))

    assert list_formats(3.5) == (
        ["turbo2", "turbo3v2", "turbo3", "turbo4v2"],
        ["turbo2", "turbo3", "turbo4", "affine6"],
    )
    assert list_formats(8.5)[1] == ["turbo4", "affine6", "affine8"]
    assert list_formats(20.0) == (["affine8"], ["affine8", "raw"])  # the largest that fits


def test_raw_is_tuned_where_it_fits(model: Any, tokenizer: Any) -> None:
    for limit in ({"max_bits": 32}, {"max_bytes": "1GiB", "context": 2048}):
        assert kvant.tune(model, tokenizer, **limit).spec == "raw"


def test_limit_of_bytes_counts_dense_rows_and_states() -> None:
    layer = LayerShape(num_heads=2, key_dim=64, value_dim=64)
    state = LayerShape(kind="linear_attention", state_nbytes=1000)
    limit, bits = BytesLimit(10**6, 1000), BitsLimit(4.0)
    planned = plan((layer, state, layer), "turbo3", context=1000)
    assert sum(limit.measure((layer, state, layer), "turbo3")) == planned.nbytes - 1000
    assert limit.compute_total((layer, state, layer)) == 10**6 - 1000
    assert bits.measure((layer, state, layer), "turbo3") == (64 * 2 * 128 * 3.25 / 8,) * 2
    assert bits.compute_total((layer, state, layer)) == 2 * 64 * 2 * 128 * 4 / 8


WORDS = ("turbo2", "turbo4", "raw")
PAIRS = [(keys, values) for keys in WORDS for values in WORDS]


def choose_pairs(harms: Any, sizes: Any, limit: int) -> list[FormatPair]:
    words = [word.split("/") for word in choose_formats(harms, sizes, limit)]
    return [(keys, values) for keys, values in words]


HARM = st.sampled_from([0.0, 1.0, 2.0, 5.0, float("inf")])


@given(
    st.lists(st.lists(HARM, min_size=9, max_size=9), min_size=1, max_size=3),
    st.lists(st.integers(1, 9), min_size=27, max_size=27),
    st.integers(0, 40),
)
def test_chosen_formats_have_the_least_harm_within_the_limit(
    rows: list[list[float]], nbytes: list[int], spare: int
) -> None:
    harms = [dict(zip(PAIRS, row, strict=True)) for row in rows]
    num_layers = len(harms)
    sizes = {pair: tuple(nbytes[3 * i : 3 * i + num_layers]) for i, pair in enumerate(PAIRS)}

    def measure(choice: Sequence[FormatPair]) -> tuple[int, float]:
        """Return the bytes and the harm of a pair for each layer."""
        size = sum(sizes[pair][layer] for layer, pair in enumerate(choice))
        return size, sum(min(harms[layer][pair], 1e6) for layer, pair in enumerate(choice))

    limit = spare + sum(min(sizes[pair][layer] for pair in PAIRS) for layer in range(num_layers))
    size, harm = measure(choose_pairs(harms, sizes, limit))
    every = map(measure, product(PAIRS, repeat=num_layers))
    assert size <= limit and harm == min(harm for size, harm in every if size <= limit)


def test_large_sizes_are_rounded_up_to_steps() -> None:
    sizes = {pair: (10**9 + 70001 * i, 10**9 + 110003 * i) for i, pair in enumerate(PAIRS)}
    harms = [dict(zip(PAIRS, range(9, 0, -1), strict=True))] * 2
    limit = 2 * 10**9 + 800_000
    chosen = choose_pairs(harms, sizes, limit)
    step = -(-800_000 // tuning.MAX_STEPS)

    def measure(choice: Sequence[FormatPair]) -> tuple[int, float]:
        size = sum(sizes[pair][layer] for layer, pair in enumerate(choice))
        return size, sum(harms[layer][pair] for layer, pair in enumerate(choice))

    size, harm = measure(chosen)
    every = [measure(choice) for choice in product(PAIRS, repeat=2)]
    assert size <= limit
    assert harm <= min(harm for size, harm in every if size <= limit - 2 * step)


def test_limit_of_bits_is_tuned_once(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, verdicts: Path
) -> None:
    limits = []
    chosen = MeasuredSpec("turbo2,layers=0:turbo4", 0.1, 0.9, is_mixture=True)

    def find_nothing(model: Any, trial: Any, limit: BitsLimit, progress: Any) -> TunedSpec:
        limits.append(limit)
        return TunedSpec(chosen.spec, 2.5, (chosen,), "no measurement")

    monkeypatch.setattr(recommendation, "find_best_spec", find_nothing)
    trial = make_trial(model, tokenizer)
    specs = [resolve_auto(model, f"auto:{bits}bits", trial) for bits in (2.5, 2.5, 3)]
    assert specs == [chosen.spec] * 3 and limits == [BitsLimit(2.5), BitsLimit(3)]
    for file in verdicts.iterdir():
        file.write_text(file.read_text().replace("turbo2,", "turbo9,"))
    assert resolve_auto(model, "auto:3bits", trial) == chosen.spec and len(limits) == 3


def test_harmful_result_in_given_bits_warns(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worst = MeasuredSpec("affine2,tail=0", 0.1, 0.9, is_mixture=False)
    result = TunedSpec(worst.spec, 4.0, (worst,), "no measurement")
    monkeypatch.setattr(recommendation, "find_best_spec", lambda *arguments: result)
    with pytest.warns(UserWarning, match="affine2,tail=0 changes predictions"):
        kvant.attach(model, "auto:4bits", tokenizer=tokenizer)
    kvant.detach(model)


def test_values_inside_keys_have_no_format_of_their_own() -> None:
    model = build("deepseek_v3")
    with kvant.attach(model, "raw"):
        result = find_best_spec(model, make_trial(model), BitsLimit(4.5))
    assert plan(model, result.spec).bits_per_value == result.bits_per_value <= 4.5
    assert "/" not in result.spec

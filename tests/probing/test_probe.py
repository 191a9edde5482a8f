"""Test that a harmful format is detected before it is used, and that the recommendation is
right.
"""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvant
from hf.outliers import scale_key_channels
from hf.zoo import build
from kvant import SpecError, demo
from kvant.hf import get_attachments
from kvant.probing import explain_harm, make_trial, resolve_auto
from kvant.probing.recommendation import find_smallest_spec, list_promotions
from kvant.probing.trials import CANDIDATE_SPECS, RANDOM_TOKENS_KL_SCALE
from kvant.spec.language import MAX_KL, MAX_LOST, Tolerance, parse_auto_tolerance


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(demo.PATH)


@pytest.fixture(scope="module")
def plain_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def outlier_model(plain_model: Any) -> Any:
    """Return a model with the same function and key channels a hundred times as large."""
    return scale_key_channels(plain_model, 100.0, channels=(3, 11))


@pytest.fixture(scope="module")
def affine4_probe(plain_model: Any, tokenizer: Any) -> kvant.Probe:
    return kvant.probe(plain_model, tokenizer, "affine4")


def test_harmless_format_is_left_unchanged(affine4_probe: kvant.Probe) -> None:
    result = affine4_probe
    assert result.harmless and result.recommended == "affine4"
    assert 0 < result.divergence.mean_kl < MAX_KL
    assert len(result.layers) == 6 and all(0 < layer_kl < MAX_KL for layer_kl in result.layers)
    first, *others = str(result).splitlines()
    assert re.fullmatch(
        r"affine4: harmless; top-1 \S+%, mean KL \S+ \(limit 0.005\), p99.9 \S+", first
    )
    assert any(re.fullmatch(r"layer \d alone: mean KL \S+, .+", line) for line in others)


@pytest.mark.parametrize(
    "options", ["capacity=300", pytest.param("window=64,sinks=4", marks=pytest.mark.laws)]
)
def test_window_and_capacity_are_no_harm_of_the_format(
    options: str, plain_model: Any, tokenizer: Any, affine4_probe: kvant.Probe
) -> None:
    result = kvant.probe(plain_model, tokenizer, f"affine4,{options}")
    assert result.harmless
    if "sinks" not in options:
        assert result.divergence.mean_kl == affine4_probe.divergence.mean_kl
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvant.attach(plain_model, f"affine4,{options}", tokenizer=tokenizer)
    kvant.detach(plain_model)


def test_raw_probes_nothing(plain_model: Any, tokenizer: Any) -> None:
    result = kvant.probe(plain_model, tokenizer, "raw")
    assert result.harmless and result.divergence.mean_kl == 0.0 and result.layers == (0.0,) * 6


@pytest.mark.parametrize("spec", ["affine4", pytest.param("turbo4v4", marks=pytest.mark.laws)])
def test_outliers_are_detected_and_scales_recommended(
    spec: str, outlier_model: Any, tokenizer: Any
) -> None:
    result = kvant.probe(outlier_model, tokenizer, spec)
    assert not result.harmless and result.divergence.mean_kl > 1
    assert max(result.layers) > 0.01
    assert result.recommended == f"{spec},smooth" and "outliers" in result.why
    assert kvant.probe(outlier_model, tokenizer, result.recommended).harmless


def test_single_harmed_layer_is_named(plain_model: Any, tokenizer: Any) -> None:
    clone = copy.deepcopy(plain_model)
    block = clone.model.layers[4].self_attn
    block.k_norm.weight.data[[3, 35]] *= 300
    block.q_norm.weight.data[[3, 35]] /= 300
    result = kvant.probe(clone, tokenizer, "affine4")
    assert result.layers.index(max(result.layers)) == 4
    assert "layer 4 alone" in str(result)


def test_custom_recipes_are_probed_too(outlier_model: Any, tokenizer: Any) -> None:
    result = kvant.probe(outlier_model, tokenizer, kvant.parse("affine4", 6))
    assert not result.harmless and result.recommended == "raw"


@pytest.mark.laws
@pytest.mark.parametrize(("name", "max_share"), [("plain_model", 0.35), ("outlier_model", 0.6)])
def test_auto_picks_the_smallest_harmless_format(
    name: str, max_share: float, tokenizer: Any, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    shape = kvant.Shape(1, 8, 128, 128)
    raw = kvant.plan(shape, "raw").nbytes_per_token
    chosen = resolve_auto(model, "auto", make_trial(model, tokenizer))
    assert isinstance(chosen, str) and chosen in CANDIDATE_SPECS
    assert kvant.plan(shape, chosen).nbytes_per_token <= max_share * raw
    result = kvant.probe(model, tokenizer, chosen)
    assert result.harmless and abs(result.divergence.perplexity_change) < 0.01
    assert result.recalled > 0.4 and result.lost < 0.1 * result.recalled


def test_format_that_breaks_recall_is_harmful(plain_model: Any, tokenizer: Any) -> None:
    """Regression: `auto` chose turbo4v2: 0.0023 nats on average, and every fourth needle and
    copy lost.
    """
    result = kvant.probe(plain_model, tokenizer, "turbo4v2")
    assert result.divergence.mean_kl < MAX_KL and result.lost > 3 * MAX_LOST
    assert not result.harmless and str(result).startswith("turbo4v2: recalls less; top-1 9")
    assert re.search(r"^recall lost \d+\.\d% \(limit 4\.0%\): ", str(result), re.M)
    assert result.example is not None and "raw continues" in str(result)
    better = kvant.probe(plain_model, tokenizer, result.recommended)
    assert better.harmless and better.lost < MAX_LOST


@pytest.mark.laws
def test_auto_tolerance_is_an_argument(plain_model: Any, tokenizer: Any) -> None:
    tried = make_trial(plain_model, tokenizer)
    lax, usual = (resolve_auto(plain_model, spec, tried) for spec in ("auto,max_lost=1", "auto"))
    strict = resolve_auto(plain_model, "auto,max_kl=1e-3,max_lost=0.005", tried)
    row = [
        kvant.plan(plain_model, str(spec), context=1).nbytes_per_token
        for spec in (lax, usual, strict)
    ]
    assert row[0] < row[1] < row[2]


def test_auto_tolerance_may_be_in_the_spec() -> None:
    assert parse_auto_tolerance("auto", Tolerance(0.5, 0.25)) == Tolerance(0.5, 0.25)
    tolerance = parse_auto_tolerance("auto,max_kl=1e-3,max_lost=0.005", Tolerance())
    assert tolerance == Tolerance(max_kl=1e-3, max_lost=0.005)


def test_probe_tolerance_is_an_argument(plain_model: Any, tokenizer: Any) -> None:
    result = kvant.probe(plain_model, tokenizer, "turbo4v2", max_lost=1.0)
    assert result.harmless and result.recommended == "turbo4v2"
    result = kvant.probe(plain_model, tokenizer, "affine4", max_kl=1e-9)
    assert not result.harmless and result.recommended == "raw"


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("auto,window=64", "auto takes max_kl=NATS and max_lost=SHARE"),
        ("auto,max_kl=1,max_kl=2", "each once"),
        ("auto:1GiB,max_lost=few", "max_lost needs a number"),
        ("auto,max_lost=-1", "max_lost=-1.0: 0 or more"),
    ],
)
def test_contradictory_auto_options_are_refused(
    spec: str, error: str, plain_model: Any, tokenizer: Any
) -> None:
    with pytest.raises(ValueError, match=error):
        resolve_auto(plain_model, spec, make_trial(plain_model, tokenizer))


def test_progress_callback_sees_formats_being_tried(plain_model: Any, tokenizer: Any) -> None:
    calls: list[tuple[int, int]] = []
    tried = make_trial(plain_model, tokenizer)
    chosen = resolve_auto(plain_model, "auto,max_lost=1", tried, lambda *step: calls.append(step))
    assert calls == [
        (n, len(CANDIDATE_SPECS)) for n in range(CANDIDATE_SPECS.index(str(chosen)) + 1)
    ]


def test_auto_without_text_reports_the_skipped_recall_test(plain_model: Any) -> None:
    with pytest.warns(UserWarning, match="by predictions alone.*give tokenizer="):
        kvant.attach(plain_model, "auto")
    kvant.detach(plain_model)


def test_auto_respects_a_size_limit() -> None:
    layers = kvant.Shape(2, 4, 64, 64).layers
    tried = []

    def judge(spec: str) -> bool:
        tried.append(spec)
        return "affine" in spec

    assert find_smallest_spec(judge, layers, 4096, None) == "affine4"
    assert tried[0] == "turbo2" and "affine8" not in tried
    nbytes = kvant.plan(layers, "turbo4v2", context=4096).nbytes
    with pytest.raises(SpecError, match=rf"auto:{nbytes}: no harmless format .* allow more bytes"):
        find_smallest_spec(judge, layers, 4096, str(nbytes))
    assert find_smallest_spec(lambda spec: False, layers, 4096, None) == "raw"


def test_promoted_formats_keep_the_requested_options() -> None:
    specs = [spec for spec, _ in list_promotions("turbo4v2,window=64,sinks=4")]
    assert specs[0] == "turbo4v2,window=64,sinks=4,smooth"
    assert specs[1] == "affine8/turbo2,window=64,sinks=4"
    assert specs[-1] == "raw,window=64,sinks=4"
    specs = [spec for spec, _ in list_promotions("affine4,tail=0,group=64")]
    assert specs[1] == "affine4,tail=0,group=64,sinks=4,smooth"
    assert specs[2] == "affine4,group=64,tail=128,smooth"
    assert not any("tail=128" in spec for spec, _ in list_promotions("affine4,tail=256"))
    for word in (
        "turbo4v2",
        "affine4,tail=0",
        "affine2,tail=0,capacity=3",
        "affine4,rotate",
        "raw/affine2",
        "fp8",
        "bf16",
    ):
        for spec, reason in list_promotions(word):
            kvant.parse(spec, 8)
            assert reason


def test_attaching_warns_once(outlier_model: Any, plain_model: Any, tokenizer: Any) -> None:
    for options in ({"tokenizer": tokenizer}, {}):
        with pytest.warns(UserWarning, match="affine4 changes predictions of Qwen3ForCausalLM"):
            kvant.attach(outlier_model, "affine4", **options)
        kvant.detach(outlier_model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kvant.attach(outlier_model, "affine4", guard=False)
        kvant.attach(outlier_model, "affine4,smooth", tokenizer=tokenizer)
        kvant.attach(outlier_model, "auto", tokenizer=tokenizer)
        kvant.detach(outlier_model)
        kvant.attach(plain_model, "affine4")
        kvant.detach(plain_model)


def test_a_warning_that_is_an_error_leaves_the_model_as_it_was(
    outlier_model: Any, tokenizer: Any
) -> None:
    before = outlier_model.config._attn_implementation
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="affine4 changes predictions"):
            kvant.attach(outlier_model, "affine4", tokenizer=tokenizer)
    assert not get_attachments(outlier_model)
    assert outlier_model.config._attn_implementation == before


def test_random_tokens_use_another_limit(plain_model: Any) -> None:
    assert make_trial(plain_model).max_kl == RANDOM_TOKENS_KL_SCALE * MAX_KL
    assert make_trial(plain_model).ids.equal(make_trial(plain_model).ids)


@pytest.mark.parametrize("name", ["gemma3", "falcon_h1", "t5", "bloom", "deepseek_v3"])
def test_guard_errors_do_not_stop_attaching(name: str) -> None:
    model = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kvant.attach(model, "affine8,group=16")
    kvant.detach(model)


def test_text_too_short_to_judge_is_refused(plain_model: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"a text of \d+ tokens is too short: give"):
        kvant.probe(plain_model, tokenizer, "affine4", text="import os")


def test_invalid_size_is_refused_and_changes_nothing(plain_model: Any, tokenizer: Any) -> None:
    for spec in ("auto:", "auto:many"):
        with pytest.raises(ValueError, match=r"auto:|size"):
            kvant.probe(plain_model, tokenizer, spec)
        with pytest.raises(ValueError, match=r"auto:|size"):
            kvant.attach(plain_model, spec, tokenizer=tokenizer)
        with pytest.raises(ValueError, match="not attached"):
            kvant.detach(plain_model)


def test_raw_gives_no_warning(plain_model: Any) -> None:
    assert explain_harm(plain_model, "raw", make_trial(plain_model)) is None

"""Adaptive: a memory under a budget goes down its steps, says so, and goes on."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import kvant
from cache.tagged import forward
from generation.speakers import DEMO, begin, model_of, prompt_of, said, tokenizer_of
from kvant import Cache, CacheSpec
from kvant.generation.strategy import (
    CODEC_LADDER,
    MIN_WINDOW,
    AdaptiveStrategy,
    limit_window,
    list_smaller_formats,
)
from kvant.retention import Window
from kvant.spec import describe_spec, parse
from thin import once

BUDGET = 1_450_000  # what the narrowest window takes, and less than a page of all layers beside


@pytest.fixture
def attached() -> Any:
    model = model_of(DEMO)
    kvant.attach(model, "raw")
    yield model
    kvant.detach(model)


def grown(spec: str, count: int, num_layers: int = 2, dim: int = 64) -> Cache:
    cache = Cache(num_layers, spec)
    forward(cache, count, dim=dim)
    return cache


def attending(spec: CacheSpec) -> list[Any]:
    return [recipe for recipe in spec.layers if isinstance(recipe, kvant.LayerSpec)]


def assert_told(memory: Any) -> None:
    """`stats` has every step: each begins with what the one before it ended with."""
    told = memory.stats()["recoded"]
    assert [step["from"] for step in told] == ["raw", *(step["to"] for step in told[:-1])]
    assert told[-1]["to"] == describe_spec(memory.spec)
    lengths = [step["length"] for step in told]
    assert lengths == sorted(set(lengths)) and lengths[0] > 0 and lengths[-1] < memory.length
    assert all(step["nbytes_after"] <= BUDGET for step in told)
    assert memory.fork().stats()["recoded"] == told


def test_it_goes_down_and_stays_under_its_budget(
    attached: Any, caplog: pytest.LogCaptureFixture
) -> None:
    memory = kvant.cache_for(attached, "raw")
    given = {"strategy": "adaptive", "budget": BUDGET, "max_new_tokens": 500}
    steps = [(step, memory.nbytes) for step in begin(DEMO, kv_cache=memory, **given)]
    assert len(steps) == 500
    assert all(nbytes <= BUDGET for _, nbytes in steps)
    assert memory.stats()["recodes"] == len(caplog.messages) >= 2
    assert "stored as affine8 from now on" in caplog.messages[0]
    assert "of 1.38 MiB: " in caplog.messages[-1] and "window=" in caplog.messages[-1]
    assert_told(memory)


@pytest.mark.parametrize("prefill_chunk", [64, 200])
def test_a_long_prompt_stays_under_it_from_the_first_chunk_on(
    attached: Any, prefill_chunk: int
) -> None:
    memory, taken = kvant.cache_for(attached, "raw,step=64"), []
    hook = attached.register_forward_hook(lambda *_: taken.append(memory.nbytes))
    text = [3 + t % 4000 for t in range(900)]
    given = {"strategy": "adaptive", "budget": BUDGET, "max_new_tokens": 5}
    try:
        list(
            kvant.generate(
                attached,
                tokenizer_of(DEMO),
                text,
                kv_cache=memory,
                prefill_chunk=prefill_chunk,
                ignore_end=True,
                **given,
            )
        )
    finally:
        hook.remove()
    assert memory.length == 904 and max(taken) <= BUDGET


def test_with_room_it_changes_nothing() -> None:
    assert said(DEMO, strategy="adaptive", budget=1 << 30) == said(DEMO)


def test_drafts_and_steps_down_go_together(attached: Any) -> None:
    memory = kvant.cache_for(attached, "affine8")
    given = {"strategy": "adaptive", "budget": 700_000, "max_new_tokens": 300, "draft": "ngram"}
    assert len(list(begin(DEMO, kv_cache=memory, **given))) == 300
    assert memory.stats()["recodes"] >= 1
    assert memory.length == len(prompt_of(DEMO)) + 299


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("raw", ["affine8", "affine4"]),
        ("affine4", []),
        ("turbo4v2", []),
        ("affine6/turbo3,window=50,sinks=0", ["affine4/turbo3,window=50,sinks=0"]),
        ("affine8,window=200,sinks=0", ["affine4,window=200,sinks=0"]),
        ("fp8,window=200,sinks=0", ["affine4,window=200,sinks=0"]),
        ("affine4,sinks=9", []),
    ],
)
def test_the_formats_of_the_steps(spec: str, expected: list[str]) -> None:
    assert [describe_spec(step) for step in list_smaller_formats(parse(spec, 2))] == expected


@pytest.mark.parametrize("budget", [280_000, 400_000, 600_000])
@pytest.mark.parametrize("spec", ["raw", "affine8", "affine4", "turbo4v2", "affine8,sinks=9"])
def test_the_widest_window_that_fits_is_taken(spec: str, budget: int) -> None:
    """Halves of what was held left up to half of the budget unused; now less than a page is."""
    cache, other = grown(spec, 5000), grown(spec, 5000)
    AdaptiveStrategy(budget).make_room(cache, 0)
    (rule,) = {layer.retention for layer in attending(cache.spec)}
    assert rule.sinks == (9 if "sinks" in spec else 4)
    forms = [*list_smaller_formats(other.spec), other.spec]
    wider = [other.nbytes_after(0, limit_window(form, rule.window + 1)) for form in forms]
    assert cache.nbytes <= budget < min(wider)


def test_of_windows_that_are_equally_wide_the_one_with_more_bits_is_taken() -> None:
    cache = grown("raw", 5000)
    in_8, in_4 = (cache.nbytes_after(0, f"affine{n},window=1007,sinks=4") for n in (8, 4))
    assert in_4 < in_8 < cache.nbytes_after(0, "affine4,window=1008,sinks=4")
    AdaptiveStrategy(in_8).make_room(cache, 0)
    assert describe_spec(cache.spec) == "affine8,window=1007,sinks=4"


@pytest.mark.parametrize(
    ("length", "budget", "prefill_chunk"),
    [
        (500, 1_000_000, 64),
        (1500, 1_700_000, 512),
        *(
            pytest.param(*sizes, marks=pytest.mark.laws)
            for sizes in (
                *((500, 1_000_000, 512), (1500, 1_700_000, 64), (1500, 1_000_000, 64)),
                *((1500, 1_000_000, 512), (900, 1_200_000, 64), (900, 1_200_000, 512)),
            )
        ),
    ],
)
def test_a_budget_that_binds_is_used(
    attached: Any, length: int, budget: int, prefill_chunk: int
) -> None:
    """A window was chosen by what was held before the first rows: 68 tokens, where 431 fit."""
    memory = kvant.cache_for(attached, "bf16")
    given: dict[str, Any] = {"strategy": "adaptive", "budget": budget, "max_new_tokens": 70}
    text = [3 + t % 4000 for t in range(length)]
    steps = kvant.generate(
        attached,
        tokenizer_of(DEMO),
        text,
        kv_cache=memory,
        prefill_chunk=prefill_chunk,
        ignore_end=True,
        **given,
    )
    taken = [memory.nbytes for _ in steps]
    assert "window=" in describe_spec(memory.spec) and memory.num_rows < length
    assert 0.85 * budget <= min(taken) <= max(taken) <= budget


def test_the_bits_of_the_steps_are_those_of_the_spec_language() -> None:
    for codec, word in zip(CODEC_LADDER, ("affine8", "affine4"), strict=True):
        assert attending(parse(word, 1))[0].keys == codec


@pytest.mark.parametrize(
    ("spec", "sinks"), [("affine8,window=200,sinks=0", 0), ("raw,window=200,sinks=2", 2)]
)
def test_a_window_keeps_its_own_sinks(spec: str, sinks: int) -> None:
    cache = grown(spec, 400)
    for budget in (cache.nbytes - 1, cache.nbytes // 2, 1):
        AdaptiveStrategy(budget).make_room(cache, 0)
    assert [layer.retention for layer in attending(cache.spec)] == [Window(64, sinks)] * 2


@pytest.mark.parametrize(("name", "budget"), [("gemma3", 176_000), ("gpt_oss", 200_000)])
def test_a_model_whose_first_layer_has_a_window(
    name: str, budget: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(name)
    kvant.attach(model, "raw")
    try:
        memory = kvant.cache_for(model, "raw")
        models = [layer.retention.window for layer in attending(memory.spec)]
        assert models[0] is not None and None in models
        given = {"strategy": "adaptive", "budget": budget, "max_new_tokens": 400}
        assert all(memory.nbytes <= budget for _ in begin(name, kv_cache=memory, **given))
    finally:
        kvant.detach(model)
    assert "as affine8 from now on" in caplog.messages[0] and "window=" in caplog.messages[-1]
    for window, layer in zip(models, attending(memory.spec), strict=True):
        assert layer.keys.bits in (4, 8)
        if window is not None:  # what a model's own layer sees stays
            assert layer.retention == Window(window)


def test_no_step_makes_it_larger(caplog: pytest.LogCaptureFixture) -> None:
    cache = grown("raw", 600, num_layers=8)
    in_8, in_4 = cache.nbytes_after(0, "affine8"), cache.nbytes_after(0, "affine4")
    assert in_8 < in_4  # for the last 128 rows, which stay dense
    AdaptiveStrategy(in_4 - 1).make_room(cache, 0)
    assert describe_spec(cache.spec) == "affine8" and cache.nbytes <= in_8
    wider = cache.nbytes_after(0, "affine8,window=304,sinks=4")
    AdaptiveStrategy(in_8 - 1).make_room(cache, 0)
    assert describe_spec(cache.spec) == "affine8,window=303,sinks=4" and wider >= in_8
    assert cache.nbytes < in_8
    assert len(caplog.messages) == cache.stats()["recodes"] == 2


def test_a_step_that_would_not_suffice_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    cache = grown("raw", 5000)
    AdaptiveStrategy(cache.nbytes_after(0, "affine4")).make_room(cache, 0)
    assert describe_spec(cache.spec) == "affine4"
    assert (
        len(caplog.messages) == 1
        and "5000 tokens are stored as affine4 from now on, in " in caplog.messages[0]
    )


def test_every_layer_above_a_step_is_lowered() -> None:
    cache = grown("affine4,edge=1:raw", 5000, num_layers=4)
    AdaptiveStrategy(cache.nbytes - 1).make_room(cache, 0)
    assert [layer.keys.bits for layer in attending(cache.spec)] == [8, 4, 4, 8]
    assert describe_spec(cache.spec) == "affine8 and affine4"
    AdaptiveStrategy(cache.nbytes - 1).make_room(cache, 0)
    assert [layer.keys.bits for layer in attending(cache.spec)] == [4, 4, 4, 4]


@pytest.mark.parametrize("form", ["raw", "affine8,rotate", "turbo4", "bf16"])
def test_a_step_changes_codecs_and_window_only(form: str) -> None:
    options = "prefill=stored,page=128,tail=70,slack=20,start=90,step=128,capacity=900"
    spec = parse(f"{form},{options}", 3)
    steps = [*list_smaller_formats(spec), limit_window(spec, MIN_WINDOW)]
    assert steps
    for step in steps:
        for old, new in zip(attending(spec), attending(step), strict=True):
            for name, codec in old.sides.items():
                assert new.sides[name].frame == codec.frame  # rotations too, layer by layer
            kept = {"keys": old.keys, "values": old.values, "retention": old.retention}
            assert replace(new, **kept) == old


def test_codecs_of_others_are_not_lowered() -> None:
    class Own:
        name, exact, tail = "own", False, 0

    layer = replace(attending(parse("raw", 1))[0], keys=Own(), values=Own())
    assert list_smaller_formats(CacheSpec((layer,))) == []


def test_rows_that_no_step_can_store_get_a_window() -> None:
    cache = grown("raw", 400, dim=12)  # affine formats need a multiple of 8
    budget, wider = cache.nbytes - 1, cache.nbytes_after(0, "raw,window=241,sinks=4")
    AdaptiveStrategy(budget).make_room(cache, 0)
    assert (
        describe_spec(cache.spec) == "raw,window=240,sinks=4"
    )  # the first rows have a page of their own
    assert cache.nbytes <= budget < wider


@pytest.mark.parametrize(
    ("spec", "coming"),
    once(
        product(
            ["raw", "raw,step=1", "affine8,window=300,sinks=0", "turbo4,page=128"], [1, 40, 300]
        )
    ),
)
def test_room_is_made_before_it_is_needed(spec: str, coming: int) -> None:
    cache = grown(spec, 64)
    least = cache.nbytes_after(900, cache.spec if "turbo" in spec else "affine8,window=64,sinks=4")
    strategy = AdaptiveStrategy(max(least, cache.nbytes) + 1000)
    for _ in range(900 // coming):
        strategy.make_room(cache, coming)
        forward(cache, coming, dim=64)
        assert cache.nbytes <= strategy.budget


def test_a_budget_that_cannot_be_met_is_told_once(
    attached: Any, caplog: pytest.LogCaptureFixture
) -> None:
    memory = kvant.cache_for(attached, "raw")
    given = {"strategy": "adaptive", "budget": 50_000, "max_new_tokens": 450}
    assert len(list(begin(DEMO, kv_cache=memory, **given))) == 450
    failed = [line for line in caplog.messages if "cannot be met" in line]
    assert len(failed) == 1 and "a budget of 48.83 KiB cannot be met: " in failed[0]
    assert memory.stats()["recodes"] == len(caplog.messages) - 1 <= 2
    assert describe_spec(memory.spec) == "affine8,window=64,sinks=4"


@pytest.mark.parametrize("budget", [0, -5])
def test_a_budget_of_nothing_is_refused_at_once(budget: int) -> None:
    with pytest.raises(ValueError, match=f"budget={budget}"):
        begin(DEMO, strategy="adaptive", budget=budget)


@pytest.mark.laws  # a minute
def test_a_tenth_of_raw_is_enough_for_thousands_of_tokens(attached: Any) -> None:
    length = len(prompt_of(DEMO)) + 4096
    budget = kvant.plan(attached, "raw", context=length).nbytes // 10
    memory = kvant.cache_for(attached, "raw")
    given = {"strategy": "adaptive", "budget": budget, "max_new_tokens": 4096}
    taken = [memory.nbytes for _ in begin(DEMO, kv_cache=memory, max_context=length, **given)]
    assert len(taken) == 4096 and max(taken) <= budget
    told = memory.stats()["recoded"]
    assert told[0]["from"] == "raw" and "window=" in told[-1]["to"]
    assert all(step["nbytes_after"] <= budget for step in told)

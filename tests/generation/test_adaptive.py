"""Test the adaptive strategy: a cache under a budget is downgraded, reports it, and continues."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar

import pytest
from transformers import AutoModelForCausalLM

import kvant
from cache.tagged import forward
from generation.speakers import (
    DEMO,
    generate_tokens,
    model_of,
    prompt_of,
    start_generation,
    tokenizer_of,
)
from kvant import Cache, CacheSpec, demo
from kvant.codecs.frames import Identity
from kvant.contracts import Form, Frame
from kvant.generation.strategy import (
    CODEC_LADDER,
    MIN_WINDOW,
    AdaptiveStrategy,
    limit_window,
    list_smaller_formats,
)
from kvant.retention import Window
from kvant.spec import describe_spec, parse
from thin import thin_rows

BUDGET = 1_450_000  # needed by the narrowest window, plus less than a page of all layers


@pytest.fixture
def attached_model() -> Any:
    model = model_of(DEMO)
    kvant.attach(model, "raw")
    yield model
    kvant.detach(model)


def make_cache(spec: str, count: int, num_layers: int = 2, dim: int = 64) -> Cache:
    cache = Cache(num_layers, spec)
    forward(cache, count, dim=dim)
    return cache


def list_attention_specs(spec: CacheSpec) -> list[Any]:
    return [recipe for recipe in spec.layers if isinstance(recipe, kvant.LayerSpec)]


def assert_downgrades_reported(cache: Any) -> None:
    """Assert that `stats` lists every downgrade, each starting from the format of the one
    before.
    """
    downgrades = cache.stats()["recoded"]
    assert [step["from"] for step in downgrades] == [
        "raw",
        *(step["to"] for step in downgrades[:-1]),
    ]
    assert downgrades[-1]["to"] == describe_spec(cache.spec)
    lengths = [step["length"] for step in downgrades]
    assert lengths == sorted(set(lengths)) and lengths[0] > 0 and lengths[-1] < cache.length
    assert all(step["nbytes_after"] <= BUDGET for step in downgrades)
    assert cache.fork().stats()["recoded"] == downgrades


def test_adaptive_cache_downgrades_and_stays_within_its_budget(
    attached_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache = kvant.cache_for(attached_model, "raw")
    options = {"strategy": "adaptive", "budget": BUDGET, "max_new_tokens": 500}
    steps = [(step, cache.nbytes) for step in start_generation(DEMO, kv_cache=cache, **options)]
    assert len(steps) == 500
    assert all(nbytes <= BUDGET for _, nbytes in steps)
    assert cache.stats()["recodes"] == len(caplog.messages) >= 2
    assert "stored as affine8 from now on" in caplog.messages[0]
    assert "of 1.38 MiB: " in caplog.messages[-1] and "window=" in caplog.messages[-1]
    assert_downgrades_reported(cache)


@pytest.mark.parametrize("prefill_chunk", [64, 200])
def test_long_prompt_stays_within_budget_from_the_first_chunk(
    attached_model: Any, prefill_chunk: int
) -> None:
    cache, sizes = kvant.cache_for(attached_model, "raw,step=64"), []
    hook = attached_model.register_forward_hook(lambda *_: sizes.append(cache.nbytes))
    text = [3 + t % 4000 for t in range(900)]
    options = {"strategy": "adaptive", "budget": BUDGET, "max_new_tokens": 5}
    try:
        list(
            kvant.generate(
                attached_model,
                tokenizer_of(DEMO),
                text,
                kv_cache=cache,
                prefill_chunk=prefill_chunk,
                ignore_end=True,
                **options,
            )
        )
    finally:
        hook.remove()
    assert cache.length == 904 and max(sizes) <= BUDGET


def test_a_model_that_reads_dense_rows_gets_no_window(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: a window was chosen, and the next forward failed."""
    model = AutoModelForCausalLM.from_pretrained(demo.PATH, attn_implementation="eager").eval()
    options = {"strategy": "adaptive", "budget": BUDGET, "max_new_tokens": 8, "ignore_end": True}
    text = [3 + t % 4000 for t in range(1500)]
    cache = kvant.cache_for(model)
    assert (
        len(list(kvant.generate(model, tokenizer_of(DEMO), text, kv_cache=cache, **options))) == 8
    )
    assert not any(spec.retention.window for spec in list_attention_specs(cache.spec))
    assert "cannot be met" in caplog.text


def test_large_budget_changes_nothing() -> None:
    assert generate_tokens(DEMO, strategy="adaptive", budget=1 << 30) == generate_tokens(DEMO)


@pytest.mark.usefixtures("every_draft_is_verified")
def test_drafts_work_across_downgrades(attached_model: Any) -> None:
    cache = kvant.cache_for(attached_model, "affine8")
    options = {"strategy": "adaptive", "budget": 700_000, "max_new_tokens": 300, "draft": "ngram"}
    assert len(list(start_generation(DEMO, kv_cache=cache, **options))) == 300
    assert cache.stats()["recodes"] >= 1
    assert cache.length == len(prompt_of(DEMO)) + 299


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
def test_downgrade_formats_are_as_documented(spec: str, expected: list[str]) -> None:
    assert [describe_spec(step) for step in list_smaller_formats(parse(spec, 2))] == expected


@pytest.mark.parametrize("budget", [280_000, 400_000, 600_000])
@pytest.mark.parametrize("spec", ["raw", "affine8", "affine4", "turbo4v2", "affine8,sinks=9"])
def test_widest_window_that_fits_is_chosen(spec: str, budget: int) -> None:
    """Regression: halving the kept tokens left up to half of the budget unused; now it is less
    than a page.
    """
    cache, other = make_cache(spec, 5000), make_cache(spec, 5000)
    AdaptiveStrategy(budget).make_room(cache, 0)
    (rule,) = {layer.retention for layer in list_attention_specs(cache.spec)}
    assert rule.sinks == (9 if "sinks" in spec else 4)
    forms = [*list_smaller_formats(other.spec), other.spec]
    wider_nbytes = [other.nbytes_after(0, limit_window(form, rule.window + 1)) for form in forms]
    assert cache.nbytes <= budget < min(wider_nbytes)


@pytest.mark.parametrize("spec", ["raw", "affine8"])
def test_equally_wide_windows_prefer_more_bits(spec: str) -> None:
    cache = make_cache(spec, 5000)
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
def test_tight_budget_is_used_up(
    attached_model: Any, length: int, budget: int, prefill_chunk: int
) -> None:
    """Regression: a window was chosen by the tokens before the first rows: 68, where 431 fit."""
    cache = kvant.cache_for(attached_model, "bf16")
    options: dict[str, Any] = {"strategy": "adaptive", "budget": budget, "max_new_tokens": 70}
    text = [3 + t % 4000 for t in range(length)]
    steps = kvant.generate(
        attached_model,
        tokenizer_of(DEMO),
        text,
        kv_cache=cache,
        prefill_chunk=prefill_chunk,
        ignore_end=True,
        **options,
    )
    nbytes = [cache.nbytes for _ in steps]
    assert "window=" in describe_spec(cache.spec) and cache.num_rows < length
    assert 0.85 * budget <= min(nbytes) <= max(nbytes) <= budget


def test_downgrade_bits_are_those_of_the_spec_language() -> None:
    for codec, word in zip(CODEC_LADDER, ("affine8", "affine4"), strict=True):
        assert list_attention_specs(parse(word, 1))[0].keys == codec


@pytest.mark.parametrize(
    ("spec", "sinks"), [("affine8,window=200,sinks=0", 0), ("raw,window=200,sinks=2", 2)]
)
def test_window_keeps_its_own_sinks(spec: str, sinks: int) -> None:
    cache = make_cache(spec, 400)
    for budget in (cache.nbytes - 1, cache.nbytes // 2, 1):
        AdaptiveStrategy(budget).make_room(cache, 0)
    assert [layer.retention for layer in list_attention_specs(cache.spec)] == [
        Window(64, sinks)
    ] * 2


@pytest.mark.parametrize(("name", "budget"), [("gemma3", 176_000), ("gpt_oss", 200_000)])
def test_model_whose_first_layer_has_a_window(
    name: str, budget: int, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(name)
    kvant.attach(model, "raw")
    try:
        cache = kvant.cache_for(model, "raw")
        models = [layer.retention.window for layer in list_attention_specs(cache.spec)]
        assert models[0] is not None and None in models
        options = {"strategy": "adaptive", "budget": budget, "max_new_tokens": 400}
        assert all(
            cache.nbytes <= budget for _ in start_generation(name, kv_cache=cache, **options)
        )
    finally:
        kvant.detach(model)
    assert "as affine8 from now on" in caplog.messages[0] and "window=" in caplog.messages[-1]
    for window, layer in zip(models, list_attention_specs(cache.spec), strict=True):
        assert layer.keys.bits in (4, 8)
        if window is not None:  # the window of the model's own layer stays
            assert layer.retention == Window(window)


def test_no_downgrade_increases_memory(caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache("raw", 600, num_layers=8)
    in_8, in_4 = cache.nbytes_after(0, "affine8"), cache.nbytes_after(0, "affine4")
    assert in_8 < in_4  # because the last 128 rows stay dense
    AdaptiveStrategy(in_4 - 1).make_room(cache, 0)
    assert describe_spec(cache.spec) == "affine8" and cache.nbytes <= in_8
    wider_nbytes = cache.nbytes_after(0, "affine8,window=304,sinks=4")
    AdaptiveStrategy(in_8 - 1).make_room(cache, 0)
    assert describe_spec(cache.spec) == "affine8,window=303,sinks=4" and wider_nbytes >= in_8
    assert cache.nbytes < in_8
    assert len(caplog.messages) == cache.stats()["recodes"] == 2


def test_insufficient_downgrade_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache("raw", 5000)
    AdaptiveStrategy(cache.nbytes_after(0, "affine4")).make_room(cache, 0)
    assert describe_spec(cache.spec) == "affine4"
    assert (
        len(caplog.messages) == 1
        and "5000 tokens are stored as affine4 from now on, in " in caplog.messages[0]
    )


def test_every_layer_above_a_downgrade_is_lowered() -> None:
    cache = make_cache("affine4,edge=1:raw", 5000, num_layers=4)
    AdaptiveStrategy(cache.nbytes - 1).make_room(cache, 0)
    assert [layer.keys.bits for layer in list_attention_specs(cache.spec)] == [8, 4, 4, 8]
    assert describe_spec(cache.spec) == "affine8,layers=1-2:affine4"
    AdaptiveStrategy(cache.nbytes - 1).make_room(cache, 0)
    assert [layer.keys.bits for layer in list_attention_specs(cache.spec)] == [4, 4, 4, 4]


@pytest.mark.parametrize("form", ["raw", "affine8,rotate", "turbo4", "bf16"])
def test_downgrade_changes_codecs_and_window_only(form: str) -> None:
    options = "prefill=stored,page=128,tail=70,slack=20,start=90,step=128,capacity=900"
    spec = parse(f"{form},{options}", 3)
    steps = [*list_smaller_formats(spec), limit_window(spec, MIN_WINDOW)]
    assert steps
    for step in steps:
        for old, new in zip(list_attention_specs(spec), list_attention_specs(step), strict=True):
            for name, codec in old.sides.items():
                assert new.sides[name].frame == codec.frame  # rotations too, layer by layer
            unchanged = {"keys": old.keys, "values": old.values, "retention": old.retention}
            assert replace(new, **unchanged) == old


def test_custom_codecs_are_not_lowered() -> None:
    class Own:
        name, exact, tail, form = "own", False, 0, None

    layer = replace(list_attention_specs(parse("raw", 1))[0], keys=Own(), values=Own())
    assert list_smaller_formats(CacheSpec((layer,))) == []


def test_rows_of_unsupported_width_get_a_window() -> None:
    cache = make_cache("raw", 400, dim=12)  # affine formats need a multiple of 8
    budget, wider_nbytes = cache.nbytes - 1, cache.nbytes_after(0, "raw,window=241,sinks=4")
    AdaptiveStrategy(budget).make_room(cache, 0)
    # the first rows have a page of their own
    assert describe_spec(cache.spec) == "raw,window=240,sinks=4"
    assert cache.nbytes <= budget < wider_nbytes


@pytest.mark.parametrize(
    ("spec", "coming"),
    thin_rows(
        product(
            ["raw", "raw,step=1", "affine8,window=300,sinks=0", "turbo4,page=128"], [1, 40, 300]
        )
    ),
)
def test_memory_is_freed_before_it_is_needed(spec: str, coming: int) -> None:
    cache = make_cache(spec, 64)
    least = cache.nbytes_after(900, cache.spec if "turbo" in spec else "affine8,window=64,sinks=4")
    strategy = AdaptiveStrategy(max(least, cache.nbytes) + 1000)
    for _ in range(900 // coming):
        strategy.make_room(cache, coming)
        forward(cache, coming, dim=64)
        assert cache.nbytes <= strategy.budget


def test_unreachable_budget_warns_once(
    attached_model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache = kvant.cache_for(attached_model, "raw")
    options = {"strategy": "adaptive", "budget": 50_000, "max_new_tokens": 450}
    assert len(list(start_generation(DEMO, kv_cache=cache, **options))) == 450
    failed = [line for line in caplog.messages if "cannot be met" in line]
    assert len(failed) == 1 and "a budget of 48.83 KiB cannot be met: " in failed[0]
    assert cache.stats()["recodes"] == len(caplog.messages) - 1 <= 2
    assert describe_spec(cache.spec) == "affine8,window=64,sinks=4"


@pytest.mark.parametrize("budget", [0, -5])
def test_zero_budget_is_refused_at_once(budget: int) -> None:
    with pytest.raises(ValueError, match=f"budget={budget}"):
        start_generation(DEMO, strategy="adaptive", budget=budget)


@pytest.mark.laws  # takes a minute
def test_tenth_of_raw_suffices_for_thousands_of_tokens(attached_model: Any) -> None:
    length = len(prompt_of(DEMO)) + 4096
    budget = kvant.plan(attached_model, "raw", context=length).nbytes // 10
    cache = kvant.cache_for(attached_model, "raw")
    options = {"strategy": "adaptive", "budget": budget, "max_new_tokens": 4096}
    sizes = [
        cache.nbytes for _ in start_generation(DEMO, kv_cache=cache, max_context=length, **options)
    ]
    assert len(sizes) == 4096 and max(sizes) <= budget
    downgrades = cache.stats()["recoded"]
    assert downgrades[0]["from"] == "raw" and "window=" in downgrades[-1]["to"]
    assert all(step["nbytes_after"] <= budget for step in downgrades)


@dataclass(frozen=True)
class FormedCodec:
    """A codec from outside kvant, with a form."""

    bits: int
    exact: ClassVar[bool] = False
    tail: ClassVar[int] = 0
    frame: Frame = field(default_factory=Identity)

    @property
    def form(self) -> Form:
        return Form("float", self.bits)


@pytest.mark.parametrize(("bits", "expected"), [(8, ["affine4"]), (4, [])])
def test_a_foreign_codec_is_lowered_by_the_bits_of_its_form(bits: int, expected: list[str]) -> None:
    codec = FormedCodec(bits)
    layer = replace(parse("affine8", 1).layers[0], keys=codec, values=codec)
    assert [describe_spec(step) for step in list_smaller_formats(CacheSpec((layer,)))] == expected

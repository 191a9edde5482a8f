"""Changing the format of what a cache stores: every layer, or an error and none."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cache.tagged import forward, layer, put, rows, same, told
from kvant import (
    Cache,
    CacheError,
    CacheSpec,
    CapacityError,
    EmptySpec,
    GroupSpec,
    LayerSpec,
    RecurrentSpec,
    SharedSpec,
    SpecError,
    attend,
    load,
    parse,
    save,
)
from kvant.cache import recode
from kvant.retention import Window


def grown(text: str | CacheSpec, count: int, num_layers: int = 2) -> Cache:
    cache = Cache(num_layers, text)
    forward(cache, count)
    return cache


def windows(cache: Cache) -> list[int | None]:
    return [recipe.retention.window for recipe in cache.spec.layers]  # type: ignore[union-attr]


def test_a_cache_goes_down_step_by_step_in_place() -> None:
    cache = Cache(3, "raw")
    forward(cache, 2000, dim=64)
    used = [cache.nbytes_used]
    for text in ("affine8", "affine4", "affine4,window=100,sinks=4"):
        cache.recode(text)
        assert cache.spec == parse(text, 3)
        assert cache.length == 2000
        used.append(cache.nbytes_used)
    assert used == sorted(used, reverse=True)
    assert [told(state) for state in cache] == [[0, 1, 2, 3, *range(1900, 2000)]] * 3
    assert (cache.num_rows, cache.max_held, cache.stats()["recodes"]) == (104, 104, 3)


def test_a_recoded_cache_goes_on(tmp_path: Path) -> None:
    cache = grown("raw", 300)
    cache.recode("affine8,window=100,sinks=4")
    for view in forward(cache, 1):
        assert torch.isfinite(attend(torch.ones(1, 2, 1, 8), view)).all()
    cache.rewind(290)
    forward(cache, 20)
    save(cache, tmp_path / "a")
    twin, again = load(tmp_path / "a"), cache.fork()
    again.restore(cache.snapshot())
    for one in (cache, twin, again):
        forward(one, 3)
        assert [told(state) for state in one] == [[0, 1, 2, 3, *range(213, 313)]] * 2


def test_earlier_forks_and_snapshots_stay_what_they_are() -> None:
    cache = grown("raw", 300)
    twin, before = cache.fork(), cache.snapshot()
    cache.recode("affine4,window=50,sinks=0")
    assert (twin.spec, twin.stats()["recodes"]) == (parse("raw", 2), 0)
    same(twin.snapshot(), before)


def test_the_old_memory_is_released() -> None:
    cache = grown("raw", 300)
    old = weakref.ref(cache[0].storage)
    cache.recode("affine4")
    assert old() is None


def test_a_forward_that_died_is_taken_back_first() -> None:
    cache = grown("raw", 100)
    forward(cache, 10, upto=1)
    cache.recode("affine8")
    assert [told(state) for state in cache] == [list(range(100))] * 2
    assert cache.stats()["abandoned"] == 1
    forward(cache, 1)
    assert cache.length == 101


def test_every_layer_or_none() -> None:
    """The second layer has lost what is asked for."""
    narrow = replace(layer("raw"), retention=Window(50))
    cache = grown(CacheSpec((layer("raw"), narrow)), 300)
    before, spec = cache.snapshot(), cache.spec
    with pytest.raises(SpecError, match=r"layer 1: all rows of 300 tokens.*last 50 are held"):
        cache.recode(CacheSpec((layer("affine8"),) * 2))
    with pytest.raises(CapacityError, match="layer 0: 300 tokens for a capacity of 200"):
        cache.recode("affine8,capacity=200")
    with pytest.raises(SpecError, match="affine7"):
        cache.recode("affine7")
    assert (cache.spec, cache.stats()["recodes"]) == (spec, 0)
    assert [state.spec for state in cache] == list(spec.layers)  # type: ignore[attr-defined]
    same(cache.snapshot(), before)


def test_an_error_from_anywhere_undoes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = grown("raw", 300)
    before = cache.snapshot()

    def out_of_memory(*args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(recode, "recode_rows", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.recode("affine8")
    monkeypatch.undo()
    cache.check()
    same(cache.snapshot(), before)
    forward(cache, 1)
    assert told(cache[0]) == list(range(301))


def test_an_empty_cache_takes_the_spec() -> None:
    cache = Cache(2, "raw,window=10,sinks=0")
    cache.recode("affine8,window=70,sinks=0")
    forward(cache, 300)
    assert told(cache[0]) == list(range(230, 300))


def test_without_a_window_the_one_that_is_there_stays() -> None:
    cache = grown("raw,window=50,sinks=2", 300)
    cache.recode("affine8")
    assert cache.spec == parse("affine8,window=50,sinks=2", 2)
    assert told(cache[0]) == [0, 1, *range(250, 300)]


def test_a_wider_window_than_all_layers_have_is_not_passed_over() -> None:
    cache = grown("raw,window=50,sinks=0", 300)
    with pytest.raises(CacheError, match=r"layer 0: window=60 of 300 tokens.*last 50 are held"):
        cache.recode("affine8,window=60,sinks=0")
    assert windows(cache) == [50, 50]


def test_layers_that_are_narrower_than_others_have_it_from_the_model() -> None:
    rules = Window(8), Window(200, sinks=4)
    spec = CacheSpec(
        tuple(replace(layer("raw"), retention=rule, chunk=rule.window) for rule in rules)
    )
    cache = grown(spec, 300)
    cache.recode("affine8,window=100,sinks=4")
    assert windows(cache) == [8, 100]
    assert [r.retention.sinks for r in cache.spec.layers] == [0, 4]  # type: ignore[union-attr]
    assert [r.chunk for r in cache.spec.layers] == [8, 200]  # type: ignore[union-attr]
    cache.recode("affine4,window=5,sinks=0")
    assert windows(cache) == [5, 5]


def test_what_follows_from_the_model_stays() -> None:
    spec = replace(layer("raw"), value_dim=4, dtype=torch.bfloat16)
    cache = Cache(1, spec)
    cache[0].append(rows(0, 100))
    cache.recode("affine8")
    assert cache.spec.layers[0] == replace(layer("affine8"), value_dim=4, dtype=torch.bfloat16)
    with pytest.raises(SpecError, match=r"layer 0: value_dim=None .*value_dim=4"):
        cache.recode(CacheSpec((layer("affine4"),)))
    cache[0].append(rows(100, 101))
    assert cache.length == 101


def kinds(text: str) -> CacheSpec:
    parts = (("attention", layer(text)), ("memory", RecurrentSpec(3)))
    return CacheSpec((layer(text), GroupSpec(parts), SharedSpec(0), RecurrentSpec(), EmptySpec()))


def hybrid() -> Cache:
    cache = Cache(None, kinds("raw"))
    put(cache[0], 100)
    put(cache[1]["attention"], 100)  # type: ignore[index]
    for state in (cache[1]["memory"], cache[3]):  # type: ignore[index]
        state.append(100, {"x": torch.full((1, 2), 7.0)})
    return cache


@pytest.mark.parametrize("full", [False, True])
def test_a_recode_concerns_attention_only(full: bool) -> None:
    cache = hybrid()
    cache.recode(kinds("affine8,window=50,sinks=0") if full else "affine8,window=50,sinks=0")
    assert cache.spec == kinds("affine8,window=50,sinks=0")
    assert cache.length == 100
    for state in (cache[0], cache[1]["attention"], cache[2]):  # type: ignore[index]
        assert told(state) == list(range(50, 100))
    assert cache[2] is cache[0]
    assert cache[3].read()["x"].tolist() == [[7.0, 7.0]]


def test_a_spec_for_the_layers_that_attend_may_say_it_of_each() -> None:
    cache = hybrid()
    cache.recode(CacheSpec((layer("affine8"), layer("affine4"))))
    assert cache.spec.layers[0] == layer("affine8")
    assert cache.spec.layers[1].parts[0][1] == layer("affine4")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "asked, message",
    [
        (CacheSpec((layer("affine8"),)), "1 layers, the cache 2"),
        (CacheSpec((layer("affine8"), *kinds("raw").layers[2:], EmptySpec())), "layer 1"),
        (CacheSpec((RecurrentSpec(), *kinds("raw").layers[1:])), "layer 0: .*kind"),
    ],
)
def test_a_layer_stays_of_its_kind(asked: CacheSpec, message: str) -> None:
    cache = hybrid()
    with pytest.raises(SpecError, match=message):
        cache.recode(asked)
    assert cache.spec == kinds("raw")


def test_where_nothing_attends_there_is_nothing_to_do() -> None:
    cache = Cache(None, CacheSpec((RecurrentSpec(), EmptySpec())))
    cache[0].append(5, {"x": torch.ones(1, 2)})
    cache.recode("affine4")
    assert cache.spec == CacheSpec((RecurrentSpec(), EmptySpec()))
    with pytest.raises(SpecError, match="affine7"):
        cache.recode("affine7")


def test_one_recipe_serves_all() -> None:
    cache = grown("raw", 100)
    cache.recode(layer("affine8"))
    assert cache.spec == CacheSpec((layer("affine8"),) * 2)
    assert isinstance(cache.spec.layers[0], LayerSpec)


@pytest.mark.parametrize("coming", [0, 1, 70, 600])
@pytest.mark.parametrize("count", [40, 300, 1000])
@pytest.mark.parametrize("text", ["raw", "affine8", "affine4,sinks=3", "raw,step=1", "turbo4v2"])
def test_what_a_recode_would_take_is_known_before(text: str, count: int, coming: int) -> None:
    for other in (None, "affine8", "affine4,tail=20", "turbo4v2,window=90,sinks=4", "bf16,step=64"):
        cache = grown(text, count)
        foreseen, before = cache.nbytes_after(coming, other), cache.nbytes
        assert (cache.nbytes, cache.spec) == (before, parse(text, 2))  # nothing has happened
        if other is not None:
            cache.recode(other)
        if coming:
            forward(cache, coming)
        assert cache.nbytes_used <= cache.nbytes <= foreseen, other


def test_before_the_first_rows_nothing_is_known() -> None:
    cache = Cache(2, "raw")
    assert cache.nbytes_after(100) == cache.nbytes_after(100, "affine8") == 0


def test_memory_that_is_there_stays_after_a_rewind() -> None:
    cache = grown("raw", 1000)
    before = cache.nbytes
    cache.rewind(10)
    assert cache.nbytes_after(5) == before > cache.nbytes_after(5, "affine8")

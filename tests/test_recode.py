"""Test changing the format of a cache: every layer, or an error and no change."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cache.tagged import append_rows, assert_same, forward, make_layer, make_rows, read_tags
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


def make_cache(text: str | CacheSpec, count: int, num_layers: int = 2) -> Cache:
    cache = Cache(num_layers, text)
    forward(cache, count)
    return cache


def list_windows(cache: Cache) -> list[int | None]:
    return [recipe.retention.window for recipe in cache.spec.layers]  # type: ignore[union-attr]


def test_cache_downgrades_step_by_step_in_place() -> None:
    cache = Cache(3, "raw")
    forward(cache, 2000, dim=64)
    used = [cache.nbytes_used]
    for text in ("affine8", "affine4", "affine4,window=100,sinks=4"):
        cache.recode(text)
        assert cache.spec == parse(text, 3)
        assert cache.length == 2000
        used.append(cache.nbytes_used)
    assert used == sorted(used, reverse=True)
    assert [read_tags(state) for state in cache] == [[0, 1, 2, 3, *range(1900, 2000)]] * 3
    assert (cache.num_rows, cache.max_held, cache.stats()["recodes"]) == (104, 104, 3)


def test_recoded_cache_continues(tmp_path: Path) -> None:
    cache = make_cache("raw", 300)
    cache.recode("affine8,window=100,sinks=4")
    for view in forward(cache, 1):
        assert torch.isfinite(attend(torch.ones(1, 2, 1, 8), view)).all()
    cache.rewind(290)
    forward(cache, 20)
    save(cache, tmp_path / "a")
    loaded, fork = load(tmp_path / "a"), cache.fork()
    fork.restore(cache.snapshot())
    for cache_ in (cache, loaded, fork):
        forward(cache_, 3)
        assert [read_tags(state) for state in cache_] == [[0, 1, 2, 3, *range(213, 313)]] * 2


def test_earlier_forks_and_snapshots_are_unaffected() -> None:
    cache = make_cache("raw", 300)
    fork, before = cache.fork(), cache.snapshot()
    cache.recode("affine4,window=50,sinks=0")
    assert (fork.spec, fork.stats()["recodes"]) == (parse("raw", 2), 0)
    assert_same(fork.snapshot(), before)


def test_old_memory_is_released() -> None:
    cache = make_cache("raw", 300)
    old = weakref.ref(cache[0].storage)
    cache.recode("affine4")
    assert old() is None


def test_failed_forward_is_rolled_back_first() -> None:
    cache = make_cache("raw", 100)
    forward(cache, 10, num_appended=1)
    cache.recode("affine8")
    assert [read_tags(state) for state in cache] == [list(range(100))] * 2
    assert cache.stats()["abandoned"] == 1
    forward(cache, 1)
    assert cache.length == 101


def test_recode_applies_to_every_layer_or_none() -> None:
    """The second layer has evicted the requested rows."""
    narrow = replace(make_layer("raw"), retention=Window(50))
    cache = make_cache(CacheSpec((make_layer("raw"), narrow)), 300)
    before, spec = cache.snapshot(), cache.spec
    with pytest.raises(SpecError, match=r"layer 1: all rows of 300 tokens.*last 50 are held"):
        cache.recode(CacheSpec((make_layer("affine8"),) * 2))
    with pytest.raises(CapacityError, match="layer 0: 300 tokens for a capacity of 200"):
        cache.recode("affine8,capacity=200")
    with pytest.raises(SpecError, match="affine7"):
        cache.recode("affine7")
    assert (cache.spec, cache.stats()["recodes"]) == (spec, 0)
    assert [state.spec for state in cache] == list(spec.layers)  # type: ignore[attr-defined]
    assert_same(cache.snapshot(), before)


def test_any_error_undoes_the_recode(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache("raw", 300)
    before = cache.snapshot()

    def out_of_memory(*args: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(recode, "recode_rows", out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.recode("affine8")
    monkeypatch.undo()
    cache.state.pools.check()
    assert_same(cache.snapshot(), before)
    forward(cache, 1)
    assert read_tags(cache[0]) == list(range(301))


def test_empty_cache_adopts_the_spec() -> None:
    cache = Cache(2, "raw,window=10,sinks=0")
    cache.recode("affine8,window=70,sinks=0")
    forward(cache, 300)
    assert read_tags(cache[0]) == list(range(230, 300))


def test_recode_without_a_window_keeps_the_current_one() -> None:
    cache = make_cache("raw,window=50,sinks=2", 300)
    cache.recode("affine8")
    assert cache.spec == parse("affine8,window=50,sinks=2", 2)
    assert read_tags(cache[0]) == [0, 1, *range(250, 300)]


def test_window_wider_than_every_layer_raises() -> None:
    cache = make_cache("raw,window=50,sinks=0", 300)
    with pytest.raises(CacheError, match=r"layer 0: window=60 of 300 tokens.*last 50 are held"):
        cache.recode("affine8,window=60,sinks=0")
    assert list_windows(cache) == [50, 50]


def test_narrower_layers_keep_the_model_window() -> None:
    rules = Window(8), Window(200, sinks=4)
    spec = CacheSpec(
        tuple(replace(make_layer("raw"), retention=rule, chunk=rule.window) for rule in rules)
    )
    cache = make_cache(spec, 300)
    cache.recode("affine8,window=100,sinks=4")
    assert list_windows(cache) == [8, 100]
    assert [r.retention.sinks for r in cache.spec.layers] == [0, 4]  # type: ignore[union-attr]
    assert [r.chunk for r in cache.spec.layers] == [8, 200]  # type: ignore[union-attr]
    cache.recode("affine4,window=5,sinks=0")
    assert list_windows(cache) == [5, 5]


def test_model_defined_settings_stay() -> None:
    spec = replace(make_layer("raw"), value_dim=4, dtype=torch.bfloat16)
    cache = Cache(1, spec)
    cache[0].append(make_rows(0, 100))
    cache.recode("affine8")
    assert cache.spec.layers[0] == replace(make_layer("affine8"), value_dim=4, dtype=torch.bfloat16)
    with pytest.raises(SpecError, match=r"layer 0: value_dim=None .*value_dim=4"):
        cache.recode(CacheSpec((make_layer("affine4"),)))
    cache[0].append(make_rows(100, 101))
    assert cache.length == 101


def make_spec(text: str) -> CacheSpec:
    parts = (("attention", make_layer(text)), ("memory", RecurrentSpec(3)))
    return CacheSpec(
        (make_layer(text), GroupSpec(parts), SharedSpec(0), RecurrentSpec(), EmptySpec())
    )


def make_hybrid() -> Cache:
    cache = Cache(None, make_spec("raw"))
    append_rows(cache[0], 100)
    append_rows(cache[1]["attention"], 100)  # type: ignore[index]
    for state in (cache[1]["memory"], cache[3]):  # type: ignore[index]
        state.append(100, {"x": torch.full((1, 2), 7.0)})
    return cache


@pytest.mark.parametrize("full", [False, True])
def test_recode_affects_attention_only(full: bool) -> None:
    cache = make_hybrid()
    cache.recode(make_spec("affine8,window=50,sinks=0") if full else "affine8,window=50,sinks=0")
    assert cache.spec == make_spec("affine8,window=50,sinks=0")
    assert cache.length == 100
    for state in (cache[0], cache[1]["attention"], cache[2]):  # type: ignore[index]
        assert read_tags(state) == list(range(50, 100))
    assert cache[2] is cache[0]
    assert cache[3].read()["x"].tolist() == [[7.0, 7.0]]


def test_spec_may_list_every_attention_layer() -> None:
    cache = make_hybrid()
    cache.recode(CacheSpec((make_layer("affine8"), make_layer("affine4"))))
    assert cache.spec.layers[0] == make_layer("affine8")
    assert cache.spec.layers[1].parts[0][1] == make_layer("affine4")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "spec, message",
    [
        (CacheSpec((make_layer("affine8"),)), "1 layers, the cache 2"),
        (CacheSpec((make_layer("affine8"), *make_spec("raw").layers[2:], EmptySpec())), "layer 1"),
        (CacheSpec((RecurrentSpec(), *make_spec("raw").layers[1:])), "layer 0: .*kind"),
    ],
)
def test_layer_keeps_its_kind(spec: CacheSpec, message: str) -> None:
    cache = make_hybrid()
    with pytest.raises(SpecError, match=message):
        cache.recode(spec)
    assert cache.spec == make_spec("raw")


def test_recode_without_attention_layers_does_nothing() -> None:
    cache = Cache(None, CacheSpec((RecurrentSpec(), EmptySpec())))
    cache[0].append(5, {"x": torch.ones(1, 2)})
    cache.recode("affine4")
    assert cache.spec == CacheSpec((RecurrentSpec(), EmptySpec()))
    with pytest.raises(SpecError, match="affine7"):
        cache.recode("affine7")


def test_single_recipe_applies_to_all_layers() -> None:
    cache = make_cache("raw", 100)
    cache.recode(make_layer("affine8"))
    assert cache.spec == CacheSpec((make_layer("affine8"),) * 2)
    assert isinstance(cache.spec.layers[0], LayerSpec)


@pytest.mark.parametrize("coming", [0, 1, 70, 600])
@pytest.mark.parametrize("count", [40, 300, 1000])
@pytest.mark.parametrize("text", ["raw", "affine8", "affine4,sinks=3", "raw,step=1", "turbo4v2"])
def test_recode_size_is_known_in_advance(text: str, count: int, coming: int) -> None:
    for other in (None, "affine8", "affine4,tail=20", "turbo4v2,window=90,sinks=4", "bf16,step=64"):
        cache = make_cache(text, count)
        forecast, before = cache.nbytes_after(coming, other), cache.nbytes
        assert (cache.nbytes, cache.spec) == (before, parse(text, 2))  # nothing has changed
        if other is not None:
            cache.recode(other)
        if coming:
            forward(cache, coming)
        assert cache.nbytes_used <= cache.nbytes <= forecast, other


def test_recode_size_is_unknown_before_the_first_rows() -> None:
    cache = Cache(2, "raw")
    assert cache.nbytes_after(100) == cache.nbytes_after(100, "affine8") == 0


def test_allocated_memory_stays_after_a_rewind() -> None:
    cache = make_cache("raw", 1000)
    before = cache.nbytes
    cache.rewind(10)
    assert cache.nbytes_after(5) == before > cache.nbytes_after(5, "affine8")

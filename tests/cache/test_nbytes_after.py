"""Test that `nbytes_after` is an upper bound of the allocation, on random real caches."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cache.tagged import forward
from kvant import Cache
from kvant.errors import SpecError

DIM = 32  # which all formats can store
COMING = (1, 1, 3, 16, 64, 65, 100, 250)


def draw_spec(pick: Any) -> str:
    form = pick(["raw", "affine8", "affine4"])
    options = [
        pick(["", "window=20", "window=64", "window=100", "window=150"]),
        pick(["sinks=0", "sinks=4", "sinks=20"]),
        pick(["", "slack=5", "slack=70"]),
        pick(["", "step=1", "step=64", "step=128"]),
        pick(["", "", "", "capacity=3000"]),
        pick(["prefill=dense", "prefill=stored"]),
    ]
    if form != "raw":
        options += [pick(["", "tail=0", "tail=1", "tail=100"]), pick(["", "start=90"])]
    return ",".join([form, *filter(None, options)])


def apply_random_operation(
    cache: Cache, other: list[Cache], dice: random.Random
) -> tuple[Cache, str]:
    """Apply a random operation that moves or shares pages."""
    verb = dice.choice(["", "", "rewind", "fork", "select", "drop"])
    if verb == "rewind":
        cache.rewind(cache.reachable(cache.length - dice.randint(0, 80)))
    elif verb == "fork":
        other.append(cache)
        cache = cache.fork()
    elif verb == "select" and 0 < cache.batch < 3:
        cache.select([0] * (cache.batch + 1))
    elif verb == "drop":
        other.clear()
    return cache, verb


def append_and_measure(cache: Cache, count: int, at_once: bool) -> int:
    """Append tokens and return the peak allocation."""
    peak = 0
    for part in [count] if at_once else [1] * count:
        forward(cache, part, dim=DIM, batch=max(cache.batch, 1))
        peak = max(peak, cache.nbytes)
    return peak


@pytest.mark.parametrize("seed", range(24))
def test_allocated_bytes_never_exceed_the_forecast(seed: int) -> None:
    """Regression: slots freed by a rewind, or shared by forks, hid the slots of the next tokens."""
    dice = random.Random(seed)
    story: list[object] = [draw_spec(dice.choice)]
    cache, other = Cache(1, str(story[0])), list[Cache]()
    story.append(append_and_measure(cache, dice.randint(1, 300), at_once=True))
    for _ in range(6):
        cache, verb = apply_random_operation(cache, other, dice)
        count, at_once = dice.choice(COMING), dice.random() < 0.5
        story.append((verb, count, at_once))
        forecast = cache.nbytes_after(count)
        assert cache.nbytes <= forecast and append_and_measure(cache, count, at_once) <= forecast, (
            story
        )


@pytest.mark.parametrize("seed", range(24))
def test_recode_never_exceeds_the_forecast(seed: int) -> None:
    dice = random.Random(1000 + seed)
    cache = Cache(1, draw_spec(dice.choice))
    append_and_measure(cache, dice.randint(1, 300), at_once=True)
    for _ in range(3):
        spec, count = draw_spec(dice.choice), dice.choice(COMING)
        try:
            forecast = cache.nbytes_after(count, spec)
            cache.recode(spec)
        except SpecError:  # rows evicted by a window
            continue
        assert (
            cache.nbytes <= forecast
            and append_and_measure(cache, count, dice.random() < 0.5) <= forecast
        ), spec


@pytest.mark.parametrize("seed", range(12))
def test_forecast_is_reached_by_a_single_cache(seed: int) -> None:
    """The bound is tight: it is reached within two pages of single tokens."""
    dice = random.Random(2000 + seed)
    cache = Cache(1, draw_spec(dice.choice))
    append_and_measure(cache, 200, at_once=True)
    forecast = cache.nbytes_after(130)
    assert append_and_measure(cache, 130, at_once=False) == forecast

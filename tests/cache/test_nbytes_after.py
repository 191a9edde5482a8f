"""What `nbytes_after` says is the most that memory then is: random lives of real caches."""

from __future__ import annotations

import random
from typing import Any

import pytest

from cache.tagged import forward
from kvant import Cache
from kvant.errors import SpecError

DIM = 32  # which all formats can store
COMING = (1, 1, 3, 16, 64, 65, 100, 250)


def any_spec(pick: Any) -> str:
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


def change(cache: Cache, other: list[Cache], dice: random.Random) -> tuple[Cache, str]:
    """Something that moves pages, or lets others hold them."""
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


def come(cache: Cache, count: int, at_once: bool) -> int:
    """The most bytes while so many tokens come."""
    most = 0
    for part in [count] if at_once else [1] * count:
        forward(cache, part, dim=DIM, batch=max(cache.batch, 1))
        most = max(most, cache.nbytes)
    return most


@pytest.mark.parametrize("seed", range(24))
def test_memory_is_never_more_than_was_said(seed: int) -> None:
    """Slots that a rewind had left free hid those that the next tokens took, and so did forks."""
    dice = random.Random(seed)
    story: list[object] = [any_spec(dice.choice)]
    cache, other = Cache(1, str(story[0])), list[Cache]()
    story.append(come(cache, dice.randint(1, 300), at_once=True))
    for _ in range(6):
        cache, verb = change(cache, other, dice)
        count, at_once = dice.choice(COMING), dice.random() < 0.5
        story.append((verb, count, at_once))
        said = cache.nbytes_after(count)
        assert cache.nbytes <= said and come(cache, count, at_once) <= said, story


@pytest.mark.parametrize("seed", range(24))
def test_of_a_recode_it_is_never_more(seed: int) -> None:
    dice = random.Random(1000 + seed)
    cache = Cache(1, any_spec(dice.choice))
    come(cache, dice.randint(1, 300), at_once=True)
    for _ in range(3):
        spec, count = any_spec(dice.choice), dice.choice(COMING)
        try:
            said = cache.nbytes_after(count, spec)
            cache.recode(spec)
        except SpecError:  # of rows that a window let go
            continue
        assert cache.nbytes <= said and come(cache, count, dice.random() < 0.5) <= said, spec


@pytest.mark.parametrize("seed", range(12))
def test_a_cache_by_itself_does_come_to_it(seed: int) -> None:
    """Over two pages of tokens, one by one: so the bound is no larger than it has to be."""
    dice = random.Random(2000 + seed)
    cache = Cache(1, any_spec(dice.choice))
    come(cache, 200, at_once=True)
    said = cache.nbytes_after(130)
    assert come(cache, 130, at_once=False) == said

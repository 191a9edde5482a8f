"""Ctrl-C between any two instructions: all layers or none; nothing is silently wrong afterwards.

Where it comes is counted in the instructions that kvant's own frames run, so every run is the same.
"""

from __future__ import annotations

import random
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from kvant import Cache, CacheError
from layers.tagged import forward, rows, same, told

SPECS = ("raw", "raw,window=70,sinks=3", "affine8,window=70", "affine4,tail=0,step=64")
LENGTH = 2 * 64 + 63  # a page falls due, and memory grows, with the next token


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("ERROR", logger="kvant")


def interrupted(action: Callable[[], object], at: int | None) -> int:
    """Run it with a KeyboardInterrupt before that instruction; how many were run."""
    count = 0

    def within(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "opcode":
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return within

    def entering(frame: FrameType, event: str, argument: Any) -> Any:
        if "/kvant/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = True
        return within

    before = sys.gettrace()
    sys.settrace(entering)
    try:
        action()
    except KeyboardInterrupt:
        assert at is not None
    finally:
        sys.settrace(before)
    return count


def filled(text: str) -> Cache:
    cache = Cache(3, text)
    forward(cache, LENGTH - 1)
    forward(cache, 1)
    return cache


def moments(total: int, count: int) -> list[int]:
    """Some of the instructions; of the last ones, where a commit is, every other."""
    return sorted({*range(1, total, max(1, total // count)), *range(max(1, total - 40), total, 2)})


@pytest.mark.parametrize("text", SPECS)
def test_an_interrupted_forward_is_there_in_all_layers_or_in_none(text: str) -> None:
    start, straight = filled(text), filled(text)
    forward(straight, 1)
    forward(straight, 70)
    fates = set()
    twin = start.fork()
    for at in moments(interrupted(lambda: forward(twin, 1), None), 50):
        cache = start.fork()
        interrupted(lambda cache=cache: forward(cache, 1), at)  # type: ignore[misc]
        kept = cache.length
        fates.add(kept)
        cache.rollback()
        assert {state.length for state in cache} == {kept}, at
        forward(cache, LENGTH + 1 - kept)
        forward(cache, 70)
        assert [told(state) for state in cache] == [told(state) for state in straight], at
    assert fates == {LENGTH, LENGTH + 1}


def test_the_next_append_ends_what_was_interrupted_too() -> None:
    """Nobody need ask for it: a loop goes on, as in a notebook."""
    start = filled("raw,window=70")
    twin = start.fork()
    for at in moments(interrupted(lambda: forward(twin, 1), None), 30):
        cache = start.fork()
        interrupted(lambda cache=cache: forward(cache, 1), at)  # type: ignore[misc]
        for _ in range(3):
            forward(cache, 1)
        last = cache.length
        assert last in (LENGTH + 3, LENGTH + 4)
        assert [told(state) for state in cache] == [list(range(last - 70, last))] * 3


VERBS: dict[str, Callable[[Cache], object]] = {
    "rewind": lambda cache: cache.rewind(LENGTH - 10),
    "reset": lambda cache: cache.reset(),
    "clear": lambda cache: cache.clear(),
    "widen": lambda cache: cache.widen(40),
    "recode": lambda cache: cache.recode("affine8"),
    "restore": lambda cache: cache.restore(Cache(3, "raw").snapshot()),
}


@pytest.mark.parametrize("verb", VERBS)
def test_an_interrupted_verb_has_acted_on_all_layers_or_on_none(verb: str) -> None:
    start, done = filled("raw"), filled("raw")
    VERBS[verb](done)
    before, after = start.snapshot(), done.snapshot()
    twin = start.fork()
    fates = set()
    for at in moments(interrupted(lambda: VERBS[verb](twin), None), 40):
        cache = start.fork()
        interrupted(lambda cache=cache: VERBS[verb](cache), at)  # type: ignore[misc]
        cache.rollback()
        length = {state.length for state in cache}
        assert len(length) == 1, at
        found = cache.snapshot()
        acted = found.numbers == after.numbers and found.tensors.keys() == after.tensors.keys()
        same(found, after if acted else before)
        fates.add(acted)
        forward(cache, 1)
        last = cache.length
        assert [told(state) for state in cache] == [list(range(last))] * 3, at
    assert True in fates


def test_an_interrupted_select_is_refused_until_the_cache_is_cleared() -> None:
    """There is no memory to undo it: rows of one sequence beside those of another were kept."""
    start = Cache(3, "raw")
    for state in start:
        state.append(rows(0, 5, batch=2), rows(0, 5, batch=2))
    twin, refused = start.fork(), 0
    for at in moments(interrupted(lambda: twin.select([1, 0]), None), 40):
        cache = start.fork()
        interrupted(lambda cache=cache: cache.select([1, 0]), at)  # type: ignore[misc]
        try:
            cache.rollback()
        except CacheError as error:
            refused += 1
            assert "clear()" in str(error)
            with pytest.raises(CacheError, match="select was interrupted"):
                cache[0].append(rows(5, 6, batch=2), rows(5, 6, batch=2))
            cache.clear()
            forward(cache, 3)
            assert [told(state) for state in cache] == [[0, 1, 2]] * 3
            continue
        assert len({tuple(told(state)) for state in cache}) == 1, at
    assert refused


def test_two_thousand_interrupts_of_a_decoding_loop_leave_a_committed_length() -> None:
    """Real signals at random moments; the loop goes on, and its rows are the right ones."""
    rng, hits, cache, tokens = random.Random(0), 0, Cache(8, "raw,window=64"), 0

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        while hits < 2000:
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.00005, 0.004))
                while True:
                    forward(cache, 1)
            except KeyboardInterrupt:
                hits += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            length = cache.length
            assert length >= tokens, "a committed token is lost"
            tokens = length
            cache.rollback()
            assert {state.length for state in cache} == {length}
            if length:
                assert [told(state) for state in cache] == [list(range(length))[-64:]] * 8
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert tokens > 1000

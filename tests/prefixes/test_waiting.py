"""Whoever leaves a store that is late holds no memory any more, wherever the others are."""

from __future__ import annotations

import pytest

import kvant
from cache.test_pieces import filled, put
from kvant.cache.arrival import Arrival
from kvant.cache.pieces import Pieces
from kvant.prefixes import Waiting


@pytest.mark.parametrize("when", ["before", "taken", "put", "settled", "ended"])
@pytest.mark.parametrize("spec", ["raw", "affine8", "affine8,sinks=4"])
def test_who_leaves_holds_nothing(spec: str, when: str) -> None:
    cache, memory = filled(spec, 300), filled(spec, 128)
    nbytes, waiting = memory.pooled()["nbytes_held"], Waiting()
    pieces, shares = Pieces(cache), memory.fork()
    waiting.hold(lambda: shares)
    if when == "before":
        waiting.leave()
    arrival = waiting.hold(lambda: Arrival(shares, 300, pieces.rest()))
    assert (arrival is None) == (when == "before")
    if arrival is not None:
        with arrival:
            if when == "taken":
                waiting.leave()
            put(arrival, pieces)
            if when == "put":
                waiting.leave()
            again = arrival.settled(300 if when != "settled" else 256)
            assert again.length == {"settled": 256, "ended": 300}.get(when, 0)
            if when == "settled":
                waiting.leave()
    waiting.drop(shares)
    assert waiting.over == (when != "ended")
    if waiting.over:
        assert not waiting.left()
        assert waiting.hold(lambda: kvant.Cache(3, spec)) is None
    else:
        assert waiting.left() and memory.pooled()["nbytes_held"] > nbytes
        waiting.leave()
    memory.check()
    assert memory.pooled()["nbytes_held"] == nbytes


def test_what_cannot_be_cleared_keeps_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def clear(self) -> None:
            raise RuntimeError("no memory to clear it with")

    memory, waiting = filled("raw", 128), Waiting()
    waiting.hold(Broken)
    waiting.hold(lambda: memory)
    waiting.leave()
    assert not memory.length and "no memory to clear it with" in caplog.text

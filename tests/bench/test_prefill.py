"""`kvant bench prefill`: every way reads the same text, in chunks of the same size."""

from __future__ import annotations

from kvant.bench.prefill import BASELINE, measure_prefill


class Noted:
    """A candidate that keeps what it is fed."""

    nbytes = 7

    def __init__(self, fed: list[list[int]]) -> None:
        self.fed = fed

    def feed(self, tokens: list[int]) -> int:
        self.fed.append(list(tokens))
        return 0


def test_all_read_the_same_text_in_the_same_chunks() -> None:
    fed: dict[str, list[list[int]]] = {BASELINE: [], "affine8,prefill=dense": []}
    makes = {name: lambda name=name: Noted(fed[name]) for name in fed}
    rows = measure_prefill(makes, list(range(10)), chunk=4, repeats=2)
    for pieces in fed.values():
        assert pieces == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 3
    assert [row["cache"] for row in rows] == list(fed)
    assert rows[0]["ratio"] == 1.0
    assert all((row["chunk"], row["nbytes"]) == (4, 7) for row in rows)

"""Test `kvant bench prefill`: every candidate reads the same text in chunks of the same size."""

from __future__ import annotations

from collections.abc import Sequence

from kvant.bench.decode import Candidate
from kvant.bench.prefill import TRANSFORMERS, measure_prefill


def make_recording_candidate(inputs: list[list[int]]) -> Candidate:
    def feed(tokens: Sequence[int]) -> int:
        inputs.append(list(tokens))
        return 0

    return Candidate(feed, lambda: 7)


def test_all_candidates_prefill_the_same_text_in_the_same_chunks() -> None:
    inputs: dict[str, list[list[int]]] = {TRANSFORMERS: [], "affine8,prefill=dense": []}
    factories = {name: lambda name=name: make_recording_candidate(inputs[name]) for name in inputs}
    rows = measure_prefill(factories, list(range(10)), chunk=4, repeats=2)
    for pieces in inputs.values():
        assert pieces == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]] * 3
    assert [row["cache"] for row in rows] == list(inputs)
    assert rows[0]["ratio"] == 1.0
    assert all((row["chunk"], row["nbytes"]) == (4, 7) for row in rows)

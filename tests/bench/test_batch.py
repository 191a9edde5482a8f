"""Sequences in one forward, and beams: the figures are there and add up; nothing here is timed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bench.test_cache_race import TINY
from kvant.bench import batch, cache_race


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cache_race.MODEL_SHAPES, "0.6b", cache_race.MODEL_SHAPES["0.6b"] | TINY)


def told(capsys: pytest.CaptureFixture[str], **given: Any) -> dict[str, Any]:
    batch.main(layers=2, repeats=3, json=True, **given)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_every_number_of_sequences_is_beside_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, sequences="1,4", context=40, formats="raw,affine8")
    caches = [(row["sequences"], row["cache"]) for row in found["rows"]]
    ours = [[(n, "dynamic"), (n, name)] for name in ("raw", "affine8") for n in (1, 4)]
    assert caches == [one for pair in ours for one in pair]
    for row in found["rows"]:
        assert row["tokens"] == 3 and row["median_ms"] >= row["best_ms"] > 0
        assert row["tokens_s"] == pytest.approx(row["sequences"] / row["median_ms"] * 1e3)
        if row["sequences"] == 1:
            assert row["times_one"] == 1
        if row["cache"] == "dynamic":
            assert row["ratio"] == 1


def test_lengths_differ_and_are_on_average_the_context() -> None:
    assert batch.spread_lengths(40, 1) == [40]
    found = batch.spread_lengths(512, 16)
    assert len(set(found)) == 16 and abs(sum(found) / 16 - 512) < 1


def test_sequences_together_are_what_they_are_alone() -> None:
    task = cache_race.RaceTask(layers=2)
    model = cache_race.build_model(task.model_sizes)
    rows, lengths = cache_race.random_rows(model, 50), [30, 50, 41]
    both = batch.make_merged_batch(model, "raw", rows, lengths)
    with torch.no_grad():
        both.decode()
        assert both.cache.lengths == [31, 51, 42]
        for i, length in enumerate(lengths):
            one = batch.make_merged_batch(model, "raw", rows, [length])
            one.decode()
            here, there = (c.states[1].read()[0] for c in (both.cache.extract(i), one.cache))
            assert (here - there).abs().max() < 0.05


def test_beams(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, beam=2, context=20, tokens=4, formats="raw")
    assert [row["cache"] for row in found["rows"]] == ["dynamic", "raw"]
    assert all(row["tokens_s"] > 0 for row in found["rows"]) and found["rows"][0]["ratio"] == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [({"sequences": "4,1"}, "rising order"), ({"sequences": "1,9", "context": 4}, "--context 4")],
)
def test_what_cannot_be_measured_is_said(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch.main(**given)

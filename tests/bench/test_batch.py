"""Test that batch and beam benchmarks report consistent figures; nothing here is timed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from bench.test_cache_race import TINY
from kvant.bench import batch, cache_race
from kvant.bench.harness import DEVICES


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cache_race.MODEL_SHAPES, "0.6b", cache_race.MODEL_SHAPES["0.6b"] | TINY)


def run_benchmark(capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    batch.main(layers=2, repeats=3, json=True, **options)
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_every_batch_size_is_compared_with_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_benchmark(capsys, sequences="1,4", context=40, formats="raw,affine8")
    caches = [(row["sequences"], row["cache"]) for row in report["rows"]]
    ours = [[(n, "dynamic"), (n, name)] for name in ("raw", "affine8") for n in (1, 4)]
    assert caches == [row for pair in ours for row in pair]
    for row in report["rows"]:
        assert row["tokens"] == 3 and row["median_ms"] >= row["best_ms"] > 0
        assert row["tokens_s"] == pytest.approx(row["sequences"] / row["median_ms"] * 1e3)
        if row["sequences"] == 1:
            assert row["times_one"] == 1
        if row["cache"] == "dynamic":
            assert row["ratio"] == 1


def test_gpu_is_timed_by_its_events(stream_log: list[str]) -> None:
    model, _ = cache_race.open_model("0.6b", 2, None)
    rows = batch.measure_batches(model, "raw", 40, [1, 2], 3, DEVICES["cuda"])
    assert [row["median_ms"] for row in rows] == [250.0] * 4
    assert all("host_ms" in row for row in rows) and stream_log.count("settle") >= 4 * 3


def test_lengths_vary_around_the_context() -> None:
    assert batch.spread_lengths(40, 1) == [40]
    lengths = batch.spread_lengths(512, 16)
    assert len(set(lengths)) == 16 and abs(sum(lengths) / 16 - 512) < 1


def test_sequences_together_equal_sequences_alone() -> None:
    task = cache_race.RaceTask(layers=2)
    model = cache_race.build_model(task.model_sizes)
    rows, lengths = cache_race.draw_random_rows(model, 50), [30, 50, 41]
    merged = batch.make_merged_batch(model, "raw", rows, lengths)
    with torch.no_grad():
        merged.decode()
        assert merged.cache.lengths == [31, 51, 42]
        for i, length in enumerate(lengths):
            single = batch.make_merged_batch(model, "raw", rows, [length])
            single.decode()
            batched_keys, single_keys = (
                c.states[1].read()[0] for c in (merged.cache.extract(i), single.cache)
            )
            assert (batched_keys - single_keys).abs().max() < 0.05


def test_beam_search_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    report = run_benchmark(capsys, beam=2, context=20, tokens=4, formats="raw")
    assert [row["cache"] for row in report["rows"]] == ["dynamic", "raw"]
    assert all(row["tokens_s"] > 0 for row in report["rows"]) and report["rows"][0]["ratio"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [({"sequences": "4,1"}, "rising numbers"), ({"sequences": "1,9", "context": 4}, "--context 4")],
)
def test_invalid_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        batch.main(**options)

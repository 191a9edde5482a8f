"""Test that the cache race runs and reports its fields; nothing here is timed."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import kvant
from kvant.bench import cache_race, decode, harness
from kvant.bench.harness import DEVICES

TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 64,
}


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cache_race.MODEL_SHAPES, "0.6b", cache_race.MODEL_SHAPES["0.6b"] | TINY)


def test_last_line_holds_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    decode.main("8,40", formats="raw,affine8", repeats=3, layers=2, peaks=False)
    captured = capsys.readouterr()
    line = captured.out.splitlines()[-1]
    report = json.loads(line)
    assert captured.err == ""
    assert (report["bench"], report["layers"], report["dtype"]) == ("decode", 2, "bfloat16")
    assert report["machine"]["threads"] == torch.get_num_threads()
    contestants = [(row["rows"], row["cache"]) for row in report["rows"]]
    pairs = [(n, name) for n in (8, 40) for name in ("dynamic", "raw", "dynamic", "affine8")]
    assert contestants == pairs
    for row in report["rows"]:
        assert row["tokens"] == 3
        assert row["median_ms"] >= row["best_ms"] > 0 and row["ratio"] > 0
        assert "host_ms" not in row  # equal on a CPU, so omitted
        assert row["peak_mib"] is None
        ours = row["cache"] != "dynamic"  # captured after four ordinary tokens
        assert (row["replayed"] is not None) == ours and (row["replayed"] or 0) < 3
        dense = row["rows"] * 2 * 2 * 2 * 32 * 2 / 2**20  # layers, sides, heads, width, bytes
        assert row["rest_mib"] == dense if row["cache"] == "dynamic" else row["rest_mib"] > 0


def test_packed_weights_are_measured_along_with_dense_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packings: list[kvant.Packing] = []

    def pack_and_record(model: Any, weights: str) -> None:
        packings.append(kvant.pack(model, weights))

    monkeypatch.setattr(cache_race, "pack", pack_and_record)
    decode.main("8", formats="raw,affine8", repeats=3, layers=2, weights="affine4", peaks=False)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    names = ["dynamic", "raw", "raw packed", "dynamic", "affine8", "affine8 packed"]
    assert [row["cache"] for row in rows] == names
    assert all(row["tokens"] == 3 and row["ratio"] > 0 for row in rows)
    assert [len(packing.layers) + len(packing.left) for packing in packings] == [2 * 7 + 1]


def test_both_caches_hold_the_same_rows_and_are_read_like_a_user_does() -> None:
    task = cache_race.RaceTask(layers=2, repeats=3)
    theirs, ours = cache_race.measure_pair(
        cache_race.build_model(task.model_sizes), "raw", 40, task
    )
    length = 40 + task.warmup_tokens + 3
    assert theirs.cache.get_seq_length() == ours.cache.get_seq_length() == length
    for layer, state in zip(theirs.cache.layers, ours.cache.states, strict=True):
        torch.testing.assert_close(state.read()[0][:, :, :40], layer.keys[:, :, :40])
        torch.testing.assert_close(state.read()[1], layer.values, atol=2e-2, rtol=2e-2)
    stats = ours.cache.stats()
    assert (stats["fused"], stats["materialized"]) == (2 * (task.warmup_tokens + 3), 0)


@pytest.mark.parametrize("name", ["dynamic", "affine8"])
def test_peak_memory_is_a_number_where_the_system_reports_it(name: str) -> None:
    task = cache_race.RaceTask(layers=1, repeats=2)
    peak = cache_race.measure_peak(task, name, 40, torch.get_num_threads())
    assert (peak is None) == (harness.reset_resident_peak() is None)
    assert peak is None or peak >= 0


@pytest.mark.parametrize(
    ("contexts", "options", "message"),
    [
        ("0", {}, "1 or more"),
        ("8", {"formats": "raww"}, "raww"),
        ("8", {"shape": "9b"}, "--shape 9b: known are 0.6b, 8b"),
        ("8", {"baseline": "quick"}, "--baseline quick: known are dynamic, static"),
        ("8", {"compiled": True}, "--compile: only the CUDA graph of a GPU can be compiled"),
        ("8", {"device": "tpu"}, "--device tpu: known are cpu, cuda"),
    ],
)
def test_invalid_arguments_are_refused(
    contexts: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        decode.main(contexts, layers=1, peaks=False, **options)


def test_packed_weights_need_a_cpu() -> None:
    with pytest.raises(ValueError, match="--weights: they are packed for a CPU, not for cuda"):
        cache_race.RaceTask(device=DEVICES["cuda"], weights="raw")


def test_static_baseline_holds_the_same_rows_and_recompiles_per_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    def record_compile(forward: Any, **options: Any) -> Any:
        calls.append(options["mode"])
        return forward

    monkeypatch.setattr(torch, "compile", record_compile)
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("reset"))
    task = cache_race.RaceTask(layers=2, repeats=3, baseline="static")
    model = cache_race.build_model(task.model_sizes)
    for context in (40, 60):
        theirs, ours = cache_race.measure_pair(model, "raw", context, task)
        length = context + task.warmup_tokens + 3
        assert (theirs.name, len(theirs.laps), len(ours.laps)) == ("static", 3, 3)
        assert ours.cache.get_seq_length() == int(theirs.cache.get_seq_length()) == length
        for layer, state in zip(theirs.cache.layers, ours.cache.states, strict=True):
            assert layer.max_cache_len % 64 == 0 and 0 <= layer.max_cache_len - length < 64
            keys, values = state.read()[:2]
            torch.testing.assert_close(layer.keys[:, :, :context], keys[:, :, :context])
            torch.testing.assert_close(layer.values[:, :, :length], values, atol=2e-2, rtol=2e-2)
    assert calls.count("reset") == 2 and calls[:2] == ["reset", "reduce-overhead"]


def test_tasks_run_in_another_process() -> None:
    for device in DEVICES.values():
        task = pickle.loads(pickle.dumps(cache_race.RaceTask(shape="8b", device=device)))
        assert (task.shape, task.device.name) == ("8b", device.name)


def test_larger_shape_has_eight_billion_weights() -> None:
    sizes = cache_race.RaceTask(shape="8b").model_sizes
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    assert round(model.num_parameters() / 1e9, 2) == 8.03
    assert cache_race.RaceTask(shape="8b", layers=3).model_sizes == sizes | {"num_hidden_layers": 3}

"""The race of caches at a context runs and says what it promises; nothing here is timed."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

import kvant
from kvant.bench import cache_race, clock, decode
from kvant.bench.device import DEVICES

TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "vocab_size": 64,
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cache_race.MODEL_SHAPES, "0.6b", cache_race.MODEL_SHAPES["0.6b"] | TINY)


def test_the_last_line_tells_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    decode.main("8,40", formats="raw,affine8", repeats=3, layers=2, peaks=False)
    said = capsys.readouterr()
    line = said.out.splitlines()[-1]
    told = json.loads(line)
    assert said.err == ""
    assert (told["bench"], told["layers"], told["dtype"]) == ("decode", 2, "bfloat16")
    assert told["machine"]["threads"] == torch.get_num_threads()
    contestants = [(row["rows"], row["cache"]) for row in told["rows"]]
    pairs = [(n, name) for n in (8, 40) for name in ("dynamic", "raw", "dynamic", "affine8")]
    assert contestants == pairs
    for row in told["rows"]:
        assert row["tokens"] == 3
        assert row["median_ms"] >= row["best_ms"] > 0 and row["ratio"] > 0
        assert "host_ms" not in row  # on a CPU it is the same
        assert row["peak_mib"] is None
        ours = row["cache"] != "dynamic"  # recorded once four tokens were ordinary ones
        assert (row["replayed"] is not None) == ours and (row["replayed"] or 0) < 3
        dense = row["rows"] * 2 * 2 * 2 * 32 * 2 / 2**20  # layers, sides, heads, width, bytes
        assert row["rest_mib"] == dense if row["cache"] == "dynamic" else row["rest_mib"] > 0


def test_packed_weights_are_measured_beside_those_of_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    packings: list[kvant.Packing] = []

    def packed(model: Any) -> None:
        packings.append(kvant.pack(model))

    monkeypatch.setattr(cache_race, "pack", packed)
    decode.main("8", formats="raw,affine8", repeats=3, layers=2, pack=True, peaks=False)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    names = ["dynamic", "raw", "raw packed", "dynamic", "affine8", "affine8 packed"]
    assert [row["cache"] for row in rows] == names
    assert all(row["tokens"] == 3 and row["ratio"] > 0 for row in rows)
    assert [len(one.layers) + len(one.left) for one in packings] == [2 * 7 + 1]


def test_both_caches_hold_the_same_rows_and_are_read_as_a_user_reads_them() -> None:
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
def test_a_peak_is_a_number_where_the_system_keeps_one(name: str) -> None:
    task = cache_race.RaceTask(layers=1, repeats=2)
    found = cache_race.measure_peak(task, name, 40, torch.get_num_threads())
    assert (found is None) == (clock.reset_resident_peak() is None)
    assert found is None or found >= 0


@pytest.mark.parametrize(
    ("contexts", "given", "why"),
    [
        ("0", {}, "1 row"),
        ("8", {"formats": "raww"}, "raww"),
        ("8", {"shape": "9b"}, "--shape 9b: known are 0.6b, 8b"),
        ("8", {"baseline": "quick"}, "--baseline quick: known are dynamic, static"),
        ("8", {"compiled": True}, "--compile: what is compiled is the CUDA graph of a GPU"),
        ("8", {"device": "tpu"}, "--device tpu: known are cpu, cuda"),
    ],
)
def test_what_cannot_be_measured_is_refused(contexts: str, given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        decode.main(contexts, layers=1, peaks=False, **given)


def test_packed_weights_are_for_a_cpu() -> None:
    with pytest.raises(ValueError, match="--pack: weights are packed for a CPU, not for cuda"):
        cache_race.RaceTask(device=DEVICES["cuda"], packed=True)


def test_a_static_baseline_holds_the_same_rows_and_is_compiled_anew_for_each_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []

    def compiled(forward: Any, **how: Any) -> Any:
        done.append(how["mode"])
        return forward

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("reset"))
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
    assert done.count("reset") == 2 and done[:2] == ["reset", "reduce-overhead"]


def test_another_process_can_be_given_a_task() -> None:
    for device in DEVICES.values():
        task = pickle.loads(pickle.dumps(cache_race.RaceTask(shape="8b", device=device)))
        assert (task.shape, task.device.name) == ("8b", device.name)


def test_the_larger_shape_has_eight_billion_weights() -> None:
    sizes = cache_race.RaceTask(shape="8b").model_sizes
    with torch.device("meta"):
        model = Qwen3ForCausalLM(Qwen3Config(**sizes))
    assert round(model.num_parameters() / 1e9, 2) == 8.03
    assert cache_race.RaceTask(shape="8b", layers=3).model_sizes == sizes | {"num_hidden_layers": 3}

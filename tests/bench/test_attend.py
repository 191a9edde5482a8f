"""Test that the attention benchmark runs and reports its fields; nothing here is timed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch

from kvant import Cache
from kvant.bench import attend, cycles
from kvant.bench.attend import AttendTask
from kvant.bench.harness import CPU, Lap, Laps
from kvant.native import get_library

TASK = AttendTask(batch=2, heads=2, group=2, dim=32, queries=1, repeats=5, backend=None)
WAYS = ["torch gqa", "torch folded", "torch by hand"]


def test_share_is_relative_to_a_plain_pass_over_the_same_bytes() -> None:
    durations = {
        ("torch gqa", ""): 8.0,
        ("stream", ""): 2.0,
        ("raw", "x"): 4.0,
        ("small", "x"): 1.0,
    }
    nbytes = dict.fromkeys(durations, 100) | {("small", "x"): 25}
    laps = {name: Laps([Lap(seconds)]) for name, seconds in durations.items()}
    rows = attend.summarize_laps(laps, nbytes)
    assert [row["share"] for row in rows] == [0.25, 1.0, 0.5, 0.5]
    assert [row["against_raw"] for row in rows] == [0.5, 2.0, 1.0, 4.0]
    assert [row["against_torch"] for row in rows] == [1.0, 4.0, 2.0, 8.0]


def test_every_sequence_of_a_batch_is_read() -> None:
    q, (keys, values) = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 2, 70, 32)
    view, _ = attend.store_rows(Cache(1, "raw"), keys.bfloat16(), values.bfloat16(), 1)
    plain, skipped = attend.make_torch_calls(q.bfloat16(), keys.bfloat16(), values.bfloat16(), CPU)
    assert skipped == [] and [name for name, _ in plain] == WAYS
    ours = attend.attend(q.bfloat16(), view)
    for call in plain.values():
        output = call().reshape(ours.shape)
        torch.testing.assert_close(output, ours, atol=2e-2, rtol=2e-2)


def test_last_line_holds_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    attend.main(lengths="70", formats="affine8", heads=2, dim=32, batch=3, repeats=2)
    captured = capsys.readouterr()
    report = json.loads(captured.out.splitlines()[-1])
    assert captured.err == "" and report["skipped"] == []
    assert (report["bench"], report["batch"], report["queries"]) == ("attend", 3, 1)
    assert [row["way"] for row in report["rows"]] == [*WAYS, "stream", "raw", "affine8"]
    for row in report["rows"]:
        assert row["rows"] == 70 and row["median_ms"] >= row["best_ms"] > 0
        assert "host_ms" not in row  # equal on a CPU, so omitted


def test_operations_of_visible_rows_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    attend.main(lengths="6", formats="raw", heads=2, dim=32, queries=3, repeats=1, json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    products = {row["way"]: row["gflop_s"] * row["median_ms"] * 1e6 for row in rows}
    size, heads, visible = attend.MATMUL_SIZE, 2 * 4, 4 + 5 + 6
    counts = {"stream": 0, "matmul": 2 * size**3, "raw": 2 * 2 * 32 * heads * visible}
    assert products == pytest.approx(dict.fromkeys(WAYS, counts["raw"]) | counts)


def test_unavailable_backend_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_attention(*shape: Any) -> dict[str, Any]:
        return {"torch gqa": torch.add, "torch flex": min}

    monkeypatch.setattr(attend, "make_torch_attention", make_attention)
    attend.main(lengths="70,80", formats="raw", heads=2, dim=32, repeats=1, json=True)
    captured = capsys.readouterr()
    assert captured.err.startswith("skipped: 70 rows, torch flex: RuntimeError, ")
    lines = json.loads(captured.out)["skipped"]
    assert captured.err.splitlines() == [f"skipped: {line}" for line in lines]
    assert [line.partition(",")[0] for line in lines] == ["70 rows", "80 rows"]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"lengths": "8", "queries": 9}, "as many rows as queries (9)"),
        ({"lengths": "x"}, "whole numbers"),
        ({"device": "gpu"}, "--device gpu: known are cpu, cuda"),
    ],
    ids=str,
)
def test_invalid_arguments_are_refused(given_: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        attend.main(**given_)


def test_cycles_are_those_of_the_rows_by_which_the_lengths_differ() -> None:
    calls, rows = cycles.CALLS, cycles.ROWS[1] - cycles.ROWS[0]
    seconds = {cycles.CLOCK: 1e-3, ("x", cycles.ROWS[0]): 5.0, ("x", cycles.ROWS[1]): 5.0 + 1e-3}
    expected = cycles.CLOCK_CYCLES / calls / rows
    assert cycles.count_row_cycles(seconds, "x") == pytest.approx(expected)


@pytest.mark.skipif(get_library().functions is None, reason="the native library is not here")
def test_cycles_are_reported_for_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    attend.main(cycles=True, formats="affine8,turbo3v3", repeats=1, json=True)
    report = json.loads(capsys.readouterr().out)
    assert [row["way"] for row in report["rows"]] == ["raw", "affine8", "turbo3v3"]
    assert all(row["ghz"] > 0 for row in report["rows"]) and report["isa"] == get_library().isa

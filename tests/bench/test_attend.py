"""Test that the attention benchmark runs and reports its fields; nothing here is timed."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvant.bench import attend
from kvant.bench.attend import AttendTask, count_copies, rotate_calls, time_calls_in_turn
from kvant.bench.clock import Lap, WallClock
from kvant.bench.device import CPU, CpuDevice

TASK = AttendTask(batch=2, heads=2, group=2, dim=32, queries=1, repeats=5, backend=None)
DENSE = 2 * 2 * 640 * 32 * 2 * 2  # bytes of 640 dense rows: sequences, heads, width, sides, bf16
WAYS = ["torch gqa", "torch folded", "torch by hand"]


class ReportingClock(WallClock):
    """A clock that reports extra figures."""

    def describe_laps(self, laps: Any) -> dict[str, float]:
        return {"host_ms": 1.0}


class CachingCpu(CpuDevice):
    """A CPU treated as if its cache kept the inputs."""

    clock = ReportingClock()
    cache_nbytes = 2 * DENSE


@given(nbytes=st.integers(1, 2**20), cached=st.integers(0, 2**22))
def test_inputs_rotate_through_more_than_a_cpu_cache(nbytes: int, cached: int) -> None:
    count = count_copies(nbytes, cached)
    assert (count - 1) * nbytes >= cached
    assert count == 1 or (count - 2) * nbytes < cached  # and no more inputs than needed


def test_inputs_are_used_in_rotation() -> None:
    used: list[int] = []
    call = rotate_calls([lambda n=n: used.append(n) for n in range(3)])
    for _ in range(7):
        call()
    assert used == [0, 1, 2, 0, 1, 2, 0]


def test_backends_alternate_and_the_first_lap_is_dropped() -> None:
    order: list[str] = []

    class Noting(WallClock):
        def start_turn(self) -> None:
            order.append("turn")

    calls = {(name, ""): lambda name=name: order.append(name) for name in "ab"}
    laps = time_calls_in_turn(calls, 2, Noting())
    assert order == ["turn", "a", "b"] * 3
    assert [len(times) for times in laps.values()] == [2, 2]


def test_share_is_relative_to_a_plain_pass_over_the_same_bytes() -> None:
    durations = {
        ("torch gqa", ""): 8.0,
        ("stream", ""): 2.0,
        ("raw", "x"): 4.0,
        ("small", "x"): 1.0,
    }
    nbytes = dict.fromkeys(durations, 100) | {("small", "x"): 25}
    laps = {name: [Lap(seconds)] for name, seconds in durations.items()}
    rows = attend.summarize_laps(laps, nbytes, WallClock())
    assert [row["share"] for row in rows] == [0.25, 1.0, 0.5, 0.5]
    assert [row["against_raw"] for row in rows] == [0.5, 2.0, 1.0, 4.0]
    assert [row["against_torch"] for row in rows] == [1.0, 4.0, 2.0, 8.0]


def test_inputs_repeat_only_after_all_others_of_their_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys_read: list[int] = []
    views_read: dict[int, list[int]] = {}

    def make_backends(self: Any, q: Any, keys: Any, values: Any) -> Any:
        return {name: lambda k, v: keys_read.append(k.data_ptr()) for name in WAYS}, []

    def read(q: Any, view: Any, backend: Any) -> None:
        views_read.setdefault(len(view.keys.sealed), []).append(id(view))

    monkeypatch.setattr(CachingCpu, "list_torch_attention", make_backends)
    monkeypatch.setattr(attend, "attend", read)
    rows, _ = attend.measure_attention(640, ["affine8"], TASK, CachingCpu())
    assert [row["way"] for row in rows] == [*WAYS, "stream", "raw", "affine8"]
    assert all(row["host_ms"] == 1.0 for row in rows)
    kinds = [keys_read, *views_read.values()]
    assert [len(set(backend_inputs)) for backend_inputs in kinds] == [
        3,
        3,
        5,
    ]  # affine8 needs about half the bytes
    for backend_inputs in kinds:
        count = len(set(backend_inputs))
        assert all(
            len(set(backend_inputs[n : n + count])) == count
            for n in range(len(backend_inputs) - count + 1)
        )


def test_every_sequence_of_a_batch_is_read() -> None:
    q, (keys, values) = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 2, 70, 32)
    view, _ = attend.store_rows("raw", keys.bfloat16(), values.bfloat16(), 1)
    ours = attend.make_kvant_calls(q.bfloat16(), {"raw": [view]}, TASK)
    plain, skipped = attend.make_torch_calls(q.bfloat16(), keys.bfloat16(), values.bfloat16(), CPU)
    assert skipped == [] and [name for name, _ in plain] == WAYS
    outputs = [call().reshape(2, 4, 1, 32).float() for call in (*ours.values(), *plain.values())]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], atol=2e-2, rtol=2e-2)


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


def test_unavailable_backend_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make_backends(self: Any, q: Any, keys: Any, values: Any) -> Any:
        return {"torch gqa": torch.add}, ["torch flex: RuntimeError, no"]

    monkeypatch.setattr(CpuDevice, "list_torch_attention", make_backends)
    attend.main(lengths="70,80", formats="raw", heads=2, dim=32, repeats=1, json=True)
    captured = capsys.readouterr()
    lines = [f"{n} rows, torch flex: RuntimeError, no" for n in (70, 80)]
    assert captured.err.splitlines() == [f"skipped: {line}" for line in lines]
    assert json.loads(captured.out)["skipped"] == lines


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

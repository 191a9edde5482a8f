"""The benchmark of attention runs and says what it promises; nothing here is timed."""

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
DENSE = 2 * 2 * 640 * 32 * 2 * 2  # bytes of 640 rows of it: sequences, heads, width, sides, bf16
WAYS = ["torch gqa", "torch folded", "torch by hand"]


class Events(WallClock):
    """A clock that tells something beside."""

    def describe_laps(self, laps: Any) -> dict[str, float]:
        return {"host_ms": 1.0}


class Caching(CpuDevice):
    """A CPU that is treated as one that would find inputs again."""

    clock = Events()
    cache_nbytes = 2 * DENSE


@given(nbytes=st.integers(1, 2**20), cached=st.integers(0, 2**22))
def test_between_two_uses_of_an_input_the_others_fill_a_cache(nbytes: int, cached: int) -> None:
    count = count_copies(nbytes, cached)
    assert (count - 1) * nbytes >= cached
    assert count == 1 or (count - 2) * nbytes < cached  # and no input more than that takes


def test_inputs_are_used_one_after_the_other() -> None:
    used: list[int] = []
    call = rotate_calls([lambda n=n: used.append(n) for n in range(3)])
    for _ in range(7):
        call()
    assert used == [0, 1, 2, 0, 1, 2, 0]


def test_all_run_in_turn_and_the_first_turn_does_not_count() -> None:
    done: list[str] = []

    class Noting(WallClock):
        def start_turn(self) -> None:
            done.append("turn")

    calls = {(name, ""): lambda name=name: done.append(name) for name in "ab"}
    laps = time_calls_in_turn(calls, 2, Noting())
    assert done == ["turn", "a", "b"] * 3
    assert [len(found) for found in laps.values()] == [2, 2]


def test_a_share_is_of_a_plain_pass_over_the_same_bytes() -> None:
    took = {("torch gqa", ""): 8.0, ("stream", ""): 2.0, ("raw", "x"): 4.0, ("small", "x"): 1.0}
    nbytes = dict.fromkeys(took, 100) | {("small", "x"): 25}
    laps = {name: [Lap(seconds)] for name, seconds in took.items()}
    rows = attend.summarize_laps(laps, nbytes, WallClock())
    assert [row["share"] for row in rows] == [0.25, 1.0, 0.5, 0.5]
    assert [row["against_raw"] for row in rows] == [0.5, 2.0, 1.0, 4.0]
    assert [row["against_torch"] for row in rows] == [1.0, 4.0, 2.0, 8.0]


def test_no_input_is_read_again_before_the_others_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys_read: list[int] = []
    views_read: dict[int, list[int]] = {}

    def ways(self: Any, q: Any, keys: Any, values: Any) -> Any:
        return {name: lambda k, v: keys_read.append(k.data_ptr()) for name in WAYS}, []

    def read(q: Any, view: Any, backend: Any) -> None:
        views_read.setdefault(len(view.keys.sealed), []).append(id(view))

    monkeypatch.setattr(Caching, "list_torch_attention", ways)
    monkeypatch.setattr(attend, "attend", read)
    rows, _ = attend.measure_attention(640, ["affine8"], TASK, Caching())
    assert [row["way"] for row in rows] == [*WAYS, "stream", "raw", "affine8"]
    assert all(row["host_ms"] == 1.0 for row in rows)
    kinds = [keys_read, *views_read.values()]
    assert [len(set(kind)) for kind in kinds] == [3, 3, 5]  # affine8 takes about half the bytes
    for kind in kinds:
        count = len(set(kind))
        assert all(len(set(kind[n : n + count])) == count for n in range(len(kind) - count + 1))


def test_every_sequence_of_a_batch_is_read() -> None:
    q, (keys, values) = torch.randn(2, 4, 1, 32), torch.randn(2, 2, 2, 70, 32)
    view, _ = attend.store_rows("raw", keys.bfloat16(), values.bfloat16(), 1)
    ours = attend.make_kvant_calls(q.bfloat16(), {"raw": [view]}, TASK)
    plain, skipped = attend.make_torch_calls(q.bfloat16(), keys.bfloat16(), values.bfloat16(), CPU)
    assert skipped == [] and [name for name, _ in plain] == WAYS
    said = [call().reshape(2, 4, 1, 32).float() for call in (*ours.values(), *plain.values())]
    for one in said[1:]:
        torch.testing.assert_close(one, said[0], atol=2e-2, rtol=2e-2)


def test_the_last_line_tells_every_figure(capsys: pytest.CaptureFixture[str]) -> None:
    attend.main(lengths="70", formats="affine8", heads=2, dim=32, batch=3, repeats=2)
    said = capsys.readouterr()
    told = json.loads(said.out.splitlines()[-1])
    assert said.err == "" and told["skipped"] == []
    assert (told["bench"], told["batch"], told["queries"]) == ("attend", 3, 1)
    assert [row["way"] for row in told["rows"]] == [*WAYS, "stream", "raw", "affine8"]
    for row in told["rows"]:
        assert row["rows"] == 70 and row["median_ms"] >= row["best_ms"] > 0
        assert "host_ms" not in row  # on a CPU it is the same


def test_a_way_that_does_not_run_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ways(self: Any, q: Any, keys: Any, values: Any) -> Any:
        return {"torch gqa": torch.add}, ["torch flex: RuntimeError, no"]

    monkeypatch.setattr(CpuDevice, "list_torch_attention", ways)
    attend.main(lengths="70,80", formats="raw", heads=2, dim=32, repeats=1, json=True)
    said = capsys.readouterr()
    lines = [f"{n} rows, torch flex: RuntimeError, no" for n in (70, 80)]
    assert said.err.splitlines() == [f"skipped: {line}" for line in lines]
    assert json.loads(said.out)["skipped"] == lines


@pytest.mark.parametrize(
    ("given_", "why"),
    [
        ({"lengths": "8", "queries": 9}, "as many rows as queries (9)"),
        ({"lengths": "x"}, "whole numbers"),
        ({"device": "gpu"}, "--device gpu: known are cpu, cuda"),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_refused(given_: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        attend.main(**given_)

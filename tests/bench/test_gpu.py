"""Test the GPU check by its rehearsal in Triton's interpreter; nothing here is timed."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attention.kernels import needed
from kvant import Cache, Mask, attend
from kvant.bench import gpu, kernel_check
from kvant.bench.gpu import FULL, REHEARSAL, Report, plan_attention, plan_formats, run_step
from kvant.bench.harness import CPU
from kvant.bench.kernel_check import FORMATS, REFUSED, RIGHT, WRONG, check_format
from kvant.bench.worker import Outcome, Worker, set_environment
from kvant.contracts import View

SHAPE = REHEARSAL.check_shape
ATTENTION = plan_attention(FULL.attention[0], FULL)


@needed
def test_rehearsal_runs_every_step_and_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "gpu.json"
    gpu.main(rehearse=True, output=file, json=True)
    captured = capsys.readouterr()
    report = json.loads(file.read_text())
    assert report == json.loads(captured.out) and captured.err == ""
    assert report["rehearsal"] and report["skipped"] == []
    steps, formats, *tables = report["tables"].values()
    done = ["15 of 15", "3 of 3", "3 of 3", "1 of 1", "2 of 2"]
    assert [step["parts_done"] for step in steps] == done
    assert [row["format"] for row in formats] == FORMATS
    assert {row["format"] for row in formats if row["reason"]} == {
        *("fp8", "fp8/turbo3", "affine6", "affine5", "affine3", "affine2")
    }
    assert {row["verdict"] for row in formats} == {RIGHT, REFUSED}
    for table in tables[:2]:
        backends = {row["backend"] for row in table if not row["way"].startswith(("torch", "str"))}
        assert backends == {"interpreted"}
    # Every gate has its value, except for torch's flash kernel, which needs a GPU.
    without_value = [gate["gate"] for gate in report["rows"] if gate["verdict"] == "open"]
    assert [name.partition(",")[0] for name in without_value] == ["raw / torch flash"] * 2
    assert report["rows"][0]["verdict"] == "passed"


@needed
def test_format_is_wrong_if_attention_loses_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_format("affine8", "interpreted", CPU, SHAPE)["verdict"] == RIGHT

    def lose_a_row(q: Tensor, view: View, *, backend: str) -> Any:
        """Attend as the reference does, but hide the first row from the only query."""
        mask = None if backend == "reference" else Mask(window=view.page_table.num_columns - 1)
        return attend(q, view, backend="reference", mask=mask if q.shape[2] == 1 else None)

    monkeypatch.setattr(kernel_check, "attend", lose_a_row)
    row = check_format("affine8", "interpreted", CPU, SHAPE)
    assert (row["verdict"], row["stored_percent"]) == (WRONG, 0.0)


@needed
def test_format_is_wrong_if_other_rows_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_check, "Cache", lambda layers, spec: Cache(layers, "affine4,tail=3"))
    row = check_format("affine8", "interpreted", CPU, SHAPE)
    assert row["verdict"] == WRONG and row["error_percent"] < 1 < row["stored_percent"]


def make_rows(raw_ms: float, flash_ms: float, speedup: float, share: float) -> list[dict[str, Any]]:
    raw = {"way": "raw", "median_ms": raw_ms, "share": share, "against_raw": 1.0}
    flash = {"way": "torch flash", "median_ms": flash_ms}
    return [flash, raw, *({"way": n, "against_raw": speedup} for n in gpu.MIN_SPEEDUPS)]


@pytest.mark.parametrize(
    ("rows", "verdicts"),
    [
        ([], ["open"] * 5),
        (make_rows(1.0, 1.0, 2.0, 0.8), ["passed"] * 5),
        (make_rows(1.0, 0.99, 1.9, 0.79), ["missed", "missed", "passed", "missed", "missed"]),
        (make_rows(1.0, 0.99, 1.9, 0.79)[1:2], ["missed", *["open"] * 4]),
    ],
    ids=["nothing", "at the floor", "below", "raw alone"],
)
def test_gates_compare_with_their_floors(rows: list[dict[str, Any]], verdicts: list[str]) -> None:
    gates = ATTENTION.judge(rows)
    assert [gate["verdict"] for gate in gates] == verdicts
    assert [gate["floor"] for gate in gates] == [0.8, 1.0, 1.5, 2.0, 2.0]


def test_run_is_passed_only_with_all_gates() -> None:
    steps = [plan_formats(FULL), plan_attention(FULL.attention[0], FULL)]
    report = Report(steps, FULL, 10, {})
    steps[0].rows = [{"verdict": RIGHT}] * 9 + [{"verdict": REFUSED}] * 6
    assert not report.is_passed
    steps[1].rows = make_rows(1.0, 1.0, 2.0, 0.8)
    assert report.is_passed
    steps[0].rows = [{"verdict": RIGHT}] * 8 + [{"verdict": WRONG}]
    assert not report.is_passed


def test_parts_that_cannot_start_in_time_are_listed() -> None:
    step = plan_formats(FULL)
    with Worker({}) as worker:
        run_step(step, worker, time.monotonic() + 1)
    assert len(step.failures) == len(step.parts) and step.rows == []
    assert step.failures[0].startswith("formats, raw: not run: ")
    assert step.failures[0].endswith(", 10 needed")
    assert step.gates[0]["verdict"] == "open"


def test_worker_whose_process_died_between_calls_reports_it() -> None:
    with Worker({}) as worker:
        pid = worker.run(os.getpid, 600).value
        os.kill(pid, signal.SIGKILL)
        worker._process.join()
        outcome = worker.run(os.getpid, 600)
        assert outcome.error == "its process ended with exit code -9"
        assert worker.run(os.getpid, 600).value != pid


def test_worker_survives_calls_that_fail_crash_and_hang() -> None:
    with Worker({}) as worker:
        first = worker.run(os.getpid, 600).value
        assert worker.run(os.getpid, 600) == Outcome(first)
        error = worker.run(partial(int, "x"), 600).error or ""
        assert error.startswith("ValueError: invalid literal")
        ended = worker.run(partial(os._exit, 3), 600)
        assert ended == Outcome(error="its process ended with exit code 3")
        assert worker.run(partial(time.sleep, 600), 0.1) == Outcome(error="stopped after 0 s")
        assert worker.run(os.getpid, 600).value not in (first, None)


def test_worker_gets_an_environment_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVANT_TEST_A", "1")
    with Worker({"KVANT_TEST_A": "2", "KVANT_TEST_B": "3"}) as worker:
        values = [worker.run(partial(os.getenv, f"KVANT_TEST_{n}"), 600).value for n in "AB"]
    assert values == ["2", "3"]
    assert (os.environ["KVANT_TEST_A"], os.environ.get("KVANT_TEST_B")) == ("1", None)
    with set_environment({"KVANT_TEST_B": "4"}):
        assert os.environ["KVANT_TEST_B"] == "4"


@pytest.mark.parametrize(
    ("found", "interpret", "options", "message"),
    [
        (False, "", {}, "finds no GPU here: .* docs/benchmarks/gpu.md .* give --rehearse"),
        (True, "1", {}, "TRITON_INTERPRET is set: unset it"),
        (False, "1", {"rehearse": True, "output": Path("none/gpu.json")}, "existing folder"),
    ],
    ids=["no gpu", "interpreter", "output"],
)
def test_refusals_name_the_way_out(
    found: bool,
    interpret: str,
    options: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gpu, "is_triton_installed", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found)
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    with pytest.raises(ValueError, match=message):
        gpu.main(**options)


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "is_triton_installed", lambda: False)
    with pytest.raises(ValueError, match=r"kvant\[gpu\]"):
        gpu.main(rehearse=True)

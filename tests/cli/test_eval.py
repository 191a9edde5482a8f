"""Test `kvant eval` as installed: tables, JSON object, files and exit codes."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import kvant.eval
from kvant import Shape, plan
from kvant.bench import harness
from kvant.cli.eval import FULL_SAMPLE
from kvant.errors import CapacityError
from kvant.eval.evaluation import Evaluation
from kvant.platform import terminal

FEW = ("--tokens", "700", "--context", "350", "--prompts", "1")
TWO = (*FEW, "--formats", "affine8,affine4")


@pytest.fixture
def fail_at_second(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | None], None]:
    """Let the second format of a run raise an exception; None lets it be measured again."""

    def patch(error: BaseException | None) -> None:
        def measure(self: Evaluation, name: str, spec: Any) -> Any:
            if error is not None and name != "affine8":
                raise error
            return measured(self, name, spec)

        monkeypatch.setattr(Evaluation, "measure_format", measure)

    measured = Evaluation.measure_format
    return patch


def test_json_is_one_object_and_matches_the_files(call: Any, tmp_path: Path) -> None:
    table, results_path = tmp_path / "a.csv", tmp_path / "a.jsonl"
    words = (
        "--formats",
        "affine8,affine4,sinks=4",
        "--csv",
        str(table),
        "--save",
        str(results_path),
    )
    code, out, error = call("eval", *FEW, *words, "--json")
    report = json.loads(out)
    assert (code, error) == (0, "")
    assert (report["model"], report["dtype"], report["tokens"]) == (
        "the model inside",
        "bfloat16",
        700,
    )
    assert [entry["format"] for entry in report["formats"]] == ["affine8", "affine4,sinks=4"]
    assert report["formats"][0]["mean_kl"] < report["formats"][1]["mean_kl"]
    bundled_model = Shape(6, 2, 64, 64)
    assert report["formats"][0]["row_nbytes"] == plan(bundled_model, "affine8").nbytes_per_token
    rows = [*csv.DictReader(table.read_text().splitlines())]
    assert [float(row["mean_kl"]) for row in rows] == [o["mean_kl"] for o in report["formats"]]
    assert rows[1]["format"] == "affine4,sinks=4"
    lines = [json.loads(line) for line in results_path.read_text().splitlines()]
    assert [line.get("format") for line in lines] == [None, "affine8", "affine4,sinks=4"]
    second_report = json.loads(call("eval", *FEW, *words, "--json")[1])
    assert second_report == report


def test_auto_is_evaluated_as_the_spec_it_stands_for(
    call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {"auto:3.25bits": "turbo3,layers=0:affine8", "affine8": "affine8"}
    monkeypatch.setattr("kvant.probing.resolve_auto", lambda model, spec, *_: chosen[spec])
    code, out, _ = call("eval", *FEW, "--formats", "auto:3.25bits,affine8", "--json")
    assert code == 0
    report = json.loads(out)
    assert [entry["format"] for entry in report["formats"]] == [*chosen.values()]
    assert report["auto"] == {"auto:3.25bits": "turbo3,layers=0:affine8"}


def test_full_disk_is_one_error_line_with_the_file(call: Any) -> None:
    code, _, error = call("eval", *FEW, "--formats", "affine8", "--csv", "/dev/full")
    assert code == 1
    assert error.splitlines()[-1].endswith("No space left on device: '/dev/full'")


def test_rows_and_tables_are_printed(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "monotonic", lambda: 0.0)  # a slow machine prints progress
    text = tmp_path / "text.py"
    text.write_text("import os\n\n\ndef listed(path):\n    return os.listdir(path)\n" * 60)
    code, out, error = call("eval", *FEW, "--formats", "raw,affine4", "--text", str(text))
    title, headings, *rows = out.splitlines()
    assert (code, error) == (0, "")
    assert title.startswith("the model inside, bfloat16; raw: perplexity ")
    assert "over 698 tokens, needle " in title and title.endswith("; of raw: at 2,048 tokens")
    words = "format of raw perplexity 95% mean KL top-1 recall tokens/s"
    assert headings.split() == words.split()
    assert rows[0].split()[:7] == ["raw", "1.00", "+0.00%", "+0.00%", "+0.00%", "0", "100.0%"]
    names = ["raw", "affine4"]
    assert [row.split()[0] for row in rows] == [*names, "format", *names, "format", *names]
    assert rows[2].split()[:4] == ["format", "mean", "KL,", "95%"]
    assert rows[3].split()[1:5] == ["0", "0", "0", "64.0"]
    assert rows[7].split()[1:3] == ["960", "0.31"]
    share = plan(Shape(6, 2, 64, 64), "affine4", context=2048).nbytes
    share /= plan(Shape(6, 2, 64, 64), "raw", context=2048).nbytes
    assert rows[1].split()[1] == rows[7].split()[5] == f"{share:.2f}"
    assert max(map(len, rows)) < 80
    assert "\x1b" not in out


def test_row_is_printed_before_the_next_format_is_measured(
    call: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, printed = Evaluation.measure_format, list[str]()

    def measure(self: Evaluation, name: str, spec: Any) -> Any:
        printed.append(capsys.readouterr().out)
        return measured(self, name, spec)

    monkeypatch.setattr(Evaluation, "measure_format", measure)
    code, out, _ = call("eval", *TWO)
    assert code == 0 and printed[0] == ""
    assert [line.split()[0] for line in printed[1].splitlines()[1:]] == ["format", "affine8"]
    assert out.splitlines()[0].split()[0] == "affine4"


def test_interrupt_leaves_the_finished_formats(
    call: Any, tmp_path: Path, fail_at_second: Any
) -> None:
    table, saved = tmp_path / "a.csv", tmp_path / "a.jsonl"
    words = ("eval", *TWO, "--csv", str(table), "--save", str(saved))
    fail_at_second(KeyboardInterrupt())
    code, out, error = call(*words)
    assert code == 130
    assert error.splitlines()[-1] == (
        f"interrupted: 1 of 2 formats measured; the same command goes on from {saved}"
    )
    first_words = [line.split()[0] for line in out.splitlines()[1:]]
    assert first_words == ["format", "affine8"] * 3
    (row,) = csv.DictReader(table.read_text().splitlines())
    assert row["format"] == "affine8"
    code, report, error = call("eval", *TWO, "--json")
    assert code == 130 and error == "interrupted: 1 of 2 formats measured\n"
    assert [entry["format"] for entry in json.loads(report)["formats"]] == ["affine8"]
    fail_at_second(None)
    code, resumed, _ = call(*words)
    assert code == 0 and resumed.splitlines()[:3] == out.splitlines()[:3]  # measured once
    assert resumed.splitlines()[3].split()[0] == "affine4"
    assert len(table.read_text().splitlines()) == 3


def test_interrupt_before_the_first_format_writes_no_file(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Evaluation, "measure_format", interrupt)
    table = tmp_path / "a.csv"
    code, out, error = call("eval", *TWO, "--csv", str(table))
    assert (code, out, error) == (130, "", "interrupted: 0 of 2 formats measured\n")
    assert not table.exists()


def test_failed_format_leaves_the_finished_ones(call: Any, fail_at_second: Any) -> None:
    fail_at_second(CapacityError("too long"))
    code, out, error = call("eval", *TWO)
    assert (code, out.count("affine8")) == (2, 3)
    assert error.splitlines()[-2:] == ["stopped: 1 of 2 formats measured", "error: too long"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), (16384, 2048, 8, 64)),
        (("--quick",), (2048, 1024, 2, 32)),
        (("--quick", "--tokens", "4096", "--prompts", "3"), (4096, 1024, 3, 32)),
    ],
)
def test_quick_measures_less_and_explicit_options_win(
    words: Any, expected: Any, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[kvant.eval.EvaluationSettings] = []

    def evaluate(*_: Any, settings: kvant.eval.EvaluationSettings, **__: Any) -> None:
        received.append(settings)
        raise ValueError("enough")

    monkeypatch.setattr("kvant.eval.evaluate", evaluate)
    assert call("eval", *words)[0] == 2
    assert tuple(asdict(received[0]).values())[:4] == expected


def test_help_names_the_defaults_of_evaluate() -> None:
    assert kvant.eval.EvaluationSettings(**FULL_SAMPLE._asdict()) == kvant.eval.EvaluationSettings()


def test_quick_results_are_named_with_their_interval(call: Any) -> None:
    code, out, _ = call("eval", "--quick", *FEW, "--formats", "affine4")
    first, *_, last = out.splitlines()
    assert code == 0 and first.startswith("the model inside, bfloat16, quick; raw: ")
    assert "  same of 32  " in out
    assert re.fullmatch(
        r"quick: perplexity changes are known to within \d\.\d\d% \(95%\), and recall is of 8 "
        r"answers; leave out --quick to narrow both",
        last,
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--formats", "affine9"), "nearest: affine8"),
        (("--formats", ""), "format"),
        (("--tokens", "1"), "--tokens"),
        (("--tokens", "40"), "too short to plant 8 items in"),
        (("--text", "nowhere.txt"), "--text nowhere.txt cannot be read: No such file"),
        (("--model", "./nowhere"), "no such folder"),
        (("--save", "nowhere/a.jsonl"), "--save nowhere/a.jsonl: the name of a file"),
        (("--csv", "nowhere/a.csv"), "--csv nowhere/a.csv: the name of a file"),
        (("--plot", "a.png"), "needs matplotlib"),
    ],
    ids=str,
)
def test_user_error_is_one_line_and_exit_code_2(
    words: Any, message: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness, "find_spec", lambda name: None)
    code, out, error = call("eval", *words)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ") and message in error


def test_results_of_other_settings_are_refused(call: Any, tmp_path: Path) -> None:
    results_path = tmp_path / "a.jsonl"
    results_path.write_text(json.dumps({"eval": "0.0.0"}) + "\n")
    code, _, error = call("eval", *FEW, "--save", str(results_path))
    assert (code, error.count("\n")) == (2, 1)
    assert "holds results with eval 0.0.0" in error and "save to another file" in error

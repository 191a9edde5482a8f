"""Test `kvant eval` as installed: tables, JSON object, files and exit codes."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from kvant import Shape, plan
from kvant.bench import harness
from kvant.platform import terminal

FEW = ("--tokens", "700", "--context", "350", "--prompts", "1")


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


def test_three_tables_are_printed(
    call: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "monotonic", lambda: 0.0)  # a slow machine prints progress
    text = tmp_path / "text.py"
    text.write_text("import os\n\n\ndef listed(path):\n    return os.listdir(path)\n" * 60)
    code, out, error = call("eval", *FEW, "--formats", "raw,affine4", "--text", str(text))
    title, quality, *rows = out.splitlines()
    assert (code, error) == (0, "")
    assert title.startswith("the model inside, bfloat16; raw: perplexity ")
    assert title.endswith("%") and "over 698 tokens" in title
    assert quality.split()[:3] == ["format", "perplexity", "95%"]
    assert rows[0].split()[:5] == ["raw", "+0.00%", "+0.00%", "+0.00%", "0"]
    names = ["raw", "affine4"]
    assert [row.split()[0] for row in rows] == [*names, "format", *names, "format", *names]
    assert rows[3].split()[1:3] == ["100.0%", "64.0"]
    assert rows[7].split()[1:3] == ["960", "0.312"]
    assert max(map(len, out.splitlines()[1:])) < 80
    assert "\x1b" not in out


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

"""`kvant eval`, as it is installed: its tables, its one object, its files, and how it ends."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from kvant import Shape, plan
from kvant.bench import report

FEW = ("--tokens", "700", "--context", "350", "--prompts", "1")


def test_json_is_one_object_and_the_files_say_the_same(call: Any, tmp_path: Path) -> None:
    table, kept = tmp_path / "a.csv", tmp_path / "a.jsonl"
    words = ("--formats", "affine8,affine4,sinks=4", "--csv", str(table), "--save", str(kept))
    code, out, error = call("eval", *FEW, *words, "--json")
    told = json.loads(out)
    assert (code, error) == (0, "")
    assert (told["model"], told["dtype"], told["tokens"]) == ("the model inside", "bfloat16", 700)
    assert [one["format"] for one in told["formats"]] == ["affine8", "affine4,sinks=4"]
    assert told["formats"][0]["mean_kl"] < told["formats"][1]["mean_kl"]
    inside = Shape(6, 2, 64, 64)
    assert told["formats"][0]["row_nbytes"] == plan(inside, "affine8").nbytes_per_token
    rows = [*csv.DictReader(table.read_text().splitlines())]
    assert [float(row["mean_kl"]) for row in rows] == [o["mean_kl"] for o in told["formats"]]
    assert rows[1]["format"] == "affine4,sinks=4"
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [line.get("format") for line in lines] == [None, "affine8", "affine4,sinks=4"]
    again = json.loads(call("eval", *FEW, *words, "--json")[1])
    assert again == told


def test_a_full_disk_is_one_line_that_names_the_file(call: Any) -> None:
    code, _, error = call("eval", *FEW, "--formats", "affine8", "--csv", "/dev/full")
    assert code == 1
    assert error.splitlines()[-1].endswith("No space left on device: '/dev/full'")


def test_three_tables(call: Any, tmp_path: Path) -> None:
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
    ("words", "told"),
    [
        (("--formats", "affine9"), "nearest: affine8"),
        (("--formats", ""), "format"),
        (("--tokens", "1"), "--tokens"),
        (("--tokens", "40"), "too short to plant 8 things in"),
        (("--text", "nowhere.txt"), "--text nowhere.txt cannot be read: No such file"),
        (("--model", "./nowhere"), "there is no such folder"),
        (("--save", "nowhere/a.jsonl"), "--save nowhere/a.jsonl: the name of a file"),
        (("--csv", "nowhere/a.csv"), "--csv nowhere/a.csv: the name of a file"),
        (("--plot", "a.png"), "needs matplotlib"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: Any, told: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "find_spec", lambda name: None)
    code, out, error = call("eval", *words)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ") and told in error


def test_results_of_other_settings_are_refused(call: Any, tmp_path: Path) -> None:
    kept = tmp_path / "a.jsonl"
    kept.write_text(json.dumps({"eval": "0.0.0"}) + "\n")
    code, _, error = call("eval", *FEW, "--save", str(kept))
    assert (code, error.count("\n")) == (2, 1)
    assert "holds results with eval 0.0.0" in error and "save to another file" in error

"""`kvant run`, as it is installed: what it prints, where, and how it ends."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvant.cli.main import main


def called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    monkeypatch.setattr(sys, "argv", ["kvant", *words])
    with pytest.raises(SystemExit) as end:
        main()
    out, error = capsys.readouterr()
    return int(end.value.code or 0), out, error


def test_it_continues_a_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("run", "--prompt", "import os\n", "--max-new-tokens", "6", "--kv-cache", "affine4")
    code, out, error = called(monkeypatch, capsys, *words)
    assert (code, error) == (0, "")
    assert out.startswith("import os\n") and len(out) > len("import os\n") + 1


def test_json_is_one_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("run", "--prompt", "def f", "--max-new-tokens", "4", "--json", "--seed", "1")
    code, out, _ = called(monkeypatch, capsys, *words)
    told = json.loads(out)
    assert (code, told["prompt"], told["tokens"]) == (0, "def f", 4)
    assert told["finish_reason"] == "length"
    assert told["cache"]["materialized"] == 0


def test_statistics_go_to_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "prompt.py"
    file.write_text("class A:\n")
    words = ("run", "--file", str(file), "--max-new-tokens", "3", "--stats")
    code, out, error = called(monkeypatch, capsys, *words)
    assert (code, out[:9]) == (0, "class A:\n")
    assert error.startswith("3 tokens") and "raw: " in error


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--kv-cache", "affine9"), "nearest: affine8"),
        (("--kv-cache", "raw,window=-3"), "window"),
        (("--prompt", ""), "the prompt is empty"),
        (("--file", "nowhere.txt"), "nowhere.txt cannot be read"),
        (("--file", "a", "--prompt", "b"), "give one of them"),
        (("--model", "./nowhere"), "there is no such folder"),
        (("--model", "."), "cannot be loaded"),
        (("--prompt", "word " * 3000), "for a context of 2048"),
        (("--top-p", "7"), "top_p=7"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: tuple[str, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, error = called(monkeypatch, capsys, "run", *words)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert error.startswith("error: ") and told in error

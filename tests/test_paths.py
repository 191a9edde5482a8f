"""Test checks of paths, and JSON objects that any reader accepts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvant.cli import print_json
from kvant.platform.paths import check_writable, expand_path
from kvant.platform.terminal import make_printable


def test_unwritable_files_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writable(tmp_path / "new", "--out")
    check_writable(None, "--out")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=f"--out .*: {tmp_path} cannot be written"):
        check_writable(tmp_path / "new", "--out")


def test_replaced_files_need_their_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.kv"
    file.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: path != file)
    check_writable(file, "--save", is_replaced=True)
    with pytest.raises(ValueError, match="cannot be written"):
        check_writable(file, "--out")
    with pytest.raises(ValueError, match="--save /dev/null: the name of a regular file is needed"):
        check_writable(Path("/dev/null"), "--save", is_replaced=True)


def test_printed_text_of_files_keeps_letters_and_tabs() -> None:
    text = "\ta\u00a0b\u3000\u200d\u00e9"
    assert make_printable(text) == text
    assert make_printable("\x1b[2J\n\u202e\ud800") == "?[2J???"


def test_home_folders_are_expanded() -> None:
    assert expand_path("~/a") == Path.home() / "a"
    with pytest.raises(ValueError, match="~nosuchuser/a: there is no such home folder"):
        expand_path("~nosuchuser/a")


def test_infinities_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"kl": float("inf"), "rows": [(1.5, float("nan"))], "text": "a"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"kl": None, "rows": [[1.5, None]], "text": "a"}

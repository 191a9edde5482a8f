"""Test checks of paths, and JSON objects that any reader accepts."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvant.cli import print_json
from kvant.platform.paths import check_writable, expand_path


def test_unwritable_files_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_writable(tmp_path / "new", "--out")
    check_writable(None, "--out")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ValueError, match=f"--out .*: {tmp_path} cannot be written"):
        check_writable(tmp_path / "new", "--out")


def test_home_folders_are_expanded() -> None:
    assert expand_path("~/a") == Path.home() / "a"
    with pytest.raises(ValueError, match="~nosuchuser/a: there is no such home folder"):
        expand_path("~nosuchuser/a")


def test_infinities_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"kl": float("inf"), "rows": [(1.5, float("nan"))], "text": "a"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"kl": None, "rows": [[1.5, None]], "text": "a"}

"""The installed command, run in this process."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from kvant.cli.main import main

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def fast_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make no dtype slow, so that standard error is equal on every processor."""
    monkeypatch.setattr("kvant.platform.devices.is_slow", lambda dtype, device: False)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Run `call("run", "--stats")` and return exit code, standard output, standard error."""

    def run_command(*words: str, typed: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvant", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as end:
            main()
        out, error = capsys.readouterr()
        return int(end.value.code or 0), out, error

    return run_command

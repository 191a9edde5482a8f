"""Test help texts: option names are never cut, even in narrow terminals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from kvant.cli.main import app


def list_commands(group: Any, *before: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Return each command with its words; benchmarks have their own tests."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from list_commands(command, *before, name)
        else:
            yield (*before, name), command


COMMANDS = dict(list_commands(typer.main.get_command(app)))


@pytest.mark.parametrize("columns", ["80", "60"])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_is_spelled_out(
    words: tuple[str, ...], columns: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = call(*words, "-h")
    assert code == 0
    named = {name.rstrip(",") for line in out.splitlines() for name in line.split()}
    options = [
        param
        for param in COMMANDS[words].params
        if param.name != "help" and param.opts[0][0] == "-"
    ]
    assert options
    assert {name for param in options for name in (*param.opts, *param.secondary_opts)} <= named


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_every_command_has_a_one_line_description(word: str, call: Any) -> None:
    out = call(word)[1]
    assert "..." not in out.partition("Commands:")[2]

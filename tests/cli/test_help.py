"""Help: no name of an option is cut, however narrow the terminal is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from kvant.cli.main import app


def commands(group: Any, *before: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words of each command, and the command; benchmarks have tests of their own."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *before, name)
        else:
            yield (*before, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("columns", ["80", "60"])
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_option_is_named_whole(
    words: tuple[str, ...], columns: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, out, _ = call(*words, "-h")
    assert code == 0
    named = {name.rstrip(",") for line in out.splitlines() for name in line.split()}
    options = [
        one for one in COMMANDS[words].params if one.name != "help" and one.opts[0][0] == "-"
    ]
    assert options
    assert {name for one in options for name in (*one.opts, *one.secondary_opts)} <= named


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_every_command_is_described_in_a_line(word: str, call: Any) -> None:
    out = call(word)[1]
    assert "..." not in out.partition("Commands:")[2]

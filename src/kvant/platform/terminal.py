"""What commands print: tables, progress and errors, with the exit codes of `kvant`.

A progress is a bar on a terminal, and a line every few seconds elsewhere.

Wrong options or files print one line on standard error and exit with 2. Errors of the system print
one line and exit with 1. Ctrl-C exits with 130. A bug in kvant keeps its traceback. The commands
`python -m kvant.bench.NAME` have the same codes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import NoReturn

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from typer.exceptions import TyperException

from kvant.errors import CacheError

INTERRUPTED_CODE = 130
PIPE_WIDTH = 160  # columns of a table in a pipe, where no terminal limits the width
LINE_INTERVAL_S = 10  # short work prints no line
RESUME_S = 0.5  # work reported as done within this time was done before


def make_table(*, stderr: bool = False) -> tuple[Console, Table]:
    """Return a console that prints text without markup, and an empty table."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console, Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)


class ProgressBar:
    """Show the share of work done and the time left; remove the bar at the end."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        hidden = quiet or not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=hidden)
        self._task = self._bar.add_task(title)
        self._title, self._prints_lines = title, hidden and not quiet
        self._resumed_from = 0  # work done by an earlier run
        self._start = self._last_line = monotonic()

    def __enter__(self) -> ProgressBar:
        self._start = self._last_line = monotonic()
        self._bar.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._bar.stop()

    @contextmanager
    def hide(self) -> Iterator[None]:
        """Remove the bar while lines are printed, which would otherwise be redirected."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def update(self, done: int, total: int) -> None:
        now = monotonic()
        if now - self._start < RESUME_S:
            self._resumed_from = done
        self._bar.update(self._task, completed=done, total=total)
        if self._prints_lines and now - self._last_line >= LINE_INTERVAL_S:
            self._last_line = now
            line = f"{self._title}: {done} of {total}"
            if done > self._resumed_from:
                seconds = (now - self._start) * (total - done) / (done - self._resumed_from)
                line += f", about {format_duration(seconds)} left"
            print(line, file=sys.stderr, flush=True)


# Except tabs: C0 and C1 controls, line separators, bidirectional controls, lone surrogates.
CONTROL_PATTERN = re.compile(
    "[\\x00-\\x08\\x0a-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)


def make_printable(text: str) -> str:
    """Replace control characters of text that anybody may have written, such as a file's."""
    return CONTROL_PATTERN.sub("?", text)


def format_duration(seconds: float) -> str:
    """Format seconds: "42 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def run_app(app: typer.Typer) -> NoReturn:
    """Run a command and exit with its code."""
    with handle_errors():
        code = app(standalone_mode=False)
        if code == INTERRUPTED_CODE:  # Typer turns Ctrl-C into this code
            raise KeyboardInterrupt
        raise SystemExit(code)


@contextmanager
def handle_errors() -> Iterator[None]:
    """Turn exceptions into exit codes."""
    try:
        yield
    except TyperException as error:
        _exit_with_error(_format_usage_error(error), error.exit_code)
    except (CacheError, ValueError) as error:
        _exit_with_error(str(error) or type(error).__name__, 2)
    except (OSError, MemoryError) as error:
        _exit_with_error(str(error), 1)
    except (KeyboardInterrupt, typer.Abort):
        print("\ninterrupted", file=sys.stderr)
        raise SystemExit(INTERRUPTED_CODE) from None


def _format_usage_error(error: TyperException) -> str:
    """Return the message of a wrong command line, with the value that an option refuses."""
    from pydantic import ValidationError  # slow to import

    message = str(error.format_message())
    if not isinstance(error.__cause__, ValidationError):
        return message
    return f"{message}, not {error.__cause__.errors()[0]['input']!r}"


def print_error(message: str) -> None:
    """Print the first line of a message; none if the command showed its help."""
    for line in message.strip().splitlines()[:1]:
        print(f"error: {line}", file=sys.stderr)


def _exit_with_error(message: str, code: int) -> NoReturn:
    print_error(message)
    raise SystemExit(code) from None

"""A bar on a terminal while long work is done; in a pipe nothing, or a line for each tenth."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class Bar:
    """How much is done, on standard error; it is gone when there is something to say."""

    def __init__(self, what: str, *, quiet: bool = False, lines: bool = False) -> None:
        """`lines` are for a log of work that takes minutes, where nobody sees the bar."""
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn())
        console = Console(stderr=True)
        hidden = quiet or not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=hidden)
        self._task = self._bar.add_task(what)
        self._what, self._lines = what, lines and not (quiet or console.is_terminal)
        self._tenths = 0

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)
        if self._lines and (tenths := 10 * done // max(total, 1)) > self._tenths:
            self._tenths = tenths
            print(f"{self._what}: {done} of {total}", file=sys.stderr, flush=True)

"""Progress of long work on standard error: a bar on a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_SECONDS = 10  # between two lines: short work prints none
AT_ONCE = 0.5  # seconds: what is shown as done so soon was done before


class ProgressBar:
    """How much is done, and how long the rest takes; a bar is removed at its end."""

    def __init__(self, title: str, *, quiet: bool = False) -> None:
        console = Console(stderr=True)
        columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        hidden = quiet or not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=hidden)
        self._task = self._bar.add_task(title)
        self._title, self._prints_lines = title, hidden and not quiet
        self._before = 0  # what was done before the work began
        self._begun = self._last_line = monotonic()

    def __enter__(self) -> ProgressBar:
        self._begun = self._last_line = monotonic()
        self._bar.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._bar.stop()

    def update(self, done: int, total: int) -> None:
        now = monotonic()
        if now - self._begun < AT_ONCE:
            self._before = done
        self._bar.update(self._task, completed=done, total=total)
        if self._prints_lines and now - self._last_line >= LINE_SECONDS:
            self._last_line = now
            line = f"{self._title}: {done} of {total}"
            if done > self._before:
                left = (now - self._begun) * (total - done) / (done - self._before)
                line += f", about {duration(left)} left"
            print(line, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Write seconds for people: 42 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"

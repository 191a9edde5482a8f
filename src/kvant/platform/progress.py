"""Progress on standard error: a bar on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import sys
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_INTERVAL_S = 10  # short work prints no line
RESUME_S = 0.5  # work reported as done within this time was done before


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


def format_duration(seconds: float) -> str:
    """Format seconds: "42 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"

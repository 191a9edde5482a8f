"""A bar on a terminal while long work is done; nothing in a pipe."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


class Bar:
    """How much is done, on standard error; it is gone when there is something to say."""

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        columns = (TextColumn(what), BarColumn(), MofNCompleteColumn())
        console = Console(stderr=True)
        hidden = quiet or not console.is_terminal
        self._bar = Progress(*columns, console=console, transient=True, disable=hidden)
        self._task = self._bar.add_task(what)

    def __enter__(self) -> Bar:
        self._bar.start()
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._bar.stop()

    def show(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

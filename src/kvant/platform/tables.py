"""Tables that commands print."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

PIPE_WIDTH = 160  # columns of a table in a pipe, where no terminal limits the width


def make_table(*, stderr: bool = False) -> tuple[Console, Table]:
    """Return a console that prints text without markup, and an empty table."""
    console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console, Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)

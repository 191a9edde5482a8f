"""The `kvant` command line. This module prints the notes, lines and tables of all commands."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Container, Iterable, Mapping
from typing import Any, Literal

from kvant.platform.terminal import make_table


def print_note(line: str) -> None:
    """Print a line to standard error: standard output is for generated text."""
    print(line, file=sys.stderr)


def print_json(report: Mapping[str, Any]) -> None:
    """Print a JSON object in one line; infinities and NaN, which JSON lacks, are null."""
    print(json.dumps(_replace_nonfinite(report), allow_nan=False), flush=True)


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _replace_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_line(line: str) -> None:
    """Print a line between tables; only a terminal wraps it."""
    make_table()[0].print(line, soft_wrap=True)


class StreamedTable:
    """A table whose rows are printed one by one: the width of each column is known before.

    The first column is aligned to the left, as is text after the last column.
    """

    def __init__(self, widths: Mapping[str, int]) -> None:
        self._widths = [max(width, len(heading)) for heading, width in widths.items()]
        self.headings = (*widths,)

    def print_row(self, cells: Iterable[str]) -> None:
        first, *others = cells
        widths, more = self._widths[1:], others[len(self._widths) - 1 :]
        padded = [first.ljust(self._widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(others, widths, strict=False)]
        print_line("  ".join([*padded, *more]))


def print_table(
    headings: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    wrapped: Container[str] = (),
    stderr: bool = False,
) -> None:
    """Print a table; only the cells of `wrapped` columns may take several lines.

    A heading that begins with > is of a column of numbers, which is aligned to the right.
    """
    console, table = make_table(stderr=stderr)
    for heading in headings:
        name = heading.removeprefix(">")
        alignment: Literal["left", "right"] = "left" if name == heading else "right"
        table.add_column(name, justify=alignment, no_wrap=name not in wrapped)
    for row in rows:
        table.add_row(*row)
    console.print(table)

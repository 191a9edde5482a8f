"""`python -m kvant.bench.markdown FILE`: print a benchmark's JSON as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvant.bench.decode import make_latency_rows
from kvant.bench.report import format_figure, run


def format_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format `rows`, which all have the keys of the first."""
    header = [rows[0].keys(), ["---"] * len(rows[0])]
    cells = [[format_figure(value) for value in row.values()] for row in rows]
    return "\n".join(map(_format_line, [*header, *cells]))


def _format_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(file: Annotated[Path, typer.Argument(help="Output of --json")]) -> None:
    """Print the tables of a benchmark in Markdown."""
    results = json.loads(file.read_text(encoding="utf-8"))
    print(format_markdown(results["rows"]))
    if "latency" in results:
        print("\n" + format_markdown(make_latency_rows(results["latency"])))


if __name__ == "__main__":
    run(main)

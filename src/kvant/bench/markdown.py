"""`python -m kvant.bench.markdown FILE`: the tables of a benchmark's JSON, for a page of docs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvant.bench.report import format_figure, run
from kvant.bench.speed import make_latency_curves


def format_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """`rows`, which all have the names of the first."""
    ruled = [rows[0].keys(), ["---"] * len(rows[0])]
    return "\n".join(
        map(_format_line, [*ruled, *([format_figure(v) for v in row.values()] for row in rows)])
    )


def _format_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(file: Annotated[Path, typer.Argument(help="what --json printed")]) -> None:
    """Print tables in Markdown."""
    told = json.loads(file.read_text(encoding="utf-8"))
    print(format_markdown(told["rows"]))
    if "latency" in told:
        found = make_latency_curves(told["latency"])
        print(
            "\n"
            + format_markdown(
                [{"cache": n, **{str(k): v for k, v in c.items()}} for n, c in found.items()]
            )
        )


if __name__ == "__main__":
    run(main)

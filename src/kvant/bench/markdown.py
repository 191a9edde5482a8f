"""`python -m kvant.bench.markdown FILE`: print a benchmark's JSON as Markdown tables."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from kvant.bench.decode import make_latency_rows
from kvant.bench.harness import format_figure, run


def format_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format `rows`, which all have the keys of the first."""
    lines = [rows[0].keys(), ["---"] * len(rows[0])]
    lines += [[format_figure(value) for value in row.values()] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(file: Annotated[Path, typer.Argument(help="Output of --json")]) -> None:
    """Print the tables of a benchmark in Markdown."""
    results = json.loads(file.read_text(encoding="utf-8"))
    print(format_markdown(results["rows"]))
    if "latency" in results:
        print("\n" + format_markdown(make_latency_rows(results["latency"])))
    for title, rows in results.get("tables", {}).items():
        print(f"\n{title}:\n\n{format_markdown(rows)}")


if __name__ == "__main__":
    run(main)

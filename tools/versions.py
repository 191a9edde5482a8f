"""Compare a benchmark of two checkouts, which run it in turn.

`python tools/versions.py OLD attend --lengths 8192` runs `kvant.bench.attend` with these options in
OLD, the root of another checkout, and in this one, for several rounds; each checkout runs first in
every second round. Each runs in the environment that its `make env` makes, with its own kernels. A
figure is the median over the rounds of a round's ratio: above 1, this checkout is slower. With
`--over stream` figures are relative to the method `stream` with as many rows in the same run, which
cancels changes in the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from kvant.bench.harness import print_report, show_progress
from pages import ROOT

KEY_COLUMNS = ("rows", "length", "sequences", "beams", "cache", "way", "growth", "backend")


def run_bench(
    checkout: Path, bench: str, options: list[str], column: str, base_way: str | None
) -> dict[str, float]:
    """Run a benchmark in a checkout's environment; return the figure of each row by its keys."""
    python = checkout / ".venv" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"error: {python} is missing: run `make env` in {checkout}")
    command = [str(python), "-m", f"kvant.bench.{bench}", *options, "--json"]
    process = subprocess.run(command, capture_output=True, text=True, cwd=checkout, check=False)
    if process.returncode:
        raise SystemExit(f"error: {' '.join(command[1:])} in {checkout}:\n{process.stderr}")
    rows: list[dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])["rows"]
    base = {row.get("rows"): row[column] for row in rows if base_way and row["way"] == base_way}
    figures: dict[str, float] = {}
    for row in rows:
        name = " ".join(str(row[key]) for key in row if key in KEY_COLUMNS)
        while name in figures:  # a baseline has a row for each format
            name += " again"
        if row[column] is not None:
            figures[name] = row[column] / base.get(row.get("rows"), 1.0)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", default="median_ms")
    parser.add_argument("--over", metavar="WAY")
    arguments, options = parser.parse_known_args()
    checkouts = {"old": arguments.old.resolve(), "new": ROOT}
    rounds: list[dict[str, dict[str, float]]] = []
    for turn in range(arguments.rounds):
        show_progress(f"round {turn + 1} of {arguments.rounds}")
        names = ("old", "new") if turn % 2 == 0 else ("new", "old")  # neither always runs second
        rounds.append(
            {
                name: run_bench(
                    checkouts[name], arguments.bench, options, arguments.figure, arguments.over
                )
                for name in names
            }
        )
    show_progress("")
    rows = [
        {
            "row": name,
            "old": statistics.median(pair["old"][name] for pair in rounds),
            "new": statistics.median(pair["new"][name] for pair in rounds),
            "new / old": statistics.median(
                pair["new"][name] / pair["old"][name] for pair in rounds
            ),
        }
        for name in rounds[0]["old"]
        if all(name in figures for pair in rounds for figures in pair.values())
    ]
    facts = {"figure": arguments.figure, "over": arguments.over, "rounds": arguments.rounds}
    facts["options"] = options
    print_report(f"{arguments.bench}, two versions", rows, facts, quiet=False)


if __name__ == "__main__":
    main()

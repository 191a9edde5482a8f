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

from kvant.bench.report import print_report, show_progress

THIS_CHECKOUT = Path(__file__).resolve().parent.parent


def find_python(checkout: Path) -> Path:
    """Return the Python of a checkout's environment, which imports that checkout's kvant."""
    python = checkout / ".venv" / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"error: {python} is missing: run `make env` in {checkout}")
    return python


def run_bench(
    checkout: Path, bench: str, options: list[str], column: str, base_way: str | None
) -> dict[str, float]:
    """Run a benchmark; return the figure of each row by its key columns."""
    command = [str(find_python(checkout)), "-m", f"kvant.bench.{bench}", *options, "--json"]
    process = subprocess.run(command, capture_output=True, text=True, cwd=checkout, check=False)
    if process.returncode:
        raise SystemExit(f"error: {' '.join(command[1:])} in {checkout}:\n{process.stderr}")
    rows: list[dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])["rows"]
    figures: dict[str, float] = {}
    base = {
        row.get("rows"): row[column]
        for row in rows
        if base_way is not None and row["way"] == base_way
    }
    for row in rows:
        key = [str(row[name]) for name in row if name in KEY_COLUMNS]
        name = " ".join(key)
        while name in figures:  # a baseline has a row for each format
            name += " again"
        if row[column] is not None:
            figures[name] = row[column] / base.get(row.get("rows"), 1.0)
    return figures


KEY_COLUMNS = ("rows", "length", "sequences", "beams", "cache", "way", "growth", "backend")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", default="median_ms")
    parser.add_argument("--over", metavar="WAY")
    arguments, options = parser.parse_known_args()
    old = arguments.old.resolve()
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    for turn in range(arguments.rounds):
        show_progress(f"round {turn + 1} of {arguments.rounds}")
        # Neither checkout always runs second.
        order = (old, THIS_CHECKOUT) if turn % 2 == 0 else (THIS_CHECKOUT, old)
        figures = {
            checkout: run_bench(
                checkout, arguments.bench, options, arguments.figure, arguments.over
            )
            for checkout in order
        }
        rounds.append((figures[old], figures[THIS_CHECKOUT]))
    show_progress("")
    rows = [
        {
            "row": name,
            "old": statistics.median(old[name] for old, _ in rounds),
            "new": statistics.median(new[name] for _, new in rounds),
            "new / old": statistics.median(new[name] / old[name] for old, new in rounds),
        }
        for name in rounds[0][0]
        if all(name in side for pair in rounds for side in pair)
    ]
    facts = {"figure": arguments.figure, "over": arguments.over, "rounds": arguments.rounds}
    facts["options"] = options
    print_report(f"{arguments.bench}, two versions", rows, facts, quiet=False)


if __name__ == "__main__":
    main()

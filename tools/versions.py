"""Compares a benchmark of two checkouts, which run it in turn: what is slower than it was?

`python tools/versions.py OLD attend --lengths 8192` runs `kvant.bench.attend` with these options in
OLD, the root of another checkout, and here, several rounds, each first in turn. Each runs in the
environment that `make env` makes in it, so with its own kernels. A figure is the median over the
rounds of the ratio of one round: above 1, this checkout takes longer. With `--over stream` it is
taken over that of the way `stream` beside as many rows in the same run: so it does not tell that
the machine was slower while one of them ran.
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
    """What runs the code of a checkout: any other would import what it has installed itself."""
    found = checkout / ".venv" / "bin" / "python"
    if not found.exists():
        raise SystemExit(f"error: {found} is missing: run `make env` in {checkout}")
    return found


def run_bench(
    checkout: Path, bench: str, options: list[str], column: str, base_way: str | None
) -> dict[str, float]:
    """The figure of every row, by what else is the same of it in both checkouts."""
    run = [str(find_python(checkout)), "-m", f"kvant.bench.{bench}", *options, "--json"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=checkout, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(run[1:])} in {checkout}:\n{done.stderr}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["rows"]
    found: dict[str, float] = {}
    base = {
        row.get("rows"): row[column]
        for row in rows
        if base_way is not None and row["way"] == base_way
    }
    for row in rows:
        words = [str(row[name]) for name in row if name in KEY_COLUMNS]
        name = " ".join(words)
        while name in found:  # as a baseline that is there once for each format
            name += " again"
        if row[column] is not None:
            found[name] = row[column] / base.get(row.get("rows"), 1.0)
    return found


KEY_COLUMNS = ("rows", "length", "sequences", "beams", "cache", "way", "growth", "backend")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figure", default="median_ms")
    parser.add_argument("--over", metavar="WAY")
    given, options = parser.parse_known_args()
    old = given.old.resolve()
    rounds: list[tuple[dict[str, float], dict[str, float]]] = []
    for turn in range(given.rounds):
        show_progress(f"round {turn + 1} of {given.rounds}")
        order = (
            (old, THIS_CHECKOUT) if turn % 2 == 0 else (THIS_CHECKOUT, old)
        )  # neither always comes second
        found = {c: run_bench(c, given.bench, options, given.figure, given.over) for c in order}
        rounds.append((found[old], found[THIS_CHECKOUT]))
    show_progress("")
    rows = [
        {
            "row": name,
            "old": statistics.median(old[name] for old, _ in rounds),
            "new": statistics.median(new[name] for _, new in rounds),
            "new / old": statistics.median(new[name] / old[name] for old, new in rounds),
        }
        for name in rounds[0][0]
        if all(name in one for pair in rounds for one in pair)
    ]
    facts = {"figure": given.figure, "over": given.over, "rounds": given.rounds}
    facts["options"] = options
    print_report(f"{given.bench}, two versions", rows, facts, quiet=False)


if __name__ == "__main__":
    main()

"""Compare every model family in every format and mode, and write docs/compatibility.md.

`python tools/compatibility.py` takes a few minutes. A problem is printed, the exit code is 1, and
the page does not change.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # must precede any import of triton: there may be no GPU

import torch
import transformers

from pages import DOCS, ROOT, format_table, merge_lines, write_tables

# The tests run a pairwise part of this product; this tool runs all of it. tests/ is no package, so
# that pytest can import each file by itself.
sys.path.insert(0, str(ROOT / "tests"))

from hf.expected import expect_reading, list_problems
from hf.graphs import trace_forward
from hf.modes import MODES, play_mode
from hf.parity import TOLERANCE, Cell, compare_cell, iterate_cells
from hf.zoo import FAMILIES, NAMES, build, valid_spec
from kvant.generation import TransformersDecoder


@dataclass
class FamilyReport:
    """The results of one family."""

    name: str
    error: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    # (stock or attached, fused or materialized or nothing)
    readings: set[tuple[str, str]] = field(default_factory=set)
    reasons: set[str] = field(default_factory=set)
    graph_result: str = ""
    refusals: dict[str, str] = field(default_factory=dict)  # by mode: the error of transformers
    problems: list[str] = field(default_factory=list)

    def describe_reading(self, way: str) -> str:
        return ", ".join(sorted(result for key, result in self.readings if key == way))


def examine_family(name: str) -> FamilyReport:
    """Examine one family, in a worker process."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    row = FamilyReport(name)
    for cell in (cell for cell in iterate_cells() if cell.family == name):
        _compare(row, cell)
    for mode in MODES:
        _play_mode(row, mode)
    if FAMILIES[name].kind != "encoder-decoder":  # `kvant.generate` does not run these
        row.graph_result = _find_graph_refusal(name)
    return row


def _compare(row: FamilyReport, cell: Cell) -> None:
    try:
        result = compare_cell(cell)
    except Exception as error:
        row.problems.append(f"{cell}: {type(error).__name__}: {error}")
        return
    kind = "raw" if cell.raw else "compressed"
    row.error[kind] = max(row.error[kind], result.error)
    row.readings.add((cell.way, expect_reading(cell)))
    row.reasons |= result.reasons
    row.problems += [f"{cell}: {problem}" for problem in list_problems(cell, result)]
    if not result.error < TOLERANCE:
        row.problems.append(f"{cell}: an error of {result.error:.1e}")


def _play_mode(row: FamilyReport, mode: str) -> None:
    """Compare tokens with transformers' cache; record the error where that cache fails too."""
    try:
        expected = play_mode(mode, row.name, "host")
    except Exception as error:
        row.refusals[mode] = f"{type(error).__name__}: {error}"
        return
    for owner in ("stock", "attached"):
        try:
            if not torch.equal(play_mode(mode, row.name, owner), expected):
                row.problems.append(f"{row.name}, {mode}, {owner}: other tokens")
        except Exception as error:
            row.problems.append(f"{row.name}, {mode}, {owner}: {type(error).__name__}: {error}")


def _find_graph_refusal(name: str) -> str:
    """Return the reason why tokens are not replayed from a graph, or "replayed"."""
    decoder = TransformersDecoder(build(name), capture=trace_forward)
    cache = decoder.make_cache(valid_spec(name, "raw,capacity=8"))
    with patch("kvant.pages.storage.select_tiles", lambda device: None):  # page layout of a GPU
        for tokens in ([3, 4, 5], [6], [7], [8]):
            decoder.compute_logits(tokens, cache)
    why = cache.context.replay_stats.refusal
    if why is not None and "value out of a tracing tensor" in why:
        why = "a number is read from the device"
    return why or "replayed"


def make_tables(rows: list[FamilyReport]) -> dict[str, str]:
    """Return the tables of docs/compatibility.md, one line for equal results."""
    groups: dict[tuple[str, ...], list[FamilyReport]] = defaultdict(list)
    for row in rows:
        reasons = ", ".join(f"`{reason}`" for reason in sorted(row.reasons))
        reads = [row.describe_reading(way) for way in ("stock", "attached")]
        reads = [f"{text} ({reasons})" if text == "materialized" else text for text in reads]
        modes = f"{len(MODES) - len(row.refusals)} of {len(MODES)}"
        groups[*reads, row.graph_result, modes].append(row)
    families = [
        {
            "families": ", ".join(row.name for row in members),
            **{
                kind: f"{error:.0e}" if (error := max(row.error[kind] for row in members)) else "0"
                for kind in ("raw", "compressed")
            },
            **dict(zip(("stock", "attached", "CUDA graph", "modes"), results, strict=True)),
        }
        for results, members in groups.items()
    ]
    failures = [
        {"modes": mode, "families": row.name, "the error": _shorten_error(why, row.name)}
        for row in rows
        for mode, why in row.refusals.items()
    ]
    return {
        "cells": "\n".join(f"* {line}" for line in _format_counts(rows)),
        "families": format_table(families),
        "failures": format_table(merge_lines(failures, "the error")),
    }


def _format_counts(rows: list[FamilyReport]) -> Iterator[str]:
    yield format_versions()
    yield f"modes: {', '.join(MODES)}"
    refusals = ((row.name, Cell(row.name, "raw", 2, "chunked", "stock").refusal()) for row in rows)
    missing = [{"families": name, "why": why} for name, why in refusals if why is not None]
    for line in merge_lines(missing, "why"):
        yield f"left out, chunks of a padded batch with {line['families']}: {line['why']}"


def publish(tables: Mapping[str, str], problems: Sequence[str], *, is_complete: bool) -> int:
    """Write complete tables without problems to the page; return the exit code."""
    if not is_complete:
        print(*tables.values(), sep="\n\n")
    elif not problems:
        write_tables(DOCS / "compatibility.md", tables)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def format_versions() -> str:
    return f"transformers {transformers.__version__}, torch {torch.__version__}, float32, CPU"


def _shorten_error(text: str, name: str) -> str:
    """Return the last line of an error, as some begin with the text of a whole model."""
    text = text.replace(FAMILIES[name].model, "this one").replace("|", "/")
    kind = text.partition(":")[0]
    last = text.splitlines()[-1].removeprefix(f"{kind}: ")
    return f"{kind}: {re.split('[.] ?(?=[A-Z])', last)[0][:80]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "families", nargs="*", default=NAMES, help="run only these, and write no file"
    )
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    began, rows = time.monotonic(), {}
    with ProcessPoolExecutor(args.workers, get_context("spawn")) as pool:
        jobs = [pool.submit(examine_family, name) for name in args.families]
        for job in as_completed(jobs):
            row = job.result()
            rows[row.name] = row
            spent = time.monotonic() - began
            done = f"{len(rows)} of {len(jobs)} families, {spent:.0f} s: {row.name}"
            print(done, file=sys.stderr, flush=True)
    ordered = [rows[name] for name in args.families]
    problems = [problem for row in ordered for problem in row.problems]
    return publish(make_tables(ordered), problems, is_complete=args.families == NAMES)


if __name__ == "__main__":
    sys.exit(main())

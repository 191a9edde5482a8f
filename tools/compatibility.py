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
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"  # must precede any import of triton: there may be no GPU

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
# The tests run a pairwise part of this product; this tool runs all of it. tests/ is no package, so
# that pytest can import each file by itself.
sys.path.insert(0, str(ROOT / "tests"))

from hf.expected import expect_reading, list_problems  # noqa: E402
from hf.graphs import trace_forward  # noqa: E402
from hf.modes import MODES, play_mode  # noqa: E402
from hf.parity import TOLERANCE, Cell, compare_cell, iterate_cells  # noqa: E402
from hf.zoo import FAMILIES, NAMES, build, valid_spec  # noqa: E402
from kvant.generation import TransformersDecoder  # noqa: E402

DOC_PAGE = ROOT / "docs" / "compatibility.md"
FAMILIES_HEADING = "## Every causal language model"  # tools/families.py writes from here on
INTRO = """# What works with transformers

Look up your model family: every mode of `generate` that works with transformers' own cache works
with kvant's. The models are tiny and random, in float32 (`tests/hf/zoo.py`), so nothing here says
how good a format is. `python tools/compatibility.py` (transformers {transformers}, torch {torch})
writes this part, `python tools/families.py` the rest.

* **raw**: the largest difference of logits from eager attention over DynamicCache, in standard
  deviations. It covers one sequence and a left-padded pair, prompts at once and in two chunks, and
  stock and attached models.
* **compressed**: the same for affine8, affine4 and turbo4v4. The reference is eager attention over
  the decoded rows that each query sees, so only rounding is left.
* **stock**, **attached**: how a decoded token reads its past. *fused* reads the stored pages,
  *materialized* makes rows dense for the operation in brackets, *nothing* means that kvant stores
  no keys and values of this model.
* **CUDA graph**: whether `kvant.generate` captures a token as a graph, or what prevents it. Found
  by tracing the forward, without a GPU.
* **modes**: those with the tokens of transformers' cache. The others fail with that cache as well.
"""


@dataclass
class FamilyReport:
    """The results of one family."""

    name: str
    error: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    # cells by (stock or attached, fused or materialized or nothing)
    reading_counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: set[str] = field(default_factory=set)
    graph_result: str = ""
    refusals: dict[str, str] = field(default_factory=dict)  # by mode: the error of transformers
    problems: list[str] = field(default_factory=list)

    def describe_reading(self, way: str) -> str:
        return ", ".join(sorted(result for key, result in self.reading_counts if key == way))


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
    row.reading_counts[cell.way, expect_reading(cell)] += 1
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
    with patch("kvant.cache.storage.select_tiles", lambda device: None):  # page layout of a GPU
        for tokens in ([3, 4, 5], [6], [7], [8]):
            decoder.compute_logits(tokens, cache)
    why = cache.context.replay_stats.refusal
    if why is not None and "value out of a tracing tensor" in why:
        why = "a number is read from the device"
    return why or "replayed"


def make_page(rows: list[FamilyReport]) -> Iterator[str]:
    """Yield the lines of docs/compatibility.md, one table line for equal results."""
    yield INTRO.format(transformers=transformers.__version__, torch=torch.__version__)
    yield from _format_counts(rows)
    yield "\n| families | raw | compressed | stock | attached | CUDA graph | modes |"
    yield "|---|---|---|---|---|---|---|"
    groups: dict[tuple[str, ...], list[FamilyReport]] = defaultdict(list)
    for row in rows:
        reasons = ", ".join(f"`{reason}`" for reason in sorted(row.reasons))
        reads = [row.describe_reading(way) for way in ("stock", "attached")]
        reads = [f"{text} ({reasons})" if text == "materialized" else text for text in reads]
        modes = f"{len(MODES) - len(row.refusals)} of {len(MODES)}"
        groups[*reads, row.graph_result, modes].append(row)
    for results, members in groups.items():
        errors = (max(row.error[kind] for row in members) for kind in ("raw", "compressed"))
        names = ", ".join(row.name for row in members)
        yield format_line(names, *map(_format_error, errors), *results)
    yield "\n## What does not work with DynamicCache either\n"
    yield "| modes | families | the error |"
    yield "|---|---|---|"
    yield from _format_refusals(rows)


def _format_counts(rows: list[FamilyReport]) -> Iterator[str]:
    cells = sum((row.reading_counts for row in rows), Counter())
    for way in ("stock", "attached"):
        counts = {result: count for (key, result), count in sorted(cells.items()) if key == way}
        text = ", ".join(f"{count} {result}" for result, count in counts.items())
        yield f"* cells of {way} models: {text}"
    yield f"* modes: {', '.join(MODES)}"
    missing: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        why = Cell(row.name, "raw", 2, "chunked", "stock").refusal()
        if why is not None:
            missing[why].append(row.name)
    for why, names in missing.items():
        yield f"* left out, chunks of a padded batch of {', '.join(names)}: {why}"


def _format_refusals(rows: Iterable[FamilyReport]) -> Iterator[str]:
    """Yield one line for each error, with the modes and families that share it."""
    groups: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for row in rows:
        for mode, why in row.refusals.items():
            text = _shorten_error(why.replace(FAMILIES[row.name].model, "this one"))
            modes, names = groups.setdefault(text, ({}, {}))
            modes[mode] = names[row.name] = None
    for why, (modes, names) in groups.items():
        yield format_line(", ".join(modes), ", ".join(names), why)


def _shorten_error(text: str) -> str:
    """Return the last line of an error, as some begin with the text of a whole model."""
    kind = text.partition(":")[0]
    last = text.splitlines()[-1].removeprefix(f"{kind}: ")
    return f"{kind}: {re.split('[.] ?(?=[A-Z])', last)[0][:80]}".replace("|", "/")


def read_other_part(*, families: bool) -> str:
    """Return the other command's part of the page: from the heading on, or all before it."""
    before, heading, after = DOC_PAGE.read_text(encoding="utf-8").partition(FAMILIES_HEADING)
    if not families:
        return before.rstrip() + "\n\n"
    return f"\n{heading}{after}" if heading else ""


def _format_error(error: float) -> str:
    return f"{error:.0e}" if error else "0"


def format_line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


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
    text = "\n".join(make_page(ordered)) + "\n"
    if args.families == NAMES and not any(row.problems for row in ordered):
        DOC_PAGE.write_text(text + read_other_part(families=True), encoding="utf-8")
    print("\n".join(_format_counts(ordered)) if args.families == NAMES else text)
    wrong = [problem for row in ordered for problem in row.problems]
    for problem in wrong:
        print(problem, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

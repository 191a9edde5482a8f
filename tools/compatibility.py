"""Runs every family with every format in every way, and writes docs/compatibility.md.

A few minutes: `python tools/compatibility.py`. If anything is not as it must be, it says so, exits
with 1 and leaves the page as it was.
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

os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton: there may be no GPU

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
# The families, what they are compared with and how is what the tests run, pairwise; here it runs
# whole. Tests are no package, so that pytest may import each file by itself.
sys.path.insert(0, str(ROOT / "tests"))

from hf.expected import problems, reading  # noqa: E402
from hf.graphs import traced  # noqa: E402
from hf.modes import MODES, played  # noqa: E402
from hf.parity import TOLERANCE, Cell, compared, every_cell  # noqa: E402
from hf.zoo import FAMILIES, NAMES, build, worded  # noqa: E402
from kvant.generation import TransformersDecoder  # noqa: E402

DOC_PAGE = ROOT / "docs" / "compatibility.md"
FAMILIES_HEADING = "## Every causal language model"  # from here on: tools/families.py
INTRO = """# What works with transformers

Two commands make this page. `python tools/compatibility.py` makes what stands before "Every causal
language model" (transformers {transformers}, torch {torch}), `python tools/families.py` the rest.
`make laws` runs a part of the former, chosen so that every two values meet, `make test` each family
once. Each family is a tiny random model in float32 (`tests/hf/zoo.py`). So nothing here says how
good a format is, only that a model computes with it what it should.

* **raw**: the largest difference of logits from those of eager attention over the host's own
  DynamicCache, in units of their standard deviation. Over {{one sequence, two of which one is
  left-padded}} x {{prompt at once, in two chunks}} x {{stock model, attached}}.
* **compressed**: the same for affine8, affine4 and turbo4v4, from eager attention over the rows
  that each query sees by the rule in architecture.md, dense or decoded. The error of the format
  lies on both sides, so what is left is rounding.
* **stock** and **attached**: how a decoded token reads its past. *fused*: from the stored pages.
  *materialized*: rows are made dense for the operation named in the last column.
  *nothing*: no layer of keys and values is stored by kvant.
* **on a GPU**: *replayed*, where `kvant.generate` captures the forward of one token as a CUDA
  graph, or what keeps it from that. Found without a GPU, by tracing the forward to operators.
* **modes**: in how many ways of generating the tokens are those that the host's cache gives. The
  other ones do not work with that cache either: the table at the end has the reasons.
"""


@dataclass
class FamilyReport:
    """What was found out about a family."""

    name: str
    error: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reading_counts: Counter[tuple[str, str]] = field(
        default_factory=Counter
    )  # cells, by way and reading
    reasons: set[str] = field(default_factory=set)
    graph_result: str = ""
    refusals: dict[str, str] = field(default_factory=dict)  # by mode: why, in the host's words
    problems: list[str] = field(default_factory=list)

    def describe_reading(self, way: str) -> str:
        return ", ".join(sorted(what for one, what in self.reading_counts if one == way))


def examine_family(name: str) -> FamilyReport:
    """One family, in a process of its own."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    row = FamilyReport(name)
    for cell in (cell for cell in every_cell() if cell.family == name):
        _compare(row, cell)
    for mode in MODES:
        _play_mode(row, mode)
    if FAMILIES[name].kind != "encoder-decoder":  # which the loop does not continue
        row.graph_result = _find_graph_refusal(name)
    return row


def _compare(row: FamilyReport, cell: Cell) -> None:
    try:
        result = compared(cell)
    except Exception as error:
        row.problems.append(f"{cell}: {type(error).__name__}: {error}")
        return
    kind = "raw" if cell.raw else "compressed"
    row.error[kind] = max(row.error[kind], result.error)
    row.reading_counts[cell.way, reading(cell)] += 1
    row.reasons |= result.reasons
    row.problems += [f"{cell}: {problem}" for problem in problems(cell, result)]
    if not result.error < TOLERANCE:
        row.problems.append(f"{cell}: an error of {result.error:.1e}")


def _play_mode(row: FamilyReport, mode: str) -> None:
    """Tokens must be the host's; where the host's cache fails, ours need not do better."""
    try:
        expected = played(mode, row.name, "host")
    except Exception as error:
        row.refusals[mode] = f"{type(error).__name__}: {error}"
        return
    for owner in ("stock", "attached"):
        try:
            if not torch.equal(played(mode, row.name, owner), expected):
                row.problems.append(f"{row.name}, {mode}, {owner}: other tokens")
        except Exception as error:
            row.problems.append(f"{row.name}, {mode}, {owner}: {type(error).__name__}: {error}")


def _find_graph_refusal(name: str) -> str:
    """Why single tokens do not come from a graph, or that they do."""
    decoder = TransformersDecoder(build(name), capture=traced)
    cache = decoder.make_cache(worded(name, "raw,capacity=8"))
    with patch("kvant.cache.storage.select_tiles", lambda device: None):  # pages as on a GPU
        for tokens in ([3, 4, 5], [6], [7], [8]):
            decoder.compute_logits(tokens, cache)
    why = cache.context.replay_stats.refusal
    if why is not None and "value out of a tracing tensor" in why:
        why = "a number is read from the device"
    return why or "replayed"


def make_page(rows: list[FamilyReport]) -> Iterator[str]:
    """The lines of docs/compatibility.md."""
    yield INTRO.format(transformers=transformers.__version__, torch=torch.__version__)
    yield from _format_counts(rows)
    head = "raw | compressed | stock | attached | on a GPU | modes | dense rows are made for"
    yield f"\n| family | {head} |"
    yield "|---|---|---|---|---|---|---|---|"
    for row in rows:
        errors = (_format_error(row.error[kind]) for kind in ("raw", "compressed"))
        reads = (row.describe_reading(way) for way in ("stock", "attached"))
        modes = f"{len(MODES) - len(row.refusals)} of {len(MODES)}"
        reasons = ", ".join(f"`{reason}`" for reason in sorted(row.reasons))
        yield format_line(row.name, *errors, *reads, row.graph_result, modes, reasons)
    yield "\n## What does not work with DynamicCache either\n"
    yield "| modes | families | the error |"
    yield "|---|---|---|"
    yield from _format_refusals(rows)


def _format_counts(rows: list[FamilyReport]) -> Iterator[str]:
    cells = sum((row.reading_counts for row in rows), Counter())
    for way in ("stock", "attached"):
        found = {what: count for (one, what), count in sorted(cells.items()) if one == way}
        told = ", ".join(f"{count} {what}" for what, count in found.items())
        yield f"* cells of {way} models: {told}"
    yield f"* modes: {', '.join(MODES)}"
    missing: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        why = Cell(row.name, "raw", 2, "chunked", "stock").refusal()
        if why is not None:
            missing[why].append(row.name)
    for why, names in missing.items():
        yield f"* not among them, chunks of a padded batch of {', '.join(names)}: {why}"


def _format_refusals(rows: Iterable[FamilyReport]) -> Iterator[str]:
    """By reason, as most families of a kind share theirs."""
    found: dict[str, tuple[dict[str, None], dict[str, None]]] = {}
    for row in rows:
        for mode, why in row.refusals.items():
            told = _shorten_error(why.replace(FAMILIES[row.name].model, "this one"))
            modes, names = found.setdefault(told, ({}, {}))
            modes[mode] = names[row.name] = None
    for why, (modes, names) in found.items():
        yield format_line(", ".join(modes), ", ".join(names), why)


def _shorten_error(text: str) -> str:
    """The last line of an error: some begin with a whole model."""
    kind = text.partition(":")[0]
    last = text.splitlines()[-1].removeprefix(f"{kind}: ")
    return f"{kind}: {re.split('[.] ?(?=[A-Z])', last)[0][:110]}".replace("|", "/")


def read_other_part(*, families: bool) -> str:
    """Return what the page has of the other command: the table of families, or all before it."""
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
    parser.add_argument("families", nargs="*", default=NAMES, help="only these, and no file")
    parser.add_argument("--workers", type=int, default=2)
    told = parser.parse_args()
    began, rows = time.monotonic(), {}
    with ProcessPoolExecutor(told.workers, get_context("spawn")) as pool:
        jobs = [pool.submit(examine_family, name) for name in told.families]
        for job in as_completed(jobs):
            row = job.result()
            rows[row.name] = row
            spent = time.monotonic() - began
            done = f"{len(rows)} of {len(jobs)} families, {spent:.0f} s: {row.name}"
            print(done, file=sys.stderr, flush=True)
    ordered = [rows[name] for name in told.families]
    text = "\n".join(make_page(ordered)) + "\n"
    if told.families == NAMES and not any(row.wrong for row in ordered):
        DOC_PAGE.write_text(text + read_other_part(families=True), encoding="utf-8")
    print("\n".join(_format_counts(ordered)) if told.families == NAMES else text)
    wrong = [problem for row in ordered for problem in row.wrong]
    for problem in wrong:
        print(problem, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

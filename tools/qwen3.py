"""Measure formats on a model of Qwen3-1.7B's shape: docs/benchmarks/qwen3.md and .json.

`python tools/qwen3.py` takes a quarter of an hour and 12 GiB. Weights and rows are random, the
caches have a capacity of 40,960 tokens. All formats decode one token each in turn, so that other
load on the machine affects all of them. Memory is measured in a new process for each format
(kvant.bench.clock).
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import torch

import kvant
from kvant.bench.cache_race import (
    MODEL_SHAPES,
    WARMUP_TOKENS,
    Contestant,
    build_model,
    draw_random_rows,
    make_contestant,
)
from kvant.bench.clock import read_resident_nbytes, reset_resident_peak, run_in_process
from kvant.bench.markdown import format_markdown
from kvant.bench.report import describe_machine, show_progress
from kvant.hf import cache_for

DOC_PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "qwen3.md"
MODEL_SIZES = MODEL_SHAPES["0.6b"] | {"hidden_size": 2048, "intermediate_size": 6144}
CAPACITY = 40960
NUM_WARMUP_TOKENS = WARMUP_TOKENS["dynamic"]
MODEL_SHAPE = kvant.Shape(MODEL_SIZES["num_hidden_layers"], 8, 128, 128)
FORMATS = ("raw", "affine8", "affine4", "turbo4v4", "turbo4v2")
CONTEXTS = {100: 41, 8192: 21}  # rows that are there: tokens decoded by each
INTRO = """# Qwen3-1.7B's shape, with 40,960 tokens reserved

Made by `python tools/qwen3.py` on {machine}.

28 layers, 16 query heads on 8 key heads of 128, hidden size 2,048: {parameters:.2f}e9 random
parameters in bf16, batch 1, random rows. Formats decode one token each in turn; medians.

* **full, GiB**: the cache of 40,960 tokens by `kvant.plan`, and its share of raw. **a sealed row**
  is the share of a row without open pages.
* **peak**: MiB of a process besides its weights while it decodes. Reserved pages that were never
  written take no memory.
* **tokens a second**, also relative to raw in the same run.

The linear layers read 3.4 GB of weights for every token, which limits all formats. At 100 tokens a
format costs nothing, within the noise of the machine. At 8,192 it gains the bytes that it does not
read.

"""


@torch.no_grad()
def decode_formats(model: Any, context: int, tokens: int) -> dict[str, Contestant]:
    """Decode `tokens` tokens with each format in turn, after `context` rows."""
    rows = draw_random_rows(model, context)
    contestants = {name: make_contestant(model, make_spec(name), *rows) for name in FORMATS}
    for turn in range(NUM_WARMUP_TOKENS + tokens):
        show_progress(f"{context} rows: token {turn + 1} of {NUM_WARMUP_TOKENS + tokens}")
        for contestant in contestants.values():
            contestant.decode()
    for contestant in contestants.values():
        del contestant.laps[:NUM_WARMUP_TOKENS]
    return contestants


@torch.no_grad()
def measure_peak(name: str, context: int) -> int | None:
    """Return the peak memory beyond the weights during decoding; run it in a new process."""
    model = build_model(MODEL_SIZES)
    resident_nbytes = reset_resident_peak()
    contestant = make_contestant(model, make_spec(name), *draw_random_rows(model, context))
    reset_resident_peak()
    for _ in range(NUM_WARMUP_TOKENS):
        contestant.decode()
    return None if resident_nbytes is None else read_resident_nbytes("VmHWM") - resident_nbytes


def make_spec(name: str) -> str:
    return f"{name},capacity={CAPACITY}"


def measure_sizes(model: Any, name: str) -> dict[str, Any]:
    """Return the figures that need no timing."""
    spec = cache_for(model, make_spec(name)).spec
    full = kvant.plan(MODEL_SHAPE, spec, context=CAPACITY).nbytes
    raw = kvant.plan(MODEL_SHAPE, f"raw,capacity={CAPACITY}", context=CAPACITY).nbytes
    row, raw_row = (
        kvant.plan(MODEL_SHAPE, row_spec).nbytes_per_token for row_spec in (spec, "raw")
    )
    return {
        "format": name,
        "a sealed row": f"{row / raw_row:.4f}",
        "full, GiB": f"{full / 2**30:.3f}",
        "of raw": f"{full / raw:.4f}",
    }


def main() -> None:
    show_progress("building the model")
    model = build_model(MODEL_SIZES)
    parameters = model.num_parameters() / 1e9
    rows = {name: measure_sizes(model, name) for name in FORMATS}
    figures_by_row: list[dict[str, Any]] = []
    for context, tokens in CONTEXTS.items():
        contestants = decode_formats(model, context, tokens)
        medians = {
            name: statistics.median(contestant.seconds) for name, contestant in contestants.items()
        }
        for name, contestant in contestants.items():
            figures = {
                "rows": context,
                "format": name,
                "tokens": tokens,
                "median_ms": medians[name] * 1e3,
                "best_ms": min(contestant.seconds) * 1e3,
                "allocated": contestant.cache_nbytes,
            }
            figures_by_row.append(figures)
            rows[name] |= {
                f"tokens a second at {context:,}": f"{1 / medians[name]:.2f}",
                f"over raw at {context:,}": f"{medians['raw'] / medians[name]:.3f}",
            }
        del contestants
    del model
    for figures in figures_by_row:
        context, name = figures["rows"], figures["format"]
        show_progress(f"{context} rows, {name}: the peak")
        peak = figures["peak"] = run_in_process(measure_peak, name, context)
        rows[name][f"peak at {context:,}"] = "" if peak is None else f"{peak / 2**20:.0f}"
    show_progress("")
    facts = describe_machine()
    machine = ", ".join(f"{key} {value}" for key, value in facts.items())
    intro = INTRO.format(machine=machine, parameters=parameters)
    page = intro + format_markdown(list(rows.values()))
    DOC_PAGE.write_text(page + "\n")
    report = {"machine": facts, "capacity": CAPACITY, "rows": figures_by_row}
    DOC_PAGE.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    print(page)


if __name__ == "__main__":
    main()

"""Measures the formats on a model of Qwen3-1.7B's shape: docs/benchmarks/qwen3.md and .json.

A quarter of an hour and 12 GiB: `python tools/qwen3.py`. Weights and rows are random, the caches
are made for 40,960 tokens. All formats decode one token each in turn, so what else the machine does
hits all; memory is that of a process of its own for each (see kvant.bench.clock).
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
    make_contestant,
    random_rows,
)
from kvant.bench.clock import read_resident_nbytes, reset_resident_peak, run_in_process
from kvant.bench.markdown import format_markdown
from kvant.bench.report import describe_machine, show_progress
from kvant.hf import cache_for

DOC_PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks" / "qwen3.md"
MODEL_SIZES = MODEL_SHAPES["0.6b"] | {"hidden_size": 2048, "intermediate_size": 6144}
CAPACITY = 40960
WARMUP_TOKENS = WARMUP_TOKENS["dynamic"]
MODEL_SHAPE = kvant.Shape(MODEL_SIZES["num_hidden_layers"], 8, 128, 128)
FORMATS = ("raw", "affine8", "affine4", "turbo4v4", "turbo4v2")
CONTEXTS = {100: 41, 8192: 21}  # rows that are there: tokens decoded by each
INTRO = """# Qwen3-1.7B's shape, made for 40,960 tokens

Made by `python tools/qwen3.py` on {machine}.

28 layers, 16 query heads on 8 key heads of 128, hidden size 2,048: {parameters:.2f}e9 random
parameters in bf16, batch 1, random rows. All formats decode one token each in turn in one process;
medians.

* **full, GiB**: what the cache takes with 40,960 tokens in it, as `kvant.plan` counts it, and its
  share of raw; **a sealed row** is the share of a row without the pages that are still open.
* **peak**: the most memory that a process has beside its weights while it decodes with so many
  tokens in the cache, in MiB. All of the 40,960 is reserved; what was never touched takes none.
* **tokens a second**, and that over raw in the same run.

"""


@torch.no_grad()
def decode_formats(model: Any, context: int, tokens: int) -> dict[str, Contestant]:
    """Every format with so many rows, after so many tokens each in turn."""
    rows = random_rows(model, context)
    ready = {name: make_contestant(model, make_spec(name), *rows) for name in FORMATS}
    for turn in range(WARMUP_TOKENS + tokens):
        show_progress(f"{context} rows: token {turn + 1} of {WARMUP_TOKENS + tokens}")
        for contestant in ready.values():
            contestant.decode()
    for contestant in ready.values():
        del contestant.laps[:WARMUP_TOKENS]
    return ready


@torch.no_grad()
def measure_peak(name: str, context: int) -> int | None:
    """The most memory beside the weights while a token is decoded: in a process of its own."""
    model = build_model(MODEL_SIZES)
    before = reset_resident_peak()
    contestant = make_contestant(model, make_spec(name), *random_rows(model, context))
    reset_resident_peak()
    for _ in range(WARMUP_TOKENS):
        contestant.decode()
    return None if before is None else read_resident_nbytes("VmHWM") - before


def make_spec(name: str) -> str:
    return f"{name},capacity={CAPACITY}"


def measure_sizes(model: Any, name: str) -> dict[str, Any]:
    """What needs no clock."""
    told = cache_for(model, make_spec(name)).spec
    full = kvant.plan(MODEL_SHAPE, told, context=CAPACITY).nbytes
    raw = kvant.plan(MODEL_SHAPE, f"raw,capacity={CAPACITY}", context=CAPACITY).nbytes
    row, raw_row = (kvant.plan(MODEL_SHAPE, one).nbytes_per_token for one in (told, "raw"))
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
    found: list[dict[str, Any]] = []
    for context, tokens in CONTEXTS.items():
        ready = decode_formats(model, context, tokens)
        medians = {name: statistics.median(one.seconds) for name, one in ready.items()}
        for name, one in ready.items():
            figures = {
                "rows": context,
                "format": name,
                "tokens": tokens,
                "median_ms": medians[name] * 1e3,
                "best_ms": min(one.seconds) * 1e3,
                "allocated": one.cache_nbytes,
            }
            found.append(figures)
            rows[name] |= {
                f"tokens a second at {context:,}": f"{1 / medians[name]:.2f}",
                f"over raw at {context:,}": f"{medians['raw'] / medians[name]:.3f}",
            }
        del ready
    del model
    for figures in found:
        context, name = figures["rows"], figures["format"]
        show_progress(f"{context} rows, {name}: the peak")
        most = figures["peak"] = run_in_process(measure_peak, name, context)
        rows[name][f"peak at {context:,}"] = "" if most is None else f"{most / 2**20:.0f}"
    show_progress("")
    facts = describe_machine()
    said = ", ".join(f"{key} {value}" for key, value in facts.items())
    page = INTRO.format(machine=said, parameters=parameters) + format_markdown(list(rows.values()))
    DOC_PAGE.write_text(page + "\n")
    told_rows = {"machine": facts, "capacity": CAPACITY, "rows": found}
    DOC_PAGE.with_suffix(".json").write_text(json.dumps(told_rows, indent=1) + "\n")
    print(page)


if __name__ == "__main__":
    main()

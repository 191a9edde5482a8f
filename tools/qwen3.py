"""Measure formats on a model of Qwen3-1.7B's shape: docs/benchmarks/qwen3.md and .json.

`python tools/qwen3.py` takes a quarter of an hour and 12 GiB. Weights and rows are random, the
caches have a capacity of 40,960 tokens. All formats decode one token each in turn, so that other
load on the machine affects all of them. Memory is measured in a new process for each format
(kvant.bench.harness).
"""

from __future__ import annotations

import json
from typing import Any

import torch

import kvant
from kvant.bench.cache_race import (
    MODEL_SHAPES,
    WARMUP_TOKENS,
    Contestant,
    build_model,
    decode_in_turn,
    draw_random_rows,
    make_contestant,
)
from kvant.bench.harness import (
    CPU,
    describe_machine,
    reset_resident_peak,
    run_in_process,
    show_progress,
)
from pages import DOCS, format_table, write_tables

DOC_PAGE = DOCS / "benchmarks" / "qwen3.md"
MODEL_SIZES = MODEL_SHAPES["0.6b"] | {"hidden_size": 2048, "intermediate_size": 6144}
CAPACITY = 40960
NUM_WARMUP_TOKENS = WARMUP_TOKENS["dynamic"]
MODEL_SHAPE = kvant.Shape(MODEL_SIZES["num_hidden_layers"], 8, 128, 128)
FORMATS = ("raw", "affine8", "affine4", "turbo4v4", "turbo4v2")
CONTEXTS = {100: 41, 8192: 21}  # rows that are there: tokens decoded by each


@torch.no_grad()
def decode_formats(model: Any, context: int, tokens: int) -> dict[str, Contestant]:
    """Decode `tokens` tokens with each format in turn, after `context` rows."""
    rows = draw_random_rows(model, context)
    contestants = {name: make_contestant(model, make_spec(name), *rows) for name in FORMATS}
    label = f"{context} rows"
    decode_in_turn([*contestants.values()], tokens, label, warmup=NUM_WARMUP_TOKENS)
    return contestants


@torch.no_grad()
def measure_peak(name: str, context: int) -> int | None:
    """Return the peak memory beyond the weights during decoding; run it in a new process."""
    model = build_model(MODEL_SIZES)

    def decode() -> None:
        contestant = make_contestant(model, make_spec(name), *draw_random_rows(model, context))
        reset_resident_peak()  # filling the cache is not counted
        for _ in range(NUM_WARMUP_TOKENS):
            contestant.decode()

    return CPU.measure_peak(decode)


def make_spec(name: str) -> str:
    return f"{name},capacity={CAPACITY}"


def measure_sizes(model: Any, name: str) -> dict[str, Any]:
    """Return the figures that need no timing."""
    spec = kvant.cache_for(model, make_spec(name)).spec
    full, raw = (
        kvant.plan(MODEL_SHAPE, s, context=CAPACITY).nbytes for s in (spec, make_spec("raw"))
    )
    row, raw_row = (kvant.plan(MODEL_SHAPE, s).nbytes_per_token for s in (spec, "raw"))
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
        raw_median = contestants["raw"].laps.median
        for name, contestant in contestants.items():
            median = contestant.laps.median
            figures: dict[str, Any] = {
                "rows": context,
                "format": name,
                "tokens": tokens,
                **contestant.laps.summarize(),
                "allocated": contestant.cache_nbytes,
            }
            figures_by_row.append(figures)
            rows[name] |= {
                f"tokens a second at {context:,}": f"{1 / median:.2f}",
                f"over raw at {context:,}": f"{raw_median / median:.3f}",
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
    lines = f"* {machine}\n* {parameters:.2f}e9 parameters"
    tables = {"machine": lines, "formats": format_table([*rows.values()])}
    write_tables(DOC_PAGE, tables)
    report = {"machine": facts, "capacity": CAPACITY, "rows": figures_by_row}
    DOC_PAGE.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    print(tables["formats"])


if __name__ == "__main__":
    main()

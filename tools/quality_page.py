"""Write results into the tables of docs/quality.md; its text stays.

The results are those of tools/quality.py, and of tools/quality_texts.py for SmolLM2.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from kvant.eval.result import FormatPoint, find_pareto_front, plot_results
from pages import DOCS, format_table, write_tables

UNIFORM_PATTERN = r"affine\d,tail=0|affine2,tail=0,group=64"  # the baseline of recipes
OPTIONS = ("tail=0", "smooth")
OUTLIER_FORMATS = ("affine8", "fp8", "affine4", "turbo4v4", "turbo4v2", "turbo2v2")
COLUMNS = {  # of the page: a field of a result, and its format
    "a row": ("of_raw", ".3f"),
    "perplexity": ("perplexity_change", "+.2%"),
    "mean KL": ("mean_kl", ".2g"),
    "p99.9": ("p999_kl", ".2g"),
    "top-1": ("top1", ".1%"),
}
SMOLLM2_TASK = {"model": "smollm2", "text": "prose", "context": 2048}
ResultRow = Mapping[str, Any]


def write_page(rows: Sequence[ResultRow]) -> None:
    tables = make_tables(rows) | {"smollm2": make_smollm2_table()}
    write_tables(DOCS / "quality.md", {name: format_table(t) for name, t in tables.items()})
    plain = select_rows(rows, "formats", "plain")
    points = [
        FormatPoint(row["of_raw"], row["mean_kl"], name)
        for name, row in plain.items()
        if "," not in name and row["mean_kl"]
    ]
    if find_spec("matplotlib") is not None:
        plot_results(points, "The model inside", DOCS / "quality.png")


def select_rows(rows: Sequence[ResultRow], table: str, model: str) -> dict[str, ResultRow]:
    """Return the results of a table and a model by format."""
    selected = [row for row in rows if (row["table"], row["model"]) == (table, model)]
    if table == "formats":
        selected.sort(key=lambda row: -row["of_raw"])
    return {row["format"]: row for row in selected}


def make_tables(rows: Sequence[ResultRow]) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of each table of the page."""
    plain, hard, harder = (select_rows(rows, "formats", m) for m in ("plain", "30x", "100x"))
    recipes = select_rows(rows, "recipes", "plain")
    ladder = find_pareto_front(
        FormatPoint(row["of_raw_2k"], row["mean_kl"], name)
        for name, row in recipes.items()
        if re.fullmatch(UNIFORM_PATTERN, name)
    )
    sinks = select_rows(rows, "sinks", "rows alone")
    steps = {step["cache"]: step for step in select_rows(rows, "speed", "plain")["all"]["steps"]}
    hard_peers = select_rows(rows, "peers", "30x")
    return {
        "plain": [_format_plain(row, plain) for name, row in plain.items() if "," not in name],
        "outliers": [
            _format_outliers(name, {"30x": hard, "100x": harder}) for name in OUTLIER_FORMATS
        ],
        "recipes": [
            _format_recipe(row, ladder)
            for name, row in recipes.items()
            if ladder[0].relative_nbytes <= row["of_raw_2k"] <= ladder[-1].relative_nbytes
            and not re.fullmatch(UNIFORM_PATTERN, name)
            and not re.match("affine[23],", name)
        ],
        "sinks": [
            {
                "format": f"`{name},tail=0`",
                "error": f"{row['error']:.1%}",
                "with `sinks=4`": f"{sinks[f'{name},sinks=4']['error']:.2%}",
            }
            for name, row in sinks.items()
            if "," not in name
        ],
        "auto": [
            {"model": row["model"], "chosen": f"`{row['chosen']}`"}
            | _format_columns(row, "mean KL", "top-1")
            for row in rows
            if row["table"] == "auto"
        ],
        "peers": [
            _format_peer(row, hard_peers[name], steps[name], steps["transformers"])
            for name, row in select_rows(rows, "peers", "plain").items()
        ],
    }


def make_smollm2_table() -> list[dict[str, Any]]:
    """Return the lines of SmolLM2's caches, and of llama.cpp's, by bits."""
    rows = json.loads((DOCS / "quality-texts.json").read_text(encoding="utf-8"))["rows"]
    wanted = [
        row
        for row in rows
        if SMOLLM2_TASK.items() <= row.items() and not row["format"].startswith("raw")
    ]
    return [
        {"cache": row["format"] if " " in row["format"] else f"`{row['format']}`"}
        | {"bits": f"{row['bits']:.2f}"}
        | _format_columns(row, "perplexity", "mean KL", "p99.9", "top-1")
        for row in sorted(wanted, key=lambda row: -row["bits"])
    ]


def _format_name(row: ResultRow) -> dict[str, str]:
    return {"format": f"`{row['format']}`"}


def _format_columns(row: ResultRow, *names: str, prefix: str = "") -> dict[str, str]:
    cells = {name: (row[COLUMNS[name][0]], COLUMNS[name][1]) for name in names}
    return {f"{prefix}{name}": format(value, form) for name, (value, form) in cells.items()}


def _format_option(row: ResultRow | None, option: str, prefix: str = "") -> dict[str, str]:
    """Return the mean KL of a format with an option."""
    return {f"{prefix}KL, `{option}`": "" if row is None else f"{row['mean_kl']:.2g}"}


def _format_plain(row: ResultRow, rows: Mapping[str, ResultRow]) -> dict[str, str]:
    low, high = row["perplexity_change_interval"]
    line = _format_name(row) | _format_columns(row, "a row", "perplexity")
    line |= {"95%": f"{low:+.2%}..{high:+.2%}"}
    line |= _format_columns(row, "mean KL", "p99.9", "top-1")
    for option in OPTIONS:
        line |= _format_option(rows.get(f"{row['format']},{option}"), option)
    return line


def _format_outliers(name: str, models: Mapping[str, Mapping[str, ResultRow]]) -> dict[str, str]:
    line = {"format": f"`{name}`"}
    for model, rows in models.items():
        line |= _format_columns(rows[name], "mean KL", "top-1", prefix=f"{model}: ")
        line |= _format_option(rows[f"{name},smooth"], "smooth", f"{model}: ")
    return line


def _format_recipe(row: ResultRow, ladder: Sequence[FormatPoint]) -> dict[str, str]:
    """Compare a recipe with uniform codes of equal bytes."""
    ratio = row["mean_kl"] / interpolate_kl(ladder, row["of_raw_2k"])
    line = _format_name(row) | _format_columns(row, "mean KL")
    return line | {"of equal bytes": f"{ratio:.2f}"}


def interpolate_kl(front: Sequence[FormatPoint], relative_nbytes: float) -> float:
    """Return the KL of a Pareto front at some bytes, interpolated in log KL."""
    pairs = [*pairwise(front)]
    low, high = next((p for p in pairs if relative_nbytes <= p[1].relative_nbytes), pairs[-1])
    part = (relative_nbytes - low.relative_nbytes) / (high.relative_nbytes - low.relative_nbytes)
    return math.exp((1 - part) * math.log(low.kl) + part * math.log(high.kl))


def _format_peer(
    row: ResultRow, hard: ResultRow, step: ResultRow, stock: ResultRow
) -> dict[str, str]:
    return {
        "cache": row["format"] if " " in row["format"] else f"`{row['format']}`",
        "bytes": f"{step['nbytes'] / stock['nbytes']:.3f}",
        "speed": f"{stock['median_ms'] / step['median_ms']:.2f}",
        **_format_columns(row, "perplexity", "mean KL", "top-1"),
        **_format_columns(hard, "mean KL", "top-1", prefix="30x: "),
    }


if __name__ == "__main__":
    write_page(json.loads((DOCS / "quality.json").read_text(encoding="utf-8"))["rows"])

"""Write the results of tools/quality.py into the tables of docs/quality.md; its text stays.

Each table is between two comments, `<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvant.bench.markdown import format_markdown
from kvant.eval.result import FormatPoint, find_pareto_front, plot_results

DOCS = Path(__file__).resolve().parent.parent / "docs"
DOC_PAGE = DOCS / "quality.md"
UNIFORM_PATTERN = r"affine\d,tail=0|affine2,tail=0,group=64"  # the baseline of recipes
ResultRow = Mapping[str, Any]


def write_page(rows: Sequence[ResultRow]) -> None:
    text = DOC_PAGE.read_text(encoding="utf-8")
    for name, table in make_tables(rows).items():
        pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, num_places = pattern.subn(lambda m, t=table: f"{m[1]}\n{t}\n\n{m[2]}", text)
        if num_places != 1:
            raise ValueError(
                f"{DOC_PAGE.name} has {num_places} places for the table {name!r}: 1 is needed"
            )
    DOC_PAGE.write_text(text, encoding="utf-8")
    points = [
        FormatPoint(row["of_raw"], row["mean_kl"], row["format"])
        for row in rows
        if (row["table"], row["model"]) == ("formats", "plain") and "," not in row["format"]
    ]
    if find_spec("matplotlib") is not None:
        plot_results(
            [point for point in points if point.kl], "The model inside", DOCS / "quality.png"
        )


def make_tables(rows: Sequence[ResultRow]) -> dict[str, str]:
    """Return the tables of the page by name, as Markdown."""

    def select_rows(table: str, model: str) -> list[ResultRow]:
        selected = [row for row in rows if (row["table"], row["model"]) == (table, model)]
        by_size = sorted(selected, key=lambda row: -row["of_raw"]) if table == "formats" else None
        return by_size or selected

    tables = {
        "plain": format_markdown(_format_plain(select_rows("formats", "plain"))),
        "outliers": format_markdown(
            _format_outliers(*(select_rows("formats", model) for model in ("30x", "100x")))
        ),
    }
    lines = [_format_recipe(row, rows) for row in select_rows("recipes", "plain")]
    tables["recipes"] = format_markdown([line for line in lines if line["of equal bytes"]])
    tables["scales"] = format_markdown(
        [_format_scales(row) for row in select_rows("scales", "plain")]
    )
    tables["values"] = format_markdown(
        [_format_short_row(row) for row in select_rows("values", "values 30x")]
    )
    sinks = {row["format"]: row for row in select_rows("sinks", "rows alone")}
    tables["sinks"] = format_markdown(
        [_format_sinks(row, sinks) for name, row in sinks.items() if "," not in name]
    )
    tables["auto"] = format_markdown(
        [
            {
                "model": row["model"],
                "chosen": f"`{row['chosen']}`",
                "mean KL": _format_kl(row["mean_kl"]),
                "p99.9": _format_kl(row["p999_kl"]),
                "top-1": f"{row['top1']:.1%}",
            }
            for row in rows
            if row["table"] == "auto"
        ]
    )
    (speed,) = select_rows("speed", "plain")
    steps = {step["cache"]: step for step in speed["steps"]}
    outliers = {row["format"]: row for row in select_rows("peers", "30x")}
    tables["peers"] = format_markdown(
        [_format_peer(row, outliers, steps) for row in select_rows("peers", "plain")]
    )
    return tables


def _format_plain(rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """Return one line for each format: its results, and the mean KL with each option."""
    by_format = {row["format"]: row for row in rows}
    sizes = {"a row": "of_raw", "at 2k": "of_raw_2k", "at 32k": "of_raw_32k"}
    lines = []
    for name, row in by_format.items():
        if "," not in name:
            line = {"format": f"`{name}`"}
            line |= {head: f"{row[key]:.3f}" for head, key in sizes.items()} | _format_quality(row)
            for option in ("tail=0", "sinks=4", "smooth"):
                variant = by_format.get(f"{name},{option}")
                line[f"KL, `{option}`"] = "" if variant is None else _format_kl(variant["mean_kl"])
            lines.append(line)
    return lines


def _format_outliers(*models: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """Return one line for each format: its results with outliers of 30 and of 100 times."""
    by_format = [{row["format"]: row for row in rows} for rows in models]
    lines = []
    for name in by_format[0]:
        if "," not in name and name != "raw":
            line = {"format": f"`{name}`"}
            for model, rows in zip(("30x", "100x"), by_format, strict=True):
                row = rows[name]
                line[f"{model}: perplexity"] = f"{row['perplexity_change']:+.2%}"
                line[f"{model}: mean KL"] = _format_kl(row["mean_kl"])
                line[f"{model}: top-1"] = f"{row['top1']:.1%}"
                smooth = rows[f"{name},smooth"]["mean_kl"]
                line[f"{model}: KL, `smooth`"] = _format_kl(smooth)
            lines.append(line)
    return lines


def _format_short_row(row: ResultRow) -> dict[str, Any]:
    return {"format": f"`{row['format']}`", "a row": f"{row['of_raw']:.3f}"} | _format_quality(row)


def _format_quality(row: ResultRow) -> dict[str, Any]:
    low, high = row["perplexity_change_interval"]
    return {
        "perplexity": f"{row['perplexity_change']:+.2%}",
        "95%": f"{low:+.2%}..{high:+.2%}",
        "mean KL": _format_kl(row["mean_kl"]),
        "p99.9": _format_kl(row["p999_kl"]),
        "top-1": f"{row['top1']:.1%}",
    }


def _format_kl(value: float) -> str:
    return f"{value:.2g}"


def _format_recipe(row: ResultRow, rows: Sequence[ResultRow]) -> dict[str, Any]:
    """Compare a recipe with uniform codes of equal bytes, interpolated in log KL."""
    ladder = find_pareto_front(
        FormatPoint(other["of_raw_2k"], other["mean_kl"], other["format"])
        for other in rows
        if other["table"] == "recipes" and re.fullmatch(UNIFORM_PATTERN, other["format"])
    )
    share = row["of_raw_2k"]
    comparable = ladder[0].relative_nbytes <= share <= ladder[
        -1
    ].relative_nbytes and not re.fullmatch(UNIFORM_PATTERN, row["format"])
    return {
        "format": f"`{row['format']}`",
        "at 2k": f"{row['of_raw_2k']:.3f}",
        "perplexity": f"{row['perplexity_change']:+.2%}",
        "mean KL": _format_kl(row["mean_kl"]),
        "of equal bytes": f"{row['mean_kl'] / _interpolate_kl(ladder, share):.2f}"
        if comparable
        else "",
    }


def _interpolate_kl(ladder: Sequence[FormatPoint], share: float) -> float:
    pairs = [*pairwise(ladder)]
    low, high = next((pair for pair in pairs if share <= pair[1].relative_nbytes), pairs[-1])
    part = (share - low.relative_nbytes) / (high.relative_nbytes - low.relative_nbytes)
    return math.exp((1 - part) * math.log(low.kl) + part * math.log(high.kl))


def _format_sinks(row: ResultRow, rows: Mapping[str, ResultRow]) -> dict[str, Any]:
    with_sinks = rows[f"{row['format']},sinks=4"]
    errors = {"error": f"{row['error']:.1%}", "with `sinks=4`": f"{with_sinks['error']:.2%}"}
    return {"format": f"`{row['format']},tail=0`"} | errors


def _format_scales(row: ResultRow) -> dict[str, Any]:
    first = row["first"]
    line = {"format": f"`{row['format']},tail=0`", "full range": _format_kl(first["mean_kl"])}
    for way in ("fitted", "searched"):
        kl = row[way]["mean_kl"] if way in row else None
        line[way] = "" if kl is None else _format_kl(kl)
        line[f"{way}, ratio"] = "" if kl is None else f"{kl / first['mean_kl']:.2f}"
    return line


def _format_peer(
    row: ResultRow, outliers: Mapping[str, ResultRow], steps: Mapping[str, Any]
) -> dict[str, Any]:
    step, stock, hard = steps[row["format"]], steps["transformers"], outliers[row["format"]]
    return {
        "cache": row["format"] if " " in row["format"] else f"`{row['format']}`",
        "bytes": f"{step['nbytes'] / stock['nbytes']:.3f}",
        "one more token": f"{step['median_ms']:.1f} ms",
        "speed": f"{stock['median_ms'] / step['median_ms']:.2f}",
        "perplexity": f"{row['perplexity_change']:+.2%}",
        "mean KL": _format_kl(row["mean_kl"]),
        "top-1": f"{row['top1']:.1%}",
        "30x: perplexity": f"{hard['perplexity_change']:+.2%}",
        "30x: mean KL": _format_kl(hard["mean_kl"]),
        "30x: top-1": f"{hard['top1']:.1%}",
    }


if __name__ == "__main__":
    write_page(json.loads((DOCS / "quality.json").read_text(encoding="utf-8"))["rows"])

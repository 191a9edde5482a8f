"""Puts what tools/quality.py found into the tables of docs/quality.md; the words around them stay.

A table stands between two comments, `<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from kvant.bench.markdown import format_markdown
from kvant.eval.result import FormatPoint, find_pareto_front, plot_results

DOCS = Path(__file__).resolve().parent.parent / "docs"
DOC_PAGE = DOCS / "quality.md"
UNIFORM_PATTERN = r"affine\d,tail=0|affine2,tail=0,group=64"  # what recipes are held against
ResultRow = Mapping[str, Any]


def write_page(rows: Sequence[ResultRow]) -> None:
    text = DOC_PAGE.read_text(encoding="utf-8")
    for name, table in make_tables(rows).items():
        pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, found = pattern.subn(lambda m, t=table: f"{m[1]}\n{t}\n\n{m[2]}", text)
        if found != 1:
            raise ValueError(
                f"{DOC_PAGE.name} has {found} places for the table {name!r}: 1 is needed"
            )
    DOC_PAGE.write_text(text, encoding="utf-8")
    points = [
        FormatPoint(row["of_raw"], row["mean_kl"], row["format"])
        for row in rows
        if (row["table"], row["model"]) == ("formats", "plain") and "," not in row["format"]
    ]
    if find_spec("matplotlib") is not None:
        plot_results([one for one in points if one.kl], "The model inside", DOCS / "quality.png")


def make_tables(rows: Sequence[ResultRow]) -> dict[str, str]:
    def of(table: str, model: str) -> list[ResultRow]:
        found = [row for row in rows if (row["table"], row["model"]) == (table, model)]
        return sorted(found, key=lambda row: -row["of_raw"]) if table == "formats" else found

    found = {
        m: format_markdown([_format_row(r) for r in of("formats", m)])
        for m in ("plain", "30x", "100x")
    }
    plain = {row["format"]: row["mean_kl"] for row in of("formats", "plain")}
    scaled = [row for row in of("formats", "30x") if row["format"].endswith(",smooth")]
    found["smooth"] = format_markdown(
        [_format_smooth_row(row, plain, of("formats", "30x")) for row in scaled]
    )
    found["recipes"] = format_markdown(
        [_format_recipe(row, rows) for row in of("recipes", "plain")]
    )
    found["scales"] = format_markdown([_format_scales(row) for row in of("scales", "plain")])
    found["values"] = format_markdown(
        [_format_short_row(row) for row in of("values", "values 30x")]
    )
    sinks = {row["format"]: row for row in of("sinks", "rows alone")}
    found["sinks"] = format_markdown(
        [_format_sinks(row, sinks) for name, row in sinks.items() if "," not in name]
    )
    autos = [row for row in rows if row["table"] == "auto"]
    found["auto"] = format_markdown(
        [
            {"model": row["model"]} | _format_short_row(row | {"format": row["chosen"]})
            for row in autos
        ]
    )
    (speed,) = of("speed", "plain")
    for model in ("plain", "30x"):
        steps = {step["cache"]: step for step in speed["steps"]}
        found[f"peers {model}"] = format_markdown(
            [_format_peer(row, steps) for row in of("peers", model)]
        )
    return found


def _format_row(row: ResultRow) -> dict[str, Any]:
    parts = {"a row": "of_raw", "at 2k": "of_raw_2k", "at 32k": "of_raw_32k"}
    told = {head: f"{row[key]:.3f}" for head, key in parts.items()}
    return {"format": f"`{row['format']}`"} | told | _format_quality(row)


def _format_short_row(row: ResultRow) -> dict[str, Any]:
    return {"format": f"`{row['format']}`", "a row": f"{row['of_raw']:.3f}"} | _format_quality(row)


def _format_quality(row: ResultRow) -> dict[str, Any]:
    low, high = row["perplexity_change_interval"]
    return {
        "perplexity": f"{row['perplexity_change']:+.2%}",
        "95%": f"{low:+.2%} to {high:+.2%}",
        "mean KL": _format_kl(row["mean_kl"]),
        "p99.9": _format_kl(row["p999_kl"]),
        "top-1": f"{row['top1']:.1%}",
    }


def _format_kl(value: float) -> str:
    return f"{value:.2g}"


def _format_smooth_row(
    row: ResultRow, plain: Mapping[str, float], rows: Iterable[ResultRow]
) -> dict[str, Any]:
    form = row["format"].removesuffix(",smooth")
    hurt = next(one["mean_kl"] for one in rows if one["format"] == form)
    return {
        "format": f"`{form}`",
        "plain": _format_kl(plain[form]),
        "30x": _format_kl(hurt),
        "of plain": f"{hurt / plain[form]:.0f}x",
        "30x with `smooth`": _format_kl(row["mean_kl"]),
        "of plain again": f"{row['mean_kl'] / plain[form]:.2f}x",
    }


def _format_recipe(row: ResultRow, rows: Sequence[ResultRow]) -> dict[str, Any]:
    """Beside what uniform codes alone do in as many bytes: between two widths, by logarithm."""
    ladder = find_pareto_front(
        FormatPoint(one["of_raw_2k"], one["mean_kl"], one["format"])
        for one in rows
        if one["table"] == "recipes" and re.fullmatch(UNIFORM_PATTERN, one["format"])
    )
    share = row["of_raw_2k"]
    held = ladder[0].relative_nbytes <= share <= ladder[-1].relative_nbytes and not re.fullmatch(
        UNIFORM_PATTERN, row["format"]
    )
    return {
        "format": f"`{row['format']}`",
        "a row": f"{row['of_raw']:.3f}",
        "at 2k": f"{row['of_raw_2k']:.3f}",
        "perplexity": f"{row['perplexity_change']:+.2%}",
        "mean KL": _format_kl(row["mean_kl"]),
        "p99.9": _format_kl(row["p999_kl"]),
        "of equal bytes": f"{row['mean_kl'] / _interpolate_kl(ladder, share):.2f}" if held else "",
    }


def _interpolate_kl(ladder: Sequence[FormatPoint], share: float) -> float:
    pairs = [*pairwise(ladder)]
    one, other = next((pair for pair in pairs if share <= pair[1].relative_nbytes), pairs[-1])
    part = (share - one.relative_nbytes) / (other.relative_nbytes - one.relative_nbytes)
    return math.exp((1 - part) * math.log(one.kl) + part * math.log(other.kl))


def _format_sinks(row: ResultRow, rows: Mapping[str, ResultRow]) -> dict[str, Any]:
    kept = rows[f"{row['format']},sinks=4"]
    errors = {"error": f"{row['error']:.1%}", "with `sinks=4`": f"{kept['error']:.2%}"}
    return {"format": f"`{row['format']},tail=0`"} | errors


def _format_scales(row: ResultRow) -> dict[str, Any]:
    first = row["first"]
    told = {"format": f"`{row['format']},tail=0`", "as they cover": _format_kl(first["mean_kl"])}
    for way in ("fitted", "searched"):
        kl = row[way]["mean_kl"] if way in row else None
        told[way] = "" if kl is None else _format_kl(kl)
        told[f"{way}, of that"] = "" if kl is None else f"{kl / first['mean_kl']:.2f}"
    return told


def _format_peer(row: ResultRow, steps: Mapping[str, Any]) -> dict[str, Any]:
    step, host = steps[row["format"]], steps["transformers"]
    return {
        "cache": row["format"] if " " in row["format"] else f"`{row['format']}`",
        "bytes": f"{step['nbytes'] / host['nbytes']:.3f}",
        "perplexity": f"{row['perplexity_change']:+.2%}",
        "mean KL": _format_kl(row["mean_kl"]),
        "p99.9": _format_kl(row["p999_kl"]),
        "top-1": f"{row['top1']:.1%}",
        "one more token": f"{step['median_ms']:.1f} ms",
        "speed": f"{host['median_ms'] / step['median_ms']:.2f}",
    }


if __name__ == "__main__":
    write_page(json.loads((DOCS / "quality.json").read_text(encoding="utf-8"))["rows"])

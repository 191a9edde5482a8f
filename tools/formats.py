"""Make the tables of README.md and of docs/benchmarks/decode.md about SmolLM2, from measurements.

Bytes are those of `kvant.plan`, the quality is that of tools/quality_texts.py, and the speeds are
those of tools/generate_speed.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import kvant
from generate_speed import WAYS
from kvant.platform.sizes import format_size
from pages import DOCS, format_table, write_tables

README, DECODE_PAGE = DOCS.parent / "README.md", DOCS / "benchmarks" / "decode.md"
MODEL = "smollm2"
SHAPE = kvant.Shape(30, 3, 64, 64)  # of its cache
FORMATS = ("raw", "affine8", "affine4", "turbo4v4")
CONTEXT = 8192
TEXT, TEXT_CONTEXT = "prose", 2048
PROMPTS = (5, 2048)  # tokens
ISAS = {"AVX-512": "avx512", "AVX2": "avx2"}
SPEED_COLUMNS = {"attach": "`model.generate`", "kvant.generate": "`kvant.generate`"}


def load_rows(path: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((DOCS / path).read_text(encoding="utf-8"))["rows"]
    return rows


def load_speeds() -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each instruction set."""
    return {isa: load_rows(f"benchmarks/generate-{file}.json") for isa, file in ISAS.items()}


def find_row(rows: Iterable[dict[str, Any]], **names: Any) -> dict[str, Any] | None:
    """Return the row that has all these values."""
    return next((row for row in rows if names.items() <= row.items()), None)


def make_table() -> list[dict[str, str]]:
    """Return the lines of the table: bytes, quality, and times the speed of stock `generate`."""
    raw = kvant.plan(SHAPE, "raw", context=CONTEXT).nbytes
    qualities = load_rows("quality-texts.json")
    speeds = load_speeds()
    lines = []
    for spec in FORMATS:
        nbytes = kvant.plan(SHAPE, spec, context=CONTEXT).nbytes
        share = f"{nbytes / raw:.2f}"
        line = {
            "format": f"`{spec}`",
            "memory": format_size(nbytes),
            "of raw": f"**{share}**" if spec == "affine4" else share,
        }
        names = {"model": MODEL, "text": TEXT, "context": TEXT_CONTEXT, "format": spec}
        quality = {"mean_kl": 0.0, "top1": 1.0} if spec == "raw" else find_row(qualities, **names)
        line["KL"] = "" if quality is None else f"{quality['mean_kl']:.2g}"
        line["same token"] = "" if quality is None else f"{quality['top1']:.1%}"
        for isa, rows in speeds.items():
            found = [find_row(rows, tokens=length, cache=spec) for length in PROMPTS]
            for way, title in SPEED_COLUMNS.items():
                ratios = [f"{row[f'{way}_ratio']:.2f}" for row in found if row is not None]
                line[f"{title}, {isa}"] = ", ".join(ratios)
        lines.append(line)
    return lines


def make_speed_table() -> list[dict[str, str]]:
    """Return the lines of the speeds: milliseconds of stock, and the ratios of our ways to it."""
    speeds = load_speeds()
    lines = []
    for row in speeds["AVX-512"]:
        line = {"prompt": f"{row['tokens']:,}", "cache": f"`{row['cache']}`"}
        for isa, rows in speeds.items():
            found = find_row(rows, tokens=row["tokens"], cache=row["cache"])
            assert found is not None
            line[f"{isa}: stock"] = f"{found['stock_ms']:.1f}"
            for way in WAYS:
                line[f"{isa}: `{way}`"] = f"{found[f'{way}_ratio']:.2f}"
        lines.append(line)
    return lines


if __name__ == "__main__":
    write_tables(README, {"formats": format_table(make_table())})
    write_tables(DECODE_PAGE, {"generate": format_table(make_speed_table())})

"""Test that the README table holds the measurements; tests/test_docs.py runs its examples."""

from __future__ import annotations

import json
from pathlib import Path

from kvant import Shape, plan
from kvant.bench.markdown import format_markdown

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def test_table_equals_the_measurements() -> None:
    rows = json.loads((ROOT / "docs" / "benchmarks" / "formats.json").read_text())["rows"]
    assert format_markdown(rows) in README.read_text()
    raw = plan(Shape(1, 8, 128, 128), "raw").nbytes_per_token
    for row in rows:
        cost = plan(Shape(1, 8, 128, 128), row["format"].strip("`")).nbytes_per_token
        assert (row["bytes a token"], row["of raw"]) == (f"{cost:.0f}", f"{cost / raw:.3g}")

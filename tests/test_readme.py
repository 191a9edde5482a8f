"""Test that the tables about SmolLM2 hold the measurements; tests/test_docs.py runs examples."""

from __future__ import annotations

from formats import DECODE_PAGE, README, make_speed_table, make_table
from kvant.bench.markdown import format_markdown


def test_table_equals_the_measurements() -> None:
    table = make_table()
    assert format_markdown(table) in README.read_text()
    assert format_markdown(make_speed_table()) in DECODE_PAGE.read_text()
    assert all(line["KL"] and line["`kvant.generate`, AVX2"] for line in table[:2])

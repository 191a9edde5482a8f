"""Test the Markdown tables of benchmark results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvant.bench import markdown


def test_all_tables_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.json"
    steps = [{"length": n, "cache": "raw", "median_ms": n / 8} for n in (128, 256)]
    rows = [{"cache": "raw", "first_ms": 1.234, "rest": None}]
    tables = {"steps": [{"step": "a"}], "formats": [{"format": "raw"}]}
    file.write_text(json.dumps({"rows": rows, "latency": steps, "tables": tables}))
    markdown.main(file)
    assert capsys.readouterr().out.splitlines() == [
        "| cache | first_ms | rest |",
        "| --- | --- | --- |",
        "| raw | 1.23 |  |",
        "",
        "| cache | 128 | 256 |",
        "| --- | --- | --- |",
        "| raw | 16.0 | 32.0 |",
        "",
        "steps:",
        "",
        "| step |",
        "| --- |",
        "| a |",
        "",
        "formats:",
        "",
        "| format |",
        "| --- |",
        "| raw |",
    ]

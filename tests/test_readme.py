"""What the README shows is run, and its table is the one that was measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvant import Shape, plan
from kvant.bench.markdown import markdown

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"


def test_its_python_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(blocks) == 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(README), "exec"), names)


def test_its_table_is_what_was_measured() -> None:
    rows = json.loads((ROOT / "docs" / "benchmarks" / "formats.json").read_text())["rows"]
    assert markdown(rows) in README.read_text()
    raw = plan(Shape(1, 8, 128, 128), "raw").nbytes_per_token
    for row in rows:
        cost = plan(Shape(1, 8, 128, 128), row["format"].strip("`")).nbytes_per_token
        assert (row["bytes a token"], row["of raw"]) == (f"{cost:.0f}", f"{cost / raw:.3g}")

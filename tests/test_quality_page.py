"""The tables of docs/quality.md equal those that tools/quality_page.py makes from quality.json."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOL = runpy.run_path(str(ROOT / "tools" / "quality_page.py"))
TABLES = TOOL["make_tables"](json.loads((ROOT / "docs" / "quality.json").read_text())["rows"])


@pytest.mark.parametrize("name", TABLES)
def test_page_has_the_generated_table(name: str) -> None:
    text = (ROOT / "docs" / "quality.md").read_text()
    assert f"<!-- {name} -->\n\n{TABLES[name]}\n\n<!-- end -->" in text

"""The tables of docs/quality.md equal those that tools/quality_page.py makes from quality.json."""

from __future__ import annotations

import json

import pytest

from pages import DOCS, format_table
from quality_page import make_smollm2_table, make_tables

TABLES = make_tables(json.loads((DOCS / "quality.json").read_text())["rows"])
TABLES["smollm2"] = make_smollm2_table()


@pytest.mark.parametrize("name", TABLES)
def test_page_has_the_generated_table(name: str) -> None:
    text = (DOCS / "quality.md").read_text()
    assert f"<!-- {name} -->\n\n{format_table(TABLES[name])}\n\n<!-- end -->" in text

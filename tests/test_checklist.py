"""Test that docs/checklist.md names existing tests for every row."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STARRED = [
    *(*range(1, 9), *range(10, 14), 15, 16, 17, 19, 24, 25, 26, 29, 31, 36, 37, 38, 40, 41, 43),
    *(55, 56, *range(61, 67), 69, 71, 72, 76, 80, 86, 92, *range(98, 102), 103, 106),
]


def read_rows() -> dict[str, list[str]]:
    """Return the number of each row, and its cells."""
    lines = (ROOT / "docs" / "checklist.md").read_text().splitlines()
    cells = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines if line[:3] != "| r"]
    return {cells[0]: cells[1:] for cells in cells if re.fullmatch(r"\d+\*?", cells[0])}


@cache
def list_functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_starred_row_is_present() -> None:
    starred = {int(number[:-1]) for number in read_rows() if number.endswith("*")}
    assert starred == set(STARRED)


@pytest.mark.parametrize("number", read_rows())
def test_row_names_existing_tests(number: str) -> None:
    feature, here, test_names = read_rows()[number]
    assert feature and here
    named = [name.split("::") for name in test_names.split(", ")]
    assert all(test in list_functions(path) for path, test in named)

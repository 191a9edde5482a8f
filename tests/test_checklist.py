"""docs/checklist.md names a test for every row, and the tests are there."""

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


def rows() -> dict[str, list[str]]:
    """The number of a row, and its cells."""
    lines = (ROOT / "docs" / "checklist.md").read_text().splitlines()
    found = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in lines if line[:3] != "| r"]
    return {cells[0]: cells[1:] for cells in found if re.fullmatch(r"\d+\*?", cells[0])}


@cache
def functions(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_starred_row_is_there() -> None:
    starred = {int(number[:-1]) for number in rows() if number.endswith("*")}
    assert starred == set(STARRED)


@pytest.mark.parametrize("number", rows())
def test_a_row_names_tests_that_are_there(number: str) -> None:
    what, here, shown = rows()[number]
    assert what and here
    named = [one.split("::") for one in shown.split(", ")]
    assert all(test in functions(path) for path, test in named)

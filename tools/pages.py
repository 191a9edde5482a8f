"""Write tables into a page of docs/; the text of the page stays.

Each table is between two comments, `<!-- NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvant.bench.markdown import format_markdown

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"


def write_tables(page: Path, tables: Mapping[str, str]) -> None:
    """Replace the tables of a page by name; raise if a name does not have one place."""
    text = page.read_text(encoding="utf-8")
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, num_places = pattern.subn(lambda m, t=table: f"{m[1]}\n{t}\n\n{m[2]}", text)
        if num_places != 1:
            raise ValueError(f"{page.name} has {num_places} places for {name!r}: 1 is needed")
    page.write_text(text, encoding="utf-8")


def format_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Format lines, which all have the keys of the first."""
    return format_markdown(lines) if lines else "None."


def merge_lines(lines: Iterable[Mapping[str, str]], by: str) -> list[dict[str, str]]:
    """Merge lines that are equal in a column; join the different values of the others."""
    groups: dict[str, list[Mapping[str, str]]] = {}
    for line in lines:
        groups.setdefault(line[by], []).append(line)
    return [
        {name: ", ".join(dict.fromkeys(line[name] for line in group)) for name in group[0]}
        for group in groups.values()
    ]

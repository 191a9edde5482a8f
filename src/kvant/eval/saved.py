"""Results in a file, a line of JSON each, so that a run that was ended can go on.

The first line says what is measured: another model, text or settings is another file. A line that
was not finished is dropped. A format is known by its name and its recipes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvant.eval.result import Result


class Saved:
    """The results of one measurement; without a path only in memory."""

    def __init__(self, path: Path | None, facts: Mapping[str, Any]) -> None:
        self.path = path
        self._found: dict[tuple[str, str], Result] = {}
        if path is None:
            return
        first, *rest = _lines(path) if path.exists() else [dict(facts)]
        _check(path, first, facts)
        for told in rest:
            self._found[told["format"], told["recipe"]] = Result.from_json(told)
        if not path.exists():
            self._append(facts)

    def get(self, name: str, recipe: str) -> Result | None:
        return self._found.get((name, recipe))

    def add(self, recipe: str, result: Result) -> None:
        self._found[result.format, recipe] = result
        self._append(result.as_json() | {"recipe": recipe})

    def _append(self, line: Mapping[str, Any]) -> None:
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def _lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text(encoding="utf-8", errors="replace")
    whole, end, torn = text.rpartition("\n")
    try:
        found: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
    except ValueError:
        found = []
    if not found or "eval" not in found[0]:
        raise ValueError(f"{path} is no file of saved results: name another, or a new one")
    if torn:
        path.write_text(whole + end, encoding="utf-8")
    return found


def _check(path: Path, told: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    for name, value in facts.items():
        if told.get(name) != value:
            raise ValueError(
                f"{path} holds results with {name} {told.get(name)}, and this is {value}: "
                "give the same settings, or save to another file"
            )

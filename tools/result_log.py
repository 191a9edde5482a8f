"""Results of a measurement that takes hours: a row of a JSON file each, measured once.

The file is written after each row, so a run may stop at any time; the same command goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.bench.harness import describe_machine, show_progress

Row = dict[str, Any]


@dataclass(frozen=True)
class ResultLog:
    """Rows in a file, the settings that all of them have, and the machine of the first."""

    file: Path
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    rows: list[Row]
    other_machine: Mapping[str, Any]  # what differs now

    @classmethod
    def open(cls, file: Path, settings: Mapping[str, Any]) -> ResultLog:
        """Read the rows of a file, if there is one; raise if they have other settings."""
        machine = describe_machine()
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            return cls(file, settings, machine, [], {})
        content = json.loads(file.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if content["settings"].get(name) != value:
                raise ValueError(
                    f"{file}: its rows have {name} {content['settings'].get(name)}, not {value}: "
                    "name another --output"
                )
        first = content["machine"]
        other_machine = {name: value for name, value in machine.items() if first.get(name) != value}
        return cls(file, settings, first, content["rows"], other_machine)

    def find(self, names: Mapping[str, Any]) -> Row | None:
        """Return the row that has all these values."""
        return next((row for row in self.rows if names.items() <= row.items()), None)

    def record(self, key: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        """Set the row of a key, and write the file, one line a row."""
        machine = {"machine": dict(self.other_machine)} if self.other_machine else {}
        row, old = {**key, **figures, **machine}, self.find(key)
        if old is None:
            self.rows.append(row)
        else:
            self.rows[self.rows.index(old)] = row
        facts = {"settings": dict(self.settings), "machine": dict(self.machine)}
        lines = ",\n".join(json.dumps(row) for row in self.rows)
        text = f'{json.dumps(facts, indent=1)[:-2]},\n "rows": [\n{lines}\n]}}\n'
        new_file = self.file.with_suffix(".new")
        new_file.write_text(text, encoding="utf-8")
        new_file.replace(self.file)  # an interrupt leaves the old file

    def measure(
        self,
        keys: Iterable[Mapping[str, Any]],
        measure_key: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        minutes: float,
    ) -> bool:
        """Measure the rows of `keys` that are missing; return whether all are there.

        No row is begun after `minutes`.
        """
        groups = ([key] for key in keys)
        return self.measure_groups(groups, lambda group: [*map(measure_key, group)], minutes)

    def measure_groups(
        self,
        groups: Iterable[Sequence[Mapping[str, Any]]],
        measure_group: Callable[[Sequence[Mapping[str, Any]]], Sequence[Mapping[str, Any]]],
        minutes: float,
    ) -> bool:
        """Measure rows, the missing ones of a group of keys together."""
        begin = time.monotonic()
        missing = [[key for key in group if self.find(key) is None] for group in groups]
        num_missing, num_done = sum(map(len, missing)), 0
        for group in filter(None, missing):
            passed = (time.monotonic() - begin) / 60
            if passed >= minutes:
                print(
                    f"rows that are missing: {num_missing - num_done}; run the same command again"
                )
                return False
            name = ", ".join(map(str, group[0].values()))
            show_progress(f"{name}: {num_done + 1} of {num_missing}, {passed:.0f} min")
            for key, figures in zip(group, measure_group(group), strict=True):
                self.record(key, figures)
            num_done += len(group)
        show_progress("")
        print("all is measured")
        return True

"""Results of a measurement that takes hours: a row of a JSON file each, measured once.

The file is written after each row, so a run may stop at any time; the same command goes on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvant.bench.harness import describe_machine, show_progress

Row = dict[str, Any]


@dataclass(frozen=True)
class ResultLog:
    """Rows in a file, the settings that all of them have, and the machine."""

    file: Path
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    rows: list[Row]

    @classmethod
    def open(cls, file: Path, settings: Mapping[str, Any]) -> ResultLog:
        """Read the rows of a file, if there is one; raise if they have other settings."""
        if not file.exists():
            return cls(file, settings, describe_machine(), [])
        content = json.loads(file.read_text(encoding="utf-8"))
        for name, value in settings.items():
            if content["settings"].get(name) != value:
                raise ValueError(
                    f"{file}: its rows have {name} {content['settings'].get(name)}, not {value}: "
                    "name another --output"
                )
        return cls(file, settings, content["machine"], content["rows"])

    def find(self, names: Mapping[str, Any]) -> Row | None:
        """Return the row that has all these values."""
        return next((row for row in self.rows if names.items() <= row.items()), None)

    def append(self, row: Row) -> None:
        """Append a row and write the file, one line a row."""
        self.rows.append(row)
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
        begin = time.monotonic()
        missing = [key for key in keys if self.find(key) is None]
        for number, key in enumerate(missing):
            passed = (time.monotonic() - begin) / 60
            if passed >= minutes:
                print(f"rows that are missing: {len(missing) - number}; run the same command again")
                return False
            name = ", ".join(map(str, key.values()))
            show_progress(f"{name}: {number + 1} of {len(missing)}, {passed:.0f} min")
            self.append({**key, **measure_key(key)})
        show_progress("")
        return True

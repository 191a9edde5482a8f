"""Products of features: by default every value is tested once, `make laws` tests them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest


def thin_rows(rows: Iterable[Sequence[Hashable]], keys: Any = tuple) -> list[Any]:
    """Return the rows as parameters; `laws` marks those that add no new value.

    `keys` returns the values of a row by position. Values in many rows, such as model families,
    rotate through the others.
    """
    rows = list(rows)
    values = [set(enumerate(keys(row))) for row in rows]
    missing, used = set().union(*values), Counter[Any]()
    chosen = set()
    while missing:
        best = max(
            range(len(rows)),
            key=lambda i: (len(values[i] & missing), -sum(used[value] for value in values[i])),
        )
        missing -= values[best]
        used.update(values[best])
        chosen.add(best)
    return [
        pytest.param(*row, marks=() if i in chosen else pytest.mark.laws)
        for i, row in enumerate(rows)
    ]

"""Products of features: by default every value is tried once, `make laws` tries them all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import pytest


def once(rows: Iterable[Sequence[Hashable]], keys: Any = tuple) -> list[Any]:
    """The rows as parameters; `laws` marks those without which every value is there already.

    `keys` gives the values that a row has, by their place. Where one of them is in many rows, as
    every family of models is, the others take turns.
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

"""A layer with several memories under one length: attention beside a recurrence.

Each part is appended to by its own `append`; the verbs act on all parts or on none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from kvant.contracts import LayerState, Ledger, Snapshot, Tally
from kvant.errors import RewindError, SnapshotMismatch
from kvant.layers.ledger import Alone


class Group:
    """Named states of one layer; a `LayerState`."""

    def __init__(self, parts: Mapping[str, LayerState]) -> None:
        self.parts = dict(parts)
        self.ledger: Ledger = Alone()

    def __getitem__(self, name: str) -> LayerState:
        return self.parts[name]

    @property
    def length(self) -> int:
        return min(part.length for part in self.parts.values())

    @property
    def batch(self) -> int:
        return max(part.batch for part in self.parts.values())

    @property
    def held(self) -> int:
        return max(part.held for part in self.parts.values())

    @property
    def max_held(self) -> int | None:
        limits = [part.max_held for part in self.parts.values()]
        return None if None in limits else max(limit or 0 for limit in limits)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def nbytes_used(self) -> int:
        return sum(part.nbytes_used for part in self.parts.values())

    @property
    def tally(self) -> Tally:
        total = Tally()
        for part in self.parts.values():
            total.add(part.tally)
        return total

    def append(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(f"a group is appended to by its parts: {list(self.parts)}")

    def read(self) -> dict[str, Any]:
        """What every part reads as, by name."""
        return {name: part.read() for name, part in self.parts.items()}

    def reachable(self, to: int) -> int:
        return agreed(list(self.parts.values()), to)

    def rewind(self, to: int) -> None:
        if self.reachable(to) != to or to < 0:
            raise RewindError(f"length {to} is not one that all of {list(self.parts)} can reach")
        for part in self.parts.values():
            part.rewind(to)

    def checkpoint(self) -> None:
        for part in self.parts.values():
            part.checkpoint()

    def commit(self) -> None:
        for part in self.parts.values():
            part.commit()

    def rollback(self) -> None:
        for part in self.parts.values():
            part.rollback()

    def snapshot(self) -> Snapshot:
        return joined({name: part.snapshot() for name, part in self.parts.items()})

    def exposed(self) -> Snapshot:
        return joined({name: part.exposed() for name, part in self.parts.items()})

    def restore(self, snapshot: Snapshot) -> None:
        pieces = split(snapshot, list(self.parts))
        restore_all([(part, pieces[name]) for name, part in self.parts.items()])

    def fork(self) -> Group:
        return Group({name: part.fork() for name, part in self.parts.items()})

    def select(self, index: Tensor) -> None:
        for part in self.parts.values():
            part.select(index)

    def reset(self) -> None:
        for part in self.parts.values():
            part.reset()

    def clear(self) -> None:
        for part in self.parts.values():
            part.clear()


def agreed(states: list[LayerState], to: int) -> int:
    """The longest length <= `to` that every state can go back to."""
    while True:
        reach = min((state.reachable(to) for state in states), default=0)
        if reach == to or reach <= 0:
            return max(reach, 0)
        to = reach


def restore_all(pairs: list[tuple[LayerState, Snapshot]]) -> None:
    """Restore every state, or none: the caller commits."""
    done: list[LayerState] = []
    try:
        for state, piece in pairs:
            state.restore(piece)
            done.append(state)
    except Exception:
        for state in done:
            state.rollback()
        raise


def joined(pieces: Mapping[str, Snapshot]) -> Snapshot:
    tensors = {f"{p}/{n}": t for p, piece in pieces.items() for n, t in piece.tensors.items()}
    numbers = {f"{p}/{n}": i for p, piece in pieces.items() for n, i in piece.numbers.items()}
    return Snapshot(tensors, numbers)


def split(snapshot: Snapshot, names: list[str]) -> dict[str, Snapshot]:
    """The snapshots that were joined under `names`."""
    pieces: dict[str, tuple[dict[str, Tensor], dict[str, int]]] = {n: ({}, {}) for n in names}
    for index, entries in enumerate((snapshot.tensors, snapshot.numbers)):
        for key, value in entries.items():
            name, _, rest = key.partition("/")
            if name not in pieces:
                raise SnapshotMismatch(f"{key} belongs to none of {names}")
            pieces[name][index][rest] = value  # type: ignore[assignment]
    return {name: Snapshot(*parts) for name, parts in pieces.items()}

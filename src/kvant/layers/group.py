"""States under one length: the memories of one layer, or the layers of one cache.

Each part is appended to by its own `append`, and all commit together; the verbs act on all parts or
on none.
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short
from typing import Any

import torch
from torch import Tensor

from kvant.contracts import Follower, LayerState, Ledger, Snapshot, Tally
from kvant.errors import SnapshotMismatch
from kvant.layers.ledger import Together
from kvant.layers.reach import agreed, check_reach
from kvant.recipes import GroupSpec


class Group:
    """States by name; a `LayerState`."""

    def __init__(self, parts: Mapping[str, LayerState]) -> None:
        self.parts = dict(parts)
        self.ledger: Ledger = Together(self.leaves(), self.followers())

    def __getitem__(self, name: str) -> LayerState:
        return self.parts[name]

    def leaves(self) -> list[LayerState]:
        return [leaf for part in self.parts.values() for leaf in part.leaves()]

    def followers(self) -> list[Follower]:
        return [other for part in self.parts.values() for other in part.followers()]

    @property
    def length(self) -> int:
        return min((part.length for part in self.parts.values()), default=0)

    @property
    def batch(self) -> int:
        return max((part.batch for part in self.parts.values()), default=0)

    @property
    def held(self) -> int:
        return max((part.held for part in self.parts.values()), default=0)

    @property
    def max_held(self) -> int | None:
        limits = [part.max_held for part in self.parts.values()]
        return None if None in limits else max((limit or 0 for limit in limits), default=0)

    @property
    def capacity(self) -> int | None:
        limits = [part.capacity for part in self.parts.values()]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    @property
    def nbytes_used(self) -> int:
        return sum(part.nbytes_used for part in self.parts.values())

    def nbytes_after(self, length: int, recipe: GroupSpec) -> int:
        return sum(self.parts[name].nbytes_after(length, part) for name, part in recipe.parts)

    def nbytes_with(self, *args: Any, **kwargs: Any) -> int:
        raise self._refusal()

    @property
    def tally(self) -> Tally:
        total = Tally()
        for part in self.parts.values():
            total.add(part.tally)
        return total

    def append(self, *args: Any, **kwargs: Any) -> Any:
        raise self._refusal()

    def read(self) -> dict[str, Any]:
        """What every part reads as, by name."""
        return {name: part.read() for name, part in self.parts.items()}

    def reachable(self, to: int) -> int:
        return agreed(list(self.parts.values()), to)

    def rewind(self, to: int) -> None:
        check_reach(self, to)
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
        return self.exposed().copied()

    def exposed(self) -> Snapshot:
        pieces = {name: part.exposed() for name, part in self.parts.items()}
        return Snapshot(
            {f"{p}/{n}": t for p, piece in pieces.items() for n, t in piece.tensors.items()},
            {f"{p}/{n}": i for p, piece in pieces.items() for n, i in piece.numbers.items()},
        )

    def restore(self, snapshot: Snapshot) -> None:
        tensors, numbers = self._split(snapshot.tensors), self._split(snapshot.numbers)
        try:
            for name, part in self.parts.items():
                part.restore(Snapshot(tensors[name], numbers[name]))
            batches = sorted({leaf.batch for leaf in self.leaves()} - {0})
            if len(batches) > 1:
                raise SnapshotMismatch(f"layers with batches of {batches}")
        except Exception:
            self.rollback()
            raise

    def fork(self) -> Group:
        return Group({name: part.fork() for name, part in self.parts.items()})

    def select(self, index: Tensor) -> None:
        for part in self.parts.values():
            part.select(index)

    def move(self, device: torch.device) -> None:
        for part in self.parts.values():
            part.move(device)

    def widen(self, slack: int) -> None:
        for part in self.parts.values():
            part.widen(slack)

    def recode(self, recipe: GroupSpec) -> None:
        try:
            for name, part in recipe.parts:
                self.parts[name].recode(part)
        except Exception:
            self.rollback()
            raise

    def reset(self) -> None:
        for part in self.parts.values():
            part.reset()

    def clear(self) -> None:
        for part in self.parts.values():
            part.clear()

    def _refusal(self) -> TypeError:
        return TypeError(f"a group is appended to by its parts: {', '.join(self.parts)}")

    def _split(self, entries: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Entries named "part/rest", by part."""
        pieces: dict[str, dict[str, Any]] = {name: {} for name in self.parts}
        for key, value in entries.items():
            name, _, rest = key.partition("/")
            if name not in pieces:
                raise SnapshotMismatch(f"{key} belongs to none of {short(list(self.parts))}")
            pieces[name][rest] = value
        return pieces

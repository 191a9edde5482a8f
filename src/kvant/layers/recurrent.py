"""A layer that remembers fixed-shape tensors: recurrences and short convolutions.

It can go back only to a checkpoint, or to nothing. Floating point states are kept in float32
whatever they come in: rounding them at every token would add up.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kvant.contracts import (
    Fields,
    Ledger,
    Snapshot,
    Tally,
)
from kvant.errors import RewindError, SnapshotMismatch
from kvant.layers.ledger import Alone
from kvant.recipes import RecurrentSpec

Moment = tuple[int, Mapping[str, Tensor]]  # a length, and the state there


class Recurrent:
    """One recurrent layer; a `LayerState`."""

    def __init__(self, spec: RecurrentSpec) -> None:
        self.spec = spec
        self.ledger: Ledger = Alone()
        self.tally = Tally()
        self._now: Moment = (0, {})
        self._undo: tuple[tuple[Moment, list[Moment]], ...] = ()  # at most one
        self._checkpoints: list[Moment] = []  # by length, the newest last

    @property
    def length(self) -> int:
        return self._now[0]

    @property
    def batch(self) -> int:
        return next((tensor.shape[0] for tensor in self._now[1].values()), 0)

    @property
    def held(self) -> int:
        """No rows, whatever the length."""
        return 0

    @property
    def max_held(self) -> int | None:
        return 0

    @property
    def nbytes(self) -> int:
        moments = [self._now, *self._checkpoints]
        return sum(tensor.nbytes for _, state in moments for tensor in state.values())

    @property
    def nbytes_used(self) -> int:
        return self.nbytes

    def append(self, count: int, state: Fields) -> Fields:
        """The state after `count` more tokens; it is copied. What is stored is returned."""
        if count < 0:
            raise ValueError(f"{count} tokens: 0 or more")
        self.ledger.opening(self)
        old = self._now[1]
        if self.length and {n: t.shape for n, t in old.items()} != {
            n: t.shape for n, t in state.items()
        }:
            raise ValueError(f"state {_shapes(state)} for a layer that holds {_shapes(old)}")
        copied = {name: _kept(tensor) for name, tensor in state.items()}
        self._undo = ((self._now, self._checkpoints),)
        self._now = (self.length + count, copied)
        self.tally.appends += 1
        self.ledger.closing(self)
        return copied

    def read(self) -> Fields:
        """The state now, by name."""
        return dict(self._now[1])

    def reachable(self, to: int) -> int:
        if to >= self.length:
            return self.length
        return max((n for n, _ in self._checkpoints if n <= to), default=0)

    def rewind(self, to: int) -> None:
        if not 0 <= to <= self.length or self.reachable(to) != to:
            raise RewindError(
                f"length {to} cannot be reached from {self.length}: the nearest checkpoint "
                f"before it is at {self.reachable(to)}"
            )
        if to == self.length:
            return
        moments = [moment for moment in self._checkpoints if moment[0] <= to]
        self._now = (to, moments[-1][1] if to else {})
        self._checkpoints, self._undo = moments, ()
        self.tally.rewinds_exact += 1

    def checkpoint(self) -> None:
        """Come back to the present length from here on. States are replaced, never written to."""
        if all(length != self.length for length, _ in self._checkpoints):
            self._checkpoints = [*self._checkpoints, self._now][-self.spec.max_checkpoints :]

    def commit(self) -> None:
        self._undo = ()

    def rollback(self) -> None:
        for before in self._undo:
            self._now, self._checkpoints = before
        self._undo = ()

    def snapshot(self) -> Snapshot:
        exposed = self.exposed()
        copies = {name: tensor.clone() for name, tensor in exposed.tensors.items()}
        return Snapshot(copies, exposed.numbers)

    def exposed(self) -> Snapshot:
        """A snapshot that shares memory with the state."""
        moments = {"now": self._now}
        moments |= {f"at{i}": moment for i, moment in enumerate(self._checkpoints)}
        tensors = {f"{k}.{n}": t for k, (_, state) in moments.items() for n, t in state.items()}
        return Snapshot(tensors, {key: length for key, (length, _) in moments.items()})

    def restore(self, snapshot: Snapshot) -> None:
        moments: dict[str, dict[str, Tensor]] = {key: {} for key in snapshot.numbers}
        for key, tensor in snapshot.tensors.items():
            moment, _, name = key.partition(".")
            if moment not in moments or not name:
                raise SnapshotMismatch(f"unknown tensor {key}")
            moments[moment][name] = _kept(tensor)
        count = len(moments) - 1
        order = ["now", *(f"at{i}" for i in range(count))]
        if set(order) != set(moments) or count > self.spec.max_checkpoints:
            raise SnapshotMismatch(f"states {sorted(moments)}: now, at0, at1, ... are needed")
        lengths = [snapshot.numbers[key] for key in order]
        now, *at = lengths
        if min(lengths) < 0 or sorted(set(at)) != at or max(at, default=0) > now:
            raise SnapshotMismatch(f"states at lengths {lengths}: now, then checkpoints in order")
        restored: list[Moment] = [(snapshot.numbers[key], moments[key]) for key in order]
        self._undo = ((self._now, self._checkpoints),)
        self._now, self._checkpoints = restored[0], restored[1:]

    def fork(self) -> Recurrent:
        twin = Recurrent(self.spec)
        twin.restore(self.exposed())
        twin.commit()
        return twin

    def select(self, index: Tensor) -> None:
        def pick(moment: Moment) -> Moment:
            return moment[0], {
                n: t.index_select(0, index.to(t.device)) for n, t in moment[1].items()
            }

        self._now = pick(self._now)
        self._checkpoints = [pick(moment) for moment in self._checkpoints]
        self._undo = ()

    def reset(self) -> None:
        """Forget the tokens; the state is small, so its memory goes too."""
        self._now, self._undo, self._checkpoints = (0, {}), (), []

    def clear(self) -> None:
        self.reset()


def _kept(tensor: Tensor) -> Tensor:
    """A copy that no later rounding can reach."""
    wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    return tensor.detach().to(wide, copy=True)


def _shapes(state: Fields) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in state.items()}

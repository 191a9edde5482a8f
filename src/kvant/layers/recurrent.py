"""A layer that remembers fixed-shape tensors: recurrences and short convolutions.

It can go back only to a checkpoint, or to nothing. Floating point states are kept in float32
whatever they come in: rounding them at every token would add up. What is handed in or out is a
copy: models are known to update the state that they are given in place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvant.contracts import Fields, Follower, LayerState, Ledger, Snapshot, Tally
from kvant.errors import SnapshotMismatch
from kvant.lasting import check_lasts
from kvant.layers.ledger import Alone
from kvant.layers.reach import check_reach
from kvant.recipes import RecurrentSpec


class Moment(NamedTuple):
    """A length, and the state there."""

    length: int
    state: Fields

    def copied(self) -> Moment:
        return Moment(self.length, {name: tensor.clone() for name, tensor in self.state.items()})


NOTHING = Moment(0, {})


@dataclass(frozen=True)
class Past:
    """Where a layer is, and where it can go back to, in order."""

    now: Moment
    checkpoints: tuple[Moment, ...] = ()


class Recurrent:
    """One recurrent layer; a `LayerState`."""

    def __init__(self, spec: RecurrentSpec) -> None:
        self.spec = spec
        self.ledger: Ledger = Alone()
        self.tally = Tally()
        self._past = self._committed = Past(NOTHING)

    def leaves(self) -> list[LayerState]:
        return [self]

    def followers(self) -> list[Follower]:
        return []

    @property
    def _now(self) -> Moment:
        return self._past.now

    @property
    def length(self) -> int:
        return self._now.length

    @property
    def batch(self) -> int:
        return next((tensor.shape[0] for tensor in self._now.state.values()), 0)

    @property
    def held(self) -> int:
        """No rows, whatever the length."""
        return 0

    @property
    def max_held(self) -> int | None:
        return 0

    @property
    def capacity(self) -> int | None:
        return None

    @property
    def nbytes(self) -> int:
        moments = [self._now, *self._past.checkpoints]
        return sum(tensor.nbytes for moment in moments for tensor in moment.state.values())

    @property
    def nbytes_used(self) -> int:
        return self.nbytes

    def nbytes_after(self, length: int, recipe: RecurrentSpec) -> int:
        """The same at every length; who takes a checkpoint adds to it."""
        return self.nbytes

    def nbytes_with(self, count: int, state: Fields) -> int:
        _check(count, state)
        self._check_fits(state)
        wide = {name: tensor.to("meta", _wide(tensor)) for name, tensor in state.items()}
        now = sum(tensor.nbytes for tensor in self._now.state.values())
        return self.nbytes - now + sum(tensor.nbytes for tensor in wide.values())

    def append(self, count: int, state: Fields) -> None:
        """The state after `count` more tokens; it is copied."""
        check_lasts("append")
        _check(count, state)
        self.ledger.opening(self)
        self._check_fits(state)
        now = Moment(self.length + count, {name: _kept(tensor) for name, tensor in state.items()})
        self._past = replace(self._past, now=now)
        self.tally.appends += 1
        self.ledger.closing(self)

    def read(self) -> Fields:
        """A copy of the state now, by name."""
        return self._now.copied().state

    def reachable(self, to: int) -> int:
        if to >= self.length:
            return self.length
        return max((m.length for m in self._past.checkpoints if m.length <= to), default=0)

    def rewind(self, to: int) -> None:
        check_reach(self, to)
        if to == self.length:
            self._settle(self._past)  # a rewind that was interrupted may have come so far
            return
        kept = tuple(moment for moment in self._past.checkpoints if moment.length <= to)
        self._settle(Past(kept[-1].copied() if to else NOTHING, kept))
        self.tally.rewinds_exact += 1

    def checkpoint(self) -> None:
        """Come back to the present length from here on; the oldest checkpoint may go for it."""
        now, kept = self._now, self._past.checkpoints
        if all(moment.length != now.length for moment in kept):
            self._settle(Past(now, (*kept, now.copied())[-self.spec.max_checkpoints :]))

    def commit(self) -> None:
        self._settle(self._past)

    def rollback(self) -> None:
        self._past = self._committed

    def snapshot(self) -> Snapshot:
        return self.exposed().copied()

    def exposed(self) -> Snapshot:
        moments = {"now": self._now}
        moments |= {f"at{i}": moment for i, moment in enumerate(self._past.checkpoints)}
        tensors = {f"{k}.{n}": t for k, moment in moments.items() for n, t in moment.state.items()}
        return Snapshot(tensors, {key: moment.length for key, moment in moments.items()})

    def restore(self, snapshot: Snapshot) -> None:
        states: dict[str, dict[str, Tensor]] = {key: {} for key in snapshot.numbers}
        for key, tensor in snapshot.tensors.items():
            moment, _, name = key.partition(".")
            if moment not in states or not name:
                raise SnapshotMismatch(f"unknown tensor {key}")
            if tensor.ndim == 0:
                raise SnapshotMismatch(f"{key} is a single number: [batch, ...] is needed")
            states[moment][name] = _kept(tensor)
        for moment, state in states.items():
            batches = sorted({tensor.shape[0] for tensor in state.values()})
            if len(batches) > 1 or 0 in batches:
                raise SnapshotMismatch(f"{moment} has states of {batches} sequences")
        count = len(states) - 1
        order = ["now", *(f"at{i}" for i in range(count))]
        if set(order) != set(states) or count > self.spec.max_checkpoints:
            raise SnapshotMismatch(f"states {sorted(states)}: now, at0, at1, ... are needed")
        now, *kept = (Moment(snapshot.numbers[key], states[key]) for key in order)
        at = [moment.length for moment in kept]
        ordered = sorted(set(at)) == at and min(at, default=0) >= 0
        if any(_shapes(moment.state) != _shapes(now.state) for moment in kept if moment.length):
            raise SnapshotMismatch("checkpoints of other shapes than the state")
        if not ordered or now.length < max(at, default=0):
            raise SnapshotMismatch(f"a state at {now.length}, checkpoints at {at}: not in order")
        self._past = Past(now, tuple(kept))

    def fork(self) -> Recurrent:
        twin = Recurrent(self.spec)
        kept = tuple(moment.copied() for moment in self._past.checkpoints)
        twin._settle(Past(self._now.copied(), kept))
        return twin

    def select(self, index: Tensor) -> None:
        def pick(moment: Moment) -> Moment:
            picked = {n: t.index_select(0, index.to(t.device)) for n, t in moment.state.items()}
            return Moment(moment.length, picked)

        kept = tuple(pick(moment) for moment in self._past.checkpoints)
        self._settle(Past(pick(self._now), kept))

    def move(self, device: torch.device) -> None:
        def there(moment: Moment) -> Moment:
            return Moment(moment.length, {n: t.to(device) for n, t in moment.state.items()})

        self._settle(Past(there(self._now), tuple(map(there, self._past.checkpoints))))

    def widen(self, slack: int) -> None:
        """Checkpoints are all there is to go back to."""

    def recode(self, recipe: RecurrentSpec) -> None:
        """A state has no format."""

    def reset(self) -> None:
        """Forget the tokens; the state is small, so its memory goes too."""
        self._settle(Past(NOTHING))

    def clear(self) -> None:
        self.reset()

    def _check_fits(self, state: Fields) -> None:
        old = _shapes(self._now.state)
        if self.length and _shapes(state) != old:
            raise ValueError(f"state {_shapes(state)} for a layer of {old}")

    def _settle(self, past: Past) -> None:
        self._past = self._committed = past


def _check(count: int, state: Fields) -> None:
    if count < 0:
        raise ValueError(f"append of {count} tokens: 0 or more")
    if any(tensor.ndim == 0 for tensor in state.values()):
        raise ValueError(f"state {_shapes(state)}: [batch, ...] is needed")


def _kept(tensor: Tensor) -> Tensor:
    """A copy that no later rounding can reach."""
    return tensor.detach().to(_wide(tensor), copy=True)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype


def _shapes(state: Fields) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in state.items()}

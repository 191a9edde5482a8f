"""A layer that remembers fixed-shape tensors: recurrences and short convolutions.

It can go back only to a checkpoint, or to nothing. A state is never written to once it is held: so
forks and checkpoints share it. Floating point states are kept in float32 whatever they come in:
rounding them at every token would add up. What is handed in or out is a copy: models are known to
update the state that they are given in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvant.cache.ledger import Ledger
from kvant.contracts import Fields, Snapshot, Tally
from kvant.errors import SnapshotMismatch
from kvant.modes import refuse_transforms
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

    now: Moment = NOTHING
    checkpoints: tuple[Moment, ...] = ()

    @property
    def moments(self) -> tuple[Moment, ...]:
        return (self.now, *self.checkpoints)

    @property
    def batch(self) -> int:
        return next((tensor.shape[0] for tensor in self.now.state.values()), 0)

    @property
    def nbytes(self) -> int:
        states = {id(m.state): m.state for m in self.moments}
        return sum(tensor.nbytes for state in states.values() for tensor in state.values())

    def reachable(self, to: int) -> int:
        if to >= self.now.length:
            return self.now.length
        return max((m.length for m in self.checkpoints if m.length <= to), default=0)

    def rewound(self, to: int) -> Past:
        if to == self.now.length:
            return self
        kept = tuple(moment for moment in self.checkpoints if moment.length <= to)
        return Past(kept[-1] if to else NOTHING, kept)

    def marked(self, most: int) -> Past:
        """Come back to the present length from here on; the oldest checkpoint may go for it."""
        if any(moment.length == self.now.length for moment in self.checkpoints):
            return self
        return Past(self.now, (*self.checkpoints, self.now)[-most:])

    def selected(self, index: Tensor) -> Past:
        def pick(moment: Moment) -> Moment:
            picked = {n: t.index_select(0, index.to(t.device)) for n, t in moment.state.items()}
            return Moment(moment.length, picked)

        return Past(pick(self.now), tuple(map(pick, self.checkpoints)))

    def later(self, columns: int) -> Past:
        """The same, counted from so many columns further on: they were padding."""
        if columns == 0:
            return self
        kept = tuple(m for m in self.checkpoints if m.length > columns)
        counted = (Moment(m.length - columns, m.state) for m in (self.now, *kept))
        return Past(next(counted), tuple(counted))

    def moved(self, device: torch.device) -> Past:
        def there(moment: Moment) -> Moment:
            return Moment(moment.length, {n: t.to(device) for n, t in moment.state.items()})

        return Past(there(self.now), tuple(map(there, self.checkpoints)))


def joined(pasts: Sequence[Past], length: int) -> Past:
    """The sequences of all of these, without checkpoints: their lengths need not be the same."""
    names = pasts[0].now.state
    state = {name: torch.cat([past.now.state[name] for past in pasts]) for name in names}
    return Past(Moment(length, state))


class Recurring:
    """What a layer tells that has a past and no rows, whoever keeps it."""

    held = 0  # rows, whatever the length
    max_held: int | None = 0
    capacity: int | None = None

    @property
    def past(self) -> Past:
        raise NotImplementedError

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first state."""
        return self.past.batch

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.past.nbytes

    @property
    def nbytes_used(self) -> int:
        return self.nbytes

    def nbytes_after(self, coming: int, recipe: RecurrentSpec) -> int:
        """The same at every length; who takes a checkpoint adds to it."""
        return self.nbytes

    def read(self) -> Fields:
        """A copy of the state now, by name."""
        return self.past.now.copied().state


class Recurrent(Recurring):
    """One recurrent layer of a cache."""

    def __init__(self, spec: RecurrentSpec, ledger: Ledger, place: int, leaf: int) -> None:
        self.spec = spec
        self.ledger = ledger
        self.place = place
        self.leaf = leaf
        self.tally = Tally()

    @property
    def past(self) -> Past:
        book = self.ledger.book
        arrived = self.leaf in book.arrived
        past: Past = book.coming[self.place] if arrived else book.states[self.place]
        return past

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.past.now.length

    def nbytes_with(self, count: int, state: Fields) -> int:
        """Bytes allocated once the same was appended."""
        _check(count, state)
        self._check_fits(state)
        kinds = {name: tensor.to("meta", wide(tensor.dtype)) for name, tensor in state.items()}
        kept = replace(self.past, now=NOTHING).nbytes  # checkpoints may hold the present state, too
        return kept + sum(tensor.nbytes for tensor in kinds.values())

    def append(self, count: int, state: Fields) -> None:
        """The state after `count` more tokens; it is copied."""
        refuse_transforms("append")
        _check(count, state)
        with self.ledger.lock:
            self.ledger.enter(self.leaf, count)
            self._check_fits(state)
            self._check_batch(state)
            kept = {name: _kept(tensor) for name, tensor in state.items()}
            past = self.past
            now = Moment(past.now.length + count, kept)
            self.tally.appends += 1
            self.ledger.arrive(self.leaf, (self.place, replace(past, now=now)))

    def twin(self, ledger: Ledger) -> Recurrent:
        """The same layer of a cache that shares states with this one."""
        return Recurrent(self.spec, ledger, self.place, self.leaf)

    def _check_batch(self, state: Fields) -> None:
        """Refuse a state of other sequences than those of the forward under way."""
        batch = next((tensor.shape[0] for tensor in state.values()), 0)
        for change in self.ledger.book.changes.values():
            if batch and change.before.batch != batch:
                raise ValueError(
                    f"a state of {batch} sequences, where another layer of this forward got rows "
                    f"of {change.before.batch}"
                )

    def _check_fits(self, state: Fields) -> None:
        old = _shapes(self.past.now.state)
        if self.length and _shapes(state) != old:
            raise ValueError(f"state {_shapes(state)} for a layer of {old}")


def shared_snapshot(past: Past) -> Snapshot:
    """All moments of a layer as tensors and integers."""
    moments = {"now": past.now} | {f"at{i}": m for i, m in enumerate(past.checkpoints)}
    for name, moment in moments.items():  # of tensors that are the same, a file takes only one
        if name != "now" and moment.state is past.now.state:
            moments[name] = moment.copied()
    tensors = {f"{k}.{n}": t for k, moment in moments.items() for n, t in moment.state.items()}
    return Snapshot(tensors, {key: moment.length for key, moment in moments.items()})


def restored(spec: RecurrentSpec, snapshot: Snapshot) -> Past:
    """What a snapshot holds, in memory of its own, or an error."""
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
    if set(order) != set(states) or count > spec.max_checkpoints:
        raise SnapshotMismatch(f"states {sorted(states)}: now, at0, at1, ... are needed")
    now, *kept = (Moment(snapshot.numbers[key], states[key]) for key in order)
    at = [moment.length for moment in kept]
    ordered = sorted(set(at)) == at and min(at, default=0) >= 0
    if any(_shapes(moment.state) != _shapes(now.state) for moment in kept if moment.length):
        raise SnapshotMismatch("checkpoints of other shapes than the state")
    if not ordered or now.length < max(at, default=0):
        raise SnapshotMismatch(f"a state at {now.length}, checkpoints at {at}: not in order")
    return Past(now, tuple(kept))


def _check(count: int, state: Fields) -> None:
    if count < 0:
        raise ValueError(f"append of {count} tokens: 0 or more")
    if any(tensor.ndim == 0 for tensor in state.values()):
        raise ValueError(f"state {_shapes(state)}: [batch, ...] is needed")


def _kept(tensor: Tensor) -> Tensor:
    """A copy that no later rounding can reach."""
    return tensor.detach().to(wide(tensor.dtype), copy=True)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a state is kept in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _shapes(state: Fields) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in state.items()}

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

from kvant.cache.tracker import StateTracker
from kvant.contracts import Fields, LayerStats, Snapshot
from kvant.errors import SnapshotMismatch
from kvant.recipes import RecurrentSpec
from kvant.torch_modes import refuse_transforms


class RecurrentState(NamedTuple):
    """A length, and the state there."""

    length: int
    tensors: Fields

    def copy(self) -> RecurrentState:
        return RecurrentState(
            self.length, {name: tensor.clone() for name, tensor in self.tensors.items()}
        )


EMPTY_STATE = RecurrentState(0, {})


@dataclass(frozen=True)
class StateHistory:
    """Where a layer is, and where it can go back to, in order."""

    current: RecurrentState = EMPTY_STATE
    checkpoints: tuple[RecurrentState, ...] = ()

    @property
    def states(self) -> tuple[RecurrentState, ...]:
        return (self.current, *self.checkpoints)

    @property
    def batch(self) -> int:
        return next((tensor.shape[0] for tensor in self.current.tensors.values()), 0)

    @property
    def nbytes(self) -> int:
        states = {id(m.tensors): m.tensors for m in self.states}
        return sum(tensor.nbytes for state in states.values() for tensor in state.values())

    def reachable(self, to: int) -> int:
        if to >= self.current.length:
            return self.current.length
        return max((m.length for m in self.checkpoints if m.length <= to), default=0)

    def rewind(self, to: int) -> StateHistory:
        if to == self.current.length:
            return self
        kept = tuple(moment for moment in self.checkpoints if moment.length <= to)
        return StateHistory(kept[-1] if to else EMPTY_STATE, kept)

    def add_checkpoint(self, max_checkpoints: int) -> StateHistory:
        """Come back to the present length from here on; the oldest checkpoint may go for it."""
        if any(moment.length == self.current.length for moment in self.checkpoints):
            return self
        return StateHistory(self.current, (*self.checkpoints, self.current)[-max_checkpoints:])

    def select(self, index: Tensor) -> StateHistory:
        def pick(state: RecurrentState) -> RecurrentState:
            picked = {n: t.index_select(0, index.to(t.device)) for n, t in state.tensors.items()}
            return RecurrentState(state.length, picked)

        return StateHistory(pick(self.current), tuple(map(pick, self.checkpoints)))

    def drop_columns(self, num_columns: int) -> StateHistory:
        """The same, counted from so many columns further on: they were padding."""
        if num_columns == 0:
            return self
        kept = tuple(m for m in self.checkpoints if m.length > num_columns)
        counted = (RecurrentState(m.length - num_columns, m.tensors) for m in (self.current, *kept))
        return StateHistory(next(counted), tuple(counted))

    def to_device(self, device: torch.device) -> StateHistory:
        def move_state(state: RecurrentState) -> RecurrentState:
            return RecurrentState(state.length, {n: t.to(device) for n, t in state.tensors.items()})

        return StateHistory(move_state(self.current), tuple(map(move_state, self.checkpoints)))


def concat_histories(histories: Sequence[StateHistory], length: int) -> StateHistory:
    """The sequences of all of these, without checkpoints: their lengths need not be the same."""
    names = histories[0].current.tensors
    state = {name: torch.cat([past.current.tensors[name] for past in histories]) for name in names}
    return StateHistory(RecurrentState(length, state))


class RecurrentBase:
    """What a layer tells that has a past and no rows, whoever keeps it."""

    num_rows = held = 0  # a recurrent state has none
    max_held: int | None = 0
    capacity: int | None = None

    @property
    def history(self) -> StateHistory:
        raise NotImplementedError

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first state."""
        return self.history.batch

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.history.nbytes

    @property
    def nbytes_used(self) -> int:
        return self.nbytes

    def nbytes_after(self, coming: int, recipe: RecurrentSpec) -> int:
        """The same at every length; who takes a checkpoint adds to it."""
        return self.nbytes

    def read(self) -> Fields:
        """A copy of the state now, by name."""
        return self.history.current.copy().tensors


class RecurrentLayer(RecurrentBase):
    """One recurrent layer of a cache."""

    def __init__(
        self, spec: RecurrentSpec, tracker: StateTracker, history_index: int, leaf: int
    ) -> None:
        self.spec = spec
        self.tracker = tracker
        self.history_index = history_index
        self.leaf = leaf
        self.stats = LayerStats()

    @property
    def history(self) -> StateHistory:
        book = self.tracker.state
        arrived = self.leaf in book.appended_leaves
        past: StateHistory = (
            book.new_histories[self.history_index]
            if arrived
            else book.histories[self.history_index]
        )
        return past

    @property
    def length(self) -> int:
        """Tokens seen."""
        return self.history.current.length

    def nbytes_after_append(self, count: int, tensors: Fields) -> int:
        """Bytes allocated once the same was appended."""
        _check_append(count, tensors)
        self._check_shapes(tensors)
        kinds = {name: tensor.to("meta", wide(tensor.dtype)) for name, tensor in tensors.items()}
        kept = replace(
            self.history, current=EMPTY_STATE
        ).nbytes  # checkpoints may hold the present state, too
        return kept + sum(tensor.nbytes for tensor in kinds.values())

    def append(self, count: int, state: Fields) -> None:
        """The state after `count` more tokens; it is copied."""
        refuse_transforms("append")
        _check_append(count, state)
        with self.tracker.lock:
            self.tracker.begin_append(self.leaf, count)
            self._check_shapes(state)
            self._check_batch(state)
            kept = {name: _copy_wide(tensor) for name, tensor in state.items()}
            past = self.history
            now = RecurrentState(past.current.length + count, kept)
            self.stats.appends += 1
            self.tracker.commit_layer(self.leaf, (self.history_index, replace(past, current=now)))

    def make_sibling(self, tracker: StateTracker) -> RecurrentLayer:
        """The same layer of a cache that shares states with this one."""
        return RecurrentLayer(self.spec, tracker, self.history_index, self.leaf)

    def _check_batch(self, tensors: Fields) -> None:
        """Refuse a state of other sequences than those of the forward under way."""
        batch = next((tensor.shape[0] for tensor in tensors.values()), 0)
        for change in self.tracker.state.plans.values():
            if batch and change.old_table.batch != batch:
                raise ValueError(
                    f"a state of {batch} sequences, where another layer of this forward got rows "
                    f"of {change.old_table.batch}"
                )

    def _check_shapes(self, tensors: Fields) -> None:
        old = _get_shapes(self.history.current.tensors)
        if self.length and _get_shapes(tensors) != old:
            raise ValueError(f"state {_get_shapes(tensors)} for a layer of {old}")


def snapshot_history(history: StateHistory) -> Snapshot:
    """All moments of a layer as tensors and integers."""
    moments = {"now": history.current} | {f"at{i}": m for i, m in enumerate(history.checkpoints)}
    for name, moment in moments.items():  # of tensors that are the same, a file takes only one
        if name != "now" and moment.tensors is history.current.tensors:
            moments[name] = moment.copy()
    tensors = {f"{k}.{n}": t for k, moment in moments.items() for n, t in moment.tensors.items()}
    return Snapshot(tensors, {key: moment.length for key, moment in moments.items()})


def restore_history(spec: RecurrentSpec, snapshot: Snapshot) -> StateHistory:
    """What a snapshot holds, in memory of its own, or an error."""
    states: dict[str, dict[str, Tensor]] = {key: {} for key in snapshot.numbers}
    for key, tensor in snapshot.tensors.items():
        moment, _, name = key.partition(".")
        if moment not in states or not name:
            raise SnapshotMismatch(f"unknown tensor {key}")
        if tensor.ndim == 0:
            raise SnapshotMismatch(f"{key} is a single number: [batch, ...] is needed")
        states[moment][name] = _copy_wide(tensor)
    for moment, state in states.items():
        batches = sorted({tensor.shape[0] for tensor in state.values()})
        if len(batches) > 1 or 0 in batches:
            raise SnapshotMismatch(f"{moment} has states of {batches} sequences")
    count = len(states) - 1
    order = ["now", *(f"at{i}" for i in range(count))]
    if set(order) != set(states) or count > spec.max_checkpoints:
        raise SnapshotMismatch(f"states {sorted(states)}: now, at0, at1, ... are needed")
    now, *kept = (RecurrentState(snapshot.numbers[key], states[key]) for key in order)
    at = [moment.length for moment in kept]
    ordered = sorted(set(at)) == at and min(at, default=0) >= 0
    if any(
        _get_shapes(moment.tensors) != _get_shapes(now.tensors) for moment in kept if moment.length
    ):
        raise SnapshotMismatch("checkpoints of other shapes than the state")
    if not ordered or now.length < max(at, default=0):
        raise SnapshotMismatch(f"a state at {now.length}, checkpoints at {at}: not in order")
    return StateHistory(now, tuple(kept))


def _check_append(count: int, tensors: Fields) -> None:
    if count < 0:
        raise ValueError(f"append of {count} tokens: 0 or more")
    if any(tensor.ndim == 0 for tensor in tensors.values()):
        raise ValueError(f"state {_get_shapes(tensors)}: [batch, ...] is needed")


def _copy_wide(tensor: Tensor) -> Tensor:
    """A copy that no later rounding can reach."""
    return tensor.detach().to(wide(tensor.dtype), copy=True)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a state is kept in."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _get_shapes(tensors: Fields) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}

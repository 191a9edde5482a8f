"""Recurrent layers: fixed-shape states of recurrences and short convolutions.

A state can be rewound only to a checkpoint, or to length 0. Stored states are never changed in
place, so forks and checkpoints share them. Floating point states are stored in float32, because
rounding at every token would accumulate. States are copied in and out, because models update theirs
in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvant.contracts import Fields, Snapshot
from kvant.errors import SnapshotMismatch
from kvant.recipes import RecurrentSpec


class RecurrentState(NamedTuple):
    """The state of a layer after `length` tokens."""

    length: int
    tensors: Fields

    def map_tensors(self, convert: Callable[[Tensor], Tensor]) -> RecurrentState:
        """Return the state with `convert` applied to each tensor."""
        return RecurrentState(self.length, {n: convert(t) for n, t in self.tensors.items()})

    def copy(self) -> RecurrentState:
        return self.map_tensors(Tensor.clone)


EMPTY_STATE = RecurrentState(0, {})


@dataclass(frozen=True)
class StateHistory:
    """The current state of a layer and its checkpoints, in order of length."""

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
        tensors_by_id = {id(state.tensors): state.tensors for state in self.states}
        return sum(
            tensor.nbytes for tensors in tensors_by_id.values() for tensor in tensors.values()
        )

    def reachable(self, to: int) -> int:
        """Return the longest length <= `to` with a state."""
        if to >= self.current.length:
            return self.current.length
        lengths = (checkpoint.length for checkpoint in self.checkpoints)
        return max((length for length in lengths if length <= to), default=0)

    def rewind(self, to: int) -> StateHistory:
        """Return the history at length `to`, which has a checkpoint or is 0."""
        if to == self.current.length:
            return self
        checkpoints = tuple(
            checkpoint for checkpoint in self.checkpoints if checkpoint.length <= to
        )
        return StateHistory(checkpoints[-1] if to else EMPTY_STATE, checkpoints)

    def add_checkpoint(self, max_checkpoints: int) -> StateHistory:
        """Return the history with a checkpoint of the current state; the oldest may be dropped."""
        if any(checkpoint.length == self.current.length for checkpoint in self.checkpoints):
            return self
        return StateHistory(self.current, (*self.checkpoints, self.current)[-max_checkpoints:])

    def select(self, index: Tensor) -> StateHistory:
        """Return the history of the sequences `index`."""
        return self._map_tensors(lambda tensor: tensor.index_select(0, index.to(tensor.device)))

    def drop_columns(self, num_columns: int) -> StateHistory:
        """Return the history with lengths reduced by `num_columns` of padding."""
        if num_columns == 0:
            return self
        checkpoints = tuple(state for state in self.checkpoints if state.length > num_columns)
        states = (
            RecurrentState(state.length - num_columns, state.tensors)
            for state in (self.current, *checkpoints)
        )
        return StateHistory(next(states), tuple(states))

    def to_device(self, device: torch.device) -> StateHistory:
        """Return the history with its tensors on `device`."""
        return self._map_tensors(lambda tensor: tensor.to(device))

    def _map_tensors(self, convert: Callable[[Tensor], Tensor]) -> StateHistory:
        """Return the history with `convert` applied; states that share tensors still do."""
        converted: dict[int, Fields] = {}
        for state in self.states:
            if id(state.tensors) not in converted:
                converted[id(state.tensors)] = state.map_tensors(convert).tensors
        current, *checkpoints = (
            RecurrentState(state.length, converted[id(state.tensors)]) for state in self.states
        )
        return StateHistory(current, tuple(checkpoints))


def concat_histories(histories: Sequence[StateHistory], length: int) -> StateHistory:
    """Concatenate `histories` along the batch, without checkpoints.

    `length` is that of the longest sequence, and of the result.
    """
    names = histories[0].current.tensors
    state = {
        name: torch.cat([history.current.tensors[name] for history in histories]) for name in names
    }
    return StateHistory(RecurrentState(length, state))


class RecurrentBase:
    """The properties of a layer with a state history and no rows, and its `read`."""

    num_rows = held = 0  # a recurrent state has none
    max_held: int | None = 0
    capacity: int | None = None

    @property
    def history(self) -> StateHistory:
        raise NotImplementedError

    @property
    def batch(self) -> int:
        """The number of sequences; 0 before the first state."""
        return self.history.batch

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.history.nbytes

    @property
    def nbytes_used(self) -> int:
        return self.nbytes

    def nbytes_after(self, num_new_tokens: int, recipe: RecurrentSpec) -> int:
        """Return `nbytes`: it is independent of the length, apart from new checkpoints."""
        return self.nbytes

    def read(self) -> Fields:
        """Return a copy of the current state, by name."""
        return self.history.current.copy().tensors


def snapshot_history(history: StateHistory) -> Snapshot:
    """Return all states of a layer as tensors and integers."""
    states = {"now": history.current} | {
        f"at{i}": state for i, state in enumerate(history.checkpoints)
    }
    for name, state in states.items():  # safetensors refuses shared tensors
        if name != "now" and state.tensors is history.current.tensors:
            states[name] = state.copy()
    tensors = {f"{k}.{n}": t for k, state in states.items() for n, t in state.tensors.items()}
    return Snapshot(tensors, {key: state.length for key, state in states.items()})


def restore_history(spec: RecurrentSpec, snapshot: Snapshot) -> StateHistory:
    """Return a copy of the history in a snapshot, or raise SnapshotMismatch."""
    states: dict[str, dict[str, Tensor]] = {key: {} for key in snapshot.numbers}
    for key, tensor in snapshot.tensors.items():
        state_name, _, name = key.partition(".")
        if state_name not in states or not name:
            raise SnapshotMismatch(f"unknown tensor {key}")
        if tensor.ndim == 0:
            raise SnapshotMismatch(f"{key} is a single number: [batch, ...] is needed")
        states[state_name][name] = copy_in_stored_dtype(tensor)
    for state_name, state in states.items():
        batches = sorted({tensor.shape[0] for tensor in state.values()})
        if len(batches) > 1 or 0 in batches:
            raise SnapshotMismatch(f"{state_name} has states of {batches} sequences")
    count = len(states) - 1
    order = ["now", *(f"at{i}" for i in range(count))]
    if set(order) != set(states) or count > spec.max_checkpoints:
        raise SnapshotMismatch(f"states {sorted(states)}: now, at0, at1, ... are needed")
    current, *checkpoints = (RecurrentState(snapshot.numbers[key], states[key]) for key in order)
    lengths = [checkpoint.length for checkpoint in checkpoints]
    ordered = sorted(set(lengths)) == lengths and min(lengths, default=0) >= 0
    if any(
        get_shapes(checkpoint.tensors) != get_shapes(current.tensors)
        for checkpoint in checkpoints
        if checkpoint.length
    ):
        raise SnapshotMismatch("checkpoints of other shapes than the state")
    if not ordered or current.length < max(lengths, default=0):
        raise SnapshotMismatch(
            f"a state at {current.length}, checkpoints at {lengths}: not in order"
        )
    return StateHistory(current, tuple(checkpoints))


def copy_in_stored_dtype(tensor: Tensor) -> Tensor:
    """Return a detached copy in the dtype of stored states."""
    return tensor.detach().to(get_stored_dtype(tensor.dtype), copy=True)


def get_stored_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a state is stored."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def get_shapes(tensors: Fields) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}

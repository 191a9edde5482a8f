"""Keep in a kvant cache the recurrent states that transformers updates in place.

transformers does not report its updates, so the length of a state is inferred:

    layers of the model   how the length is known
    some attention        it is set when all attention layers have appended (the commit)
    no attention          tokens are counted at the first convolution

A forward that starts before the previous one has committed shows that the previous one failed. This
is known only if an attention layer follows a recurrent one.

    valid --begin_forward--> in forward --advance_to--> valid
                                 |
                                 +--failure--> lost --rewind, restore or reset--> valid

A lost state has no length. It becomes valid again only from a checkpoint or a snapshot, or empty.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import LinearAttentionLayer

from kvant.cache.recurrent import (
    EMPTY_STATE,
    RecurrentBase,
    RecurrentState,
    StateHistory,
    get_stored_dtype,
    restore_history,
    snapshot_history,
)
from kvant.contracts import Fields, LayerStats, Snapshot
from kvant.errors import CacheError, RewindError, SnapshotMismatch
from kvant.hf.model import ModelLayer
from kvant.recipes import RecurrentSpec

# Name in files -> attribute of a transformers layer.
STATE_ATTRIBUTES = {"conv": "conv_states", "recurrent": "recurrent_states"}


class Recurrence(RecurrentBase):
    """The state of a recurrent layer, with tensors that a cache layer of transformers holds."""

    def __init__(self, spec: RecurrentSpec, layer: LinearAttentionLayer) -> None:
        self.spec = spec
        self.layer = layer
        self.stats = LayerStats()
        self.length = 0
        self.checkpoints: tuple[RecurrentState, ...] = ()
        self.is_lost = False
        self.in_forward = False  # a forward has started and not committed

    @property
    def history(self) -> StateHistory:
        """The current state and the checkpoints, sharing memory with the layer."""
        return StateHistory(RecurrentState(self.length, self._collect_tensors()), self.checkpoints)

    def begin_forward(self) -> None:
        """Start a forward; if the previous one did not end, it failed."""
        if self.in_forward:
            self.invalidate()
        self.check_valid()
        self.in_forward = True

    def advance_to(self, length: int) -> None:
        """End a forward: the state is that of `length` tokens."""
        self.in_forward = False
        self.length = length

    def invalidate(self) -> None:
        """Mark the state as lost after a failed forward; an empty state is cleared instead."""
        self.is_lost = True
        if self.length == 0:
            self._load_tensors({})
            self.is_lost = False
        self.in_forward = False  # last: if interrupted before, the forward counts as failed

    def check_valid(self) -> None:
        """Refuse a lost state."""
        if self.is_lost:
            raise CacheError(
                "a forward or an operation was abandoned, and a recurrent layer cannot undo it: "
                f"rewind to a checkpoint ({self.reachable(self.length)} is the longest) or reset"
            )

    def append(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("transformers updates this state in place: append is not supported")

    def reachable(self, to: int) -> int:
        """Return the longest length <= `to` that a crop or a checkpoint can restore."""
        if self._can_crop(to):
            return min(to, self.length)
        lengths = (state.length for state in self.checkpoints)
        return max((length for length in lengths if length <= to), default=0)

    def prepare_rewind(self, to: int) -> Callable[[], None]:
        """Return the function that rewinds; until it is called, the state is lost."""
        if self.reachable(to) != to:
            raise RewindError(
                f"length {to} cannot be reached: {self.reachable(to)} is the longest that can"
            )
        checkpoints = tuple(state for state in self.checkpoints if state.length <= to)
        can_crop = self._can_crop(to)
        if to < self.length or not can_crop:
            self.is_lost = True
        return partial(self._crop if can_crop else self._restore_checkpoint, to, checkpoints)

    def _crop(self, to: int, checkpoints: tuple[RecurrentState, ...]) -> None:
        if self.layer.record_past:
            self.layer.crop(to - self.length)
        self.length, self.checkpoints = to, checkpoints
        self.is_lost = False

    def _restore_checkpoint(self, to: int, checkpoints: tuple[RecurrentState, ...]) -> None:
        self._restore_history(
            StateHistory(checkpoints[-1].copy() if to else EMPTY_STATE, checkpoints)
        )

    def checkpoint(self) -> None:
        """Save the current state, and drop the oldest checkpoint above `max_checkpoints`."""
        current = self.get_history().current
        if all(state.length != self.length for state in self.checkpoints):
            checkpoints = (*self.checkpoints, current.copy())
            self.checkpoints = checkpoints[-self.spec.max_checkpoints :]

    def shared_snapshot(self) -> Snapshot:
        """Return a snapshot that shares memory with the layer."""
        return snapshot_history(self.get_history())

    def parse_snapshot(self, snapshot: Snapshot) -> StateHistory:
        """Decode a snapshot, and check its dtypes and shapes against those of the model."""
        history, expected = restore_history(self.spec, snapshot), self._collect_shapes()
        for state in history.states:
            shapes = {name: (x.dtype, tuple(x.shape[1:])) for name, x in state.tensors.items()}
            if expected and shapes and shapes != expected:
                raise SnapshotMismatch(f"states {shapes}, but the model has {expected}")
        # `restore_history` converts 16-bit states to float32. Convert the current state back to
        # the dtype of the snapshot, since a layer without tensors stores it without a conversion.
        dtypes = {name: tensor.dtype for name, tensor in snapshot.tensors.items()}
        tensors = history.current.tensors
        current = {name: tensor.to(dtypes[f"now.{name}"]) for name, tensor in tensors.items()}
        return replace(history, current=RecurrentState(history.current.length, current))

    @property
    def has_shapes(self) -> bool:
        """Whether transformers allocated the tensors, so that their shapes are known."""
        return bool(self._collect_shapes())

    def prepare_restore(self, history: StateHistory) -> Callable[[], None]:
        """Return the function that restores `history`; until it is called, the state is lost."""
        self.is_lost, self.checkpoints = True, ()
        return partial(self._restore_history, history)

    def _restore_history(self, history: StateHistory) -> None:
        """Load the current state of `history` into the layer."""
        self._load_tensors(history.current.tensors)
        self.length, self.checkpoints = history.current.length, history.checkpoints
        # Last, so that an interrupt before it leaves the state lost.
        self.in_forward = self.is_lost = False

    def fork(self) -> Recurrence:
        """Return a copy in memory of its own."""
        history = self.get_history()
        recurrence = Recurrence(self.spec, copy.deepcopy(self.layer))
        recurrence.length = history.current.length
        recurrence.checkpoints = tuple(state.copy() for state in history.checkpoints)
        return recurrence

    def get_history(self) -> StateHistory:
        """Return `history`, or refuse a lost state; an unfinished forward counts as failed."""
        if self.in_forward:
            self.invalidate()
        self.check_valid()
        return self.history

    def _can_crop(self, to: int) -> bool:
        """Return whether the crop of transformers can drop all tokens after `to`.

        A state that is lost, or inside a forward, has no known length.
        """
        is_known = not (self.is_lost or self.in_forward)
        return is_known and to >= self.length - self._count_recorded_tokens()

    def _collect_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the layer by their names in files."""
        layer, tensors = self.layer, {}
        for name, attribute in STATE_ATTRIBUTES.items():
            for index, tensor in getattr(layer, attribute).items():
                if tensor is None or not layer.has_previous_state[index]:
                    continue
                if name == "conv":  # without the older columns that `record_past` keeps
                    tensor = tensor[..., -layer.conv_kernel_size[index] :]
                tensors[f"{name}{index}"] = tensor
        return tensors

    def _collect_shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Return the dtypes and shapes of a snapshot by name, without the batch dimension."""
        layer, shapes = self.layer, {}
        for name, attribute in STATE_ATTRIBUTES.items():
            for index, tensor in getattr(layer, attribute).items():
                if tensor is None:
                    continue
                shape = tuple(tensor.shape[1:])
                if name == "conv":  # without the older columns that `record_past` keeps
                    shape = (*shape[:-1], layer.conv_kernel_size[index] or shape[-1])
                shapes[f"{name}{index}"] = get_stored_dtype(tensor.dtype), shape
        return shapes

    def _load_tensors(self, tensors: Fields) -> None:
        """Replace the state of the layer; a tensor that is missing from `tensors` is zeroed."""
        layer = self.layer
        for name, attribute in STATE_ATTRIBUTES.items():
            states = getattr(layer, attribute)
            is_initialized = getattr(layer, f"is_{attribute}_initialized")
            for index, old in list(states.items()):
                new = tensors.get(f"{name}{index}")
                if new is not None:
                    states[index] = new if old is None else new.to(old.dtype)
                elif old is not None:  # as the reset of transformers does
                    states[index] = torch.zeros_like(old)
                is_initialized[index] = new is not None
                if name == "conv":
                    layer.has_previous_state[index] = False
                if new is None:
                    continue
                layer.has_previous_state[index] = True
                layer.dtype, layer.device = states[index].dtype, states[index].device
                if name == "conv":
                    layer.conv_kernel_size[index] = new.shape[-1]

    def stop_recording(self) -> None:
        """Drop the older columns that `record_past` of transformers keeps, and keep no new ones."""
        if not self.layer.record_past:
            return
        for index, tensor in self.layer.conv_states.items():
            if tensor is not None and self.layer.has_previous_state[index]:
                size = self.layer.conv_kernel_size[index]
                columns = tensor[..., -size:]
                self.layer.conv_states[index] = pad(columns, (size - columns.shape[-1], 0))
        self.layer.record_past = False

    def _count_recorded_tokens(self) -> int:
        """Return how many of the newest tokens the crop of transformers can drop."""
        layer = self.layer
        if not layer.record_past or not layer.is_croppable:
            return 0
        recorded = [
            tensor.shape[-1] - layer.conv_kernel_size[index]
            for index, tensor in layer.conv_states.items()
            if tensor is not None and layer.has_previous_state[index]
        ]
        return max(0, min(recorded, default=0))


class RecurrentProgress:
    """Detect forwards: each forward reads the state of the first recurrent layer once."""

    def __init__(self, layers: Sequence[ModelLayer], recurrences: Sequence[Recurrence]) -> None:
        self.recurrences = tuple(recurrences)
        attending = [index for index, layer in enumerate(layers) if layer.attends]
        recurring = [index for index, layer in enumerate(layers) if layer.recurs]
        self._first_state = (recurring[0], 0) if recurring else None
        self._counts_tokens = not attending
        self._tracks_forwards = bool(attending and recurring) and recurring[0] < attending[-1]
        self._first_is_hybrid = bool(recurring) and recurring[0] in attending

    def restarts_forward(self, layer_idx: int, state_idx: int) -> bool:
        """Return whether a forward starts here while the previous one has not ended."""
        is_start = (layer_idx, state_idx) == self._first_state
        return is_start and any(recurrence.in_forward for recurrence in self.recurrences)

    def record_state_read(self, layer_idx: int, state_idx: int, has_rows: bool) -> None:
        """Record that the model reads a state, which starts a forward if it is the first state.

        Without attention, this counts one token; `record_conv_tokens` adds the others.
        `has_rows`: attention rows were appended since the last commit. If the first recurrent layer
        also attends, it reads its state and then appends rows. In the first forward, two reads
        without rows in between mean a failed forward, or a part of the model run alone.
        """
        if (layer_idx, state_idx) != self._first_state:
            return
        empty = [state for state in self.recurrences if state.in_forward and not state.length]
        if self._first_is_hybrid and empty and not has_rows:
            raise CacheError(
                f"the state of layer {layer_idx} was read twice, and no rows came in between: if a "
                "forward failed, reset the cache; a part of a model alone cannot be cached"
            )
        if self._counts_tokens:
            self._add_tokens(1)
        elif self._tracks_forwards:
            for recurrence in self.recurrences:
                recurrence.begin_forward()

    def record_conv_tokens(self, layer_idx: int, state_idx: int, num_tokens: int) -> None:
        """Count the tokens that pass a convolution; reading the state already counted one."""
        if self._counts_tokens and (layer_idx, state_idx) == self._first_state:
            self._add_tokens(num_tokens - 1)

    def check_valid(self) -> None:
        """Refuse lost states, which a failed forward leaves."""
        for recurrence in self.recurrences:
            recurrence.check_valid()

    def stop_recording(self) -> None:
        """Keep only the columns that the next token needs: speculation has ended."""
        for recurrence in self.recurrences:
            recurrence.stop_recording()

    def _add_tokens(self, num_tokens: int) -> None:
        self.check_valid()
        for recurrence in self.recurrences:
            recurrence.advance_to(recurrence.length + num_tokens)

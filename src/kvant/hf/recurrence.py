"""The state of a layer that the host updates in place, as one that a cache of ours can take along.

The host tells nobody what it does to its tensors, so this state follows: the layers that are
appended to say how far the forward came. When one died, the state is of no length, and only going
back to a checkpoint, a restore or a reset makes it one again.

Nor does the host tell how far a forward is. Where attention follows on the first recurrent layer, a
commit tells; a second beginning before that is another forward, and the one before it died. Where
nothing attends, tokens are counted as they pass the first convolution.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvant.cache.recurrent import (
    EMPTY_STATE,
    RecurrentBase,
    RecurrentState,
    StateHistory,
    restore_history,
    snapshot_history,
    wide,
)
from kvant.contracts import Fields, LayerStats, Snapshot
from kvant.errors import CacheError, RewindError, SnapshotMismatch
from kvant.hf.model_layers import ModelLayer
from kvant.recipes import RecurrentSpec

STATE_ATTRIBUTES = {
    "conv": "conv_states",
    "recurrent": "recurrent_states",
}  # name in a file: the host's


class Recurrence(RecurrentBase):
    """A state that lies in a layer of the host's; a `HostState`."""

    def __init__(self, spec: RecurrentSpec, layer: LinearAttentionLayer) -> None:
        self.spec = spec
        self.layer = layer
        self.stats = LayerStats()
        self.length = 0
        self.checkpoints: tuple[RecurrentState, ...] = ()
        self.is_lost = False
        self.in_forward = False  # by a forward that has not come to its end

    @property
    def history(self) -> StateHistory:
        return StateHistory(RecurrentState(self.length, self._collect_tensors()), self.checkpoints)

    def begin_forward(self) -> None:
        """A forward begins here; if the one before did not end, it died."""
        if self.in_forward:
            self.invalidate()
        self.check_valid()
        self.in_forward = True

    def advance_to(self, length: int) -> None:
        self.in_forward = False
        self.length = length

    def invalidate(self) -> None:
        self.is_lost = True
        if self.length == 0:
            self._load_tensors({})
            self.is_lost = False
        self.in_forward = False  # last: an interrupt before it leaves no state at all

    def check_valid(self) -> None:
        if self.is_lost:
            raise CacheError(
                "a forward or a verb was abandoned, and a recurrent layer cannot go back alone: "
                f"rewind to a checkpoint ({self.reachable(self.length)} is the longest) or reset"
            )

    def append(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("the host changes this state; nobody appends to it")

    def reachable(self, to: int) -> int:
        if not self._has_no_length and to >= self.length - self._count_recorded_tokens():
            return min(to, self.length)
        points = (moment.length for moment in self.checkpoints)
        return max((length for length in points if length <= to), default=0)

    def prepare_rewind(self, to: int) -> Callable[[], None]:
        if self.reachable(to) != to:
            raise RewindError(f"length {to}: {self.reachable(to)} is the longest that can be")
        kept = tuple(moment for moment in self.checkpoints if moment.length <= to)
        crops = not self._has_no_length and to >= self.length - self._count_recorded_tokens()
        if to < self.length or not crops:
            self.is_lost = True
        return partial(self._crop if crops else self._restore_checkpoint, to, kept)

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
        """Come back to the present length from here on; the oldest checkpoint may go for it."""
        self._check_between_forwards()
        if all(moment.length != self.length for moment in self.checkpoints):
            marked = (*self.checkpoints, self.history.current.copy())
            self.checkpoints = marked[-self.spec.max_checkpoints :]

    def shared_snapshot(self) -> Snapshot:
        self._check_between_forwards()
        return snapshot_history(self.history)

    def parse_snapshot(self, snapshot: Snapshot) -> StateHistory:
        past, own = restore_history(self.spec, snapshot), self._shapes()
        for moment in past.states:
            held = {name: (x.dtype, tuple(x.shape[1:])) for name, x in moment.tensors.items()}
            if own and held and held != own:
                raise SnapshotMismatch(f"states {held}, {own} are the model's")
        return past

    @property
    def has_shapes(self) -> bool:
        """Whether the host made its tensors, so that their shapes are known."""
        return bool(self._shapes())

    def prepare_restore(self, history: StateHistory) -> Callable[[], None]:
        self.is_lost, self.checkpoints = True, ()  # of another past
        return partial(self._restore_history, history)

    def _restore_history(self, history: StateHistory) -> None:
        """Let the host's layer have the present state of this past."""
        self._load_tensors(history.current.tensors)
        self.length, self.checkpoints = history.current.length, history.checkpoints
        self.in_forward = self.is_lost = (
            False  # last: an interrupt before it leaves no state at all
        )

    def fork(self) -> Recurrence:
        self._check_between_forwards()
        twin = Recurrence(self.spec, copy.deepcopy(self.layer))
        twin.length = self.length
        twin.checkpoints = tuple(moment.copy() for moment in self.checkpoints)
        return twin

    def get_history(self) -> StateHistory:
        self._check_between_forwards()
        return self.history

    @property
    def _has_no_length(self) -> bool:
        """Is the state of no length?"""
        return self.is_lost or self.in_forward

    def _check_between_forwards(self) -> None:
        """The verbs come between forwards: one that is under way has died."""
        if self.in_forward:
            self.invalidate()
        self.check_valid()

    def _collect_tensors(self) -> dict[str, Tensor]:
        """The host's tensors, by a name that a file may hold."""
        layer, live = self.layer, {}
        for kind, attribute in STATE_ATTRIBUTES.items():
            for index, tensor in getattr(layer, attribute).items():
                if tensor is None or not layer.has_previous_state[index]:
                    continue
                if kind == "conv":  # without what is recorded for a crop
                    tensor = tensor[..., -layer.conv_kernel_size[index] :]
                live[f"{kind}{index}"] = tensor
        return live

    def _shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """What a snapshot of the host's tensors has, by name, whatever the sequences."""
        layer, found = self.layer, {}
        for kind, attribute in STATE_ATTRIBUTES.items():
            for index, tensor in getattr(layer, attribute).items():
                if tensor is None:
                    continue
                shape = tuple(tensor.shape[1:])
                if kind == "conv":  # without what is recorded for a crop
                    shape = (*shape[:-1], layer.conv_kernel_size[index] or shape[-1])
                found[f"{kind}{index}"] = wide(tensor.dtype), shape
        return found

    def _load_tensors(self, tensors: Fields) -> None:
        """Let the host's layer have this state and no other."""
        layer = self.layer
        for kind, attribute in STATE_ATTRIBUTES.items():
            held, begun = getattr(layer, attribute), getattr(layer, f"is_{attribute}_initialized")
            for index, old in list(held.items()):
                new = tensors.get(f"{kind}{index}")
                if new is not None:
                    held[index] = new if old is None else new.to(old.dtype)
                elif old is not None:  # the host's own reset leaves zeros, too
                    held[index] = torch.zeros_like(old)
                begun[index] = new is not None
                if kind == "conv":
                    layer.has_previous_state[index] = False
                if new is None:
                    continue
                layer.has_previous_state[index] = True
                layer.dtype, layer.device = held[index].dtype, held[index].device
                if kind == "conv":
                    layer.conv_kernel_size[index] = new.shape[-1]

    def _count_recorded_tokens(self) -> int:
        """How many tokens back the host has kept what a convolution needs."""
        layer = self.layer
        if not layer.record_past or not layer.is_croppable:
            return 0
        spare = [
            tensor.shape[-1] - layer.conv_kernel_size[index]
            for index, tensor in layer.conv_states.items()
            if tensor is not None and layer.has_previous_state[index]
        ]
        return max(0, min(spare, default=0))


class RecurrentProgress:
    """Told of the first state of the first recurrent layer, which every forward asks for once."""

    def __init__(self, layers: Sequence[ModelLayer], recurrences: Sequence[Recurrence]) -> None:
        self.recurrences = tuple(recurrences)
        attending = [index for index, layer in enumerate(layers) if layer.attends]
        recurring = [index for index, layer in enumerate(layers) if layer.recurs]
        self._first_state = (recurring[0], 0) if recurring else None
        self._counts_tokens = not attending
        self._tracks_forwards = bool(attending and recurring) and recurring[0] < attending[-1]
        self._first_is_hybrid = bool(recurring) and recurring[0] in attending

    def is_repeated_forward(self, layer_idx: int, state_idx: int) -> bool:
        """Does a forward begin here, and did the one before it not end?"""
        begins = (layer_idx, state_idx) == self._first_state
        return begins and any(recurrence.in_forward for recurrence in self.recurrences)

    def record_state_read(self, layer_idx: int, state_idx: int, has_rows: bool) -> None:
        """The host asks for a state: a forward of one token, unless `passed` says more.

        `rows` says whether any came since the last commit. Where attention is in the same layer and
        none ever did, a dead forward and a part of the model that runs alone look the same.
        """
        if (layer_idx, state_idx) != self._first_state:
            return
        empty = [one for one in self.recurrences if one.in_forward and one.length == 0]
        if self._first_is_hybrid and empty and not has_rows:
            raise CacheError(
                f"the state of layer {layer_idx} is asked for again, and no rows came in between: "
                "if "
                "a forward died, reset the cache; a part of a model alone cannot be cached"
            )
        if self._counts_tokens:
            self._add_tokens(1)
        elif self._tracks_forwards:
            for recurrence in self.recurrences:
                recurrence.begin_forward()

    def record_conv_tokens(self, layer_idx: int, state_idx: int, num_tokens: int) -> None:
        """So many tokens pass a convolution; one of them was counted when it was asked."""
        if self._counts_tokens and (layer_idx, state_idx) == self._first_state:
            self._add_tokens(num_tokens - 1)

    def check_valid(self) -> None:
        """Refuse to go on with a state that a dead forward left behind."""
        for recurrence in self.recurrences:
            recurrence.check_valid()

    def _add_tokens(self, num_tokens: int) -> None:
        self.check_valid()
        for recurrence in self.recurrences:
            recurrence.advance_to(recurrence.length + num_tokens)

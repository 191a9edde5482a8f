"""The state of a layer that the host updates in place, as one that a cache of ours can take along.

The host tells nobody what it does to its tensors, so this state follows: the layers that are
appended to say how far the forward came. When one died, the state is of no length, and only going
back to a checkpoint, a restore or a reset makes it one again.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvant.contracts import Fields, Follower, LayerState, Snapshot
from kvant.errors import CacheError
from kvant.layers.reach import check_reach
from kvant.layers.recurrent import NOTHING, Moment, Past, Recurrent
from kvant.recipes import RecurrentSpec

KINDS = {"conv": "conv_states", "recurrent": "recurrent_states"}  # name in a file: the host's


class Recurrence(Recurrent):
    """A `Recurrent` whose present state lies in a layer of the host's; a `Follower`."""

    def __init__(self, spec: RecurrentSpec, layer: LinearAttentionLayer) -> None:
        super().__init__(spec)
        self.layer = layer
        self.lost = False
        self.touched = False  # by a forward that has not come to its end

    def leaves(self) -> list[LayerState]:
        return []

    def followers(self) -> list[Follower]:
        return [self]

    def touch(self) -> None:
        """A forward begins here; if the one before did not end, it died."""
        if self.touched:
            self.lose()
        self.check()
        self.touched = True

    def follow(self, length: int) -> None:
        self.touched = False
        self._stand(length, self._past.checkpoints)

    def lose(self) -> None:
        self.touched = False
        if self.length == 0:
            self._give({})
        else:
            self.lost = True

    def check(self) -> None:
        if self.lost:
            raise CacheError(
                "a forward was abandoned, and a recurrent layer cannot go back by itself: "
                f"rewind to a checkpoint ({self.reachable(self.length)} is the longest) or reset"
            )

    @property
    def astray(self) -> bool:
        """Is the state of no length?"""
        return self.lost or self.touched

    @property
    def _now(self) -> Moment:
        return Moment(self._past.now.length, self._live())

    def append(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("the host changes this state; nobody appends to it")

    nbytes_with = append

    def reachable(self, to: int) -> int:
        if not self.astray and to >= self.length - self._recorded():
            return min(to, self.length)
        points = (moment.length for moment in self._past.checkpoints)
        return max((length for length in points if length <= to), default=0)

    def rewind(self, to: int) -> None:
        check_reach(self, to)
        kept = tuple(moment for moment in self._past.checkpoints if moment.length <= to)
        if not self.astray and to >= self.length - self._recorded():
            if self.layer.record_past:
                self.layer.crop(to - self.length)
            self._stand(to, kept)
            return
        self._settle(Past(kept[-1].copied() if to else NOTHING, kept))
        self.lost = False

    def checkpoint(self) -> None:
        self._check_still()
        super().checkpoint()

    def commit(self) -> None:
        """The layer gets what was restored; until then it has what it had."""
        if self._past is not self._committed:
            self._settle(self._past)
            self.lost = False

    def exposed(self) -> Snapshot:
        self._check_still()
        return super().exposed()

    def fork(self) -> Recurrence:
        self._check_still()
        twin = Recurrence(self.spec, copy.deepcopy(self.layer))
        kept = tuple(moment.copied() for moment in self._past.checkpoints)
        twin._stand(self.length, kept)
        return twin

    def select(self, index: Tensor) -> None:
        self._check_still()
        super().select(index)

    def move(self, device: torch.device) -> None:
        self._check_still()
        super().move(device)

    def reset(self) -> None:
        super().reset()
        self.lost = False

    def _check_still(self) -> None:
        """The verbs come between forwards: one that is under way has died."""
        if self.touched:
            self.lose()
        self.check()

    def _live(self) -> dict[str, Tensor]:
        """The host's tensors, by a name that a file may hold."""
        layer, live = self.layer, {}
        for kind, attribute in KINDS.items():
            for index, tensor in getattr(layer, attribute).items():
                if tensor is None or not layer.has_previous_state[index]:
                    continue
                if kind == "conv":  # without what is recorded for a crop
                    tensor = tensor[..., -layer.conv_kernel_size[index] :]
                live[f"{kind}{index}"] = tensor
        return live

    def _settle(self, past: Past) -> None:
        self._give(past.now.state)
        self.touched = False
        self._stand(past.now.length, past.checkpoints)

    def _stand(self, length: int, checkpoints: tuple[Moment, ...]) -> None:
        """Be at a length whose state is the host's to keep."""
        self._past = self._committed = Past(Moment(length, {}), checkpoints)

    def _give(self, state: Fields) -> None:
        """Let the host's layer have this state and no other."""
        layer = self.layer
        for kind, attribute in KINDS.items():
            held, begun = getattr(layer, attribute), getattr(layer, f"is_{attribute}_initialized")
            for index, old in list(held.items()):
                new = state.get(f"{kind}{index}")
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

    def _recorded(self) -> int:
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

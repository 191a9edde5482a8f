"""The state of a host's recurrent layer, as one that a cache of ours can take along.

The host changes its tensors in place and tells nobody, so this state follows: the layers that are
appended to say how far the forward came. When one died, the state is nowhere, and only a
checkpoint or a reset brings it back.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from kvant.contracts import Fields, Follower, LayerState, Snapshot
from kvant.errors import CacheError
from kvant.layers.reach import check_reach
from kvant.layers.recurrent import Moment, Past, Recurrent
from kvant.recipes import RecurrentSpec

KINDS = {"conv": "conv_states", "recurrent": "recurrent_states"}


class Recurrence(Recurrent):
    """A `Recurrent` whose present state lives in the host's layer; a `Follower`."""

    def __init__(self, spec: RecurrentSpec, host: LinearAttentionLayer) -> None:
        super().__init__(spec)
        self.host = host
        self.lost = False
        self.touched = False  # by a forward that has not come to its end

    def leaves(self) -> list[LayerState]:
        return []

    def followers(self) -> list[Follower]:
        return [self]

    @property
    def astray(self) -> bool:
        """Is the state none of any length?"""
        return self.lost or self.touched

    def touch(self) -> None:
        """A forward begins here; if the one before did not end, it died."""
        if self.touched:
            self.rollback()
        self.check()
        self.touched = True

    def follow(self, length: int) -> None:
        self.touched = False
        self._past = self._committed = replace(self._past, now=Moment(length, {}))

    @property
    def batch(self) -> int:
        return next((tensor.shape[0] for tensor in self._live().values()), 0)

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(tensor.nbytes for tensor in self._live().values())

    def append(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("the host changes this state; nobody appends to it")

    def read(self) -> Fields:
        return {name: tensor.clone() for name, tensor in self._live().items()}

    def reachable(self, to: int) -> int:
        if not self.astray and to >= self.length - self._recorded():
            return min(to, self.length)
        points = (moment.length for moment in self._past.checkpoints)
        return max((length for length in points if length <= to), default=0)

    def rewind(self, to: int) -> None:
        check_reach(self, to)
        kept = tuple(moment for moment in self._past.checkpoints if moment.length <= to)
        if not self.astray and self.length - self._recorded() <= to:
            if self.host.record_past:
                self.host.crop(to - self.length)
            self._past = self._committed = Past(Moment(to, {}), kept)
            return
        now = kept[-1].copied() if to else Moment(0, {})
        self._past = self._committed = Past(now, kept)
        self._give()

    def checkpoint(self) -> None:
        self.check()
        self._take()
        super().checkpoint()
        self._drop()

    def rollback(self) -> None:
        """A forward died, and what it did to the state cannot be undone."""
        self.touched = False
        if self.length == 0:
            self.host.reset()
        else:
            self.lost = True

    def check(self) -> None:
        if self.lost:
            raise CacheError(
                "a forward was abandoned, and a recurrent layer cannot go back by itself: "
                f"rewind to a checkpoint ({self.reachable(self.length)} is the longest) or reset"
            )

    def exposed(self) -> Snapshot:
        self.check()
        self._take()
        snapshot = super().exposed()
        self._drop()
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        super().restore(snapshot)
        self._committed = self._past
        self._give()

    def fork(self) -> Recurrence:
        twin = Recurrence(self.spec, copy.deepcopy(self.host))
        kept = tuple(moment.copied() for moment in self._past.checkpoints)
        twin._past = twin._committed = Past(self._past.now, kept)
        twin.lost = self.lost
        return twin

    def select(self, index: Tensor) -> None:
        self._take()
        super().select(index)
        self._give()

    def move(self, device: torch.device) -> None:
        self._take()
        super().move(device)
        self._give()

    def reset(self) -> None:
        super().reset()
        self.host.reset()
        self.lost = False

    def _live(self) -> dict[str, Tensor]:
        """The host's tensors, by a name that a file may hold."""
        host = self.host
        return {
            f"{kind}{index}": tensor[..., -host.conv_kernel_size[index] :]
            if kind == "conv"
            else tensor
            for kind, attribute in KINDS.items()
            for index, tensor in getattr(host, attribute).items()
            if tensor is not None and host.has_previous_state[index]
        }

    def _take(self) -> None:
        """Let the present be what the host has."""
        now = Moment(self.length, self._live())
        self._past = self._committed = replace(self._past, now=now)

    def _drop(self) -> None:
        self.follow(self.length)

    def _give(self) -> None:
        """Let the host have what is now the present."""
        host, state = self.host, self._past.now.state
        host.reset()
        for name, tensor in state.items():
            kind = name.rstrip("0123456789")
            index = int(name[len(kind) :])
            held = getattr(host, KINDS[kind])
            old = held[index]
            kept = tensor if old is None else tensor.to(old.dtype)
            held[index] = kept.clone()
            host.dtype, host.device = kept.dtype, kept.device
            getattr(host, f"is_{KINDS[kind]}_initialized")[index] = True
            host.has_previous_state[index] = True
            if kind == "conv":
                host.conv_kernel_size[index] = kept.shape[-1]
        self.lost = False
        self._drop()

    def _recorded(self) -> int:
        """How many tokens back the host has kept what a convolution needs."""
        host = self.host
        if not host.record_past or not host.is_croppable:
            return 0
        spare = [
            tensor.shape[-1] - host.conv_kernel_size[index]
            for index, tensor in host.conv_states.items()
            if tensor is not None and host.has_previous_state[index]
        ]
        return max(0, min(spare, default=0))

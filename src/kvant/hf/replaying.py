"""Tokens one after the other through a forward that is captured once and then replayed.

The cache makes room and seals what falls due before, and counts the token after: it is at every
token what ordinary forwards would have made it. A graph lasts while memory stays where it is, which
a capacity sees to. What cannot be captured is told by `refusal`, and ordinary forwards go on.

Holds the memory that a graph reads, but not the cache. What is changed of the model during a reply
is noticed when a page falls due or something else is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DummyLayer

from kvant.attention import Step
from kvant.contracts import View
from kvant.errors import CapacityError, UnsupportedView
from kvant.hf.attention import switched
from kvant.hf.baking import baked, unfit
from kvant.hf.cache import HostCache
from kvant.hf.graph import Capture, Forward
from kvant.hf.layers import AttentionLayer
from kvant.hf.reading import Reading
from kvant.hf.stepping import StepCache
from kvant.lasting import lasting

log = logging.getLogger("kvant")
FAILED: WeakKeyDictionary[PreTrainedModel, str] = WeakKeyDictionary()  # to be captured, and why
Call = Callable[[Tensor, Tensor, Any], Tensor]  # (ids [1, 1], positions [1, 1], cache) -> logits


class Passing(Exception):
    """What keeps a model from being replayed now, and may be over at the next token."""


class Replayer:
    """One model on one cache; `call` is a forward of the model."""

    def __init__(self, model: PreTrainedModel, call: Call, capture: Capture) -> None:
        self.model = model
        self.call = call
        self.capture = capture
        self.refusal: str | None = None
        with lasting():
            self._ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        self._places = self._ids
        self._baked: list[object] = []  # of the model,
        self._held: list[Tensor] = []  # and its tensors, which the graph reads
        self._steps: list[Step] = []
        self._forward: Forward | None = None  # for these steps; the second time it is a replay
        self._ran = self._captured = False
        self._changes = (-1, -1)  # of the cache, when it was left

    def logits(self, cache: HostCache, token: int) -> Tensor | None:
        """After one more token, until the next one; None where an ordinary forward has to do it."""
        refusal = self.refusal or FAILED.get(self.model)
        if refusal is None:
            try:
                return self._logits(cache, token)
            except CapacityError:  # there is no room, or a page falls due with its own row
                return None
            except Passing as error:
                refusal = str(error)
            except UnsupportedView as error:
                refusal = self.refusal = str(error)
            except Exception as error:  # a model may do anything that a graph cannot hold
                refusal = self.refusal = _told(error)
            log.info("tokens are not replayed from a graph: %s", refusal)
        cache.context.replays.refusal = refusal
        return None

    def _logits(self, cache: HostCache, token: int) -> Tensor:
        layers = _attending(cache)
        if cache.context.changes != self._changes or cache.length >= self._until:
            self._follow(cache, layers)
        self._ids.fill_(token)
        self._places[:, 0] = cache.length + 1
        out = self._run()
        for layer, step in zip(layers, self._steps, strict=True):
            layer.arrive(step.backend)
        self._changes = cache.context.changes
        cache.context.replays.tokens += self._captured
        cache.context.replays.refusal = None
        return out

    @property
    def _until(self) -> int:
        """The length up to which nothing has to be sealed, and no memory is needed."""
        return min(step.until for step in self._steps)

    def _follow(self, cache: HostCache, layers: list[AttentionLayer]) -> None:
        """Let the cache make room; where its memory is another one, or the model's, begin anew."""
        if (reason := unfit(self.model)) is not None:
            raise Passing(reason)
        if (now := baked(self.model)) != self._baked:
            self._baked, self._steps, self._forward = now, [], None
            self._held = [x.detach() for x in (*self.model.parameters(), *self.model.buffers())]
        cache.states.rollback()  # what a forward that died has left
        views: list[View] = []
        for layer in layers:
            view = layer.state.expect()
            if self._steps and not self._steps[len(views)].follow(view):
                self._steps, self._forward = [], None  # one memory that moved ends the graph of all
            views.append(view)
        if not self._steps:
            self._ran = self._captured = False
            with lasting():
                self._places = self._ids.new_zeros(len(layers), 4)
                self._steps = [Step.of(*given) for given in zip(views, self._places, strict=True)]
            self._forward = self._stepping(StepCache(cache.layers, self._steps))

    def _stepping(self, cache: StepCache) -> Forward:
        def forward(ids: Tensor, places: Tensor) -> Tensor:
            with switched(self.model):
                return self.call(ids, places[:1, :1] - 1, cache)

        return forward

    def _run(self) -> Tensor:
        """The first time as it is: kernels are compiled, and what is made once is made."""
        assert self._forward is not None
        if self._ran and not self._captured:
            try:
                self._forward = self.capture(self._forward, self._ids, self._places)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # the next cache need not try again
                FAILED[self.model] = _told(error)
                raise
            self._captured = True
        self._ran = True
        return self._forward(self._ids, self._places)


def _told(error: Exception) -> str:
    """In one line: some print whole programs."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _attending(cache: HostCache) -> list[AttentionLayer]:
    """The layers that take rows; some of a model's may remember nothing."""
    layers = [layer for layer in cache.layers if not isinstance(layer, DummyLayer)]
    for layer in layers:
        if type(layer) is not AttentionLayer or layer.kind is not Reading:
            kind = "latents" if isinstance(layer, AttentionLayer) else type(layer).__name__
            raise UnsupportedView(f"layers of {kind} take no steps")
    return layers

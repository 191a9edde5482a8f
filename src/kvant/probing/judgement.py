"""Do specs leave a model what it is? What is measured on one trial, and read once for all of them.

Two things are asked: what the model predicts, and what it recalls. A format may hardly change the
first, and take away half of the second: few tokens of a text are far back and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor
from transformers import PreTrainedModel

from kvant.hf import HostCache, cache_for
from kvant.probing.predictions import (
    Divergence,
    compared,
    divergence,
    empty_cache,
    forward,
    stored,
    unbounded,
)
from kvant.probing.recall import Recall
from kvant.probing.text import Trial
from kvant.recipes import AnySpec, CacheSpec, Recipe, attention_in

JUDGED = 128  # tokens


@dataclass(frozen=True)
class Screen:
    """A prompt in a raw cache, and the tokens behind it with what raw predicts."""

    model: PreTrainedModel
    cache: HostCache
    ids: Tensor
    right: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, ids: Tensor) -> Screen:
        judged = min(JUDGED, ids.shape[1] // 2)
        cache = empty_cache(model, stored(model, "raw"))
        forward(model, ids[:, : -judged - 1], cache)
        behind = ids[:, -judged - 1 :]
        return cls(model, cache, behind, forward(model, behind[:, :-1], cache.fork()))

    def divergence(self, spec: AnySpec) -> Divergence:
        return self._of(cache_for(self.model, stored(self.model, spec)).spec)

    def by_layer(self, spec: AnySpec) -> tuple[float, ...]:
        """The mean divergence where one layer alone is stored by the spec; 0 where none is."""
        full = cache_for(self.model, stored(self.model, spec)).spec.layers
        return tuple(self._alone(full, index) for index in range(len(full)))

    def _alone(self, full: tuple[Recipe, ...], index: int) -> float:
        if not any(layer.seals for layer in attention_in(full[index])):
            return 0.0
        raw = self.cache.spec.layers
        return self._of(CacheSpec((*raw[:index], full[index], *raw[index + 1 :]))).mean_kl

    def _of(self, spec: CacheSpec) -> Divergence:
        twin = self.cache.fork()
        twin.recode(spec)
        logits = forward(self.model, self.ids[:, :-1], twin)
        return compared(self.right, logits, self.ids[0, 1:])


@dataclass(frozen=True)
class Judgement:
    """Of a model on a trial; windows and capacities are left out (see `unbounded`)."""

    model: PreTrainedModel
    tried: Trial

    @cached_property
    def screen(self) -> Screen:
        return Screen.of(self.model, self.tried.ids)

    @cached_property
    def recall(self) -> Recall:
        return Recall.of(self.model, self.tried.exams())

    def divergence(self, spec: AnySpec) -> Divergence:
        return divergence(self.model, [self.tried.ids], unbounded(self.model, spec))

    def lost(self, spec: AnySpec) -> float:
        return self.recall.lost(unbounded(self.model, spec))

    def spares(self, spec: AnySpec) -> bool:
        """Does it do little enough? What costs least to find out is asked first."""
        tried = self.tried
        return (
            self.screen.divergence(unbounded(self.model, spec)).mean_kl <= tried.max_kl
            and self.lost(spec) <= tried.max_lost
            and self.divergence(spec).mean_kl <= tried.max_kl
        )

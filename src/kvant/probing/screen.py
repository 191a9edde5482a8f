"""Many specs judged on one prompt, which is read once.

A spec is put on a fork of the raw cache by a recode, and a few more tokens are read with it: what
they are predicted to be is compared. What the prompt's own rows would have become if the model had
read them through the spec is left out, so this is a little less than `predictions.damage`.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from kvant.hf import HostCache, cache_for
from kvant.probing.predictions import Damage, compared, empty_cache, forward, stored
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

    def damage(self, spec: AnySpec) -> Damage:
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

    def _of(self, spec: CacheSpec) -> Damage:
        twin = self.cache.fork()
        twin.recode(spec)
        logits = forward(self.model, self.ids[:, :-1], twin)
        return compared(self.right, logits, self.ids[0, 1:])

"""Compare a spec with raw on a few tokens after a prompt, which was read once for all specs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from kvant.hf import TransformersCache
from kvant.probing.divergence import (
    Divergence,
    compare_logits,
    compute_logits,
    make_empty_cache,
    make_filled_cache,
)
from kvant.recipes import AnySpec, CacheSpec, iterate_attention

MAX_SCREEN_TOKENS = 128


@dataclass(frozen=True)
class QuickScreen:
    """A prompt in a raw cache, and raw logits of the tokens after it."""

    model: PreTrainedModel
    prompt: Tensor
    cache: TransformersCache
    ids: Tensor
    raw_logits: Tensor

    @classmethod
    def from_tokens(cls, model: PreTrainedModel, ids: Tensor) -> QuickScreen:
        num_screened = min(MAX_SCREEN_TOKENS, ids.shape[1] // 2)
        cache = make_empty_cache(model, "raw")
        prompt, screened = ids[:, : -num_screened - 1], ids[:, -num_screened - 1 :]
        compute_logits(model, prompt, cache)
        return cls(
            model, prompt, cache, screened, compute_logits(model, screened[:, :-1], cache.fork())
        )

    def make_cache(self, spec: AnySpec) -> TransformersCache:
        """Return a cache of the prompt under a spec."""
        return make_filled_cache(self.model, self.prompt, spec, self.cache)

    def measure_divergence(self, spec: AnySpec, count: int = MAX_SCREEN_TOKENS) -> Divergence:
        """Measure the divergence of a spec on the first `count` tokens after the prompt."""
        logits = compute_logits(self.model, self.ids[:, :-1][:, :count], self.make_cache(spec))
        return compare_logits(self.raw_logits[:count], logits, self.ids[0, 1 : count + 1])

    def measure_by_layer(self, spec: AnySpec) -> tuple[float, ...]:
        """Return the mean divergence with one layer alone in the format; 0 if it stays raw."""
        full, raw = make_empty_cache(self.model, spec).spec.layers, self.cache.spec.layers
        harms = [0.0] * len(full)
        for index, recipe in enumerate(full):
            if any(layer.seals or layer.prune for layer in iterate_attention(recipe)):
                single = CacheSpec((*raw[:index], recipe, *raw[index + 1 :]))
                harms[index] = self.measure_divergence(single).mean_kl
        return tuple(harms)

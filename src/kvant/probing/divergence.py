"""What a spec does to a model's predictions: every next token of a text, beside the raw cache.

Both caches read the same tokens, a chunk each in turn, and the distributions of a chunk are
compared before the next: memory does not grow with the text. Where a spec prunes, the first half of
a piece is its prompt, and the tokens behind it judge what stays. Both run under `prefill="stored"`
whatever the spec says: so every token sees what it would see in decoding, and raw takes the same
ways through the backends, which makes its own divergence exactly 0. Log-softmax is in float32
whatever the model is in. Knows tokens, no text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.hf import TransformersCache, cache_for, get_cache_argument, supports_chunked_prefill
from kvant.hf.model_layers import get_model_layers, make_cache_spec
from kvant.recipes import AnySpec, CacheSpec
from kvant.retention import KeepAll

MAX_FORWARD_TOKENS = 512  # tokens of a forward
MAX_COMPARED_POSITIONS = (
    64  # positions whose distributions are compared at once: bounds float32 copies
)


@dataclass(frozen=True)
class Divergence:
    """One number a position, for all positions whose next token is known."""

    kl: Tensor  # KL(raw || spec), nats; infinite where the spec gives no distribution
    raw_loss: Tensor  # -log of what the true next token gets, with the raw cache
    loss: Tensor  # and with the spec
    same_top1: Tensor  # bool: is the likeliest token the same?

    @staticmethod
    def concatenate(parts: Iterable[Divergence]) -> Divergence:
        """All positions of the parts, in their order."""
        found = [*parts]
        if not found:
            raise ValueError("no tokens to predict: give pieces of 2 tokens or more")
        names = [field.name for field in fields(Divergence)]
        return Divergence(*(torch.cat([getattr(part, name) for part in found]) for name in names))

    @property
    def num_positions(self) -> int:
        return len(self.kl)

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean(dtype=torch.float64))

    def quantile(self, share: float) -> float:
        """The least KL that so large a share of the positions does not pass: 0.999 is the tail."""
        return float(self.kl.kthvalue(max(1, math.ceil(share * self.num_positions))).values)

    @property
    def raw_perplexity(self) -> float:
        return float(self.raw_loss.mean(dtype=torch.float64).exp())

    @property
    def perplexity(self) -> float:
        return float(self.loss.mean(dtype=torch.float64).exp())

    @property
    def perplexity_change(self) -> float:
        """0.01 is one percent more than raw."""
        return self.perplexity / self.raw_perplexity - 1

    @property
    def top1(self) -> float:
        """The share of positions whose likeliest token stays the same."""
        return float(self.same_top1.mean(dtype=torch.float64))


def measure_divergence(
    model: PreTrainedModel,
    pieces: Iterable[Tensor],
    spec: AnySpec,
    *,
    chunk: int = MAX_FORWARD_TOKENS,
) -> Divergence:
    """Over pieces of text [1, T], each with caches of its own; the last token is only predicted."""
    full = make_stored_prefill_spec(model, spec)
    return measure_cache_divergence(
        model, pieces, lambda: make_empty_cache(model, full), chunk=chunk
    )


def measure_cache_divergence(
    model: PreTrainedModel, pieces: Iterable[Tensor], make_cache: Callable[[], Any], *, chunk: int
) -> Divergence:
    """That of anybody's caches; one that has no `prefill="stored"` is to be read in chunks of 1."""
    raw = make_stored_prefill_spec(model, "raw")
    return Divergence.concatenate(
        part
        for piece in pieces
        for part in _measure_piece(
            model, piece, (make_empty_cache(model, raw), make_cache()), chunk
        )
    )


def make_stored_prefill_spec(model: PreTrainedModel, spec: AnySpec) -> CacheSpec:
    """The recipes that a model gets by a spec, where prompts are read as decoding would."""
    full = make_cache_spec(get_model_layers(model), spec)
    return full.map_layers(lambda layer: replace(layer, prefill="stored"))


def make_unbounded_spec(model: PreTrainedModel, spec: AnySpec) -> CacheSpec:
    """The formats of a spec with all rows kept: what a window or a capacity does is another thing.

    A window of the model's own stays, since the model sees no more.
    """
    return make_stored_prefill_spec(model, spec).map_layers(
        lambda layer: replace(layer, retention=KeepAll(layer.retention.sinks), capacity=None)
    )


def make_empty_cache(model: PreTrainedModel, spec: AnySpec) -> TransformersCache:
    """An empty cache for one sequence."""
    cache = cache_for(model, spec)
    if not isinstance(cache, TransformersCache):
        raise ValueError(
            f"{type(model).__name__} reads an encoder: divergence is that of a model that "
            "continues text"
        )
    if not any(layer.attends for layer in cache.layer_info):
        raise ValueError(f"no layer of {type(model).__name__} attends: it has no rows to store")
    return cache


def _measure_piece(
    model: PreTrainedModel, piece: Tensor, caches: tuple[TransformersCache, Any], chunk: int
) -> Iterator[Divergence]:
    ids = piece.to(model.device)
    count = ids.shape[1] - 1
    begin = 0
    if isinstance(caches[1], TransformersCache) and caches[1].spec.prunes:
        begin = count // 2
        for cache in caches:
            read_prompt(model, ids[:, :begin], cache)
        caches[1].prune()
    for first in range(begin, count, chunk):
        last = min(first + chunk, count)
        raw, ours = (compute_logits(model, ids[:, first:last], cache) for cache in caches)
        targets = ids[0, first + 1 : last + 1]
        for begin in range(0, last - first, MAX_COMPARED_POSITIONS):
            here = slice(begin, begin + MAX_COMPARED_POSITIONS)
            yield compare_logits(raw[here], ours[here], targets[here])


@torch.no_grad()
def compute_logits(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """The logits [T, vocabulary] of tokens [1, T] behind those that the cache holds."""
    if ids.shape[1] > 1 and cache.get_seq_length() and not supports_chunked_prefill(model):
        single = (compute_logits(model, ids[:, at : at + 1], cache) for at in range(ids.shape[1]))
        return torch.cat([*single])
    given = {get_cache_argument(model): cache}
    logits: Tensor = model(input_ids=ids, use_cache=True, **given).logits[0]
    return logits


def read_prompt(model: PreTrainedModel, ids: Tensor, cache: TransformersCache) -> Tensor:
    """The logits [vocabulary] after tokens [1, T], read in chunks."""
    for first in range(0, ids.shape[1], MAX_FORWARD_TOKENS):
        logits = compute_logits(
            model, ids[:, first : first + MAX_FORWARD_TOKENS].to(model.device), cache
        )
    return logits[-1]


def compare_logits(raw_logits: Tensor, logits: Tensor, targets: Tensor) -> Divergence:
    """Of logits [N, vocabulary] and the tokens [N] that came; the result lies on the CPU."""
    before, after = (one.float().log_softmax(-1) for one in (raw_logits, logits))
    shares = before.exp()
    # What raw rules out has no share, also where both say -inf. Below 0 there is only rounding.
    kl = torch.where(shares > 0, shares * (before - after), 0.0).sum(-1).clamp(min=0)
    lost = [-one.gather(-1, targets[:, None])[:, 0] for one in (before, after)]
    same = before.argmax(-1) == after.argmax(-1)
    broken = after.isnan().any(-1)
    return Divergence(
        kl.masked_fill(broken, torch.inf).cpu(),
        lost[0].cpu(),
        lost[1].masked_fill(broken, torch.inf).cpu(),
        (same & ~broken).cpu(),
    )

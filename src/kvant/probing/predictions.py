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

from kvant.hf import HostCache, cache_for, cache_name, continues
from kvant.hf.detect import host_layers, recipes
from kvant.recipes import AnySpec, CacheSpec
from kvant.retention import All

CHUNK = 512  # tokens of a forward
COMPARED = 64  # positions whose distributions are compared at once: bounds float32 copies


@dataclass(frozen=True)
class Divergence:
    """One number a position, for all positions whose next token is known."""

    kl: Tensor  # KL(raw || spec), nats; infinite where the spec gives no distribution
    raw_loss: Tensor  # -log of what the true next token gets, with the raw cache
    loss: Tensor  # and with the spec
    same: Tensor  # bool: is the likeliest token the same?

    @staticmethod
    def joined(parts: Iterable[Divergence]) -> Divergence:
        """All positions of the parts, in their order."""
        found = [*parts]
        if not found:
            raise ValueError("no tokens to predict: give pieces of 2 tokens or more")
        names = [field.name for field in fields(Divergence)]
        return Divergence(*(torch.cat([getattr(part, name) for part in found]) for name in names))

    @property
    def positions(self) -> int:
        return len(self.kl)

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean(dtype=torch.float64))

    def quantile(self, share: float) -> float:
        """The least KL that so large a share of the positions does not pass: 0.999 is the tail."""
        return float(self.kl.kthvalue(max(1, math.ceil(share * self.positions))).values)

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
        return float(self.same.mean(dtype=torch.float64))


def divergence(
    model: PreTrainedModel, pieces: Iterable[Tensor], spec: AnySpec, *, chunk: int = CHUNK
) -> Divergence:
    """Over pieces of text [1, T], each with caches of its own; the last token is only predicted."""
    full = stored(model, spec)
    return damage_by(model, pieces, lambda: empty_cache(model, full), chunk=chunk)


def damage_by(
    model: PreTrainedModel, pieces: Iterable[Tensor], empty: Callable[[], Any], *, chunk: int
) -> Divergence:
    """That of anybody's caches; one that has no `prefill="stored"` is to be read in chunks of 1."""
    raw = stored(model, "raw")
    return Divergence.joined(
        part
        for piece in pieces
        for part in _piece(model, piece, (empty_cache(model, raw), empty()), chunk)
    )


def stored(model: PreTrainedModel, spec: AnySpec) -> CacheSpec:
    """The recipes that a model gets by a spec, where prompts are read as decoding would."""
    full = recipes(host_layers(model), spec)
    return full.changed(lambda layer: replace(layer, prefill="stored"))


def unbounded(model: PreTrainedModel, spec: AnySpec) -> CacheSpec:
    """The formats of a spec with all rows kept: what a window or a capacity does is another thing.

    A window of the model's own stays, since the model sees no more.
    """
    return stored(model, spec).changed(
        lambda layer: replace(layer, retention=All(layer.retention.sinks), capacity=None)
    )


def empty_cache(model: PreTrainedModel, spec: AnySpec) -> HostCache:
    """An empty cache for one sequence."""
    cache = cache_for(model, spec)
    if not isinstance(cache, HostCache):
        raise ValueError(
            f"{type(model).__name__} reads an encoder: divergence is that of a model that "
            "continues text"
        )
    if not any(layer.attends for layer in cache.described):
        raise ValueError(f"no layer of {type(model).__name__} attends: it has no rows to store")
    return cache


def _piece(
    model: PreTrainedModel, piece: Tensor, caches: tuple[HostCache, Any], chunk: int
) -> Iterator[Divergence]:
    ids = piece.to(model.device)
    count = ids.shape[1] - 1
    begin = 0
    if isinstance(caches[1], HostCache) and caches[1].spec.prunes:
        begin = count // 2
        for cache in caches:
            read(model, ids[:, :begin], cache)
        caches[1].prune()
    for first in range(begin, count, chunk):
        last = min(first + chunk, count)
        raw, ours = (forward(model, ids[:, first:last], cache) for cache in caches)
        targets = ids[0, first + 1 : last + 1]
        for begin in range(0, last - first, COMPARED):
            here = slice(begin, begin + COMPARED)
            yield compared(raw[here], ours[here], targets[here])


@torch.no_grad()
def forward(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """The logits [T, vocabulary] of tokens [1, T] behind those that the cache holds."""
    if ids.shape[1] > 1 and cache.get_seq_length() and not continues(model):
        single = (forward(model, ids[:, at : at + 1], cache) for at in range(ids.shape[1]))
        return torch.cat([*single])
    given = {cache_name(model): cache}
    logits: Tensor = model(input_ids=ids, use_cache=True, **given).logits[0]
    return logits


def read(model: PreTrainedModel, ids: Tensor, cache: HostCache) -> Tensor:
    """The logits [vocabulary] after tokens [1, T], read in chunks."""
    for first in range(0, ids.shape[1], CHUNK):
        logits = forward(model, ids[:, first : first + CHUNK].to(model.device), cache)
    return logits[-1]


def compared(raw: Tensor, logits: Tensor, targets: Tensor) -> Divergence:
    """Of logits [N, vocabulary] and the tokens [N] that came; the result lies on the CPU."""
    before, after = (one.float().log_softmax(-1) for one in (raw, logits))
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

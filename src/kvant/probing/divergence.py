"""Measure what a spec does to predictions: compare each next token of a text with the raw cache.

Both caches read the same tokens, one chunk each in turn. The distributions of a chunk are compared
before the next chunk, so memory does not grow with the text. If a spec prunes, the first half of a
piece is its prompt; the tokens after it are compared.

Both caches run with `prefill="stored"`: every token sees what decoding would see, and both take the
same path through the backends, so that raw has a divergence of exactly 0. Log-softmax runs in
float32 for every dtype. This module knows tokens, not text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.errors import SpecError
from kvant.hf import TransformersCache, cache_for, get_cache_argument, supports_chunked_prefill
from kvant.hf.model import get_model_layers, make_cache_spec
from kvant.models import max_context
from kvant.recipes import AnySpec, CacheSpec, LayerSpec, iterate_attention
from kvant.retention import KeepAll

Predict = Callable[[Tensor], Tensor]  # reads tokens [1, T], and returns logits [T, vocabulary]

MAX_FORWARD_TOKENS = 512
MAX_TRIAL_TAIL = 256  # newest rows that a trial reads dense
MAX_COMPARED_POSITIONS = 64  # compared at once: bounds the float32 copies


@dataclass(frozen=True)
class Divergence:
    """Values of each position whose next token is known."""

    kl: Tensor  # KL(raw || spec), nats; infinite if the logits are NaN
    raw_loss: Tensor  # -log of the true next token's probability, with the raw cache
    loss: Tensor  # and with the spec
    same_top1: Tensor  # bool: whether the most likely token is the same

    @staticmethod
    def concatenate(parts: Iterable[Divergence]) -> Divergence:
        """Concatenate the positions of the parts."""
        divergences = [*parts]
        if not divergences:
            raise ValueError("no tokens to predict: give pieces of 2 tokens or more")
        names = [field.name for field in fields(Divergence)]
        return Divergence(
            *(torch.cat([getattr(part, name) for part in divergences]) for name in names)
        )

    @property
    def num_positions(self) -> int:
        return len(self.kl)

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean(dtype=torch.float64))

    def quantile(self, share: float) -> float:
        """Return the smallest KL that at least `share` of the positions do not exceed."""
        return float(self.kl.kthvalue(max(1, math.ceil(share * self.num_positions))).values)

    @property
    def raw_perplexity(self) -> float:
        return float(self.raw_loss.mean(dtype=torch.float64).exp())

    @property
    def perplexity(self) -> float:
        return float(self.loss.mean(dtype=torch.float64).exp())

    @property
    def perplexity_change(self) -> float:
        """Relative change: 0.01 is one percent more than raw."""
        return self.perplexity / self.raw_perplexity - 1

    @property
    def top1(self) -> float:
        """Share of positions whose most likely token stays the same."""
        return float(self.same_top1.mean(dtype=torch.float64))


def measure_divergence(
    model: PreTrainedModel,
    pieces: Iterable[Tensor],
    spec: AnySpec,
    *,
    chunk: int = MAX_FORWARD_TOKENS,
) -> Divergence:
    """Measure pieces of text [1, T], each with new caches; the last token is only predicted."""
    full = make_stored_prefill_spec(model, spec)  # first: an invalid spec raises
    return measure_cache_divergence(
        model, pieces, lambda: make_empty_cache(model, full), chunk=chunk
    )


def measure_cache_divergence(
    model: PreTrainedModel, pieces: Iterable[Tensor], make_cache: Callable[[], Any], *, chunk: int
) -> Divergence:
    """Measure caches of any kind; without `prefill="stored"`, use a chunk of 1."""
    return Divergence.concatenate(
        part
        for piece in pieces
        for part in _measure_piece(
            model, piece, (make_empty_cache(model, "raw"), make_cache()), chunk
        )
    )


def make_stored_prefill_spec(model: PreTrainedModel, spec: AnySpec) -> CacheSpec:
    """Resolve a spec to the model's recipes, whose prompts are read as in decoding."""
    full = make_cache_spec(get_model_layers(model), spec)
    return full.map_layers(lambda layer: replace(layer, prefill="stored"))


def make_unbounded_spec(model: PreTrainedModel, spec: AnySpec) -> CacheSpec:
    """Resolve the formats of a spec with all rows kept, without windows and capacities.

    A window of the model's own attention stays. Most rows of a trial are sealed, as those of a long
    text are: a `start` within the model's context is left out, and a longer tail than
    `MAX_TRIAL_TAIL` is shortened.
    """
    context = max_context(model) or math.inf

    def keep_rows(layer: LayerSpec) -> LayerSpec:
        tail = None if layer.tail is None else min(layer.tail, MAX_TRIAL_TAIL)
        start = layer.dense_until if layer.dense_until >= context else 0
        retention = KeepAll(layer.retention.sinks)
        return replace(layer, retention=retention, capacity=None, dense_until=start, tail=tail)

    return make_stored_prefill_spec(model, spec).map_layers(keep_rows)


def check_keeps_rows(model: PreTrainedModel, spec: AnySpec) -> None:
    """Refuse a window or a capacity, which `make_unbounded_spec` leaves out."""
    raw_layers = iterate_attention(*make_stored_prefill_spec(model, "raw").layers)
    layers = iterate_attention(*make_stored_prefill_spec(model, spec).layers)
    for layer, raw_layer in zip(layers, raw_layers, strict=True):
        if layer.retention.window != raw_layer.retention.window or layer.capacity is not None:
            raise SpecError(
                f"spec {spec!r}: formats are compared with all rows kept: leave out window=, "
                "retain= and capacity="
            )


def make_format_spec(model: PreTrainedModel, spec: AnySpec) -> CacheSpec:
    """Resolve the formats of a spec with all rows kept, also those that a prune would drop."""
    return make_unbounded_spec(model, spec).map_layers(lambda layer: replace(layer, prune=None))


def make_empty_cache(model: PreTrainedModel, spec: AnySpec) -> TransformersCache:
    """Make an empty cache for one sequence, whose prompts are read as in decoding."""
    cache = cache_for(model, make_stored_prefill_spec(model, spec))
    if not isinstance(cache, TransformersCache):
        raise ValueError(
            f"{type(model).__name__} reads an encoder: divergence is measured on models that "
            "continue text"
        )
    if not any(layer.attends for layer in cache.layer_info):
        raise ValueError(f"no layer of {type(model).__name__} attends: it has no rows to store")
    return cache


def make_filled_cache(
    model: PreTrainedModel, prompt: Tensor, spec: AnySpec, raw_cache: TransformersCache
) -> TransformersCache:
    """Return a cache of a prompt under a spec: a recoded fork of `raw_cache`, which holds it.

    The prompt is read again where `needs_prefill` says so.
    """
    cache = make_empty_cache(model, spec)
    if needs_prefill(cache.spec, raw_cache):
        read_prompt(model, prompt, cache)
        cache.prune()
        return cache
    full, cache = cache.spec, raw_cache.fork()
    cache.recode(full)  # with fitted channel scales
    return cache


def needs_prefill(spec: CacheSpec, raw_cache: TransformersCache) -> bool:
    """Whether a cache under a spec has to read the prompt itself, which `raw_cache` holds.

    Scores of a prune need queries, which raw does not store. Rows that were read through a window
    depend on fewer tokens than those of a raw cache without it.
    """
    pairs = zip(
        iterate_attention(*spec.layers), iterate_attention(*raw_cache.spec.layers), strict=True
    )
    return spec.prunes or any(
        layer.effective_window < min(raw_cache.length, raw.effective_window) for layer, raw in pairs
    )


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
    raw, other = (partial(compute_logits, model, cache=cache) for cache in caches)
    for (part,) in compare_predictions(raw, [other], ids[:, begin:], chunk):
        yield part


def compare_predictions(
    raw: Predict, others: Sequence[Predict], ids: Tensor, chunk: int
) -> Iterator[tuple[Divergence, ...]]:
    """Let all read tokens [1, T] chunk by chunk, and compare the others of each chunk with raw.

    The last token is only predicted.
    """
    for start in range(0, ids.shape[1] - 1, chunk):
        targets = ids[0, start + 1 : start + 1 + chunk]
        read = ids[:, start : start + len(targets)]
        raw_logits = raw(read)
        yield tuple(compare_logits(raw_logits, other(read), targets) for other in others)


@torch.no_grad()
def compute_logits(model: PreTrainedModel, ids: Tensor, cache: Any) -> Tensor:
    """Return the logits [T, vocabulary] of tokens [1, T] appended to the cache."""
    if ids.shape[1] > 1 and cache.get_seq_length() and not supports_chunked_prefill(model):
        return torch.cat([compute_logits(model, token[:, None], cache) for token in ids.T])
    cache_argument = {get_cache_argument(model): cache}
    logits: Tensor = model(input_ids=ids, use_cache=True, **cache_argument).logits[0]
    return logits


def read_prompt(model: PreTrainedModel, ids: Tensor, cache: TransformersCache) -> Tensor:
    """Read tokens [1, T] in chunks; return the logits [vocabulary] after the last."""
    for first in range(0, ids.shape[1], MAX_FORWARD_TOKENS):
        logits = compute_logits(
            model, ids[:, first : first + MAX_FORWARD_TOKENS].to(model.device), cache
        )
    return logits[-1]


def continue_greedily(
    model: PreTrainedModel, ids: Tensor, cache: TransformersCache
) -> Iterator[int]:
    """Read tokens [1, T], and yield the most likely next tokens without end."""
    while True:
        token = int(read_prompt(model, ids, cache).argmax())
        yield token
        ids = torch.tensor([[token]])


def compare_logits(raw_logits: Tensor, logits: Tensor, targets: Tensor) -> Divergence:
    """Compare logits [N, vocabulary] at the true next tokens [N]; the result is on the CPU."""
    parts = (torch.split(x, MAX_COMPARED_POSITIONS) for x in (raw_logits, logits, targets))
    return Divergence.concatenate(_compare_positions(*part) for part in zip(*parts, strict=True))


def _compare_positions(raw_logits: Tensor, logits: Tensor, targets: Tensor) -> Divergence:
    raw_logprobs, logprobs = (values.float().log_softmax(-1) for values in (raw_logits, logits))
    weights = raw_logprobs.exp()
    # 0 * inf: a token that raw excludes adds nothing. Below 0 there is only rounding.
    kl = torch.where(weights > 0, weights * (raw_logprobs - logprobs), 0.0).sum(-1).clamp(min=0)
    losses = [-values.gather(-1, targets[:, None])[:, 0] for values in (raw_logprobs, logprobs)]
    same = raw_logprobs.argmax(-1) == logprobs.argmax(-1)
    broken = logprobs.isnan().any(-1)
    return Divergence(
        kl.masked_fill(broken, torch.inf).cpu(),
        losses[0].cpu(),
        losses[1].masked_fill(broken, torch.inf).cpu(),
        (same & ~broken).cpu(),
    )

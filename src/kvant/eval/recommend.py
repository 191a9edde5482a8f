"""`kvant.recommend`: compare formats on a model, and say which one to take.

    raw      ... prompt | a b c d e ...     the reply that the raw cache generates
    format   ... prompt | a b c d e ...     the same tokens, decoded one by one: what changes, and
                                            how long a token takes

Formats are tried from raw down to the smallest. The recommended one is the smallest that is
harmless, by the tests of `auto`, and fits the budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvant.errors import SpecError
from kvant.eval.decoding import decode_token, measure_token_seconds
from kvant.generation.decoder import TransformersDecoder
from kvant.hf import TransformersCache, get_text_model, get_transformers_model
from kvant.models import layer_shapes, max_context
from kvant.planner import find_default_context, plan
from kvant.platform.figures import describe_predictions, describe_recall, format_of_raw
from kvant.platform.sizes import as_bytes, format_size
from kvant.probing import Divergence, make_trial
from kvant.probing.divergence import (
    check_keeps_rows,
    compare_logits,
    make_unbounded_spec,
    read_prompt,
)
from kvant.probing.example import Example, find_example
from kvant.probing.screen import QuickScreen
from kvant.probing.trials import HARMFUL, HARMLESS, RECALLS_LESS, FormatTrial, SpecEvaluator

REPLY_TOKENS = 96  # decoded with each format
COMPARED_SPECS = (  # from the largest to the smallest
    *("raw", "affine8", "affine8v4", "affine6", "affine5", "affine4"),
    *("turbo4", "turbo4v3", "turbo4v2", "turbo3", "turbo2"),
)


@dataclass(frozen=True)
class ComparedFormat:
    """What a format takes, and what was seen of it on a model."""

    spec: str
    nbytes: int  # of a cache at the context
    of_raw: float  # share of raw's bytes
    mean_kl: float  # nats, after a prompt
    top1: float  # share of tokens whose most likely successor stays the same
    lost: float  # of the probability of recalling what was planted in a text
    reply_kl: float  # nats, while a reply is decoded
    reply_same: float  # share of the reply's tokens that stay the most likely ones
    tokens_per_second: float
    verdict: str  # HARMLESS, or what the format does
    fits: bool  # in the budget
    example: Example | None = None  # what the model writes, where the format changes that

    @property
    def is_harmless(self) -> bool:
        return self.verdict == HARMLESS


@dataclass(frozen=True)
class Recommendation:
    """Formats on one model, and the one to take.

    >>> result = kvant.recommend(model, tokenizer, context=1024, specs=("raw", "affine8"))
    >>> result.spec, len(result.formats)
    ('affine8', 2)
    """

    spec: str | None  # None: no harmless format fits the budget
    context: int
    budget: int | None  # bytes
    formats: tuple[ComparedFormat, ...]  # in the order tried

    def explain(self) -> str:
        """Say what to take, and why its neighbours were not taken."""
        return "\n".join(self._iterate_sentences())

    def _iterate_sentences(self) -> Iterator[str]:
        size = f"at {self.context:,} tokens"
        harmless = [row for row in self.formats if row.is_harmless]
        if self.spec is None:
            smallest = min(harmless, key=lambda row: row.nbytes)
            yield (
                f"no harmless format fits {format_size(self.budget or 0)} {size}: {smallest.spec} "
                f"takes {format_size(smallest.nbytes)}; allow more bytes, or a shorter context"
            )
            return
        taken = next(row for row in self.formats if row.spec == self.spec)
        share = format_of_raw(taken.of_raw)
        yield f"take {taken.spec}: {format_size(taken.nbytes)} {size}, {share} of raw"
        larger = [row for row in harmless if row.nbytes > taken.nbytes]
        if larger:
            nearest = min(larger, key=lambda row: row.nbytes)
            times = nearest.nbytes / taken.nbytes
            yield f"{nearest.spec} is harmless too, and takes {times:.2f} times as much"
        smaller = [row for row in self.formats if row.nbytes < taken.nbytes]
        if smaller:
            nearest = max(smaller, key=lambda row: row.nbytes)
            seen = "" if nearest.example is None else f"; after {nearest.example.describe('it')}"
            yield f"{nearest.spec} {nearest.verdict}{seen}"


def recommend(
    model: nn.Module,
    tokenizer: Any,
    *,
    context: int | None = None,
    budget: int | str | None = None,
    specs: tuple[str, ...] = COMPARED_SPECS,
    on_format: Callable[[ComparedFormat], None] = lambda row: None,
) -> Recommendation:
    """Compare formats on a model and recommend the smallest harmless one within `budget` bytes.

    Bytes are those of a cache of `context` tokens (default: 8,192, or the model's context). The
    text is the standard library's. `on_format` is called with each format as it is measured.

    >>> result = kvant.recommend(model, tokenizer, context=512, specs=("raw", "affine8"))
    >>> result.formats[1].is_harmless
    True
    """
    text_model = get_text_model(get_transformers_model(model))
    limit = max_context(text_model)
    if context is None:
        context = find_default_context(text_model)
    if context < 1 or (limit is not None and context > limit):
        raise ValueError(f"context={context}: 1 to {limit or 'any number of'} tokens are possible")
    max_bytes = None if budget is None else as_bytes(budget)
    if specs[:1] != ("raw",):
        raise SpecError(f"specs={specs}: begin with 'raw', which the others are compared with")
    for spec in specs:
        check_keeps_rows(text_model, spec)
    comparison = _Comparison.make(text_model, tokenizer, context, max_bytes)
    rows = []
    for spec in specs:
        rows.append(comparison.measure_format(spec))
        on_format(rows[-1])
    candidates = [row for row in rows if row.is_harmless and row.fits]
    best = min(candidates, key=lambda row: row.nbytes, default=None)
    return Recommendation(None if best is None else best.spec, context, max_bytes, tuple(rows))


@dataclass(frozen=True)
class _Comparison:
    """A model with a text in a raw cache, and the reply of that cache."""

    evaluator: SpecEvaluator
    decoder: TransformersDecoder
    context: int
    max_bytes: int | None
    reply: tuple[int, ...]  # tokens, from the last of the prompt on
    raw_logits: Tensor  # [tokens, vocabulary], after each of them

    @classmethod
    def make(
        cls, model: PreTrainedModel, tokenizer: Any, context: int, max_bytes: int | None
    ) -> _Comparison:
        evaluator = SpecEvaluator(model, make_trial(model, tokenizer))
        screen, decoder = evaluator.screen, TransformersDecoder(model)
        cache = _drop_last_token(screen, screen.cache.fork())
        reply, rows = [int(screen.prompt[0, -1])], list[Tensor]()
        for _ in range(REPLY_TOKENS):
            rows.append(decode_token(decoder, reply[-1], cache))
            reply.append(int(rows[-1].argmax()))
        return cls(evaluator, decoder, context, max_bytes, tuple(reply), torch.stack(rows))

    def measure_format(self, spec: str) -> ComparedFormat:
        evaluator, model = self.evaluator, self.evaluator.model
        layers = layer_shapes(model)
        nbytes, raw_nbytes = (
            plan(layers, word, context=self.context).nbytes for word in (spec, "raw")
        )
        trial = evaluator.try_format(spec)
        formats = make_unbounded_spec(model, spec)
        lost = evaluator.measure_recall_loss(spec) if trial.lost is None else trial.lost
        tokenizer = evaluator.trial.tokenizer
        example = None
        if not trial.harmless and tokenizer is not None:
            example = find_example(evaluator.screen, tokenizer, formats)
        reply, seconds = self._decode_reply(spec)
        return ComparedFormat(
            spec,
            nbytes,
            nbytes / raw_nbytes,
            trial.mean_kl,
            trial.top1,
            lost,
            reply.mean_kl,
            reply.top1,
            1 / seconds,
            self._describe_verdict(trial),
            self.max_bytes is None or nbytes <= self.max_bytes,
            example,
        )

    def _decode_reply(self, spec: str) -> tuple[Divergence, float]:
        """Decode the reply of the raw cache under a spec; return the seconds of a token."""
        screen = self.evaluator.screen
        cache = screen.make_cache(make_unbounded_spec(screen.model, spec))
        cache = _drop_last_token(screen, cache)
        rows, times = list[Tensor](), list[float]()
        for token in self.reply[:-1]:
            begin = time.perf_counter()
            rows.append(decode_token(self.decoder, token, cache))
            times.append(time.perf_counter() - begin)
        targets = torch.tensor(self.reply[1:])
        divergence = compare_logits(self.raw_logits, torch.stack(rows), targets)
        return divergence, measure_token_seconds(times)

    def _describe_verdict(self, trial: FormatTrial) -> str:
        tolerance = self.evaluator.trial
        if trial.harmless:
            return HARMLESS
        if trial.lost is not None and trial.lost > tolerance.max_lost:
            recalled = self.evaluator.recall.raw_probability
            return f"{RECALLS_LESS}: {describe_recall(recalled, trial.lost, tolerance.max_lost)}"
        return f"{HARMFUL}: {describe_predictions(trial.mean_kl, trial.top1, tolerance.max_kl)}"


def _drop_last_token(screen: QuickScreen, cache: TransformersCache) -> TransformersCache:
    """Return the cache of a screen's prompt without its last token.

    A cache that cannot be rewound by one token reads again what it lost.
    """
    cache.rewind(cache.reachable(cache.length - 1))
    if cache.length < screen.prompt.shape[1] - 1:
        read_prompt(screen.model, screen.prompt[:, cache.length : -1], cache)
    return cache

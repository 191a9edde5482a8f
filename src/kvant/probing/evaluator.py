"""Do specs leave a model what it is? What is measured on one trial, and read once for all of them.

Two things are asked: what the model predicts, and what it recalls. A format may hardly change the
first, and take away half of the second: few tokens of a text are far back and nowhere else.

A trial is a text for the model's tokenizer, or tokens that mean nothing. The usual text is source
code that the model inside was not trained on: a text that a model knows by heart shows less
divergence than any other. `kvant eval` measures on other files than these. A model is less sure
behind tokens that mean nothing, and any change shows ten times as large there (5 to 11 times for
formats that do little to the model inside): so is what is tolerated. Nor is anything asked for
among them: without a tokenizer there are no words to ask in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.demo import load_probe_prompts
from kvant.hf import TransformersCache, cache_for
from kvant.models import max_context
from kvant.probing.assessment import assess, ignore_progress
from kvant.probing.divergence import (
    Divergence,
    compare_logits,
    compute_logits,
    make_empty_cache,
    make_stored_prefill_spec,
    make_unbounded_spec,
    measure_divergence,
)
from kvant.probing.recall import RecallExam, RecallTest, make_exams
from kvant.recipes import AnySpec, CacheSpec, Recipe, iterate_attention
from kvant.spec.auto import Tolerance

MAX_TRIAL_TOKENS = 1024  # read; the last ones are judged by
MAX_CHARACTERS_PER_TOKEN = 8  # of a text for a token: no tokenizer packs source code so densely
MIN_EXAM_TOKENS = (
    512  # in fewer there is no room for what is planted, and most rows of a tail are dense
)
NUM_EXAMS = 2  # texts in which things are planted, and asked for
RANDOM_TOKENS_KL_SCALE = 10.0  # times as much: what was seen is said above


DEFAULT_TOLERANCE = Tolerance()


@dataclass(frozen=True)
class ProbeTrial:
    """Tokens [1, n], and what is tolerated on them."""

    ids: Tensor
    tolerance: Tolerance = DEFAULT_TOLERANCE
    tokenizer: Any = None
    kl_scale: float = 1.0  # of the nats

    @property
    def max_kl(self) -> float:
        return self.tolerance.max_kl * self.kl_scale

    @property
    def max_lost(self) -> float:
        return self.tolerance.max_lost

    def make_exams(self) -> list[RecallExam]:
        """The same text with things in it; none where there is no room, or nobody to ask in."""
        if self.tokenizer is None or self.ids.shape[1] < MIN_EXAM_TOKENS:
            return []
        return make_exams(self.tokenizer, [self.ids], NUM_EXAMS, seed=0)


def make_trial(
    model: PreTrainedModel,
    tokenizer: Any = None,
    text: str | None = None,
    tolerance: Tolerance = DEFAULT_TOLERANCE,
) -> ProbeTrial:
    """The first tokens of a text (of files of the standard library, if none is given)."""
    count = min(MAX_TRIAL_TOKENS, max_context(model.config) or MAX_TRIAL_TOKENS)
    usual = load_probe_prompts() if text is None and tokenizer is not None else []
    if tokenizer is None or (text is None and not usual):  # nor has every Python its sources
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (1, count), generator=generator, device="cpu")
        return ProbeTrial(ids.to(model.device), tolerance, tokenizer, RANDOM_TOKENS_KL_SCALE)
    told = (
        "\n".join(reversed(usual))[: MAX_CHARACTERS_PER_TOKEN * MAX_TRIAL_TOKENS]
        if text is None
        else text
    )
    found = [int(token) for token in tokenizer.encode(told)[:count]]
    if len(found) < min(MIN_EXAM_TOKENS, count):
        raise ValueError(
            f"a text of {len(found)} tokens shows too little: {min(MIN_EXAM_TOKENS, count)} or more"
        )
    return ProbeTrial(torch.tensor([found], device=model.device), tolerance, tokenizer)


MAX_SCREEN_TOKENS = 128  # tokens
FEW = 16  # of them, which show a format that does far too much:
FAR = 4.0  # times what is tolerated


@dataclass(frozen=True)
class QuickScreen:
    """A prompt in a raw cache, and the tokens behind it with what raw predicts."""

    model: PreTrainedModel
    prompt: Tensor
    cache: TransformersCache
    ids: Tensor
    raw_logits: Tensor

    @classmethod
    def from_tokens(cls, model: PreTrainedModel, ids: Tensor) -> QuickScreen:
        judged = min(MAX_SCREEN_TOKENS, ids.shape[1] // 2)
        cache = make_empty_cache(model, make_stored_prefill_spec(model, "raw"))
        prompt, behind = ids[:, : -judged - 1], ids[:, -judged - 1 :]
        compute_logits(model, prompt, cache)
        return cls(
            model, prompt, cache, behind, compute_logits(model, behind[:, :-1], cache.fork())
        )

    def measure_divergence(self, spec: AnySpec, count: int = MAX_SCREEN_TOKENS) -> Divergence:
        """Of the first `count` tokens behind the prompt."""
        return self._measure_spec(
            cache_for(self.model, make_stored_prefill_spec(self.model, spec)).spec, count
        )

    def measure_by_layer(self, spec: AnySpec) -> tuple[float, ...]:
        """The mean divergence where one layer alone is stored by the spec; 0 where none is."""
        full = cache_for(self.model, make_stored_prefill_spec(self.model, spec)).spec.layers
        return tuple(self._measure_layer(full, index) for index in range(len(full)))

    def _measure_layer(self, recipes: tuple[Recipe, ...], index: int) -> float:
        if not any(layer.seals or layer.prune for layer in iterate_attention(recipes[index])):
            return 0.0
        raw = self.cache.spec.layers
        return self._measure_spec(
            CacheSpec((*raw[:index], recipes[index], *raw[index + 1 :]))
        ).mean_kl

    def _measure_spec(self, spec: CacheSpec, count: int = MAX_SCREEN_TOKENS) -> Divergence:
        if spec.prunes:  # by what the prompt asks, which a cache that is recoded was not
            twin = make_empty_cache(self.model, spec)
            compute_logits(self.model, self.prompt, twin)
            twin.prune()
        else:
            twin = self.cache.fork()
            twin.recode(spec)
        logits = compute_logits(self.model, self.ids[:, :-1][:, :count], twin)
        return compare_logits(self.raw_logits[:count], logits, self.ids[0, 1 : count + 1])


HARMLESS = "harmless"


@dataclass(frozen=True)
class FormatTrial:
    """A format that was tried on a model."""

    spec: str
    mean_kl: float  # nats, over the tokens that its verdict took
    top1: float  # share of them whose likeliest token stays
    lost: float | None  # of the chance of an answer; None: not asked any more
    verdict: str

    @classmethod
    def from_json(cls, fields: Any) -> FormatTrial:
        """Parse a candidate that was kept; an error where one of its fields is wrong."""
        lost = None if fields["lost"] is None else float(fields["lost"])
        numbers = float(fields["mean_kl"]), float(fields["top1"])
        return cls(str(fields["spec"]), *numbers, lost, str(fields["verdict"]))

    @property
    def harmless(self) -> bool:
        return self.verdict == HARMLESS


@dataclass(frozen=True)
class SpecEvaluator:
    """Of a model on a trial; windows and capacities are left out (see `unbounded`)."""

    model: PreTrainedModel
    trial: ProbeTrial

    @cached_property
    def screen(self) -> QuickScreen:
        return QuickScreen.from_tokens(self.model, self.trial.ids)

    @cached_property
    def recall(self) -> RecallTest:
        return RecallTest.from_exams(self.model, self.trial.make_exams())

    def measure_divergence(self, spec: AnySpec) -> Divergence:
        return measure_divergence(
            self.model, [self.trial.ids], make_unbounded_spec(self.model, spec)
        )

    def measure_recall_loss(self, spec: AnySpec) -> float:
        return self.recall.measure_loss(make_unbounded_spec(self.model, spec))

    def is_harmless(self, spec: str) -> bool:
        """Does it do little enough?"""
        return self.candidate(spec).harmless

    def candidate(self, spec: str) -> FormatTrial:
        """Try a format, the cheapest question first; the first that it fails is the last asked."""
        formats, max_kl = make_unbounded_spec(self.model, spec), self.trial.max_kl
        for count, most in ((FEW, FAR * max_kl), (MAX_SCREEN_TOKENS, max_kl)):
            found = self.screen.measure_divergence(formats, count)
            if found.mean_kl > most:
                return FormatTrial(spec, found.mean_kl, found.top1, None, "changes predictions")
        lost = self.measure_recall_loss(spec)
        if lost > self.trial.max_lost:
            return FormatTrial(spec, found.mean_kl, found.top1, lost, "recalls less")
        if formats.prunes:
            whole = self.measure_divergence(spec)
            harmless, measured = whole.mean_kl <= max_kl, (whole.mean_kl, whole.top1)
        else:
            verdict = assess(
                self.model,
                self.trial.ids,
                formats,
                max_kl,
                seconds=math.inf,
                progress=ignore_progress,
            )
            harmless, measured = bool(verdict.harmless), (verdict.mean_kl, verdict.top1)
        return FormatTrial(spec, *measured, lost, HARMLESS if harmless else "changes predictions")

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

from kvant.demo import probed
from kvant.hf import HostCache, cache_for
from kvant.models import max_context
from kvant.probing.assessment import assess, silent
from kvant.probing.predictions import (
    Divergence,
    compared,
    divergence,
    empty_cache,
    forward,
    stored,
    unbounded,
)
from kvant.probing.recall import Exam, Recall, exams
from kvant.recipes import AnySpec, CacheSpec, Recipe, attention_in
from kvant.spec.auto import Tolerance

TOKENS = 1024  # read; the last ones are judged by
LETTERS = 8  # of a text for a token: no tokenizer packs source code so densely
FEWEST = 512  # in fewer there is no room for what is planted, and most rows of a tail are dense
EXAMS = 2  # texts in which things are planted, and asked for
MEANINGLESS = 10.0  # times as much: what was seen is said above


USUAL = Tolerance()


@dataclass(frozen=True)
class Trial:
    """Tokens [1, n], and what is tolerated on them."""

    ids: Tensor
    tolerated: Tolerance = USUAL
    tokenizer: Any = None
    scale: float = 1.0  # of the nats

    @property
    def max_kl(self) -> float:
        return self.tolerated.max_kl * self.scale

    @property
    def max_lost(self) -> float:
        return self.tolerated.max_lost

    def exams(self) -> list[Exam]:
        """The same text with things in it; none where there is no room, or nobody to ask in."""
        if self.tokenizer is None or self.ids.shape[1] < FEWEST:
            return []
        return exams(self.tokenizer, [self.ids], EXAMS, seed=0)


def trial(
    model: PreTrainedModel,
    tokenizer: Any = None,
    text: str | None = None,
    tolerated: Tolerance = USUAL,
) -> Trial:
    """The first tokens of a text (of files of the standard library, if none is given)."""
    count = min(TOKENS, max_context(model.config) or TOKENS)
    usual = probed() if text is None and tokenizer is not None else []
    if tokenizer is None or (text is None and not usual):  # nor has every Python its sources
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(vocabulary, (1, count), generator=generator, device="cpu")
        return Trial(ids.to(model.device), tolerated, tokenizer, MEANINGLESS)
    told = "\n".join(reversed(usual))[: LETTERS * TOKENS] if text is None else text
    found = [int(token) for token in tokenizer.encode(told)[:count]]
    if len(found) < min(FEWEST, count):
        raise ValueError(
            f"a text of {len(found)} tokens shows too little: {min(FEWEST, count)} or more"
        )
    return Trial(torch.tensor([found], device=model.device), tolerated, tokenizer)


JUDGED = 128  # tokens
FEW = 16  # of them, which show a format that does far too much:
FAR = 4.0  # times what is tolerated


@dataclass(frozen=True)
class Screen:
    """A prompt in a raw cache, and the tokens behind it with what raw predicts."""

    model: PreTrainedModel
    prompt: Tensor
    cache: HostCache
    ids: Tensor
    right: Tensor

    @classmethod
    def of(cls, model: PreTrainedModel, ids: Tensor) -> Screen:
        judged = min(JUDGED, ids.shape[1] // 2)
        cache = empty_cache(model, stored(model, "raw"))
        prompt, behind = ids[:, : -judged - 1], ids[:, -judged - 1 :]
        forward(model, prompt, cache)
        return cls(model, prompt, cache, behind, forward(model, behind[:, :-1], cache.fork()))

    def divergence(self, spec: AnySpec, count: int = JUDGED) -> Divergence:
        """Of the first `count` tokens behind the prompt."""
        return self._of(cache_for(self.model, stored(self.model, spec)).spec, count)

    def by_layer(self, spec: AnySpec) -> tuple[float, ...]:
        """The mean divergence where one layer alone is stored by the spec; 0 where none is."""
        full = cache_for(self.model, stored(self.model, spec)).spec.layers
        return tuple(self._alone(full, index) for index in range(len(full)))

    def _alone(self, full: tuple[Recipe, ...], index: int) -> float:
        if not any(layer.seals or layer.prune for layer in attention_in(full[index])):
            return 0.0
        raw = self.cache.spec.layers
        return self._of(CacheSpec((*raw[:index], full[index], *raw[index + 1 :]))).mean_kl

    def _of(self, spec: CacheSpec, count: int = JUDGED) -> Divergence:
        if spec.prunes:  # by what the prompt asks, which a cache that is recoded was not
            twin = empty_cache(self.model, spec)
            forward(self.model, self.prompt, twin)
            twin.prune()
        else:
            twin = self.cache.fork()
            twin.recode(spec)
        logits = forward(self.model, self.ids[:, :-1][:, :count], twin)
        return compared(self.right[:count], logits, self.ids[0, 1 : count + 1])


HARMLESS = "harmless"


@dataclass(frozen=True)
class Candidate:
    """A format that was tried on a model."""

    spec: str
    mean_kl: float  # nats, over the tokens that its verdict took
    top1: float  # share of them whose likeliest token stays
    lost: float | None  # of the chance of an answer; None: not asked any more
    verdict: str

    @classmethod
    def from_json(cls, fields: Any) -> Candidate:
        """Parse a candidate that was kept; an error where one of its fields is wrong."""
        lost = None if fields["lost"] is None else float(fields["lost"])
        numbers = float(fields["mean_kl"]), float(fields["top1"])
        return cls(str(fields["spec"]), *numbers, lost, str(fields["verdict"]))

    @property
    def harmless(self) -> bool:
        return self.verdict == HARMLESS


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

    def spares(self, spec: str) -> bool:
        """Does it do little enough?"""
        return self.candidate(spec).harmless

    def candidate(self, spec: str) -> Candidate:
        """Try a format, the cheapest question first; the first that it fails is the last asked."""
        formats, max_kl = unbounded(self.model, spec), self.tried.max_kl
        for count, most in ((FEW, FAR * max_kl), (JUDGED, max_kl)):
            found = self.screen.divergence(formats, count)
            if found.mean_kl > most:
                return Candidate(spec, found.mean_kl, found.top1, None, "changes predictions")
        lost = self.lost(spec)
        if lost > self.tried.max_lost:
            return Candidate(spec, found.mean_kl, found.top1, lost, "recalls less")
        if formats.prunes:
            whole = self.divergence(spec)
            harmless, measured = whole.mean_kl <= max_kl, (whole.mean_kl, whole.top1)
        else:
            verdict = assess(
                self.model, self.tried.ids, formats, max_kl, seconds=math.inf, progress=silent
            )
            harmless, measured = bool(verdict.harmless), (verdict.mean_kl, verdict.top1)
        return Candidate(spec, *measured, lost, HARMLESS if harmless else "changes predictions")

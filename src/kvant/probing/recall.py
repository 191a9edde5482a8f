"""Does a model still find what it read? Two kinds of things are planted in a text, at depths of it.

A needle is a line with a random name and a random number; at the end of the text the name comes
again, and the number is the answer. A copy is a string of random tokens; the first of them come
again, and the rest is the answer. Both stand behind the marker that the model inside was trained
with. All of a text are planted at once, and each is asked for by itself, on a fork of the cache.
An answer counts where greedy decoding gives all of it: where each of its tokens is the likeliest
after the ones before. The chance that it is drawn says the same of few answers with less noise.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.hf import HostCache
from kvant.probing.predictions import empty_cache, forward, read, stored
from kvant.recipes import AnySpec, CacheSpec

DEPTHS = (0.0, 0.25, 0.5, 0.75)  # of the text that is before
KINDS = ("needle", "copy")
CUE, COPIED = 4, 24  # tokens of a string that are shown again, and all of them
MARKER = "\n# recall: "
Shares = dict[str, dict[str, float]]  # kind: depth: share of the answers that were right


@dataclass(frozen=True)
class Planted:
    """Something in a text, and how it is asked for."""

    kind: str
    depth: float
    line: list[int]
    question: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Exam:
    """A text with things in it."""

    prompt: list[int]
    planted: tuple[Planted, ...]


@dataclass(frozen=True)
class Answer:
    right: bool  # is it what greedy decoding gives?
    chance: float  # that it is drawn


def exams(tokenizer: Any, pieces: Sequence[Tensor], count: int, seed: int) -> list[Exam]:
    """Of the pieces in turn; each keeps its length, and the longest question has room behind it."""
    rng = random.Random(seed)
    return [_exam(tokenizer, pieces[i % len(pieces)][0].tolist(), rng) for i in range(count)]


def recall(model: PreTrainedModel, asked: Iterable[Exam], spec: AnySpec) -> Shares:
    """The share of right answers, by kind and depth."""
    full = stored(model, spec)
    return _shares(model, ((exam, _read(model, exam, full)) for exam in asked))


@dataclass(frozen=True)
class Recall:
    """Exams that were read once, into raw caches; what each spec leaves of the answers.

    A spec that prunes reads them anew. Any other is put on them by a recode, as in `Screen`; on the
    model inside the chance of an answer is then within 0.02 of what it is where the model has read
    them through the spec.
    """

    model: PreTrainedModel
    read: tuple[tuple[Exam, HostCache], ...]
    chance: float  # of the raw cache, in the mean of all answers

    @classmethod
    def of(cls, model: PreTrainedModel, asked: Iterable[Exam]) -> Recall:
        raw = stored(model, "raw")
        pairs = tuple((exam, _read(model, exam, raw)) for exam in asked)
        return cls(model, pairs, _chance(model, pairs))

    def lost(self, spec: AnySpec) -> float:
        """By how much the chance of an answer is less than with the raw cache: 0.03 is 3 in 100."""
        full = empty_cache(self.model, stored(self.model, spec)).spec
        return self.chance - _chance(self.model, self._under(full))

    def shares(self, spec: AnySpec) -> Shares:
        """The share of right answers, by kind and depth."""
        full = empty_cache(self.model, stored(self.model, spec)).spec
        return _shares(self.model, self._under(full))

    def _under(self, spec: CacheSpec) -> Iterator[tuple[Exam, HostCache]]:
        """The exams under a spec; what it prunes, only reading tells."""
        for exam, cache in self.read:
            yield exam, _read(self.model, exam, spec) if spec.prunes else _recoded(cache, spec)


def _recoded(cache: HostCache, spec: CacheSpec) -> HostCache:
    twin = cache.fork()
    twin.recode(spec)
    return twin


def _chance(model: PreTrainedModel, read: Iterable[tuple[Exam, HostCache]]) -> float:
    found = [_answer(model, one, cache).chance for exam, cache in read for one in exam.planted]
    return fmean(found) if found else 0.0


def _shares(model: PreTrainedModel, read: Iterable[tuple[Exam, HostCache]]) -> Shares:
    right: dict[tuple[str, float], list[bool]] = {}
    for exam, cache in read:
        for one in exam.planted:
            found = right.setdefault((one.kind, one.depth), [])
            found.append(_answer(model, one, cache).right)
    return {
        kind: {str(d): sum(found) / len(found) for (k, d), found in right.items() if k == kind}
        for kind in KINDS
    }


def _read(model: PreTrainedModel, exam: Exam, spec: CacheSpec) -> HostCache:
    """The text, of which nobody knows yet what will be asked: so it is pruned here."""
    cache = empty_cache(model, spec)
    read(model, torch.tensor([exam.prompt]), cache)
    cache.prune()
    return cache


def _answer(model: PreTrainedModel, one: Planted, cache: HostCache) -> Answer:
    ids = torch.tensor([one.question + one.answer[:-1]], device=model.device)
    logits = forward(model, ids, cache.fork())[len(one.question) - 1 :].float()
    told = torch.tensor(one.answer, device=logits.device)
    chance = logits.log_softmax(-1).gather(-1, told[:, None]).sum().exp().nan_to_num(0.0)
    return Answer(bool((logits.argmax(-1) == told).all()), float(chance))


def _exam(tokenizer: Any, text: list[int], rng: random.Random) -> Exam:
    planted = [make(tokenizer, depth, rng) for depth in DEPTHS for make in (_needle, _copy)]
    room = len(text) - sum(len(one.line) for one in planted)
    room -= max(len(one.question + one.answer) for one in planted)
    if room < len(planted):
        raise ValueError(
            f"pieces of {len(text)} tokens are too short to plant {len(planted)} things in: "
            "give a longer text or context"
        )
    prompt: list[int] = []
    places = [round(one.depth * room) for one in planted]
    for one, place, stop in zip(planted, places, [*places[1:], room], strict=True):
        at = max(1, place)  # behind what begins a text
        prompt += [] if prompt else text[:at]
        prompt += one.line + text[at : max(at, stop)]
    return Exam(prompt, tuple(planted))


def _needle(tokenizer: Any, depth: float, rng: random.Random) -> Planted:
    name = "".join(rng.choices(string.ascii_uppercase, k=6))
    number = "".join(rng.choices(string.digits, k=6))
    question, answer, end = (
        tokenizer.encode(part, add_special_tokens=False)
        for part in (f"{MARKER}{name} ", number, "\n")
    )
    return Planted("needle", depth, question + answer + end, question, answer)


def _copy(tokenizer: Any, depth: float, rng: random.Random) -> Planted:
    special = set(tokenizer.all_special_ids)
    usual = [token for token in range(len(tokenizer)) if token not in special]
    passage = rng.choices(usual, k=COPIED)
    marker = tokenizer.encode(MARKER, add_special_tokens=False)
    return Planted("copy", depth, marker + passage, marker + passage[:CUE], passage[CUE:])

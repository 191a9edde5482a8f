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

from kvant.hf import TransformersCache
from kvant.probing.divergence import (
    compute_logits,
    make_empty_cache,
    make_stored_prefill_spec,
    read_prompt,
)
from kvant.recipes import AnySpec, CacheSpec

PLANT_DEPTHS = (0.0, 0.25, 0.5, 0.75)  # of the text that is before
PLANT_KINDS = ("needle", "copy")
NUM_CUE_TOKENS, NUM_COPY_TOKENS = 4, 24  # tokens of a string that are shown again, and all of them
PLANT_MARKER = "\n# recall: "
RecallShares = dict[str, dict[str, float]]  # kind: depth: share of the answers that were right


@dataclass(frozen=True)
class PlantedItem:
    """Something in a text, and how it is asked for."""

    kind: str
    depth: float
    line: list[int]
    question: list[int]
    answer: list[int]


@dataclass(frozen=True)
class RecallExam:
    """A text with things in it."""

    prompt: list[int]
    planted: tuple[PlantedItem, ...]


@dataclass(frozen=True)
class ExamAnswer:
    is_correct: bool  # is it what greedy decoding gives?
    probability: float  # that it is drawn


def make_exams(tokenizer: Any, pieces: Sequence[Tensor], count: int, seed: int) -> list[RecallExam]:
    """Of the pieces in turn; each keeps its length, and the longest question has room behind it."""
    rng = random.Random(seed)
    return [_make_exam(tokenizer, pieces[i % len(pieces)][0].tolist(), rng) for i in range(count)]


def measure_recall(
    model: PreTrainedModel, exams: Iterable[RecallExam], spec: AnySpec
) -> RecallShares:
    """The share of right answers, by kind and depth."""
    full = make_stored_prefill_spec(model, spec)
    return _compute_shares(model, ((exam, _read_exam(model, exam, full)) for exam in exams))


@dataclass(frozen=True)
class RecallTest:
    """Exams that were read once, into raw caches; what each spec leaves of the answers.

    A spec that prunes reads them anew. Any other is put on them by a recode, as in `Screen`; on the
    model inside the chance of an answer is then within 0.02 of what it is where the model has read
    them through the spec.
    """

    model: PreTrainedModel
    exam_caches: tuple[tuple[RecallExam, TransformersCache], ...]
    raw_probability: float  # of the raw cache, in the mean of all answers

    @classmethod
    def from_exams(cls, model: PreTrainedModel, exams: Iterable[RecallExam]) -> RecallTest:
        raw = make_stored_prefill_spec(model, "raw")
        pairs = tuple((exam, _read_exam(model, exam, raw)) for exam in exams)
        return cls(model, pairs, _compute_mean_probability(model, pairs))

    def measure_loss(self, spec: AnySpec) -> float:
        """By how much the chance of an answer is less than with the raw cache: 0.03 is 3 in 100."""
        full = make_empty_cache(self.model, make_stored_prefill_spec(self.model, spec)).spec
        return self.raw_probability - _compute_mean_probability(
            self.model, self._iterate_under_spec(full)
        )

    def measure_shares(self, spec: AnySpec) -> RecallShares:
        """The share of right answers, by kind and depth."""
        full = make_empty_cache(self.model, make_stored_prefill_spec(self.model, spec)).spec
        return _compute_shares(self.model, self._iterate_under_spec(full))

    def _iterate_under_spec(
        self, spec: CacheSpec
    ) -> Iterator[tuple[RecallExam, TransformersCache]]:
        """The exams under a spec; what it prunes, only reading tells."""
        for exam, cache in self.exam_caches:
            yield (
                exam,
                _read_exam(self.model, exam, spec) if spec.prunes else _fork_recoded(cache, spec),
            )


def _fork_recoded(cache: TransformersCache, spec: CacheSpec) -> TransformersCache:
    twin = cache.fork()
    twin.recode(spec)
    return twin


def _compute_mean_probability(
    model: PreTrainedModel, exam_caches: Iterable[tuple[RecallExam, TransformersCache]]
) -> float:
    found = [
        _grade_answer(model, one, cache).probability
        for exam, cache in exam_caches
        for one in exam.planted
    ]
    return fmean(found) if found else 0.0


def _compute_shares(
    model: PreTrainedModel, exam_caches: Iterable[tuple[RecallExam, TransformersCache]]
) -> RecallShares:
    right: dict[tuple[str, float], list[bool]] = {}
    for exam, cache in exam_caches:
        for one in exam.planted:
            found = right.setdefault((one.kind, one.depth), [])
            found.append(_grade_answer(model, one, cache).is_correct)
    return {
        kind: {str(d): sum(found) / len(found) for (k, d), found in right.items() if k == kind}
        for kind in PLANT_KINDS
    }


def _read_exam(model: PreTrainedModel, exam: RecallExam, spec: CacheSpec) -> TransformersCache:
    """The text, of which nobody knows yet what will be asked: so it is pruned here."""
    cache = make_empty_cache(model, spec)
    read_prompt(model, torch.tensor([exam.prompt]), cache)
    cache.prune()
    return cache


def _grade_answer(
    model: PreTrainedModel, item: PlantedItem, cache: TransformersCache
) -> ExamAnswer:
    ids = torch.tensor([item.question + item.answer[:-1]], device=model.device)
    logits = compute_logits(model, ids, cache.fork())[len(item.question) - 1 :].float()
    told = torch.tensor(item.answer, device=logits.device)
    chance = logits.log_softmax(-1).gather(-1, told[:, None]).sum().exp().nan_to_num(0.0)
    return ExamAnswer(bool((logits.argmax(-1) == told).all()), float(chance))


def _make_exam(tokenizer: Any, text: list[int], rng: random.Random) -> RecallExam:
    planted = [
        make(tokenizer, depth, rng) for depth in PLANT_DEPTHS for make in (_make_needle, _make_copy)
    ]
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
    return RecallExam(prompt, tuple(planted))


def _make_needle(tokenizer: Any, depth: float, rng: random.Random) -> PlantedItem:
    name = "".join(rng.choices(string.ascii_uppercase, k=6))
    number = "".join(rng.choices(string.digits, k=6))
    question, answer, end = (
        tokenizer.encode(part, add_special_tokens=False)
        for part in (f"{PLANT_MARKER}{name} ", number, "\n")
    )
    return PlantedItem("needle", depth, question + answer + end, question, answer)


def _make_copy(tokenizer: Any, depth: float, rng: random.Random) -> PlantedItem:
    special = set(tokenizer.all_special_ids)
    usual = [token for token in range(len(tokenizer)) if token not in special]
    passage = rng.choices(usual, k=NUM_COPY_TOKENS)
    marker = tokenizer.encode(PLANT_MARKER, add_special_tokens=False)
    return PlantedItem(
        "copy", depth, marker + passage, marker + passage[:NUM_CUE_TOKENS], passage[NUM_CUE_TOKENS:]
    )

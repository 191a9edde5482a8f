"""Test whether a model still recalls what it read: items are planted in a text at several depths.

    text ... | # recall: QZRTLM 481516 | ... text | # recall: QZRTLM | 481516
               planted item (a needle)              question           answer

A needle is a line with a random name and a random number. Its question is the name, its answer the
number. A copy is a string of random tokens; its question is the first of them, its answer the rest.
Both follow the marker that the built-in model was trained with. All items of a text are planted at
once; each question runs on a fork of the cache. An answer is correct if greedy decoding gives all
of its tokens. Its probability measures the same with less noise when answers are few.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvant.hf import TransformersCache
from kvant.probing.divergence import (
    compute_logits,
    make_empty_cache,
    make_filled_cache,
    read_prompt,
)
from kvant.recipes import AnySpec

PLANT_DEPTHS = (0.0, 0.25, 0.5, 0.75)  # share of the text before the item
PLANT_KINDS = ("needle", "copy")
NUM_CUE_TOKENS, NUM_COPY_TOKENS = 4, 24  # tokens of a copy: in its question, and in all
PLANT_MARKER = "\n# recall: "
RecallShares = dict[str, dict[str, float]]  # kind: depth: share of correct answers


@dataclass(frozen=True)
class PlantedItem:
    """An item planted in a text, its question and its answer."""

    kind: str
    depth: float
    line: list[int]
    question: list[int]
    answer: list[int]


@dataclass(frozen=True)
class RecallExam:
    """A text with planted items."""

    prompt: list[int]
    planted: tuple[PlantedItem, ...]


ExamCache = tuple[RecallExam, TransformersCache]  # and the cache that holds its text


class ExamAnswer(NamedTuple):
    item: PlantedItem
    is_correct: bool  # whether greedy decoding gives it
    probability: float  # that sampling gives it


def make_exams(tokenizer: Any, pieces: Sequence[Tensor], count: int, seed: int) -> list[RecallExam]:
    """Make exams from the pieces in turn; each has its piece's length, questions included."""
    rng = random.Random(seed)
    return [_make_exam(tokenizer, pieces[i % len(pieces)][0].tolist(), rng) for i in range(count)]


def measure_recall(
    model: PreTrainedModel, exams: Iterable[RecallExam], spec: AnySpec
) -> RecallShares:
    """Return the share of correct answers, by kind and depth."""
    return _compute_shares(model, ((exam, _read_exam(model, exam, spec)) for exam in exams))


@dataclass(frozen=True)
class RecallTest:
    """Exams in raw caches, which specs are then tested on.

    Most specs are applied by recoding the raw caches, as in `QuickScreen`; for the built-in model
    the probability of an answer is then within 0.02 of a cache that was filled under the spec. A
    spec that prunes, or has a window, is applied while reading.
    """

    model: PreTrainedModel
    exam_caches: tuple[ExamCache, ...]
    raw_probability: float  # mean over all answers, with the raw cache

    @classmethod
    def from_exams(cls, model: PreTrainedModel, exams: Iterable[RecallExam]) -> RecallTest:
        pairs = tuple((exam, _read_exam(model, exam, "raw")) for exam in exams)
        return cls(model, pairs, _compute_mean_probability(model, pairs))

    def measure_loss(self, spec: AnySpec) -> float:
        """Return the loss in the probability of an answer against raw: 0.03 is 3 in 100."""
        return self.raw_probability - _compute_mean_probability(
            self.model, self._iterate_under_spec(spec)
        )

    def measure_shares(self, spec: AnySpec) -> RecallShares:
        """Return the share of correct answers, by kind and depth."""
        return _compute_shares(self.model, self._iterate_under_spec(spec))

    def _iterate_under_spec(self, spec: AnySpec) -> Iterator[ExamCache]:
        """Yield the exams with their caches under a spec, recoded or read again."""
        for exam, cache in self.exam_caches:
            prompt = torch.tensor([exam.prompt])
            yield exam, make_filled_cache(self.model, prompt, spec, cache)


def _compute_mean_probability(model: PreTrainedModel, exam_caches: Iterable[ExamCache]) -> float:
    probabilities = [answer.probability for answer in _iterate_answers(model, exam_caches)]
    return fmean(probabilities) if probabilities else 0.0


def _compute_shares(model: PreTrainedModel, exam_caches: Iterable[ExamCache]) -> RecallShares:
    results: dict[tuple[str, float], list[bool]] = {}
    for item, is_correct, _ in _iterate_answers(model, exam_caches):
        results.setdefault((item.kind, item.depth), []).append(is_correct)
    return {
        kind: {str(d): fmean(correct) for (k, d), correct in results.items() if k == kind}
        for kind in PLANT_KINDS
    }


def _read_exam(model: PreTrainedModel, exam: RecallExam, spec: AnySpec) -> TransformersCache:
    """Read the text; prune here, since the question is not known to the cache."""
    cache = make_empty_cache(model, spec)
    read_prompt(model, torch.tensor([exam.prompt]), cache)
    cache.prune()
    return cache


def _iterate_answers(
    model: PreTrainedModel, exam_caches: Iterable[ExamCache]
) -> Iterator[ExamAnswer]:
    """Ask each question on a fork of the cache."""
    for exam, cache in exam_caches:
        for item in exam.planted:
            ids = torch.tensor([item.question + item.answer[:-1]], device=model.device)
            logits = compute_logits(model, ids, cache.fork())[len(item.question) - 1 :].float()
            answer = torch.tensor(item.answer, device=logits.device)
            is_correct = bool((logits.argmax(-1) == answer).all())
            logprob = logits.log_softmax(-1).gather(-1, answer[:, None]).sum()
            yield ExamAnswer(item, is_correct, float(logprob.exp().nan_to_num(0.0)))


def _make_exam(tokenizer: Any, text: list[int], rng: random.Random) -> RecallExam:
    planted = [
        make(tokenizer, depth, rng) for depth in PLANT_DEPTHS for make in (_make_needle, _make_copy)
    ]
    num_free = len(text) - sum(len(item.line) for item in planted)
    num_free -= max(len(item.question + item.answer) for item in planted)
    if num_free < len(planted):
        raise ValueError(
            f"pieces of {len(text)} tokens are too short to plant {len(planted)} items in: "
            "give a longer text or context"
        )
    prompt: list[int] = []
    positions = [round(item.depth * num_free) for item in planted]
    for item, position, stop in zip(planted, positions, [*positions[1:], num_free], strict=True):
        start = max(1, position)  # after the token that begins a text
        prompt += [] if prompt else text[:start]
        prompt += item.line + text[start : max(start, stop)]
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
    candidates = [token for token in range(len(tokenizer)) if token not in special]
    passage = rng.choices(candidates, k=NUM_COPY_TOKENS)
    marker = tokenizer.encode(PLANT_MARKER, add_special_tokens=False)
    return PlantedItem(
        "copy", depth, marker + passage, marker + passage[:NUM_CUE_TOKENS], passage[NUM_CUE_TOKENS:]
    )

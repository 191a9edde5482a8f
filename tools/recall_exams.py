"""Exams of recall at any length: needles, several keys, two hops, and copies, hidden in a text.

The kinds follow RULER (arXiv 2404.06654), with lines short enough for a model of 135M parameters:

* `needle`: one name and its number under a topic of its own (single NIAH);
* `multikey`: four names and numbers under one topic; three of them distract (multi-key NIAH);
* `multihop`: two lines, in any order; the first leads from a name to a number, the second from
  that number to the answer (variable tracking). Both numbers must be right. The second question
  repeats the first number: a model of 135M parameters does not carry it over;
* `copy`: random hexadecimal digits, continued from the first of them.

All lines of an exam are planted in one text at even distances, in random order, and each question
is asked on a fork of its cache. So the items of the other kinds are distractors, too.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

KINDS = ("needle", "multikey", "multihop", "copy")
ITEMS_OF_KIND = 4  # in an exam
NAME_LETTERS, NUMBER_DIGITS = 6, 6
CUE_DIGITS, COPY_DIGITS = 8, 20
NEEDLE_TOPICS = ("magic", "secret", "lucky", "final")
MULTIKEY_TOPIC = "access"
HEXADECIMAL = "0123456789ABCDEF"


@dataclass(frozen=True)
class Turn:
    """Tokens of a question, and those that answer it."""

    question: list[int]
    answer: list[int]


@dataclass(frozen=True)
class RecallItem:
    """The lines that are planted, and the turns that ask for them."""

    kind: str
    lines: tuple[list[int], ...]
    turns: tuple[Turn, ...]

    @property
    def tokens(self) -> list[int]:
        """The tokens of all turns."""
        return [token for turn in self.turns for token in turn.question + turn.answer]

    @property
    def is_answer(self) -> list[bool]:
        """Whether each token belongs to an answer."""
        return [
            is_answer
            for turn in self.turns
            for part, is_answer in ((turn.question, False), (turn.answer, True))
            for _ in part
        ]


@dataclass(frozen=True)
class LongExam:
    prompt: list[int]
    items: tuple[RecallItem, ...]


def make_exam(tokenizer: Any, piece: Tensor, number: int) -> LongExam:
    """Make an exam of the length of a piece [1, T], questions included; `number` seeds it."""
    text = piece[0].tolist()
    writer = _ItemWriter(
        lambda part: tokenizer.encode(part, add_special_tokens=False), random.Random(number)
    )
    items = tuple(writer.write_items())
    lines = [line for item in items for line in item.lines]
    writer.rng.shuffle(lines)
    num_free = len(text) - sum(map(len, lines)) - max(len(item.tokens) for item in items)
    if num_free < len(lines):
        raise ValueError(
            f"an exam of {len(text)} tokens has no room for {len(lines)} lines: "
            f"{len(text) - num_free + len(lines)} or more are needed"
        )
    prompt: list[int] = []
    for index, line in enumerate(lines):
        start, stop = (round(step * num_free / len(lines)) for step in (index, index + 1))
        prompt += text[start:stop] + line
    return LongExam(prompt, items)


@dataclass(frozen=True)
class _ItemWriter:
    encode: Callable[[str], list[int]]
    rng: random.Random

    def write_items(self) -> list[RecallItem]:
        multikey_topics = [MULTIKEY_TOPIC] * ITEMS_OF_KIND
        return [
            *(self._write_number("needle", topic) for topic in NEEDLE_TOPICS),
            *(self._write_number("multikey", topic) for topic in multikey_topics),
            *(self._write_hops() for _ in range(ITEMS_OF_KIND)),
            *(self._write_copy() for _ in range(ITEMS_OF_KIND)),
        ]

    def _write_number(self, kind: str, topic: str) -> RecallItem:
        return self._write_item(
            kind, f"\n# {topic} number: {self._draw_name()} ", self._draw_number()
        )

    def _write_copy(self) -> RecallItem:
        digits = self._draw(HEXADECIMAL, COPY_DIGITS)
        return self._write_item("copy", f"\n# copy: {digits[:CUE_DIGITS]}", digits[CUE_DIGITS:])

    def _write_item(self, kind: str, question: str, answer: str) -> RecallItem:
        turn = Turn(self.encode(question), self.encode(answer))
        return RecallItem(kind, (turn.question + turn.answer + self.encode("\n"),), (turn,))

    def _write_hops(self) -> RecallItem:
        first, second = self._draw_number(), self._draw_number()
        turns = tuple(
            Turn(self.encode(f"\n# link: {key} "), self.encode(number))
            for key, number in ((self._draw_name(), first), (first, second))
        )
        end = self.encode("\n")
        return RecallItem("multihop", tuple(t.question + t.answer + end for t in turns), turns)

    def _draw_name(self) -> str:
        return self._draw(string.ascii_uppercase, NAME_LETTERS)

    def _draw_number(self) -> str:
        return self._draw(string.digits, NUMBER_DIGITS)

    def _draw(self, alphabet: str, count: int) -> str:
        return "".join(self.rng.choices(alphabet, k=count))

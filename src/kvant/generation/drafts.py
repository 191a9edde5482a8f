"""Speculation: tokens that are guessed cheaply, to be verified many in one forward.

A guess comes from what was said before (`NGrams`) or from a smaller model (`DraftModel`). What is
said is as if there were no guesses: the sampler sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.nn.functional import pad

from kvant.generation.decoder import decoder_of
from kvant.generation.reader import Reader
from kvant.generation.sampling import NEVER, Draft, Sampler

SIZES = (4, 3, 2)  # of the n-grams: the longest that was there before is believed


@dataclass(frozen=True)
class Aim:
    """What is guessed: tokens of a vocabulary, drawn as this sampler draws."""

    sampler: Sampler
    vocabulary: int

    def draft(self, logits: Tensor, before: Sequence[int]) -> Draft:
        """A token for the logits of another model, whose vocabulary may be padded differently."""
        missing = self.vocabulary - len(logits)
        return self.sampler.draft(pad(logits, (0, missing), value=NEVER), before)


@runtime_checkable
class Drafter(Protocol):
    """Guesses how a text goes on."""

    def drafts(self, tokens: Sequence[int], most: int, aim: Aim) -> list[Draft]:
        """At most `most` tokens behind `tokens`; none is an answer too."""

    def fork(self) -> Drafter: ...


class NoDrafts:
    """Guesses nothing: one forward, one token."""

    def drafts(self, tokens: Sequence[int], most: int, aim: Aim) -> list[Draft]:
        return []

    def fork(self) -> NoDrafts:
        return self


class NGrams:
    """Guesses that what followed the last few tokens before will follow them again."""

    def __init__(self) -> None:
        self._tokens: list[int] = []  # those that are indexed
        self._behind: dict[tuple[int, ...], int] = {}  # n-gram: where its newest copy ends

    def drafts(self, tokens: Sequence[int], most: int, aim: Aim) -> list[Draft]:
        self._index(tokens)
        for size in SIZES:
            at = self._behind.get(tuple(tokens[-size:]))
            if at is not None and len(tokens) >= size:
                return [Draft(token) for token in tokens[at : at + most]]
        return []

    def fork(self) -> NGrams:
        return NGrams()

    def _index(self, tokens: Sequence[int]) -> None:
        """Every n-gram that ends before the newest token, so that something follows each."""
        begin = len(self._tokens)
        if self._tokens != tokens[:begin]:  # another text, or one that went back
            self._tokens, self._behind, begin = [], {}, 0
        for end in range(max(begin, 1), len(tokens)):
            for size in SIZES:
                if size <= end:
                    self._behind[tuple(tokens[end - size : end])] = end
        self._tokens = list(tokens)


class DraftModel:
    """Guesses with a model of the same tokenizer, on a memory of its own."""

    def __init__(self, model: Any) -> None:
        decoder = decoder_of(model)
        self._reader = Reader(decoder, decoder.memory("raw"))

    def drafts(self, tokens: Sequence[int], most: int, aim: Aim) -> list[Draft]:
        text, drafts = list(tokens), list[Draft]()
        decoder = self._reader.decoder
        if decoder.vocabulary is not None and max(text) >= decoder.vocabulary:
            return []  # a smaller vocabulary, and a token that is not in it
        if decoder.context is not None:
            most = min(most, decoder.context - len(text) + 1)
        self._reader.memory.widen(most + 1)
        for count in range(most):
            if count == 0:
                logits = self._reader.prompt(text)
                self._reader.memory.checkpoint()
            else:
                logits = self._reader.next(text)[-1]
            draft = aim.draft(logits, text)
            drafts.append(draft)
            text.append(draft.token)
        return drafts

    def fork(self) -> DraftModel:
        twin = DraftModel.__new__(DraftModel)
        twin._reader = self._reader.fork()
        return twin


def drafter_of(draft: Any) -> Drafter:
    """None, "ngram", a drafter, or a model that is to be one."""
    if draft is None:
        return NoDrafts()
    if draft == "ngram":
        return NGrams()
    if isinstance(draft, Drafter):
        return draft
    if isinstance(draft, str):
        raise ValueError(f"draft={draft!r}: 'ngram', a model, or None is needed")
    return DraftModel(draft)

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

from kvant.generation.decoder import make_decoder
from kvant.generation.prefill import Prefiller
from kvant.generation.sampling import NEGATIVE_INFINITY, DraftToken, Sampler

NGRAM_SIZES = (4, 3, 2)  # of the n-grams: the longest that was there before is believed


@dataclass(frozen=True)
class DraftTarget:
    """What is guessed: tokens of a vocabulary, drawn as this sampler draws."""

    sampler: Sampler
    vocab_size: int

    def sample_draft(self, logits: Tensor, previous_tokens: Sequence[int]) -> DraftToken:
        """A token for the logits of another model, whose vocabulary may be padded differently."""
        missing = self.vocab_size - len(logits)
        return self.sampler.sample_draft(
            pad(logits, (0, missing), value=NEGATIVE_INFINITY), previous_tokens
        )


@runtime_checkable
class Drafter(Protocol):
    """Guesses how a text goes on."""

    def propose_drafts(
        self, tokens: Sequence[int], max_drafts: int, target: DraftTarget
    ) -> list[DraftToken]:
        """At most `most` tokens behind `tokens`; none is an answer too."""

    def fork(self) -> Drafter: ...


class NoDrafter:
    """Guesses nothing: one forward, one token."""

    def propose_drafts(
        self, tokens: Sequence[int], max_drafts: int, target: DraftTarget
    ) -> list[DraftToken]:
        return []

    def fork(self) -> NoDrafter:
        return self


class NGramDrafter:
    """Guesses that what followed the last few tokens before will follow them again."""

    def __init__(self) -> None:
        self._tokens: list[int] = []  # those that are indexed
        self._ngram_ends: dict[tuple[int, ...], int] = {}  # n-gram: where its newest copy ends

    def propose_drafts(
        self, tokens: Sequence[int], max_drafts: int, target: DraftTarget
    ) -> list[DraftToken]:
        self._index_ngrams(tokens)
        for size in NGRAM_SIZES:
            at = self._ngram_ends.get(tuple(tokens[-size:]))
            if at is not None and len(tokens) >= size:
                return [DraftToken(token) for token in tokens[at : at + max_drafts]]
        return []

    def fork(self) -> NGramDrafter:
        return NGramDrafter()

    def _index_ngrams(self, tokens: Sequence[int]) -> None:
        """Every n-gram that ends before the newest token, so that something follows each."""
        begin = len(self._tokens)
        if self._tokens != tokens[:begin]:  # another text, or one that went back
            self._tokens, self._ngram_ends, begin = [], {}, 0
        for end in range(max(begin, 1), len(tokens)):
            for size in NGRAM_SIZES:
                if size <= end:
                    self._ngram_ends[tuple(tokens[end - size : end])] = end
        self._tokens = list(tokens)


class ModelDrafter:
    """Guesses with a model of the same tokenizer, on a memory of its own."""

    def __init__(self, model: Any) -> None:
        decoder = make_decoder(model)
        self._prefiller = Prefiller(decoder, decoder.make_cache("raw"))

    def propose_drafts(
        self, tokens: Sequence[int], max_drafts: int, target: DraftTarget
    ) -> list[DraftToken]:
        text, drafts = list(tokens), list[DraftToken]()
        decoder = self._prefiller.decoder
        if decoder.vocab_size is not None and max(text) >= decoder.vocab_size:
            return []  # a smaller vocabulary, and a token that is not in it
        if decoder.max_context is not None:
            max_drafts = min(max_drafts, decoder.max_context - len(text) + 1)
        self._prefiller.cache.ensure_slack(max_drafts + 1)
        for count in range(max_drafts):
            if count == 0:
                logits = self._prefiller.prefill(text)
                self._prefiller.cache.checkpoint()
            else:
                logits = self._prefiller.compute_next_logits(text)[-1]
            draft = target.sample_draft(logits, text)
            drafts.append(draft)
            text.append(draft.token)
        return drafts

    def fork(self) -> ModelDrafter:
        twin = ModelDrafter.__new__(ModelDrafter)
        twin._prefiller = self._prefiller.fork()
        return twin


def make_drafter(draft: Any) -> Drafter:
    """None, "ngram", a drafter, or a model that is to be one."""
    if draft is None:
        return NoDrafter()
    if draft == "ngram":
        return NGramDrafter()
    if isinstance(draft, Drafter):
        return draft
    if isinstance(draft, str):
        raise ValueError(f"draft={draft!r}: 'ngram', a model, or None is needed")
    return ModelDrafter(draft)

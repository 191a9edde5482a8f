"""Speculative decoding: propose cheap draft tokens, which one forward verifies together.

Drafts come from earlier tokens (`NGramDrafter`) or from a smaller model (`ModelDrafter`). The
sampler verifies them, so drafting does not change the distribution of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.functional import pad

from kvant.generation.decoder import LogitsFunction, Prefiller, make_decoder
from kvant.generation.sampling import NEGATIVE_INFINITY, DraftToken, Sampler

NGRAM_SIZES = (4, 3, 2)  # the longest n-gram with an earlier copy is used


@dataclass(frozen=True)
class DraftTarget:
    """The distribution that drafts aim at: a sampler and the size of its vocabulary."""

    sampler: Sampler
    vocab_size: int

    def sample_draft(self, logits: Tensor, previous_tokens: Sequence[int]) -> DraftToken:
        """Sample a draft from another model's logits, padded to the target's vocabulary."""
        missing = self.vocab_size - len(logits)
        return self.sampler.sample_draft(
            pad(logits, (0, missing), value=NEGATIVE_INFINITY), previous_tokens
        )


@runtime_checkable
class Drafter(Protocol):
    """Propose the next tokens of a sequence."""

    def propose_drafts(
        self, tokens: Sequence[int], max_drafts: int, target: DraftTarget
    ) -> list[DraftToken]:
        """Propose at most `max_drafts` tokens after `tokens`; an empty list is allowed."""

    def fork(self) -> Drafter: ...


class NGramDrafter:
    """Propose the tokens that followed the newest earlier copy of the last n-gram."""

    def __init__(self) -> None:
        self._tokens: list[int] = []  # tokens in the index
        self._ngram_ends: dict[tuple[int, ...], int] = {}  # n-gram: end of its newest copy

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
        """Index the n-grams that end before the newest token: each has a successor."""
        begin = len(self._tokens)
        if self._tokens != tokens[:begin]:  # another sequence, or a rewound one
            self._tokens, self._ngram_ends, begin = [], {}, 0
        for end in range(max(begin, 1), len(tokens)):
            for size in NGRAM_SIZES:
                if size <= end:
                    self._ngram_ends[tuple(tokens[end - size : end])] = end
        self._tokens = list(tokens)


class ModelDrafter:
    """Propose drafts with a smaller model of the same tokenizer, which has its own cache."""

    def __init__(self, model: nn.Module | LogitsFunction) -> None:
        decoder = make_decoder(model)
        self._prefiller = Prefiller(decoder, decoder.make_cache("raw"))

    def propose_drafts(
        self, tokens: Sequence[int], max_drafts: int, target: DraftTarget
    ) -> list[DraftToken]:
        text, drafts = list(tokens), list[DraftToken]()
        decoder = self._prefiller.decoder
        if decoder.vocab_size is not None and max(text) >= decoder.vocab_size:
            return []  # the draft model's vocabulary is smaller and lacks a token
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
        copy = ModelDrafter.__new__(ModelDrafter)
        copy._prefiller = self._prefiller.fork()
        return copy


def make_drafter(draft: str | Drafter | nn.Module | LogitsFunction) -> Drafter:
    """Make a drafter from "ngram", a `Drafter` or a draft model."""
    if draft == "ngram":
        return NGramDrafter()
    if isinstance(draft, Drafter):
        return draft
    if isinstance(draft, str):
        raise ValueError(f"draft={draft!r}: 'ngram', a model, or None is needed")
    return ModelDrafter(draft)

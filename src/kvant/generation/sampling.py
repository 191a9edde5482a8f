"""From logits to a token, and how likely it was.

The order is the customary one: repetition penalty, temperature, then what is left out (top-k,
top-p, min-p, each on the distribution that the one before left). Temperature 0 is the likeliest
token, whatever is left out. The same seed draws the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NEVER = float("-inf")


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature}: 0 or more is needed")
        for name, value in (("top_p", self.top_p), ("min_p", self.min_p)):
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"{name}={value}: 0 to 1 is needed")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k}: 1 or more, or None for all tokens")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise ValueError(f"seed={self.seed}: a number of 64 bits is needed")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty={self.repetition_penalty}: more than 0 is needed")


@dataclass(frozen=True)
class Draft:
    """A token that was guessed, and the log-probabilities it was drawn from (None: certain)."""

    token: int
    logprobs: Tensor | None = None


class Sampler:
    """Draws from one stream of random numbers."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def draw(self, logits: Tensor, before: Sequence[int]) -> tuple[int, float]:
        """A token for logits [vocabulary] after the tokens `before`, and its log-probability."""
        logprobs = self.distribution(logits, before)
        token = self._chosen(logprobs)
        return token, float(logprobs[token])

    def draft(self, logits: Tensor, before: Sequence[int]) -> Draft:
        """A guess by another model, drawn as its tokens would be."""
        logprobs = self.distribution(logits, before)
        token = self._chosen(logprobs)
        return Draft(token, logprobs)

    def verify(self, logits: Tensor, before: Sequence[int], draft: Draft) -> tuple[int, float]:
        """As `draw`, and from the same distribution, but the draft's token wherever that can be.

        Rejection: the draft stands with probability p / q; where it falls, the token comes from
        what p has above q, in which the draft's has no part.
        """
        logprobs = self.distribution(logits, before)
        if self._greedy:
            token = self._likeliest(logprobs)
        else:
            token = self._stands_or_falls(logprobs.exp(), _guessed(draft, logprobs), draft.token)
        return token, float(logprobs[token])

    def _stands_or_falls(self, right: Tensor, guessed: Tensor, token: int) -> int:
        chance = torch.rand((), generator=self._generator, dtype=right.dtype)
        if chance * guessed[token] < right[token]:
            return token
        above = (right - guessed).clamp_min(0.0)
        return self._random(above if above.sum() > 0 else right)  # rounding may leave nothing above

    def _chosen(self, logprobs: Tensor) -> int:
        return self._likeliest(logprobs) if self._greedy else self._random(logprobs.exp())

    def _random(self, probabilities: Tensor) -> int:
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _likeliest(self, logprobs: Tensor) -> int:
        return int(logprobs.argmax())

    @property
    def _greedy(self) -> bool:
        return self.sampling.temperature == 0

    def distribution(self, logits: Tensor, before: Sequence[int]) -> Tensor:
        """Log-probabilities that a token is drawn from; at temperature 0 those of temperature 1."""
        sampling = self.sampling
        logits = penalized(logits.cpu().double(), before, sampling.repetition_penalty)
        if self._greedy:
            return logits.log_softmax(-1)
        # From the largest down: then a tiny temperature overflows to "never", and not to NaN.
        logprobs = ((logits - logits.max()) / sampling.temperature).log_softmax(-1)
        for keep in (self._top_k, self._top_p, self._min_p):
            logprobs = logprobs.masked_fill(~keep(logprobs), NEVER).log_softmax(-1)
        return logprobs

    def _top_k(self, logprobs: Tensor) -> Tensor:
        count = min(self.sampling.top_k or len(logprobs), len(logprobs))
        kept = torch.zeros_like(logprobs, dtype=torch.bool)
        kept[logprobs.topk(count).indices] = True
        return kept

    def _top_p(self, logprobs: Tensor) -> Tensor:
        """The fewest tokens that together have the mass; the likeliest always stays."""
        if self.sampling.top_p in (None, 1.0):
            return torch.ones_like(logprobs, dtype=torch.bool)
        ordered, index = logprobs.exp().sort(descending=True)
        kept = torch.zeros_like(logprobs, dtype=torch.bool)
        kept[index] = ordered.cumsum(-1) - ordered < (self.sampling.top_p or 0.0)
        kept[index[0]] = True
        return kept

    def _min_p(self, logprobs: Tensor) -> Tensor:
        """Tokens at least so likely as this part of the likeliest."""
        share = self.sampling.min_p or 0.0
        return logprobs.exp() >= share * logprobs.max().exp()


def _guessed(draft: Draft, logprobs: Tensor) -> Tensor:
    """The probabilities that a draft was drawn from."""
    if draft.logprobs is None:
        return torch.zeros_like(logprobs).index_fill(0, torch.tensor([draft.token]), 1.0)
    return draft.logprobs.exp()


def penalized(logits: Tensor, before: Sequence[int], penalty: float) -> Tensor:
    """Tokens that were there are less likely: positive logits shrink, negative ones grow."""
    if penalty == 1.0 or not before:
        return logits
    index = torch.tensor(sorted(set(before)))
    old = logits[index]
    new = torch.where(old > 0, old / penalty, old * penalty)
    return logits.index_copy(0, index, new)

"""From logits to a token, and how likely it was.

The order is the customary one: penalties, biases, the grammar, temperature, then what is left out
(top-k, top-p, min-p, each on the distribution that the one before left). Temperature 0 is the
likeliest token, whatever is left out. What is drawn follows from the seed and the position of the
token: the same seed draws the same tokens, whoever else is drawn for in the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from kvant.generation.settings import Sampling

NEVER = float("-inf")
LIKELIEST = (256, 4096)  # tokens that are looked at before all of them are
SMALLEST = 1e-30  # a temperature below it would divide 0 by 0


class Drawn(NamedTuple):
    """A token, how likely it was, and the likeliest ones beside it, where they were asked for."""

    token: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


NOBODY = Drawn(-1, NEVER)


@dataclass(frozen=True)
class Draft:
    """A token that was guessed, and the log-probabilities it was drawn from (None: certain)."""

    token: int
    logprobs: Tensor | None = None


@dataclass(frozen=True)
class Distributions:
    """Log-probabilities [rows, n] that tokens are drawn from: of all, or of the likeliest."""

    logprobs: Tensor
    tokens: Tensor | None = None  # [rows, n], the likeliest first

    def dense(self, vocabulary: int) -> Tensor:
        """Those of all tokens."""
        if self.tokens is None:
            return self.logprobs
        never = self.logprobs.new_full((len(self.logprobs), vocabulary), NEVER)
        return never.scatter(1, self.tokens, self.logprobs)

    def drawn(self, chances: Sequence[float]) -> tuple[Tensor, Tensor]:
        """A token for each number from 0 to below 1, and its log-probability: [rows] each."""
        sums = self.logprobs.exp().double().cumsum(-1)
        most = sums[:, -1:]
        _check_numbers(most)
        aims = (sums.new_tensor(chances)[:, None] * most).minimum(most.nextafter(most * 0))
        tokens, logprobs = self._at(torch.searchsorted(sums, aims, right=True))
        return tokens[:, 0], logprobs[:, 0]

    def likeliest(self, count: int) -> list[tuple[tuple[int, float], ...]]:
        """For each row the tokens that are, with their log-probabilities; none that cannot be."""
        tops = self._at(self.logprobs.topk(min(count, self.logprobs.shape[-1])).indices)
        return [
            tuple(pair for pair in zip(ids, values, strict=True) if pair[1] > NEVER)
            for ids, values in zip(*(top.tolist() for top in tops), strict=True)
        ]

    def _at(self, places: Tensor) -> tuple[Tensor, Tensor]:
        tokens = places if self.tokens is None else self.tokens.gather(1, places)
        return tokens, self.logprobs.gather(1, places)


def distributions(logits: Tensor, sampling: Sampling) -> Distributions:
    """Those that logits [rows, vocabulary] give; at temperature 0 those of temperature 1."""
    if sampling.temperature == 0:
        return Distributions(logits.log_softmax(-1))
    # From the largest down: then a tiny temperature overflows to "never", and not to NaN.
    below = logits - logits.amax(-1, keepdim=True)
    logits = below / max(sampling.temperature, SMALLEST)
    if sampling.leaves_all:
        return Distributions(logits.log_softmax(-1))
    for count in (*LIKELIEST, logits.shape[-1]):
        found, complete = _among(logits, sampling, min(count, logits.shape[-1]))
        if complete:
            break
    return found


def _among(logits: Tensor, sampling: Sampling, count: int) -> tuple[Distributions, bool]:
    """What is kept of the likeliest tokens; is that all that is kept?"""
    vocabulary = logits.shape[-1]
    count = min(sampling.top_k or count, vocabulary)
    tokens = logits.topk(count).indices.sort().values  # equals in one order, however many there are
    values, order = logits.gather(1, tokens).sort(descending=True, stable=True)
    within = logits if sampling.top_k is None else values
    shares = (values - within.logsumexp(-1, keepdim=True)).exp()
    kept = shares >= (sampling.min_p or 0.0) * shares[:, :1]
    if sampling.top_p not in (None, 1.0):
        kept &= shares.cumsum(-1) - shares < (sampling.top_p or 0.0)
    kept[:, 0] = True
    complete = sampling.top_k is not None or count == vocabulary or not bool(kept[:, -1].any())
    logprobs = values.masked_fill(~kept, NEVER).log_softmax(-1)
    return Distributions(logprobs, tokens.gather(1, order)), complete


def _chosen_by_torch() -> int:
    """A seed of its own random numbers, so `torch.manual_seed` counts."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))


class Sampler:
    """Draws tokens for one sequence; its random numbers follow from the seed and a position."""

    def __init__(self, sampling: Sampling, begin: int = 0) -> None:
        """`begin` tokens are a prompt: presence, frequency and a grammar are of those behind it."""
        self.sampling = sampling
        self.begin = begin
        self.follower = None if sampling.rules is None else sampling.rules.begin()
        self.unseeded = replace(sampling, seed=None)  # what others may have in common
        seed = sampling.seed
        if seed is None:
            seed = _chosen_by_torch() if sampling.temperature else 0
        self._seed = seed % 2**64

    def draw(self, logits: Tensor, before: Sequence[int]) -> Drawn:
        """A token for logits [vocabulary] after the tokens `before`."""
        return drawn(logits[None], [self], [before])[0]

    def draft(self, logits: Tensor, before: Sequence[int]) -> Draft:
        """A guess by another model, drawn as its tokens would be."""
        logprobs = self.distribution(logits, before)
        if self.sampling.temperature == 0:
            return Draft(self.draw(logits, before).token, logprobs)
        tokens, _ = Distributions(logprobs[None]).drawn([self.chance(len(before), "draft")])
        return Draft(int(tokens), logprobs)

    def verify(self, logits: Tensor, before: Sequence[int], draft: Draft) -> Drawn:
        """As `draw`, and from the same distribution, but the draft's token wherever that can be.

        Rejection: the draft stands with probability p / q; where it falls, the token comes from
        what p has above q, in which the draft's has no part.
        """
        if self.sampling.temperature == 0:
            return self.draw(logits, before)
        logprobs = self.distribution(logits, before)
        token = self._stands_or_falls(logprobs, draft, len(before))
        return Drawn(token, float(logprobs[token]))

    def _stands_or_falls(self, logprobs: Tensor, draft: Draft, position: int) -> int:
        right, guessed = logprobs.exp(), _guessed(draft, logprobs)
        if self.chance(position, "stands") * guessed[draft.token] < right[draft.token]:
            return draft.token
        above = (right - guessed).clamp_min(0.0)
        left = above if above.sum() > 0 else right  # rounding may leave nothing above
        tokens, _ = Distributions(left.log()[None]).drawn([self.chance(position, "falls")])
        return int(tokens)

    def chance(self, position: int, what: str = "") -> float:
        """A random number from 0 to below 1."""
        asked = f"{self._seed} {position} {what}".encode()
        return (int.from_bytes(blake2b(asked, digest_size=8).digest()) >> 11) / 2**53

    def distribution(self, logits: Tensor, before: Sequence[int]) -> Tensor:
        """Log-probabilities [vocabulary] that a token is drawn from."""
        rows = _changed(logits[None].float(), [self], [before])
        return distributions(rows, self.sampling).dense(len(logits))[0]


def drawn(
    logits: Tensor,
    samplers: Sequence[Sampler],
    before: Sequence[Sequence[int]],
    likeliest: Sequence[int] = (),
) -> list[Drawn]:
    """A token for each row of logits [rows, vocabulary], by the sampler of its sequence.

    `likeliest` says for each row how many of the likeliest tokens are told beside it.
    """
    groups: dict[Sampling, list[int]] = {}
    for row, sampler in enumerate(samplers):
        groups.setdefault(sampler.unseeded, []).append(row)
    found: list[Drawn] = [NOBODY] * len(samplers)
    for sampling, rows in groups.items():
        some = (logits if len(rows) == len(logits) else logits[rows]).float()
        if sampling.changes:
            some = _changed(some, [samplers[row] for row in rows], [before[row] for row in rows])
        chances = [samplers[row].chance(len(before[row])) for row in rows]
        count = max((likeliest[row] for row in rows), default=0) if likeliest else 0
        for row, one in zip(rows, _drawn_alike(some, sampling, chances, count), strict=True):
            told = one.likeliest[: likeliest[row]] if likeliest else ()
            found[row] = one._replace(likeliest=told)
    return found


def _drawn_alike(
    logits: Tensor, sampling: Sampling, chances: Sequence[float], count: int
) -> list[Drawn]:
    """A token for each row by one rule, with `count` of the likeliest beside it."""
    if sampling.temperature == 0:
        tokens, logprobs = _likeliest(logits)
        told = distributions(logits, sampling) if count else None
    else:
        told = distributions(logits, sampling)
        tokens, logprobs = told.drawn(chances)
    pairs = [()] * len(chances) if told is None or not count else told.likeliest(count)
    return list(map(Drawn, tokens.tolist(), logprobs.tolist(), pairs))


def _likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row, and its log-probability."""
    values, tokens = logits.max(-1)
    _check_numbers(values)
    return tokens, values - logits.logsumexp(-1)


def _check_numbers(largest: Tensor) -> None:
    if largest.isnan().any():
        raise ValueError("logits that are not numbers: no token can be drawn from them")


def _guessed(draft: Draft, logprobs: Tensor) -> Tensor:
    """The probabilities that a draft was drawn from."""
    if draft.logprobs is None:
        return torch.zeros_like(logprobs).index_fill(0, torch.tensor([draft.token]), 1.0)
    return draft.logprobs.exp()


def _changed(
    logits: Tensor, samplers: Sequence[Sampler], before: Sequence[Sequence[int]]
) -> Tensor:
    """Logits [rows, vocabulary] once tokens were penalized, biased, and left out by a grammar."""
    if not samplers[0].sampling.changes:
        return logits
    rows = []
    for row, sampler, text in zip(logits.clone(), samplers, before, strict=True):
        one = sampler.sampling
        if one.repetition_penalty != 1.0:
            index, _ = _counted(text, row)
            row[index] = _penalized(row[index], one.repetition_penalty)
        if one.presence_penalty or one.frequency_penalty:
            index, counts = _counted(text[sampler.begin :], row)
            row[index] -= one.presence_penalty + one.frequency_penalty * counts
        if one.logit_bias:
            tokens, biases = zip(*one.logit_bias, strict=True)
            row[torch.tensor(tokens, device=row.device)] += row.new_tensor(biases)
        if sampler.follower is not None:
            allowed = sampler.follower.allowed(text[sampler.begin :], len(row))
            row.masked_fill_(~allowed.to(row.device), NEVER)
        rows.append(row)
    return torch.stack(rows)


def _counted(text: Sequence[int], row: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of a text, each once, and how often they are there."""
    tokens = torch.tensor(list(text), dtype=torch.long, device=row.device)
    index, counts = torch.unique(tokens, return_counts=True)
    return index, counts.to(row.dtype)


def _penalized(logits: Tensor, penalty: float) -> Tensor:
    """Less likely: positive logits shrink, negative ones grow."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)

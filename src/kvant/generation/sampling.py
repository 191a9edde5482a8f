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

NEGATIVE_INFINITY = float("-inf")
CANDIDATE_COUNTS = (256, 4096)  # tokens that are looked at before all of them are
MIN_TEMPERATURE = 1e-30  # a temperature below it would divide 0 by 0


class SampledToken(NamedTuple):
    """A token, how likely it was, and the likeliest ones beside it, where they were asked for."""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


NO_TOKEN = SampledToken(-1, NEGATIVE_INFINITY)


@dataclass(frozen=True)
class DraftToken:
    """A token that was guessed, and the log-probabilities it was drawn from (None: certain)."""

    token: int
    logprobs: Tensor | None = None


@dataclass(frozen=True)
class TokenDistributions:
    """Log-probabilities [rows, n] that tokens are drawn from: of all, or of the likeliest."""

    logprobs: Tensor
    tokens: Tensor | None = None  # [rows, n], the likeliest first

    def to_dense(self, vocab_size: int) -> Tensor:
        """Those of all tokens."""
        if self.tokens is None:
            return self.logprobs
        never = self.logprobs.new_full((len(self.logprobs), vocab_size), NEGATIVE_INFINITY)
        return never.scatter(1, self.tokens, self.logprobs)

    def sample(self, uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
        """A token for each number from 0 to below 1, and its log-probability: [rows] each."""
        sums = self.logprobs.exp().double().cumsum(-1)
        most = sums[:, -1:]
        _check_no_nan(most)
        aims = (sums.new_tensor(uniforms)[:, None] * most).minimum(most.nextafter(most * 0))
        tokens, logprobs = self._gather(torch.searchsorted(sums, aims, right=True))
        return tokens[:, 0], logprobs[:, 0]

    def list_top_logprobs(self, count: int) -> list[tuple[tuple[int, float], ...]]:
        """For each row the tokens that are, with their log-probabilities; none that cannot be."""
        tops = self._gather(self.logprobs.topk(min(count, self.logprobs.shape[-1])).indices)
        return [
            tuple(pair for pair in zip(ids, values, strict=True) if pair[1] > NEGATIVE_INFINITY)
            for ids, values in zip(*(top.tolist() for top in tops), strict=True)
        ]

    def _gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        tokens = indices if self.tokens is None else self.tokens.gather(1, indices)
        return tokens, self.logprobs.gather(1, indices)


def compute_distributions(logits: Tensor, sampling: Sampling) -> TokenDistributions:
    """Those that logits [rows, vocabulary] give; at temperature 0 those of temperature 1."""
    if sampling.temperature == 0:
        return TokenDistributions(logits.log_softmax(-1))
    # From the largest down: then a tiny temperature overflows to "never", and not to NaN.
    below = logits - logits.amax(-1, keepdim=True)
    logits = below / max(sampling.temperature, MIN_TEMPERATURE)
    if sampling.keeps_all_tokens:
        return TokenDistributions(logits.log_softmax(-1))
    for count in (*CANDIDATE_COUNTS, logits.shape[-1]):
        found, complete = _filter_candidates(logits, sampling, min(count, logits.shape[-1]))
        if complete:
            break
    return found


def _filter_candidates(
    logits: Tensor, sampling: Sampling, num_candidates: int
) -> tuple[TokenDistributions, bool]:
    """What is kept of the likeliest tokens; is that all that is kept?"""
    vocabulary = logits.shape[-1]
    num_candidates = min(sampling.top_k or num_candidates, vocabulary)
    tokens = (
        logits.topk(num_candidates).indices.sort().values
    )  # equals in one order, however many there are
    values, order = logits.gather(1, tokens).sort(descending=True, stable=True)
    within = logits if sampling.top_k is None else values
    shares = (values - within.logsumexp(-1, keepdim=True)).exp()
    kept = shares >= (sampling.min_p or 0.0) * shares[:, :1]
    if sampling.top_p not in (None, 1.0):
        kept &= shares.cumsum(-1) - shares < (sampling.top_p or 0.0)
    kept[:, 0] = True
    complete = (
        sampling.top_k is not None or num_candidates == vocabulary or not bool(kept[:, -1].any())
    )
    logprobs = values.masked_fill(~kept, NEGATIVE_INFINITY).log_softmax(-1)
    return TokenDistributions(logprobs, tokens.gather(1, order)), complete


def _draw_torch_seed() -> int:
    """A seed of its own random numbers, so `torch.manual_seed` counts."""
    return int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))


class Sampler:
    """Draws tokens for one sequence; its random numbers follow from the seed and a position."""

    def __init__(self, sampling: Sampling, prompt_length: int = 0) -> None:
        """`begin` tokens are a prompt: presence, frequency and a grammar are of those behind it."""
        self.sampling = sampling
        self.prompt_length = prompt_length
        self.matcher = None if sampling.grammar is None else sampling.grammar.make_matcher()
        self.unseeded_sampling = replace(sampling, seed=None)  # what others may have in common
        seed = sampling.seed
        if seed is None:
            seed = _draw_torch_seed() if sampling.temperature else 0
        self._seed = seed % 2**64

    def sample(self, logits: Tensor, previous_tokens: Sequence[int]) -> SampledToken:
        """A token for logits [vocabulary] after the tokens `before`."""
        return sample_batch(logits[None], [self], [previous_tokens])[0]

    def sample_draft(self, logits: Tensor, previous_tokens: Sequence[int]) -> DraftToken:
        """A guess by another model, drawn as its tokens would be."""
        logprobs = self.compute_logprobs(logits, previous_tokens)
        if self.sampling.temperature == 0:
            return DraftToken(self.sample(logits, previous_tokens).token, logprobs)
        tokens, _ = TokenDistributions(logprobs[None]).sample(
            [self.draw_uniform(len(previous_tokens), "draft")]
        )
        return DraftToken(int(tokens), logprobs)

    def verify_draft(
        self, logits: Tensor, previous_tokens: Sequence[int], draft: DraftToken
    ) -> SampledToken:
        """As `draw`, and from the same distribution, but the draft's token wherever that can be.

        Rejection: the draft stands with probability p / q; where it falls, the token comes from
        what p has above q, in which the draft's has no part.
        """
        if self.sampling.temperature == 0:
            return self.sample(logits, previous_tokens)
        logprobs = self.compute_logprobs(logits, previous_tokens)
        token = self._accept_or_resample(logprobs, draft, len(previous_tokens))
        return SampledToken(token, float(logprobs[token]))

    def _accept_or_resample(self, logprobs: Tensor, draft: DraftToken, position: int) -> int:
        right, guessed = logprobs.exp(), _get_draft_probabilities(draft, logprobs)
        if self.draw_uniform(position, "stands") * guessed[draft.token] < right[draft.token]:
            return draft.token
        above = (right - guessed).clamp_min(0.0)
        left = above if above.sum() > 0 else right  # rounding may leave nothing above
        tokens, _ = TokenDistributions(left.log()[None]).sample(
            [self.draw_uniform(position, "falls")]
        )
        return int(tokens)

    def draw_uniform(self, position: int, purpose: str = "") -> float:
        """A random number from 0 to below 1."""
        asked = f"{self._seed} {position} {purpose}".encode()
        return (int.from_bytes(blake2b(asked, digest_size=8).digest()) >> 11) / 2**53

    def compute_logprobs(self, logits: Tensor, previous_tokens: Sequence[int]) -> Tensor:
        """Log-probabilities [vocabulary] that a token is drawn from."""
        rows = _modify_logits(logits[None].float(), [self], [previous_tokens])
        return compute_distributions(rows, self.sampling).to_dense(len(logits))[0]


def sample_batch(
    logits: Tensor,
    samplers: Sequence[Sampler],
    previous_tokens: Sequence[Sequence[int]],
    num_top_logprobs: Sequence[int] = (),
) -> list[SampledToken]:
    """A token for each row of logits [rows, vocabulary], by the sampler of its sequence.

    `likeliest` says for each row how many of the likeliest tokens are told beside it.
    """
    groups: dict[Sampling, list[int]] = {}
    for row, sampler in enumerate(samplers):
        groups.setdefault(sampler.unseeded_sampling, []).append(row)
    found: list[SampledToken] = [NO_TOKEN] * len(samplers)
    for sampling, rows in groups.items():
        some = (logits if len(rows) == len(logits) else logits[rows]).float()
        if sampling.modifies_logits:
            some = _modify_logits(
                some, [samplers[row] for row in rows], [previous_tokens[row] for row in rows]
            )
        chances = [samplers[row].draw_uniform(len(previous_tokens[row])) for row in rows]
        count = max((num_top_logprobs[row] for row in rows), default=0) if num_top_logprobs else 0
        for row, one in zip(rows, _sample_group(some, sampling, chances, count), strict=True):
            told = one.top_logprobs[: num_top_logprobs[row]] if num_top_logprobs else ()
            found[row] = one._replace(top_logprobs=told)
    return found


def _sample_group(
    logits: Tensor, sampling: Sampling, uniforms: Sequence[float], num_top_logprobs: int
) -> list[SampledToken]:
    """A token for each row by one rule, with `count` of the likeliest beside it."""
    if sampling.temperature == 0:
        tokens, logprobs = _sample_greedily(logits)
        told = compute_distributions(logits, sampling) if num_top_logprobs else None
    else:
        told = compute_distributions(logits, sampling)
        tokens, logprobs = told.sample(uniforms)
    pairs = (
        [()] * len(uniforms)
        if told is None or not num_top_logprobs
        else told.list_top_logprobs(num_top_logprobs)
    )
    return list(map(SampledToken, tokens.tolist(), logprobs.tolist(), pairs))


def _sample_greedily(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The likeliest token of each row, and its log-probability."""
    values, tokens = logits.max(-1)
    _check_no_nan(values)
    return tokens, values - logits.logsumexp(-1)


def _check_no_nan(max_logits: Tensor) -> None:
    if max_logits.isnan().any():
        raise ValueError("logits that are not numbers: no token can be drawn from them")


def _get_draft_probabilities(draft: DraftToken, logprobs: Tensor) -> Tensor:
    """The probabilities that a draft was drawn from."""
    if draft.logprobs is None:
        return torch.zeros_like(logprobs).index_fill(0, torch.tensor([draft.token]), 1.0)
    return draft.logprobs.exp()


def _modify_logits(
    logits: Tensor, samplers: Sequence[Sampler], previous_tokens: Sequence[Sequence[int]]
) -> Tensor:
    """Logits [rows, vocabulary] once tokens were penalized, biased, and left out by a grammar."""
    if not samplers[0].sampling.modifies_logits:
        return logits
    rows = []
    for row, sampler, text in zip(logits.clone(), samplers, previous_tokens, strict=True):
        one = sampler.sampling
        if one.repetition_penalty != 1.0:
            index, _ = _count_tokens(text, row)
            row[index] = _penalize_repetition(row[index], one.repetition_penalty)
        if one.presence_penalty or one.frequency_penalty:
            index, counts = _count_tokens(text[sampler.prompt_length :], row)
            row[index] -= one.presence_penalty + one.frequency_penalty * counts
        if one.logit_bias:
            tokens, biases = zip(*one.logit_bias, strict=True)
            row[torch.tensor(tokens, device=row.device)] += row.new_tensor(biases)
        if sampler.matcher is not None:
            allowed = sampler.matcher.compute_token_mask(text[sampler.prompt_length :], len(row))
            row.masked_fill_(~allowed.to(row.device), NEGATIVE_INFINITY)
        rows.append(row)
    return torch.stack(rows)


def _count_tokens(token_ids: Sequence[int], logits: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens of a text, each once, and how often they are there."""
    tokens = torch.tensor(list(token_ids), dtype=torch.long, device=logits.device)
    index, counts = torch.unique(tokens, return_counts=True)
    return index, counts.to(logits.dtype)


def _penalize_repetition(logits: Tensor, penalty: float) -> Tensor:
    """Less likely: positive logits shrink, negative ones grow."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)

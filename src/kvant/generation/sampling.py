"""Sample tokens from logits, with their log-probabilities.

The order is the usual one: penalties, biases, grammar, temperature, then top-k, top-p and min-p,
each on the distribution that the previous filter left. Temperature 0 is greedy, whatever the
filters are. The random number of a token depends on the seed and the position alone: a seed gives
the same tokens in every batch, with or without drafts (speculation.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from kvant.generation.grammar import GrammarMatcher
from kvant.generation.settings import Sampling

NEGATIVE_INFINITY = float("-inf")
CANDIDATE_COUNTS = (256, 4096)  # candidates of top-p and min-p, before the whole vocabulary
MIN_TEMPERATURE = 1e-30  # a lower temperature would divide 0 by 0
NAN_MESSAGE = "the logits are NaN: no token can be sampled from them"


class SampledToken(NamedTuple):
    """A token, its log-probability, and the most likely alternatives if requested."""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class TokenDistributions:
    """Log-probabilities [rows, n] to sample from: of the vocabulary, or of its candidates."""

    logprobs: Tensor
    tokens: Tensor | None = None  # [rows, n], the most likely first

    def sample(self, uniforms: Sequence[float]) -> tuple[Tensor, Tensor]:
        """Sample a token for each number in [0, 1), with its log-probability: [rows] each."""
        sums = self.logprobs.exp().double().cumsum(-1)
        totals = sums[:, -1:]
        if totals.isnan().any():
            raise ValueError(NAN_MESSAGE)
        targets = (sums.new_tensor(uniforms)[:, None] * totals).minimum(
            totals.nextafter(totals * 0)
        )
        tokens, logprobs = self._gather(torch.searchsorted(sums, targets, right=True))
        return tokens[:, 0], logprobs[:, 0]

    def list_top_logprobs(self, count: int) -> list[tuple[tuple[int, float], ...]]:
        """Return the `count` most likely tokens of each row; impossible tokens are left out."""
        tops = self._gather(self.logprobs.topk(min(count, self.logprobs.shape[-1])).indices)
        return [
            tuple(pair for pair in zip(ids, values, strict=True) if pair[1] > NEGATIVE_INFINITY)
            for ids, values in zip(*(top.tolist() for top in tops), strict=True)
        ]

    def _gather(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        tokens = indices if self.tokens is None else self.tokens.gather(1, indices)
        return tokens, self.logprobs.gather(1, indices)


def compute_distributions(logits: Tensor, sampling: Sampling) -> TokenDistributions:
    """Return the distributions of logits [rows, vocabulary]; temperature 0 counts as 1."""
    if sampling.temperature == 0:
        return TokenDistributions(logits.log_softmax(-1))
    # Subtract the maximum first: a tiny temperature then overflows to -inf and not to NaN.
    shifted = logits - logits.amax(-1, keepdim=True)
    logits = shifted / max(sampling.temperature, MIN_TEMPERATURE)
    if sampling.top_k is None and sampling.top_p in (None, 1.0) and not sampling.min_p:
        return TokenDistributions(logits.log_softmax(-1))
    for count in (*CANDIDATE_COUNTS, logits.shape[-1]):
        distributions, complete = _filter_candidates(logits, sampling, min(count, logits.shape[-1]))
        if complete:
            break
    return distributions


def _filter_candidates(
    logits: Tensor, sampling: Sampling, num_candidates: int
) -> tuple[TokenDistributions, bool]:
    """Filter the most likely tokens; also return whether no token beyond them can pass."""
    vocab_size = logits.shape[-1]
    num_candidates = min(sampling.top_k or num_candidates, vocab_size)
    # Sorted ids: ties have the same order for every number of candidates.
    tokens = logits.topk(num_candidates).indices.sort().values
    values, order = logits.gather(1, tokens).sort(descending=True, stable=True)
    total = logits if sampling.top_k is None else values
    probabilities = (values - total.logsumexp(-1, keepdim=True)).exp()
    allowed = probabilities >= (sampling.min_p or 0.0) * probabilities[:, :1]
    if sampling.top_p not in (None, 1.0):
        allowed &= probabilities.cumsum(-1) - probabilities < (sampling.top_p or 0.0)
    allowed[:, 0] = True
    complete = (
        sampling.top_k is not None or num_candidates == vocab_size or not bool(allowed[:, -1].any())
    )
    logprobs = values.masked_fill(~allowed, NEGATIVE_INFINITY).log_softmax(-1)
    return TokenDistributions(logprobs, tokens.gather(1, order)), complete


class Sampler:
    """Sample the tokens of one sequence; random numbers depend on seed and position alone."""

    def __init__(
        self, sampling: Sampling, prompt_length: int = 0, matcher: GrammarMatcher | None = None
    ) -> None:
        """Create a sampler after a prompt of `prompt_length` tokens.

        Presence and frequency penalties apply to the tokens after the prompt, and so does the
        matcher of the sampling's grammar.
        """
        self.sampling = sampling
        self.modifies_logits = sampling.modifies_logits
        self.prompt_length = prompt_length
        self.matcher = matcher
        self.unseeded_sampling = sampling.with_seed(None)  # equal: sampled as one batch
        seed = sampling.seed
        if seed is None and sampling.temperature:  # `torch.manual_seed` applies
            seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        self._seed = (seed or 0) % 2**64

    def sample(self, logits: Tensor, previous_tokens: Sequence[int]) -> SampledToken:
        """Sample a token from logits [vocabulary] that follow `previous_tokens`."""
        return sample_batch(logits[None], [self], [previous_tokens])[0]

    def draw_uniform(self, position: int) -> float:
        """Draw a number in [0, 1) for a position."""
        key = f"{self._seed} {position} ".encode()  # a change of this text changes all samples
        return (int.from_bytes(blake2b(key, digest_size=8).digest()) >> 11) / 2**53


def sample_batch(
    logits: Tensor,
    samplers: Sequence[Sampler],
    previous_tokens: Sequence[Sequence[int]],
    num_top_logprobs: Sequence[int] = (),
) -> list[SampledToken]:
    """Sample a token for each row of logits [rows, vocabulary] by the sampler of its sequence.

    `num_top_logprobs` is the number of alternatives to return for each row.
    """
    groups: dict[Sampling, list[int]] = {}  # rows whose samplers differ only in their seeds
    for row, sampler in enumerate(samplers):
        groups.setdefault(sampler.unseeded_sampling, []).append(row)
    results: dict[int, SampledToken] = {}
    for sampling, rows in groups.items():
        group, texts = [samplers[row] for row in rows], [previous_tokens[row] for row in rows]
        group_logits = (logits if len(groups) == 1 else logits[rows]).float()
        if group[0].modifies_logits:
            group_logits = _modify_logits(group_logits, group, texts)
        counts = [num_top_logprobs[row] for row in rows] if num_top_logprobs else [0] * len(rows)
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
        if sampling.temperature or any(counts):
            distributions = compute_distributions(group_logits, sampling)
            if any(counts):
                tops = distributions.list_top_logprobs(max(counts))
        if sampling.temperature:
            uniforms = [s.draw_uniform(len(t)) for s, t in zip(group, texts, strict=True)]
            tokens, logprobs = distributions.sample(uniforms)
        else:
            values, tokens = group_logits.max(-1)
            if values.isnan().any():
                raise ValueError(NAN_MESSAGE)
            logprobs = values - group_logits.logsumexp(-1)
        columns = rows, tokens.tolist(), logprobs.tolist(), tops, counts
        for row, token, logprob, top, count in zip(*columns, strict=True):
            results[row] = SampledToken(token, logprob, top[:count])
    return [results[row] for row in range(len(samplers))]


def _modify_logits(
    logits: Tensor, samplers: Sequence[Sampler], previous_tokens: Sequence[Sequence[int]]
) -> Tensor:
    """Apply penalties, biases and grammars to logits [rows, vocabulary]."""
    rows = []
    for row, sampler, tokens in zip(logits.clone(), samplers, previous_tokens, strict=True):
        sampling = sampler.sampling
        if sampling.repetition_penalty != 1.0:
            index, _ = _count_tokens(tokens, row)
            values, penalty = row[index], sampling.repetition_penalty
            row[index] = torch.where(values > 0, values / penalty, values * penalty)
        if sampling.presence_penalty or sampling.frequency_penalty:
            index, counts = _count_tokens(tokens[sampler.prompt_length :], row)
            row[index] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        if sampling.logit_bias:
            biased_tokens, biases = zip(*sampling.logit_bias, strict=True)
            row[torch.tensor(biased_tokens, device=row.device)] += row.new_tensor(biases)
        if sampler.matcher is not None:
            allowed = sampler.matcher.compute_token_mask(tokens[sampler.prompt_length :], len(row))
            row.masked_fill_(~allowed.to(row.device), NEGATIVE_INFINITY)
        rows.append(row)
    return torch.stack(rows)


def _count_tokens(token_ids: Sequence[int], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct tokens and their counts."""
    tokens = torch.tensor(list(token_ids), dtype=torch.long, device=logits.device)
    index, counts = torch.unique(tokens, return_counts=True)
    return index, counts.to(logits.dtype)

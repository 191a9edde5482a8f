"""Sample tokens from logits, with their log-probabilities.

The order is the usual one: penalties, biases, grammar, temperature, then top-k, top-p and min-p,
each on the distribution that the previous filter left. Temperature 0 is greedy, whatever the
filters are. The random number of a token depends on the seed and the position alone: a seed gives
the same tokens in every batch.

Speculative decoding proposes cheap draft tokens, which one forward verifies together. Drafts come
from earlier tokens (`NGramDrafter`) or from a smaller model (`ModelDrafter`). The sampler verifies
them, so drafting does not change the distribution of the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from kvant.generation.decoder import LogitsFunction, Prefiller, make_decoder
from kvant.generation.grammar import GrammarMatcher
from kvant.generation.settings import Sampling

NEGATIVE_INFINITY = float("-inf")
CANDIDATE_COUNTS = (256, 4096)  # candidates of top-p and min-p, before the whole vocabulary
MIN_TEMPERATURE = 1e-30  # a lower temperature would divide 0 by 0
NGRAM_SIZES = (4, 3, 2)  # the longest n-gram of drafts with an earlier copy is used
NAN_MESSAGE = "the logits are NaN: no token can be sampled from them"


class SampledToken(NamedTuple):
    """A token, its log-probability, and the most likely alternatives if requested."""

    token: int
    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class DraftToken:
    """A drafted token and the log-probabilities it was drawn from (None: it was certain)."""

    token: int
    logprobs: Tensor | None = None


@dataclass(frozen=True)
class TokenDistributions:
    """Log-probabilities [rows, n] to sample from: of the vocabulary, or of its candidates."""

    logprobs: Tensor
    tokens: Tensor | None = None  # [rows, n], the most likely first

    def to_dense(self, vocab_size: int) -> Tensor:
        """Return the log-probabilities of the whole vocabulary."""
        if self.tokens is None:
            return self.logprobs
        impossible = self.logprobs.new_full((len(self.logprobs), vocab_size), NEGATIVE_INFINITY)
        return impossible.scatter(1, self.tokens, self.logprobs)

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

    def sample_draft(self, logits: Tensor, previous_tokens: Sequence[int]) -> DraftToken:
        """Sample a draft from the logits of a draft model."""
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
        """Sample as `sample` does, but return the draft's token whenever it can be accepted.

        Rejection sampling: the draft is accepted with probability p / q. If it is rejected, the
        token is drawn from the part of p above q, so the distribution stays p.
        """
        if self.sampling.temperature == 0:
            return self.sample(logits, previous_tokens)
        logprobs, position = self.compute_logprobs(logits, previous_tokens), len(previous_tokens)
        target, token = logprobs.exp(), draft.token
        if draft.logprobs is None:
            proposal = torch.zeros_like(target).index_fill(0, torch.tensor([token]), 1.0)
        else:
            proposal = draft.logprobs.exp()
        if self.draw_uniform(position, "stands") * proposal[token] >= target[token]:
            excess = (target - proposal).clamp_min(0.0)
            residual = excess if excess.sum() > 0 else target  # rounding may leave no excess
            uniforms = [self.draw_uniform(position, "falls")]
            token = int(TokenDistributions(residual.log()[None]).sample(uniforms)[0])
        return SampledToken(token, float(logprobs[token]))

    def draw_uniform(self, position: int, purpose: str = "") -> float:
        """Draw a number in [0, 1) for a position and a purpose."""
        key = f"{self._seed} {position} {purpose}".encode()
        return (int.from_bytes(blake2b(key, digest_size=8).digest()) >> 11) / 2**53

    def compute_logprobs(self, logits: Tensor, previous_tokens: Sequence[int]) -> Tensor:
        """Return the log-probabilities [vocabulary] that a token is sampled from."""
        rows = logits[None].float()
        if self.modifies_logits:
            rows = _modify_logits(rows, [self], [previous_tokens])
        return compute_distributions(rows, self.sampling).to_dense(len(logits))[0]


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

"""Speculative decoding: propose cheap draft tokens, which one forward verifies together.

Drafts come from earlier tokens (`NGramDrafter`) or from a smaller model (`ModelDrafter`). The
sampler samples after each of them as it does without drafts, and a draft is accepted if it is the
sampled token. So drafting changes neither the distribution nor, up to rounding, the tokens of a
seed.

    tokens    ... a b c       sampled so far; c is not cached yet
    drafts          d e f g
    forward       c d e f g   five rows of logits
    sampled       d e x       d and e are accepted, x replaces f

A forward of more tokens takes longer. `DraftSizer` chooses the number of drafts with the highest
predicted tokens per second, from the times of forwards and the share of accepted proposals. A
proposal that was not verified counts as accepted if its tokens were sampled. The first forwards of
a size are slow, as they are captured. So a new size waits until it would have saved as much.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.nn.functional import pad

from kvant.generation.decoder import Decoder, make_decoder
from kvant.generation.prefiller import Prefiller
from kvant.generation.sampling import NEGATIVE_INFINITY, Sampler
from kvant.prefixes.tree import count_shared_prefix

MIN_NGRAM, MAX_NGRAM = 2, 4  # tokens of a text whose earlier copy is looked for
MAX_COPIES = 64  # copies of the last two tokens that are looked at, from the newest
MAX_INDEXED_TOKENS = 1 << 15  # of a text, at first
MAX_TOKENS_PER_CALL = 1 << 12  # to index: about a millisecond
NUM_RECENT_TOKENS = 16  # compared to notice that a text is another one
DRAFT_SPEC = "raw"  # of a draft model's cache


@dataclass(frozen=True)
class DraftTarget:
    """What drafts aim at: a sampler, and the size of its vocabulary."""

    sampler: Sampler
    vocab_size: int | None

    def sample_draft(self, logits: Tensor, previous_tokens: Sequence[int]) -> int | None:
        """Sample a draft from another model's logits, padded to the target's vocabulary.

        The random number is that of the target's token, so a similar model samples the same one.
        Return None if the model has no token that is possible here.
        """
        missing = 0 if self.vocab_size is None else self.vocab_size - len(logits)
        padded = pad(logits, (0, missing), value=NEGATIVE_INFINITY)
        try:
            sampled = self.sampler.sample(padded, previous_tokens)
        except ValueError:  # no probability is a number
            return None
        return sampled.token if math.isfinite(sampled.logprob) else None


@runtime_checkable
class Drafter(Protocol):
    """Propose the next tokens of a sequence."""

    def propose_drafts(
        self, tokens: Sequence[int], max_drafts: int, target: DraftTarget
    ) -> list[int]:
        """Propose at most `max_drafts` tokens after `tokens`; an empty list is allowed."""

    def fork(self) -> Drafter: ...


class NGramDrafter:
    """Propose the tokens that followed an earlier copy of the last n-gram.

    Copies of the last two tokens are linked, the newest first. Of the newest ones, the copy counts
    that the most equal tokens precede.
    """

    def __init__(self) -> None:
        self._num_indexed = 0  # tokens in the index
        self._recent_tokens: list[int] = []  # the newest ones of these
        self._newest_ends: dict[tuple[int, int], int] = {}  # pair of tokens: end of its newest copy
        self._older_ends: dict[int, int] = {}  # end of a pair: end of the copy before it

    def propose_drafts(
        self, tokens: Sequence[int], max_drafts: int, target: DraftTarget | None = None
    ) -> list[int]:
        self._index_pairs(tokens)
        best, longest, last = 0, 0, len(tokens)
        end = self._newest_ends.get((tokens[-2], tokens[-1]), 0) if last >= MIN_NGRAM else 0
        for _ in range(MAX_COPIES):
            if not end or longest == MAX_NGRAM:
                break
            size = MIN_NGRAM
            while size < min(MAX_NGRAM, end) and tokens[end - size - 1] == tokens[last - size - 1]:
                size += 1
            if size > longest:
                best, longest = end, size
            end = self._older_ends.get(end, 0)
        return list(tokens[best : best + max_drafts]) if best else []

    def fork(self) -> NGramDrafter:
        return NGramDrafter()

    def _index_pairs(self, tokens: Sequence[int]) -> None:
        """Index pairs that end before the newest token: each has a successor.

        A long text is indexed in several calls, without its beginning.
        """
        begin, recent = self._num_indexed, self._recent_tokens
        if list(tokens[begin - len(recent) : begin]) != recent:  # another text, or a rewound one
            self._newest_ends, self._older_ends, begin = {}, {}, 0
        begin = max(begin, MIN_NGRAM, len(tokens) - MAX_INDEXED_TOKENS)
        stop = max(begin, min(begin + MAX_TOKENS_PER_CALL, len(tokens)))
        newest, older = self._newest_ends, self._older_ends
        pairs = zip(tokens[begin - 2 : stop - 2], tokens[begin - 1 : stop - 1], strict=True)
        for end, pair in enumerate(pairs, begin):
            if pair in newest:
                older[end] = newest[pair]
            newest[pair] = end
        self._num_indexed = min(stop, len(tokens))
        self._recent_tokens = list(tokens[max(0, stop - NUM_RECENT_TOKENS) : stop])


class ModelDrafter:
    """Propose drafts with a smaller model of the same tokenizer, which has its own cache."""

    def __init__(self, decoder: Decoder) -> None:
        self._prefiller = Prefiller(decoder, decoder.make_cache(DRAFT_SPEC))

    def propose_drafts(
        self, tokens: Sequence[int], max_drafts: int, target: DraftTarget
    ) -> list[int]:
        text = list(tokens)
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
            if (token := target.sample_draft(logits, text)) is None:
                break
            text.append(token)
        return text[len(tokens) :]

    def fork(self) -> ModelDrafter:
        copy = ModelDrafter.__new__(ModelDrafter)
        copy._prefiller = self._prefiller.fork()
        return copy


def make_drafter(draft: str | Drafter | nn.Module) -> Drafter:
    """Make a drafter from "ngram", a `Drafter` or a draft model."""
    if draft == "ngram":
        return NGramDrafter()
    if isinstance(draft, Drafter):
        return draft
    if not isinstance(draft, nn.Module):
        raise ValueError(f"draft={draft!r}: 'ngram', a model of transformers, or None is needed")
    return ModelDrafter(make_decoder(draft))


# ---- the number of drafts

ACCEPTANCE_DECAY = 0.8  # weight of older proposals against the newest one
USUAL_DECAY = 0.95  # the same for the proposals of all sequences
INITIAL_ACCEPTED = 1.0  # drafts that count as accepted before the first proposal,
INITIAL_REJECTED = 0.5  # and as rejected


@dataclass
class AcceptanceRate:
    """How often a draft is accepted once those before it were; newer proposals weigh more."""

    accepted: float = INITIAL_ACCEPTED
    rejected: float = INITIAL_REJECTED
    decay: float = ACCEPTANCE_DECAY

    @property
    def value(self) -> float:
        return self.accepted / (self.accepted + self.rejected)

    def record(self, num_accepted: int, *, is_rejected: bool) -> None:
        """Add a proposal: its accepted drafts, and whether another one was rejected."""
        self.accepted = self.decay * self.accepted + num_accepted
        self.rejected = self.decay * self.rejected + is_rejected


@dataclass
class Acceptance:
    """How likely the drafts of one sequence are accepted."""

    rate: AcceptanceRate = field(default_factory=AcceptanceRate)
    usual_rate: AcceptanceRate | None = None  # of all sequences, which this one adds to
    pending: tuple[int, list[int]] | None = None  # a proposal, and the tokens before it

    @classmethod
    def start_from(cls, usual_rate: AcceptanceRate) -> Acceptance:
        """Return the acceptance of a new sequence: at first, the rate of all sequences."""
        total, rate = INITIAL_ACCEPTED + INITIAL_REJECTED, usual_rate.value
        return cls(AcceptanceRate(rate * total, (1 - rate) * total), usual_rate)

    def fork(self) -> Acceptance:
        """Return an independent acceptance for a copy of the sequence."""
        return Acceptance(replace(self.rate), self.usual_rate)

    def record_proposal(self, tokens: Sequence[int], drafts: list[int]) -> None:
        """Compare the pending proposal with the tokens that came; then wait for this one."""
        if self.pending is not None:
            num_before, proposal = self.pending
            num_matched = count_shared_prefix(proposal, tokens[num_before:])
            if num_matched == len(tokens) - num_before < len(proposal):
                return  # all match so far: the rest is still to come
            self._record(num_matched, is_rejected=num_matched < len(proposal))
        self.pending = (len(tokens), drafts) if drafts else None

    def record_rejection(self) -> None:
        """Count a draft that could not even be made."""
        self._record(0, is_rejected=True)

    def _record(self, num_accepted: int, *, is_rejected: bool) -> None:
        for rate in (self.rate, self.usual_rate):
            if rate is not None:
                rate.record(num_accepted, is_rejected=is_rejected)

    def estimate_tokens(self, num_drafts: int) -> float:
        """Return the tokens that a forward with this many drafts will give, on average."""
        rate = self.rate.value
        return (1 - rate ** (1 + num_drafts)) / (1 - rate) if rate < 1 else 1.0 + num_drafts


class Proposal(NamedTuple):
    """The number of drafts of one sequence, and how likely they are accepted."""

    num_drafts: int
    acceptance: Acceptance


DRAFT_COUNTS = (1, 2, 4, 8)  # few: forwards of each are captured once
MIN_SAMPLES = 2  # forwards of a size before its time is known
MAX_SAMPLES = 5  # the newest ones, of which the fastest counts: others were interrupted
MAX_CAPTURES = 4  # forwards before and during the capture of a size, at most
SAMPLE_LIFETIME = 500  # forwards after which a time is measured again
DEFAULT_ROW_COST = 0.1  # of a forward of one token, for each more, before any was measured
MIN_GAIN = 1.05  # predicted tokens a second against those without drafts


@dataclass
class ForwardTimes:
    """The newest times of forwards of one size."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    newest: int = 0  # number of the newest forward


class DraftSizer:
    """Choose how many drafts a forward verifies, by the tokens per second that it predicts."""

    def __init__(self, max_drafts: int) -> None:
        self._counts = [*(count for count in DRAFT_COUNTS if count < max_drafts), max_drafts]
        # By sequences and tokens of each:
        self._times: dict[tuple[int, int], ForwardTimes] = {}
        self._capture_times: dict[tuple[int, int], list[float]] = {}
        self._saved_seconds = defaultdict[tuple[int, int], float](float)  # had they been verified
        self._known = set[tuple[int, int]]()  # since captures were forgotten
        self._num_forwards = 0

    def record_forward(self, num_sequences: int, num_new: int, seconds: float) -> None:
        """Add the time of a forward of `num_new` tokens of each sequence."""
        self._known.add((num_sequences, num_new))
        times = self._times.setdefault((num_sequences, num_new), ForwardTimes())
        self._num_forwards += 1
        times.seconds.append(seconds)
        times.newest = self._num_forwards

    def record_capture(self, num_sequences: int, num_new: int, seconds: float) -> None:
        """Add the time of a forward with drafts before or during a capture."""
        self._known.add((num_sequences, num_new))
        if num_new > 1:
            times = self._capture_times.setdefault((num_sequences, num_new), [])
            times += [seconds] if len(times) < MAX_CAPTURES else []

    def record_failure(self, num_sequences: int, num_new: int) -> None:
        """Record that such a forward failed: it is not tried again soon."""
        for _ in range(MAX_SAMPLES):
            self.record_forward(num_sequences, num_new, math.inf)

    def forget_captures(self) -> None:
        """Treat all sizes as new: their captures were dropped."""
        self._known.clear()
        self._saved_seconds.clear()

    def choose_num_drafts(
        self,
        proposals: Sequence[Proposal],
        limit: int,
        *,
        recomputes: bool = False,
        draft_seconds: float = 0.0,
    ) -> int:
        """Return how many drafts to verify in each of the sequences, at most `limit`.

        With `recomputes`, a rejection costs another forward, as it does on recurrent layers. One
        draft of each sequence takes `draft_seconds`.
        """
        drafted = [proposal for proposal in proposals if proposal.num_drafts]
        num_sequences, num_plain = len(proposals), len(proposals) - len(drafted)

        def estimate_tokens(count: int) -> float:
            return num_plain + sum(a.estimate_tokens(min(count, most)) for most, a in drafted)

        longest = min(limit, max((num_drafts for num_drafts, _ in drafted), default=0))
        if estimate_tokens(longest) <= MIN_GAIN * num_sequences:  # even if drafts took no time
            return 0
        plain = self._predict_seconds(num_sequences, 1)
        if plain is None or self._is_old(num_sequences, 1):
            return 0
        # Predictions, by number of drafts: tokens, seconds, and tokens per second.
        expected, seconds = {0: 1.0 * num_sequences}, {0: plain}
        rates = {0: MIN_GAIN * num_sequences / plain}
        for count in (count for count in self._counts if count <= longest):
            expected[count] = estimate_tokens(count)
            forward_seconds = self._predict_seconds(num_sequences, 1 + count)
            assert forward_seconds is not None
            seconds[count] = forward_seconds + count * draft_seconds
            if recomputes:
                rejection = 1 - min(a.rate.value**count for _, a in drafted)
                seconds[count] += plain * rejection
            rates[count] = expected[count] / seconds[count]
        best = max(rates, key=rates.__getitem__)
        is_known = partial(self._is_known, num_sequences)
        known = max(filter(is_known, rates), key=rates.__getitem__)
        if best == known:
            return best
        size = num_sequences, 1 + best
        self._saved_seconds[size] += expected[best] / rates[known] - seconds[best]
        is_worth_capture = self._saved_seconds[size] >= self._capture_cost
        return best if is_worth_capture else known

    def _is_known(self, num_sequences: int, num_drafts: int) -> bool:
        """Whether forwards of this size are captured, or will be soon."""
        return not num_drafts or (num_sequences, 1 + num_drafts) in self._known

    @property
    def _capture_cost(self) -> float:
        """The seconds that captures of forwards with drafts took on average; 0 before any."""
        total = sum(map(sum, self._capture_times.values()))
        return total / max(1, len(self._capture_times))

    def _predict_seconds(self, num_sequences: int, num_new: int) -> float | None:
        """Return the seconds of a forward; None before the first measurement."""
        if (known := self._get_seconds(num_sequences, num_new)) is not None:
            return known
        # By rows, from the closest measured forward.
        rows = num_sequences * num_new
        measured = {
            sequences * new: seconds
            for sequences, new in self._times
            if math.isfinite(seconds := self._get_seconds(sequences, new) or math.inf)
        }
        if not measured:
            return None
        closest = min(measured, key=lambda other: abs(other - rows))
        fewest, most = min(measured), max(measured)
        row_seconds = (
            max(0.0, measured[most] - measured[fewest]) / (most - fewest)
            if most > fewest
            else DEFAULT_ROW_COST * measured[closest] / closest
        )
        return max(measured[fewest], measured[closest] + (rows - closest) * row_seconds)

    def _get_seconds(self, num_sequences: int, num_new: int) -> float | None:
        times = self._times.get((num_sequences, num_new))
        if times is None or len(times.seconds) < MIN_SAMPLES:
            return None
        is_tried_again = num_new > 1 and self._is_old(num_sequences, num_new)
        return None if is_tried_again else min(times.seconds)

    def _is_old(self, num_sequences: int, num_new: int) -> bool:
        """Whether such a forward was measured long ago."""
        times = self._times.get((num_sequences, num_new))
        return times is not None and self._num_forwards - times.newest > SAMPLE_LIFETIME

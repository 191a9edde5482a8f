"""Speculative decoding in an engine: one forward verifies several draft tokens per sequence.

Drafts are the tokens that followed an earlier occurrence of a sequence's last n-gram
(`NGramDrafts`), or come from a smaller model (`ModelDrafts`). The forward runs them after the
newest token of each sequence. A decode verifies equally many drafts of every sequence; the number
is the one with the highest predicted speed: while a forward mostly reads weights, more tokens take
little more time. Sequences with fewer drafts are padded. Rejected drafts and padding are dropped
from the caches afterwards.
"""

from __future__ import annotations

import logging
import time
from collections import abc, deque
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from kvant.engine.batch import MAX_DRAFTS, PADDING_TOKEN, Batch
from kvant.engine.memory import MemoryModel
from kvant.engine.request import Request, Sequence, clear_traceback_frames
from kvant.errors import CacheError
from kvant.generation.decoder import TransformersDecoder, make_decoder
from kvant.generation.settings import NGRAM
from kvant.generation.speculation import (
    DRAFT_SPEC,
    USUAL_DECAY,
    Acceptance,
    AcceptanceRate,
    DraftSizer,
    DraftTarget,
    NGramDrafter,
    Proposal,
)
from kvant.planner import plan

log = logging.getLogger("kvant")

Pairs = abc.Sequence[tuple[Request, Sequence]]
# Chooses the number of drafts. Its arguments are the proposals, and the seconds that it takes to
# draft one token for every sequence.
ChooseCount = abc.Callable[[list[Proposal], float], int]
CATCH_UP_CHUNK = 256  # tokens that the draft model may prefill before a decode
PROBE_INTERVAL = 63  # decodes without drafts, after which a draft model proposes one again
MAX_DRAFT_TIMES = 5  # newest durations of a draft; the shortest counts
MAX_VOCABULARY_DIFFERENCE = 0.1  # relative; models pad the vocabulary of a tokenizer
MAX_FAILURES = 3  # of the draft model, after which it is not used any more


@dataclass(frozen=True)
class DraftMethod:
    """How an engine drafts: by n-grams, by a smaller model, or not at all."""

    max_drafts: int = 0  # 0: no drafts
    decoder: TransformersDecoder | None = None  # of the draft model

    @classmethod
    def make(cls, draft: Any, max_drafts: int, target: TransformersDecoder) -> DraftMethod:
        """Check an engine's `draft` and `max_drafts`; `target` decodes the engine's model."""
        if not 1 <= max_drafts <= MAX_DRAFTS:
            raise ValueError(f"max_drafts={max_drafts}: 1 to {MAX_DRAFTS} is needed")
        if draft is None:
            return cls()
        if isinstance(draft, str) and draft == NGRAM:
            return cls(max_drafts)
        is_model = isinstance(draft, nn.Module)
        name = type(draft).__name__ if is_model else repr(draft)
        decoder = make_decoder(draft) if is_model else None
        if not isinstance(decoder, TransformersDecoder):
            raise ValueError(f"draft={name}: {NGRAM!r}, a model of transformers, or None is needed")
        if decoder.model is target.model:
            raise ValueError(
                f"draft={name}: it is the model itself: pass a smaller one, or {NGRAM!r}"
            )
        if not Batch(decoder, decoder.make_cache(DRAFT_SPEC)).verifies_drafts_in_batch:
            raise ValueError(
                f"draft={name}: its sequences cannot be decoded and rewound in one batch: pass a "
                f"model with attention layers alone, or {NGRAM!r}"
            )
        own, others = decoder.vocab_size or 0, target.vocab_size or 0
        if abs(own - others) > MAX_VOCABULARY_DIFFERENCE * others:
            log.warning(
                "draft=%s: its vocabulary has %d tokens and that of %s has %d: if their tokenizers "
                "differ, nearly all drafts will be rejected",
                *(name, own, type(target.model).__name__, others),
            )
        return cls(max_drafts, decoder)

    def make_memory_model(self, num_idle: int, spare_divisor: int) -> MemoryModel | None:
        """Return what the caches of the draft model need, if there is one."""
        if self.decoder is None:
            return None
        return MemoryModel.from_plan(
            plan(self.decoder.model, DRAFT_SPEC, context=1),
            CATCH_UP_CHUNK,
            spare_divisor=spare_divisor,
            num_idle=num_idle * self.decoder.captures_graphs,
        )


class DraftChooser:
    """Choose the drafts of each decode, by the times of decodes and the accepted proposals."""

    def __init__(self, batch: Batch, method: DraftMethod) -> None:
        self._batch = batch
        self._max_drafts = method.max_drafts
        self._sizer = DraftSizer(max(1, method.max_drafts))
        self._drafts: Drafts = NGramDrafts()
        if method.decoder is not None:
            self._drafts = ModelDrafts(method.decoder, batch)

    def choose_drafts(self, pairs: Pairs) -> list[list[int]]:
        """Return the drafts of each sequence that the next decode verifies."""
        limit = 0
        if self._max_drafts:
            limit = self._batch.count_max_drafts([sequence for _, sequence in pairs])
        if not limit:
            return [list[int]()] * len(pairs)

        def choose_count(proposals: list[Proposal], draft_seconds: float) -> int:
            recomputes = self._batch.caches.empty_cache.is_recurrent
            return self._sizer.choose_num_drafts(
                proposals, limit, recomputes=recomputes, draft_seconds=draft_seconds
            )

        # Leave room for the token that follows the accepted drafts.
        limits = [
            max(0, min(self._max_drafts, request.outputs[sequence.choice].num_remaining - 1))
            for request, sequence in pairs
        ]
        return self._drafts.propose_drafts(pairs, limits, choose_count)

    def forget(self, sequences: abc.Iterable[Sequence]) -> None:
        """Free what was kept to draft for finished sequences."""
        self._drafts.forget(sequences)

    def release_caches(self, sequences: abc.Iterable[Sequence]) -> None:
        """Free the caches of the draft model of sequences that are swapped out."""
        self._drafts.release_caches(sequences)

    def clear(self) -> None:
        """Free all memory. Forwards are captured again."""
        self._drafts.clear()
        self._sizer.forget_captures()

    @property
    def nbytes(self) -> int:
        """The bytes of the caches of the draft model."""
        return self._drafts.nbytes

    def record_decode(
        self, num_sequences: int, num_new: int, seconds: float, *, is_steady: bool
    ) -> None:
        """Add the time of a decode of `num_new` tokens of each sequence.

        Ignore it if the sequences are decoded one by one. A decode before or during a capture is
        not steady.
        """
        if self._batch.ragged or num_sequences == 1:
            record = self._sizer.record_forward if is_steady else self._sizer.record_capture
            record(num_sequences, num_new, seconds)

    def record_failure(self, num_sequences: int, num_new: int) -> None:
        """Record that such a decode failed: it is not tried again soon."""
        self._sizer.record_failure(num_sequences, num_new)


class Drafts(Protocol):
    """Propose drafts for sequences, and keep state for each of them."""

    def propose_drafts(
        self, pairs: Pairs, limits: list[int], choose_count: ChooseCount
    ) -> list[list[int]]:
        """Return the drafts of each sequence, at most its limit and the chosen number."""

    def forget(self, sequences: abc.Iterable[Sequence]) -> None: ...

    def release_caches(self, sequences: abc.Iterable[Sequence]) -> None: ...

    def clear(self) -> None: ...

    @property
    def nbytes(self) -> int: ...


@dataclass
class NGramState:
    """The n-grams of a sequence, and how often its drafts are accepted."""

    drafter: NGramDrafter
    acceptance: Acceptance


class NGramDrafts:
    """Drafts from n-gram lookups: they are nearly free, so they precede the choice of a number.

    A new sequence is expected to repeat itself as much as those before it.
    """

    nbytes = 0

    def __init__(self) -> None:
        self._states: dict[Sequence, NGramState] = {}
        self._usual_rate = AcceptanceRate(decay=USUAL_DECAY)

    def propose_drafts(
        self, pairs: Pairs, limits: list[int], choose_count: ChooseCount
    ) -> list[list[int]]:
        all_drafts, proposals = list[list[int]](), list[Proposal]()
        for (_, sequence), limit in zip(pairs, limits, strict=True):
            state = self._states.get(sequence)
            if state is None:
                state = NGramState(NGramDrafter(), Acceptance.start_from(self._usual_rate))
                self._states[sequence] = state
            drafts = state.drafter.propose_drafts(sequence.tokens, limit) if limit else []
            state.acceptance.record_proposal(sequence.tokens, drafts)
            all_drafts.append(drafts)
            proposals.append(Proposal(len(drafts), state.acceptance))
        count = choose_count(proposals, 0.0) if any(all_drafts) else 0
        return [drafts[:count] for drafts in all_drafts]

    def forget(self, sequences: abc.Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._states.pop(sequence, None)

    def release_caches(self, sequences: abc.Iterable[Sequence]) -> None:
        """Do nothing: indexes are kept."""

    def clear(self) -> None:
        self._states.clear()


@dataclass(eq=False)
class ModelState:
    """A sequence of the draft model, and how often its drafts are accepted.

    All tokens of the sequence but the newest are cached.
    """

    sequence: Sequence
    num_equal: int = 0  # known length of the prefix shared with the engine's sequence
    is_readable: bool = True  # whether the draft model's vocabulary has all its tokens
    acceptance: Acceptance = field(default_factory=Acceptance)

    def find_divergence(self, tokens: list[int]) -> int:
        """Return the length of the prefix shared with `tokens`."""
        own = self.sequence.tokens
        equal, shortest = self.num_equal, min(len(own), len(tokens))
        while equal < shortest and own[equal] == tokens[equal]:
            equal += 1
        self.num_equal = equal
        return equal


class ModelDrafts:
    """Drafts of a smaller model, whose sequences decode in one batch, too.

        tokens of the engine    ... a b c      c is the newest; neither model has cached it
        draft model             ... a b [c]    proposes d (forward of c), e (of d), f (of e)
        verified                ... a b c d e x    f is rejected, x was sampled in its place
        draft model             ... a b c d e  rewound; the next forward is of x

    A forward for each draft costs time. So the number is chosen first. Where drafts do not pay, one
    is proposed now and then and compared with the token that comes. The draft model prefills
    prompts in chunks, and only before decodes for which it would draft.
    """

    def __init__(self, decoder: TransformersDecoder, batch: Batch) -> None:
        """Draft with the model of `decoder` for the sequences of `batch`."""
        backend = batch.caches.empty_cache.backend
        self._batch = Batch(decoder, decoder.make_cache(DRAFT_SPEC), backend)
        self._vocab_size = batch.decoder.vocab_size
        self._states: dict[Sequence, ModelState] = {}
        # Seconds of one draft of each sequence, by the number of sequences.
        self._draft_times: dict[int, deque[float]] = {}
        self._num_skipped = 0  # decodes since drafts were proposed
        self._num_failures = 0

    @property
    def nbytes(self) -> int:
        return self._batch.caches.stats([])["nbytes_held"]

    def propose_drafts(
        self, pairs: Pairs, limits: list[int], choose_count: ChooseCount
    ) -> list[list[int]]:
        try:
            return self._propose(pairs, limits, choose_count)
        except Exception as error:  # the requests do not depend on drafts
            clear_traceback_frames(error)
            self.forget([sequence for _, sequence in pairs])
            self._num_failures += 1
            text = repr(error)  # a log handler may store the error, and with it our caches
            log.warning(
                "the draft model failed %d of at most %d times: %s",
                *(self._num_failures, MAX_FAILURES, text),
            )
            return [list[int]()] * len(pairs)

    def forget(self, sequences: abc.Iterable[Sequence]) -> None:
        sequences = [*sequences]
        self.release_caches(sequences)
        for sequence in sequences:
            self._states.pop(sequence, None)

    def release_caches(self, sequences: abc.Iterable[Sequence]) -> None:
        for sequence in sequences:
            if (state := self._states.get(sequence)) is not None:
                self._batch.caches.release([state.sequence])
                state.sequence, state.num_equal = Sequence([]), 0

    def clear(self) -> None:
        self._states.clear()
        self._batch.clear()

    def _propose(
        self, pairs: Pairs, limits: list[int], choose_count: ChooseCount
    ) -> list[list[int]]:
        no_drafts = [list[int]()] * len(pairs)
        if self._num_failures >= MAX_FAILURES:
            return no_drafts
        states = [self._get_state(sequence) for _, sequence in pairs]
        counts = [
            self._limit_count(pair, limit, state)
            for pair, limit, state in zip(pairs, limits, states, strict=True)
        ]
        chosen = choose_count(*self._make_choice_arguments(states, counts))
        is_probe = not chosen
        self._num_skipped += is_probe
        if is_probe and self._num_skipped < PROBE_INTERVAL:
            return no_drafts
        ready = self._catch_up(
            [pair for pair, count in zip(pairs, counts, strict=True) if count],
            [state for state, count in zip(states, counts, strict=True) if count],
        )
        if len(ready) < sum(count > 0 for count in counts):  # fewer drafts may not pay
            counts = [n * (s in ready) for n, s in zip(counts, states, strict=True)]
            chosen = chosen and choose_count(*self._make_choice_arguments(states, counts))
        counts = [min(1 if is_probe else chosen, count) for count in counts]
        if not any(counts):
            return no_drafts
        self._num_skipped = 0
        drafts = self._decode_drafts(pairs, states, counts)
        for (_, sequence), state, count, proposal in zip(
            pairs, states, counts, drafts, strict=True
        ):
            if count and not proposal:  # as good as a wrong draft
                state.acceptance.record_rejection()
            state.acceptance.record_proposal(sequence.tokens, proposal)
        return no_drafts if is_probe else drafts

    def _limit_count(self, pair: tuple[Request, Sequence], limit: int, state: ModelState) -> int:
        """Return how many drafts of a sequence may be made, at most `limit`."""
        request, sequence = pair
        num_tokens, max_context = len(sequence.tokens), self._batch.decoder.max_context
        num_unread = num_tokens - len(state.sequence.tokens)
        num_remaining = request.outputs[sequence.choice].num_remaining
        if not state.is_readable or num_unread // CATCH_UP_CHUNK >= num_remaining:
            return 0
        if sequence.layout.images:  # the draft model would not see them
            return 0
        return limit if max_context is None else max(0, min(limit, max_context - num_tokens))

    def _make_choice_arguments(
        self, states: list[ModelState], counts: list[int]
    ) -> tuple[list[Proposal], float]:
        """Return the arguments of `ChooseCount`."""
        proposals = [Proposal(n, s.acceptance) for n, s in zip(counts, states, strict=True)]
        times = self._draft_times.get(sum(count > 0 for count in counts), ())
        return proposals, min(times, default=0.0)

    def _get_state(self, sequence: Sequence) -> ModelState:
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = ModelState(Sequence([]))
        return state

    def _catch_up(self, pairs: Pairs, states: list[ModelState]) -> list[ModelState]:
        """Rewind rejected drafts, and prefill what is missing.

        Return the sequences whose caches lack at most the two newest tokens.
        """
        caches, vocab_size = self._batch.caches, self._batch.decoder.vocab_size
        for (_, sequence), state in zip(pairs, states, strict=True):
            own, equal = state.sequence, state.find_divergence(sequence.tokens)
            # After the rewind below, `own.tokens` is a prefix of the engine's tokens, and all of it
            # but the last token is cached.
            length = min(equal, caches.count_tokens(own), len(sequence.tokens) - 1)
            unread = sequence.tokens[length:]
            state.is_readable = vocab_size is None or max(unread) < vocab_size
            own.tokens = sequence.tokens[: length + 1]
            state.num_equal = length + 1
        caches.rewind([state.sequence for state in states])
        budget, ready = CATCH_UP_CHUNK, list[ModelState]()
        for (_, sequence), state in zip(pairs, states, strict=True):
            own, tokens = state.sequence, sequence.tokens
            num_missing = len(tokens) - len(own.tokens)
            if not state.is_readable:
                continue
            is_new = num_missing > 0 and len(own.tokens) == 1
            if (num_missing > 1 or is_new) and (count := min(num_missing, budget)):
                budget -= count
                caches.extract([own])
                length = len(own.tokens) - 1
                own.tokens = tokens[: length + count]
                self._batch.prefill(own, count)
                own.tokens = tokens[: length + count + 1]
                state.num_equal = len(own.tokens)
                num_missing -= count
            if num_missing <= 1 and len(own.tokens) > 1:
                ready.append(state)
        return ready

    def _decode_drafts(
        self, pairs: Pairs, states: list[ModelState], counts: list[int]
    ) -> list[list[int]]:
        """Return `counts[i]` drafts of each sequence, fewer where none can be sampled."""
        drafts, texts = [list[int]() for _ in pairs], [[*sequence.tokens] for _, sequence in pairs]
        active = [index for index, count in enumerate(counts) if count]
        num_sequences, begin = len(active), time.perf_counter()
        num_unsteady = self._batch.decoder.num_unsteady_forwards
        newest = [pairs[i][1].tokens[len(states[i].sequence.tokens) :] for i in active]
        while active:
            sequences = [states[index].sequence for index in active]
            logits, errors = self._batch.decode(sequences, newest)
            for error in errors.values():
                raise error
            if logits.shape[1] <= max(map(len, newest)):
                # `Batch.decode` fell back to one token of each sequence, but some needed two.
                raise CacheError(
                    "the draft model could not decode two tokens per sequence in one forward"
                )
            next_active = list[int]()
            for index, extra, rows in zip(active, newest, logits, strict=True):
                request, sequence = pairs[index]
                target = DraftTarget(request.samplers[sequence.choice], self._vocab_size)
                own = states[index].sequence
                own.tokens += extra
                token = target.sample_draft(rows[len(extra)], texts[index])
                own.tokens.append(PADDING_TOKEN if token is None else token)
                if token is not None:
                    drafts[index].append(token)
                    texts[index].append(token)
                    if len(drafts[index]) < counts[index]:
                        next_active.append(index)
            if any(newest):
                self._batch.caches.rewind(sequences)  # drops padding
            active, newest = next_active, [[] for _ in next_active]
        num_drafts = max(map(len, drafts))
        if num_drafts and self._batch.decoder.num_unsteady_forwards == num_unsteady:
            times = self._draft_times.setdefault(num_sequences, deque(maxlen=MAX_DRAFT_TIMES))
            times.append((time.perf_counter() - begin) / num_drafts)
        return drafts

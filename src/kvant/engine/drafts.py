"""The drafts of an engine: the tokens that a decode verifies besides the newest ones.

They are the tokens that followed an earlier copy of a sequence's last ones (`NGramDrafts`), or
those of a smaller model (`ModelDrafts`). A decode verifies the same number of drafts of each
sequence, the one with the highest predicted speed: while a forward mostly reads weights, more
tokens take little more time. Sequences with fewer drafts are padded. Rejected drafts and padding
are dropped from the caches afterwards.
"""

from __future__ import annotations

import logging
import math
import time
from collections import abc, deque
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from kvant.engine.batch import MAX_DRAFTS, Batch
from kvant.engine.memory import MemoryModel
from kvant.engine.request import Request, Sequence
from kvant.generation.decoder import TransformersDecoder, make_decoder
from kvant.generation.settings import NGRAM
from kvant.generation.speculation import (
    DRAFT_SPEC,
    Acceptance,
    DraftSizer,
    DraftTarget,
    ModelDrafter,
    NGramDrafter,
    Proposal,
)
from kvant.planner import plan

log = logging.getLogger("kvant")

Pairs = abc.Sequence[tuple[Request, Sequence]]
# Returns the number of drafts by the proposals, and the seconds that one draft of each takes.
ChooseCount = abc.Callable[[list[Proposal], float], int]
MAX_CAUGHT_UP = 256  # tokens of a sequence that the draft model prefills between two decodes
NUM_SKIPPED = 64  # decodes without drafts after which a draft model is tried again
MAX_DRAFT_TIMES = 5  # the newest ones, of which the fastest counts


@dataclass(frozen=True)
class DraftMethod:
    """How an engine drafts: by n-grams, by a smaller model, or not at all."""

    max_drafts: int = 0  # 0: no drafts
    decoder: TransformersDecoder | None = None  # of the draft model

    @classmethod
    def make(cls, draft: Any, max_drafts: int, model: Any) -> DraftMethod:
        """Check the arguments of an engine of `model`."""
        if not 1 <= max_drafts <= MAX_DRAFTS:
            raise ValueError(f"max_drafts={max_drafts}: 1 to {MAX_DRAFTS} is needed")
        if draft is None:
            return cls()
        if draft == NGRAM:
            return cls(max_drafts)
        decoder = None if isinstance(draft, str) else make_decoder(draft)
        if not isinstance(decoder, TransformersDecoder):
            name = repr(draft) if isinstance(draft, str) else type(draft).__name__
            raise ValueError(f"draft={name}: {NGRAM!r}, a model of transformers, or None is needed")
        if decoder.model is model:
            raise ValueError("draft: the model itself: pass a smaller model of the same tokenizer")
        return cls(max_drafts, decoder)

    def make_memory_model(self, max_chunk: int) -> MemoryModel | None:
        """Return what the caches of the draft model need, if there is one."""
        if self.decoder is None:
            return None
        return MemoryModel.from_plan(plan(self.decoder.model, DRAFT_SPEC, context=1), max_chunk)


class DraftChooser:
    """Choose the drafts of each decode, by the times of decodes and the accepted proposals."""

    def __init__(self, batch: Batch, method: DraftMethod) -> None:
        self._batch = batch
        self._max_drafts = method.max_drafts
        self._sizer = DraftSizer(max(1, method.max_drafts))
        self._drafts: NGramDrafts | ModelDrafts = (
            NGramDrafts() if method.decoder is None else ModelDrafts(method.decoder, batch)
        )

    def choose_drafts(self, pairs: Pairs) -> list[list[int]]:
        """Return the drafts of each sequence that the next decode verifies."""
        no_drafts = [list[int]()] * len(pairs)
        limit = 0
        if self._max_drafts:
            limit = self._batch.count_max_drafts([sequence for _, sequence in pairs])
        if not limit:
            return no_drafts
        recomputes = self._batch.caches.empty_cache.is_recurrent

        def choose_count(proposals: list[Proposal], draft_seconds: float) -> int:
            return self._sizer.choose_num_drafts(
                proposals, limit, recomputes=recomputes, draft_seconds=draft_seconds
            )

        # At least one draft and the token after it may still be generated.
        limits = [
            max(0, min(self._max_drafts, request.outputs[sequence.choice].num_remaining - 1))
            for request, sequence in pairs
        ]
        return self._drafts.propose_drafts(pairs, limits, choose_count)

    def forget(self, sequences: abc.Iterable[Sequence]) -> None:
        """Free what was kept to draft for these sequences."""
        self._drafts.forget(sequences)

    def record_decode(self, num_sequences: int, num_new: int, seconds: float) -> None:
        """Add the time of a decode of `num_new` tokens of each sequence.

        Ignore it if the sequences are decoded one by one.
        """
        if self._batch.ragged or num_sequences == 1:
            self._sizer.record_forward(num_sequences, num_new, seconds)

    def record_failure(self, num_sequences: int, num_new: int) -> None:
        """Record that such a decode failed: it is not tried again soon."""
        self._sizer.record_forward(num_sequences, num_new, math.inf)


class Drafts(Protocol):
    """Propose drafts for sequences, and keep what this needs of each of them."""

    def propose_drafts(
        self, pairs: Pairs, limits: list[int], choose_count: ChooseCount
    ) -> list[list[int]]:
        """Return the drafts of each sequence, at most its limit and the chosen number."""

    def forget(self, sequences: abc.Iterable[Sequence]) -> None: ...


@dataclass
class NGramState:
    """The index of a sequence, and how often its drafts are accepted."""

    drafter: NGramDrafter
    acceptance: Acceptance = field(default_factory=Acceptance)


class NGramDrafts:
    """Drafts that followed earlier copies; they cost next to nothing, so all are looked up."""

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[Sequence, NGramState] = WeakKeyDictionary()

    def propose_drafts(
        self, pairs: Pairs, limits: list[int], choose_count: ChooseCount
    ) -> list[list[int]]:
        drafts, proposals = list[list[int]](), list[Proposal]()
        for (_, sequence), limit in zip(pairs, limits, strict=True):
            state = self._states.get(sequence)
            if state is None:
                state = self._states[sequence] = NGramState(NGramDrafter())
            found = state.drafter.propose_drafts(sequence.tokens, limit) if limit else []
            state.acceptance.record_proposal(sequence.tokens, found)
            drafts.append(found)
            proposals.append(Proposal(len(found), state.acceptance))
        count = choose_count(proposals, 0.0)
        return [found[:count] for found in drafts]

    def forget(self, sequences: abc.Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._states.pop(sequence, None)


@dataclass
class ModelState:
    """The draft model's cache of a sequence, and how often its drafts are accepted."""

    drafter: ModelDrafter
    acceptance: Acceptance = field(default_factory=Acceptance)


class ModelDrafts:
    """Drafts of a smaller model, which reads each sequence into a cache of its own.

    A forward for each draft costs time. So the number is chosen first, and where drafts do not pay,
    one is proposed now and then, to see whether it still is so. A long prompt is read in parts,
    between decodes.
    """

    def __init__(self, decoder: TransformersDecoder, batch: Batch) -> None:
        self._decoder = decoder
        self._batch = batch
        self._states: WeakKeyDictionary[Sequence, ModelState] = WeakKeyDictionary()
        self._draft_times: deque[float] = deque(maxlen=MAX_DRAFT_TIMES)  # of one draft
        self._num_skipped = 0  # decodes since drafts were proposed
        self._has_failed = False

    def propose_drafts(
        self, pairs: Pairs, limits: list[int], choose_count: ChooseCount
    ) -> list[list[int]]:
        no_drafts = [list[int]()] * len(pairs)
        if self._has_failed:
            return no_drafts
        try:
            return self._propose(pairs, limits, choose_count) or no_drafts
        except Exception as error:  # the requests do not depend on drafts
            self._has_failed = True
            self._states.clear()
            log.warning("drafts end: the draft model failed: %r", error)
            return no_drafts

    def forget(self, sequences: abc.Iterable[Sequence]) -> None:
        for sequence in sequences:
            self._states.pop(sequence, None)

    def _propose(
        self, pairs: Pairs, limits: list[int], choose_count: ChooseCount
    ) -> list[list[int]]:
        """Return the drafts of each sequence; an empty list if none are worth their time."""
        states = [self._get_state(sequence) for _, sequence in pairs]
        counts = [
            limit if limit and state.drafter.catch_up(sequence.tokens, MAX_CAUGHT_UP) else 0
            for (_, sequence), limit, state in zip(pairs, limits, states, strict=True)
        ]
        num_ready = sum(count > 0 for count in counts)
        proposals = [Proposal(n, s.acceptance) for n, s in zip(counts, states, strict=True)]
        chosen = choose_count(proposals, num_ready * min(self._draft_times, default=0.0))
        if not chosen:
            self._num_skipped += 1
            if self._num_skipped < NUM_SKIPPED or not num_ready:
                return []
            chosen = 1
        self._num_skipped = 0
        begin, drafts = time.perf_counter(), list[list[int]]()
        vocab_size = self._batch.decoder.vocab_size or 0
        for (request, sequence), count, state in zip(pairs, counts, states, strict=True):
            target = DraftTarget(request.samplers[sequence.choice], vocab_size)
            found = list[int]()
            if count:
                found = state.drafter.propose_drafts(sequence.tokens, min(chosen, count), target)
            state.acceptance.record_proposal(sequence.tokens, found)
            drafts.append(found)
        if num_drafts := sum(map(len, drafts)):
            self._draft_times.append((time.perf_counter() - begin) / num_drafts)
        return drafts

    def _get_state(self, sequence: Sequence) -> ModelState:
        state = self._states.get(sequence)
        if state is None:
            state = self._states[sequence] = ModelState(ModelDrafter(self._decoder))
        return state

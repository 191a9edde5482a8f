"""The drafts of an engine: the tokens that a decode verifies besides the newest ones.

Every sequence proposes the tokens that followed an earlier copy of its last ones. A decode verifies
the same number of drafts of each sequence, the one with the highest predicted speed: while a
forward mostly reads weights, more tokens take little more time. Sequences with fewer drafts are
padded. Rejected drafts and padding are dropped from the caches afterwards.
"""

from __future__ import annotations

import math
from collections import abc

from kvant.engine.batch import Batch
from kvant.engine.request import Request, Sequence
from kvant.generation.speculation import DraftSizer, Proposal


class DraftChooser:
    """Choose the drafts of each decode, by the times of decodes and the accepted proposals."""

    def __init__(self, batch: Batch, max_drafts: int) -> None:
        self._batch = batch
        self._sizer = DraftSizer(max_drafts)
        self._max_drafts = max_drafts

    def choose_drafts(self, pairs: abc.Sequence[tuple[Request, Sequence]]) -> list[list[int]]:
        """Return the drafts of each sequence that the next decode verifies."""
        no_drafts = [list[int]()] * len(pairs)
        if all(sequence.drafter is None for _, sequence in pairs):
            return no_drafts
        limit = self._batch.count_max_drafts([sequence for _, sequence in pairs])
        if not limit:
            return no_drafts
        proposals = [
            Proposal(self._propose_drafts(request, sequence), sequence.acceptance)
            for request, sequence in pairs
        ]
        recomputes = self._batch.caches.empty_cache.is_recurrent
        count = self._sizer.choose_num_drafts(proposals, limit, recomputes=recomputes)
        return [drafts[:count] for drafts, _ in proposals]

    def record_decode(self, num_sequences: int, num_new: int, seconds: float) -> None:
        """Add the time of a decode of `num_new` tokens of each sequence, in one forward or not."""
        if self._batch.ragged or num_sequences == 1:
            self._sizer.record_forward(num_sequences, num_new, seconds)

    def record_failure(self, num_sequences: int, num_new: int) -> None:
        """Record that such a decode failed: it is not tried again soon."""
        self._sizer.record_forward(num_sequences, num_new, math.inf)

    def _propose_drafts(self, request: Request, sequence: Sequence) -> list[int]:
        """Propose drafts, if at least one and the token after it may still be generated."""
        if sequence.drafter is None:
            return []
        limit = min(self._max_drafts, request.outputs[sequence.choice].num_remaining - 1)
        drafts = sequence.drafter.propose_drafts(sequence.tokens, limit) if limit > 0 else []
        sequence.acceptance.record_proposal(sequence.tokens, drafts)
        return drafts

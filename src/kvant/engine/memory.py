"""Predict the bytes of sequences before they are allocated, without tensors.

All sequences share pools of pages. An open page holds rows that are not encoded yet; a sealed page
holds encoded ones. Each kind has its own pool, which frees memory only once it is empty. So the
peak of each pool counts: a long sequence needs sealed pages, and cannot use the free open pages
that many short sequences left.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from kvant.engine.request import NO_SLOTS, Request
from kvant.page_table import Ints, LayerGroup
from kvant.pages.pool import Pools, bound_pages
from kvant.planner import Plan

MAX_IDLE_TOKENS = 64  # tokens of an idle sequence, which pads a batch
STATE_COPIES = 4  # a recurrent state and its checkpoint; each exists twice during a copy


@dataclass(frozen=True)
class MemoryModel:
    """Count the slots of a sequence by its length.

    A slot is a page of a pool, or room for `STATE_COPIES` copies of a recurrent state. Counts are
    arrays in this order:

        [open of group 0, sealed of group 0, open of group 1, ..., state, image, draft slots]

    The image column counts tokens of images, whose features lie outside the pools.
    """

    groups: tuple[LayerGroup, ...]
    slot_nbytes: Ints  # bytes of each slot
    max_chunk: int  # tokens of a prefill chunk
    num_idle: int = 0  # sequences that pad a batch
    max_drafts: int = 0  # tokens that a decode stores until they are rejected
    draft_memory: MemoryModel | None = None  # of the draft model, which has pools of its own

    @cached_property
    def is_pooled(self) -> Ints:
        """1 for slots of pools, which keep their peak; 0 for others."""
        drafts = NO_SLOTS if self.draft_memory is None else self.draft_memory.is_pooled
        return self._append_others([1] * self._num_own_slots, drafts)

    @property
    def _num_own_slots(self) -> int:
        """Columns of the model's own pools and states."""
        return 2 * len(self.groups) + 1

    @classmethod
    def from_plan(
        cls,
        plan: Plan,
        max_chunk: int,
        *,
        spare_divisor: int = 0,
        num_idle: int = 0,
        max_drafts: int = 0,
        draft_memory: MemoryModel | None = None,
        image_token_nbytes: int = 0,
    ) -> MemoryModel:
        """Take slot sizes from `plan`; `image_token_nbytes` are those of an image token's features.

        A `spare_divisor` adds 1 / `spare_divisor` to each page: on a GPU, a pool that grows
        reserves that much more than it needs.
        """
        sizes = [size for open_sealed in plan.page_nbytes.values() for size in open_sealed]
        if spare_divisor:
            sizes = [size + -(-size // spare_divisor) for size in sizes]
        sizes += [STATE_COPIES * plan.state_nbytes, image_token_nbytes]
        if draft_memory is not None:
            sizes += draft_memory.slot_nbytes.tolist()
        groups = tuple(plan.page_nbytes)
        return cls(groups, np.array(sizes), max_chunk, num_idle, max_drafts, draft_memory)

    def compute_nbytes(self, slots: Ints) -> int:
        """Return the bytes of new pools with `slots` in use."""
        return int((slots + self.pool_overhead) @ self.slot_nbytes)

    def count_slots(self, length: int) -> Ints:
        """Return the peak slots of a sequence that grows to a length."""
        counts = []
        for group in self.groups:
            num_open, num_sealed = _max_pages(group, group.capacity or length)
            copies = 1 if group.pruning is None else 2  # a prune stores before it frees
            counts += [copies * num_open, copies * num_sealed]
        return self._append_others([*counts, length > 0])

    def count_image_slots(self, num_tokens: int) -> Ints:
        """Return the slots of the features of `num_tokens` image tokens."""
        return self._append_others([0] * self._num_own_slots, num_image_tokens=num_tokens)

    def count_draft_slots(self, length: int) -> Ints:
        """Return the peak slots of the draft model's cache of such a sequence."""
        drafts = NO_SLOTS if self.draft_memory is None else self.draft_memory.count_slots(length)
        return self._append_others([0] * self._num_own_slots, drafts)

    def _append_others(
        self, counts: list[int], draft_counts: Ints = NO_SLOTS, num_image_tokens: int = 0
    ) -> Ints:
        """Append the slots of images, and of the draft model if there is one, to the model's."""
        counts = [*counts, num_image_tokens]
        if self.draft_memory is None:
            return np.array(counts)
        size = len(self.draft_memory.slot_nbytes)
        return np.concatenate([counts, np.broadcast_to(draft_counts, size)])

    def count_shared_slots(self, length: int) -> Ints:
        """Return the slots that forks made at `length` keep sharing, however long they grow."""
        counts = []
        for group in self.groups:
            is_permanent = group.window is None and group.pruning is None
            counts.append(length // group.page if is_permanent and not group.seals else 0)
            counts.append(group.paging.count_due_pages(length) if is_permanent else 0)
        return self._append_others([*counts, 0])

    def count_page_slots(
        self, pages: Mapping[LayerGroup, tuple[int, int]], num_caches: int = 0
    ) -> Ints:
        """Return the slots of (open, sealed) pages by group, and of the states of `num_caches`.

        The states of `STATE_COPIES` caches fit in one slot.
        """
        counts = [count for group in self.groups for count in pages.get(group, (0, 0))]
        return self._append_others([*counts, -(-num_caches // STATE_COPIES)])

    @cached_property
    def pool_overhead(self) -> Ints:
        """Slots that are needed once, however many sequences there are.

        They are growth steps of pools, idle sequences, and pages that a window frees only after a
        chunk.
        """
        counts = []
        for group in self.groups:
            num_outside = 0 if group.window is None else self.max_chunk // group.page + 2
            counts += [num_outside + Pools.make(group).open.step - 1] * 2
        drafts = NO_SLOTS if self.draft_memory is None else self.draft_memory.pool_overhead
        idle = self.num_idle * self.count_slots(MAX_IDLE_TOKENS)
        return self._append_others([*counts, 0], drafts) + idle

    def count_transient_slots(self, *prompt_lengths: int) -> Ints:
        """Return the most extra pages that the prefill of one of these prompts needs.

        Prompts are prefilled one at a time, so this is needed once. The last chunk seals open
        pages, and they are freed only after its forward. Pages of a window are in `pool_overhead`.
        """
        lengths, counts = np.array(prompt_lengths, np.int64), []
        for group in self.groups:
            nums_open = [0]
            if group.seals and group.window is None:
                nums_sealed = group.find_first_open(lengths).tolist()
                pairs = zip(prompt_lengths, nums_sealed, strict=True)
                nums_open += [min(count, _max_pages(group, n)[0]) for n, count in pairs]
            counts += [max(nums_open), 0]
        return self._append_others([*counts, 0])

    def count_fork_slots(self, num_prompt_tokens: int, num_fork_tokens: int) -> Ints:
        """Return the slots that a second pass needs besides those of the prompt.

        The pass repeats the prompt on forks of its cache, one after another, to score its KV rows.
        A fork copies a page and a state, opens pages, and seals those that fall due. A fork of 0
        tokens needs none.
        """
        if not num_fork_tokens:
            return np.zeros(len(self.slot_nbytes), np.int64)
        counts = []
        for group in self.groups:
            num_due = group.paging.count_due_pages(num_prompt_tokens + num_fork_tokens)
            num_due -= group.paging.count_due_pages(num_prompt_tokens)
            counts += [num_fork_tokens // group.page + 2, num_due]
        return self._append_others([*counts, 1])


# With a tight limit this is called for every sequence and token.
_max_pages = lru_cache(1 << 16)(bound_pages)


class MemoryBudget:
    """Count the slots of prefixes and requests, and compare their bytes with a limit.

    Pools keep their peak size, so the peak of each is tracked, too. Slots of requests are counted

        committed    at their longest lengths
        allocated    as they are now
        charged      as they count towards the limit: committed, or with overcommit allocated
    """

    def __init__(
        self, memory_model: MemoryModel, max_bytes: int | None, overcommit: float = 1.0
    ) -> None:
        """Limit the bytes to `max_bytes`, if it is given.

        With `overcommit` above 1, any request may be swapped out. The sequences of a request then
        count in full, because swap files share no pages.
        """
        self.memory_model = memory_model
        self.max_bytes = max_bytes
        self.overcommit = overcommit
        self.may_swap = overcommit > 1
        self.zero_slots: Ints = np.zeros(len(memory_model.slot_nbytes), np.int64)
        self.has_prefixes = False  # whether prefixes are on
        self.prefix_slots = self.zero_slots  # slots of cached prefixes
        self.peak_slots = self.zero_slots  # since the pools were freed

    def compute_nbytes(self, slots: Ints) -> int:
        """Return the bytes of the pools once `slots` are in use; pools keep their peak size."""
        return self.memory_model.compute_nbytes(np.maximum(self.peak_slots, slots))

    def fits(self, slots: Ints, extra_slots: Ints = NO_SLOTS) -> bool:
        """Return whether `slots` in the pools, and `extra_slots` outside them, fit the limit."""
        if self.max_bytes is None:
            return True
        extra_nbytes = int((extra_slots * self.memory_model.slot_nbytes).sum())
        return self.compute_nbytes(slots) + extra_nbytes <= self.max_bytes

    def fits_admission(self, request: Request, running: list[Request]) -> bool:
        """Return whether a waiting request may be admitted within the limit of bytes."""
        if self.max_bytes is None:
            return True
        committed = self.count_committed([*running, request])
        if not self.may_swap:
            return self.fits(committed)
        if request.is_swapped_out:
            # Its pages are read into new memory. If pools exist, they are then copied there, so
            # both copies must fit.
            second_copy = self.count_current(request) if self.peak_slots.any() else NO_SLOTS
            return self.fits(committed, extra_slots=second_copy)
        chunk_end = request.num_computed_tokens + self.memory_model.max_chunk
        chunk = self.memory_model.count_slots(min(request.num_prompt_tokens, chunk_end))
        chunk = chunk - request.shared_slots
        chunk = chunk + self.memory_model.count_transient_slots(request.num_prompt_tokens)
        chunk = chunk + self.memory_model.count_image_slots(request.layout.num_image_tokens)
        if not self.fits(self.count_allocated(running) + chunk):
            return False
        return self.memory_model.compute_nbytes(committed) <= self.overcommit * self.max_bytes

    def fits_restore(self, request: Request, length: int, running: list[Request]) -> bool:
        """Return whether `length` tokens of a running request may come from a store."""
        slots = self.count_charged(running)
        if self.may_swap:
            slots = slots + self.count_growth(request, max(length, request.num_computed_tokens))
        return self.fits(slots)

    def record_slots(self, slots: Ints) -> None:
        """Raise the peak to `slots`."""
        self.peak_slots = np.maximum(self.peak_slots, slots * self.memory_model.is_pooled)

    @property
    def has_reclaimable_memory(self) -> bool:
        """Whether pools have memory, and no prefix is in them."""
        return bool(self.peak_slots.any()) and not self.prefix_slots.any()

    # ---- slots of requests

    def count_charged(self, requests: list[Request]) -> Ints:
        """Return the slots that count towards the limit: committed; with overcommit, allocated."""
        count = self.count_allocated if self.may_swap else self.count_committed
        return count(requests)

    def count_committed(self, requests: list[Request]) -> Ints:
        """Return the most slots that prefixes and `requests` may need."""
        peaks = (self.count_peak(request) - request.shared_slots for request in requests)
        prompt_lengths = (request.num_prompt_tokens for request in requests)
        transient = self.memory_model.count_transient_slots(*prompt_lengths)
        return sum(peaks, self.prefix_slots) + transient

    def count_allocated(self, requests: list[Request]) -> Ints:
        """Return the slots that prefixes and `requests` hold now."""
        slots = (self.count_current(request) - request.shared_slots for request in requests)
        return sum(slots, self.prefix_slots)

    def count_growth(self, request: Request, length: int, num_sequences: int = 1) -> Ints:
        """Return the slots that a request at a length needs beyond its current ones."""
        return self.count_at(request, length, num_sequences) - self._count_held(request)

    def count_current(self, request: Request) -> Ints:
        """Return the slots of a request; after its prefill, with those of a pending second pass."""
        num_prompt = request.num_prompt_tokens
        num_fork_tokens = request.num_fork_tokens if request.is_computed else 0
        fork = self.memory_model.count_fork_slots(num_prompt, num_fork_tokens)
        return self._count_held(request) + fork

    def _count_held(self, request: Request) -> Ints:
        """Return the slots of a request, without its newest token: the next forward stores it."""
        num_prompt = request.num_prompt_tokens
        if request.is_decoding:
            length = num_prompt + request.num_output_tokens - 1
            return self.count_at(request, length, request.num_sequences)
        # A store lookup reserves slots for the whole prompt.
        length = num_prompt if request.store_deadline_ms else request.num_computed_tokens
        return self.count_at(request, length, 1)

    def count_peak(self, request: Request, num_sequences: int | None = None) -> Ints:
        """Return the slots of `num_sequences` at the final length, plus those of a second pass.

        The default is all unfinished sequences.
        """
        count = request.num_sequences if num_sequences is None else num_sequences
        num_stored = max(request.max_new_tokens - 1, 0)  # the last new token is not stored
        num_drafts = self.memory_model.max_drafts if num_stored else 0
        num_prompt = request.num_prompt_tokens
        fork = self.memory_model.count_fork_slots(num_prompt, request.num_fork_tokens)
        return self.count_at(request, num_prompt + num_stored + num_drafts, count) + fork

    def count_at(self, request: Request, length: int, num_sequences: int) -> Ints:
        """Return the slots of `num_sequences` sequences of a request at a length.

        They share the pages of the prompt, unless they may be swapped out.
        """
        slots = num_sequences * self.memory_model.count_slots(length)
        if request.layout.num_image_tokens:
            slots = slots + self.memory_model.count_image_slots(request.layout.num_image_tokens)
        if request.max_new_tokens > 1:
            slots = slots + num_sequences * self.memory_model.count_draft_slots(length)
        if num_sequences == 1 or self.may_swap:
            return slots
        shared = self.memory_model.count_shared_slots(request.num_prompt_tokens)
        return slots - (num_sequences - 1) * shared

"""Choose the next action of an engine: what to prefill, decode, swap or evict.

The scheduler counts tokens and pages; it has no model, no tensors and no clock. The engine carries
out its actions: `Prefill` and `Decode` by the batch, in batch.py.

     add()
       v
    waiting  <--------------------------------------------------+
       v   memory for its longest length fits                   |
    running, not active: no room in max_sequences               |
       v                                                        |  SwapOut
    in a store lookup: store_deadline_ms > 0                    |  (overcommit > 1):
       v   finish_store_lookup(), or the deadline               |  is_swapped_out
    active, prefilling: num_computed_tokens < num_prompt_tokens |  until SwapIn
       v   last Prefill, then Repeats if a prune needs them     |
    active, decoding  ------------------------------------------+
       v   finish_sequence() of the last sequence; remove() at any time
    removed

With `overcommit` above 1, the newest request of the lowest priority is swapped out when memory runs
short. Prompts are prefilled in chunks, with decodes between them. No request overtakes the first
one that does not fit, so none starves. Cached prefixes are evicted when a request needs memory.
Requests of one adapter are decoded together, and adapters take turns. Some prunes need a second
pass over the prompt, in Repeat actions. With a store, one request may be admitted without room in
max_sequences, so that its store lookup starts early.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kvant.engine.actions import (
    Action,
    Decode,
    EncodeImage,
    Evict,
    ForwardAction,
    FreePools,
    LookUpStore,
    MatchPrefix,
    Prefill,
    Repeat,
    SwapIn,
    SwapOut,
)
from kvant.engine.chunk_sizer import ChunkSizer
from kvant.engine.memory import MemoryBudget, MemoryModel
from kvant.engine.request import NO_SLOTS, Request
from kvant.errors import CapacityError, ContextError
from kvant.page_table import Ints
from kvant.platform.sizes import format_size


@dataclass
class RequestQueue:
    """Waiting requests, and running ones; at most `max_sequences` sequences are active."""

    max_sequences: int
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)

    @property
    def num_sequences(self) -> int:
        """Unfinished sequences of active requests."""
        return sum(request.num_sequences for request in self.running if request.is_active)

    def has_capacity_for(self, request: Request) -> bool:
        """Return whether all sequences of a request fit in max_sequences."""
        return self.num_sequences + request.num_sequences <= self.max_sequences

    def activate(self, now_ms: int) -> None:
        """Activate running requests that have room now; end store waits whose deadline passed."""
        for request in self.running:
            request.is_active = request.is_active or self.has_capacity_for(request)
            if request.is_active and request.store_deadline_ms <= now_ms:
                request.store_deadline_ms = 0

    def find_next(self, now_ms: int) -> Request:
        """Return the first waiting request.

        High priority comes first, then swapped-out ones, low load of the tenant, early arrival.
        """

        def rank(request: Request) -> tuple[int, bool, int, int]:
            same_tenant = [other for other in self.running if other.tenant == request.tenant]
            load = sum(other.num_sequences for other in same_tenant)
            priority = request.compute_priority(now_ms)
            return -priority, not request.is_swapped_out, load, request.number

        return min(self.waiting, key=rank)

    def load(self, tenant: str | None = None) -> dict[str, int]:
        """Count active requests (running), all others (waiting), and active sequences.

        With `tenant`, only those of this tenant.
        """
        requests = [r for r in (*self.waiting, *self.running) if tenant in (None, r.tenant)]
        active = [request.num_sequences for request in requests if request.is_active]
        waiting = len(requests) - len(active)
        return {"waiting": waiting, "running": len(active), "sequences": sum(active)}

    def compute_timeout(self, now_ms: int) -> float | None:
        """Return the seconds until the next store deadline; None without one."""
        deadlines = {r.store_deadline_ms for r in self.running if r.is_active} - {0}
        return max(min(deadlines) - now_ms, 0) / 1e3 if deadlines else None


@dataclass
class Scheduler:
    """Choose the next action from the queue of requests and the memory promised to them."""

    memory_model: MemoryModel
    chunk_sizer: ChunkSizer
    max_bytes: int | None = None
    max_sequences: int = 16
    overcommit: float = 1.0
    chunk_seconds: float = math.inf  # of prefill between two decodes, for each prompt in prefill
    has_store: bool = False  # if so, the next request is admitted early, to look it up
    prefix_version: int = 0  # raised when prefixes gain slots
    may_evict: bool = True  # False: the last eviction found nothing, and nothing changed since
    _is_head_blocked: bool = False  # the first waiting request did not fit; nothing changed since

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_sequences", "overcommit"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ValueError(f"{name}={value}: 1 or more is needed")
        if not self.chunk_seconds > 0:
            raise ValueError(f"chunk_seconds={self.chunk_seconds}: must be above 0")
        if self.overcommit > 1 and self.max_bytes is None:
            raise ValueError(f"overcommit={self.overcommit} without max_bytes: set max_bytes, too")
        self.memory_budget = MemoryBudget(self.memory_model, self.max_bytes, self.overcommit)
        self.queue = RequestQueue(self.max_sequences)

    def check_request(self, request: Request) -> None:
        """Raise an error for a request that could never be served."""
        if (n := request.num_choices) > self.max_sequences:
            raise CapacityError(
                f"n={n} with max_sequences={self.max_sequences}: lower n or raise max_sequences"
            )
        budget = self.memory_budget
        transient = self.memory_model.count_transient_slots(request.num_prompt_tokens)
        need = self.memory_model.compute_nbytes(budget.count_peak(request) + transient)
        if self.max_bytes is not None and need > self.max_bytes:
            single = budget.count_peak(request, 1)  # a smaller n may help
            fits = self.memory_model.compute_nbytes(single + transient) <= self.max_bytes
            new = "" if request.is_embedding else f" and {request.max_new_tokens} new ones"
            raise (CapacityError if fits else ContextError)(
                f"{request.num_prompt_tokens} tokens{new} need "
                f"{format_size(need)} of a limit of {format_size(self.max_bytes)}: use a smaller "
                "format, a window, a shorter prompt, less max_new_tokens or n, or more max_bytes"
            )

    def add(self, request: Request) -> None:
        """Append a request to the waiting queue."""
        self.queue.waiting.append(request)
        self._is_head_blocked = False

    def choose_action(self, now_ms: int) -> Action | None:
        """Return the action that is due at `now_ms`; None if there is nothing to do."""
        if (first := self._admit(now_ms)) is not None:
            return first
        running = self.queue.running
        action = self.chunk_sizer.choose_forward(running, self.chunk_seconds)
        if action is None:
            can_free = self.memory_budget.has_reclaimable_memory and not running
            return FreePools() if can_free else None
        if isinstance(action, Prefill | EncodeImage) and self._needs_prefix_match(action.request):
            return MatchPrefix(action.request)
        if self.overcommit > 1:
            slots = self._count_slots_after(action)
            if not self.memory_budget.fits(slots):
                eviction = self._plan_eviction(slots, include_unwritten=True)
                return eviction or SwapOut(
                    max(running, key=lambda r: (-r.compute_priority(now_ms), r.number))
                )
            self.memory_budget.record_slots(slots)
        return action

    def complete(self, action: Action) -> None:
        """Update requests and memory after `action` was performed."""
        if isinstance(action, Prefill):
            request = action.request
            self.chunk_sizer.record_forward(action, self.queue.running)
            request.num_computed_tokens += action.count
            request.prefill_started = True
            request.num_output_tokens += request.is_decoding  # last prompt logits give a token
        elif isinstance(action, Repeat):
            self.chunk_sizer.record_forward(action, self.queue.running)
            action.request.num_output_tokens += action.request.is_decoding
        elif isinstance(action, EncodeImage):
            self.chunk_sizer.record_forward(action, self.queue.running)
        elif isinstance(action, Decode):
            self.chunk_sizer.record_forward(action, self.queue.running)
            for request in action.requests:
                request.num_output_tokens += 1
        elif isinstance(action, SwapOut):
            request = action.request
            request.is_swapped_out, request.shared_slots = True, NO_SLOTS  # files share no pages
            request.is_active, request.store_deadline_ms = False, 0
            self.queue.running.remove(request)
            self._is_head_blocked, self.may_evict = False, True
            self.queue.waiting.append(request)
        elif isinstance(action, SwapIn):
            action.request.is_swapped_out = False
        elif isinstance(action, FreePools):
            self.memory_budget.peak_slots = self.memory_budget.zero_slots
            self._is_head_blocked = False

    def finish_store_lookup(self, request: Request, length: int) -> bool:
        """End a store lookup that found `length` tokens; return whether they may be used.

        They may be used if they fit and no chunk was prefilled yet, even after the deadline.
        """
        request.store_deadline_ms = 0
        if request.prefill_started or request not in self.queue.running:
            return False
        return self.memory_budget.fits_restore(request, length, self.queue.running)

    def set_prefix_slots(self, slots: Ints) -> None:
        """Set the slots that cached prefixes hold."""
        budget = self.memory_budget
        self.prefix_version += not budget.has_prefixes or bool((slots > budget.prefix_slots).any())
        budget.has_prefixes, budget.prefix_slots = True, slots
        self._is_head_blocked, self.may_evict = False, True
        budget.record_slots(budget.count_charged(self.queue.running))

    def can_insert_prefix(self, request: Request, length: int) -> bool:
        """Return whether the first `length` tokens of a request fit as a cached prefix."""
        # Counted elsewhere already: the pages that forks of a running request share with it, and
        # those of an ended request that prefixes hold.
        budget, counted = self.memory_budget, request.shared_slots
        if request in self.queue.running:
            counted = self.memory_model.count_shared_slots(min(length, request.num_prompt_tokens))
        new_slots = np.maximum(self.memory_model.count_slots(length) - counted, 0)
        if request not in self.queue.running:  # else its features are counted
            num_image_tokens = request.layout.num_image_tokens
            new_slots = new_slots + self.memory_model.count_image_slots(num_image_tokens)
        fits = budget.fits(budget.count_charged(self.queue.running) + new_slots)
        return budget.has_prefixes and fits

    def set_output_length(self, request: Request, num_tokens: int) -> None:
        """Set the tokens of the longest unfinished sequence, accepted drafts included."""
        request.num_output_tokens = num_tokens

    def finish_sequence(self, request: Request) -> None:
        """Count a finished sequence of a request; remove the request after the last one."""
        request.num_finished += 1
        self._is_head_blocked, self.may_evict = False, True
        if not request.num_sequences:
            self.remove(request)

    def remove(self, request: Request) -> None:
        """Remove a request from both queues."""
        self._is_head_blocked, self.may_evict = False, True
        request.store_deadline_ms = 0
        for requests in (self.queue.waiting, self.queue.running):
            if request in requests:
                requests.remove(request)

    # ---- internals

    def _admit(self, now_ms: int) -> Action | None:
        """Admit waiting requests that fit, in order; return an action that must come first."""
        queue, budget = self.queue, self.memory_budget
        queue.activate(now_ms)
        while not self._is_head_blocked and queue.waiting:
            request = queue.find_next(now_ms)
            any_inactive = any(not other.is_active for other in queue.running)
            can_look_up = self.has_store and not (request.is_embedding or request.is_swapped_out)
            if any_inactive or not (queue.has_capacity_for(request) or can_look_up):
                self._is_head_blocked = True
                break
            if self._needs_prefix_match(request):
                return MatchPrefix(request)
            if not budget.fits_admission(request, queue.running):
                committed = budget.count_committed([*queue.running, request])
                if eviction := self._plan_eviction(committed):
                    return eviction
                if not queue.running and budget.has_reclaimable_memory:
                    return FreePools()
                self._is_head_blocked = True
                break
            queue.waiting.remove(request)
            request.is_active = queue.has_capacity_for(request)
            queue.running.append(request)
            if self.overcommit == 1:
                budget.record_slots(budget.count_committed(queue.running))
            if request.is_swapped_out:
                budget.record_slots(budget.count_allocated(queue.running))
                return SwapIn(request)
            num_prompt = request.num_prompt_tokens
            if can_look_up and budget.fits_restore(request, num_prompt, queue.running):
                return LookUpStore(request)
        return None

    def _needs_prefix_match(self, request: Request) -> bool:
        """Return whether prefixes were added since the prompt was matched."""
        if request.is_embedding or not self.memory_budget.has_prefixes:
            return False
        is_stale = request.matched_version != self.prefix_version
        return is_stale and not (request.prefill_started or request.is_swapped_out)

    def _plan_eviction(self, slots: Ints, *, include_unwritten: bool = False) -> Evict | None:
        """Return the eviction after which `slots` fit; None if no prefix can be evicted."""
        budget = self.memory_budget
        has_evictable = self.may_evict and budget.prefix_slots.any()
        if self.max_bytes is None or not has_evictable:
            return None
        excess = budget.compute_nbytes(slots) - self.max_bytes
        return Evict(max(excess, 1), include_unwritten)

    def _count_slots_after(self, action: ForwardAction) -> Ints:
        """Return the slots of running requests after `action`, plus those used while it runs."""
        slots = self.memory_budget.count_allocated(self.queue.running)
        if isinstance(action, EncodeImage):  # its features are counted since the admission
            return slots
        if isinstance(action, Prefill | Repeat):
            request = action.request
            num_computed = request.num_computed_tokens
            num_computed += action.count if isinstance(action, Prefill) else 0
            is_last = num_computed >= request.num_prompt_tokens
            num_sequences = request.num_choices if is_last else 1
            slots = slots + self.memory_budget.count_growth(request, num_computed, num_sequences)
            return slots + self.memory_model.count_transient_slots(request.num_prompt_tokens)
        for request in action.requests:
            length = request.num_prompt_tokens + request.num_output_tokens
            length += self.memory_model.max_drafts
            slots = slots + self.memory_budget.count_growth(request, length, request.num_sequences)
        return slots

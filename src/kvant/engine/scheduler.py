"""Choose the next action of an engine: what to prefill, decode, swap or evict.

The scheduler counts tokens and pages; it has no model, no tensors and no clock.

     add()
       v
    waiting  <--------------------------------------------------+
       v   memory for its longest length fits                   |
    running, not active: no room in max_sequences               |
       v                                                        |  SwapOut
    active, in a store lookup: store_deadline_ms > 0            |  (overcommit > 1):
       v   finish_store_lookup(), or the deadline               |  is_swapped_out
    active, prefilling: num_computed_tokens < num_prompt_tokens |  until SwapIn
       v   last Prefill                                         |
    active, decoding  ------------------------------------------+
       v   finish_sequence() of the last sequence; remove() at any time
    removed

With `overcommit` above 1, the newest request of the lowest priority is swapped out when memory runs
short. Prompts are prefilled in chunks, with decodes between them. No request overtakes the first
one that does not fit, so none starves. Cached prefixes are evicted when a request needs memory.
With a store, one request is admitted before `max_sequences` has room: its lookup runs meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kvant.engine.chunk_sizer import CHUNK_TIME_TOLERANCE, ChunkSizer
from kvant.engine.memory import MemoryBudget, MemoryModel
from kvant.errors import CapacityError, ContextError
from kvant.page_table import Ints
from kvant.platform.sizes import format_size

AGING_MS = 10_000  # milliseconds of waiting that raise the priority by 1
MAX_TIMED_PROMPTS = 4  # prompts in prefill that may each delay a token by `chunk_seconds`


@dataclass(eq=False)
class ScheduledRequest:
    """The scheduler's record of a request: counts of tokens."""

    number: int  # in the order of arrival
    num_prompt_tokens: int
    max_new_tokens: int
    num_choices: int = 1  # sequences that continue the prompt
    priority: int = 0
    tenant: str = ""
    arrival_ms: int = 0
    num_computed_tokens: int = 0  # tokens of the prompt
    num_output_tokens: int = 0  # of each unfinished sequence
    matched_version: int | None = None  # `_prefix_version` at the last match; None: unmatched
    prefill_started: bool = False
    checkpoint_positions: tuple[int, ...] = ()  # prompt lengths at which a chunk must end
    shared_slots: Ints | None = None  # slots shared with cached prefixes
    num_finished: int = 0  # finished sequences
    is_swapped_out: bool = False
    is_active: bool = False  # its sequences count towards max_sequences
    store_deadline_ms: int = 0  # when it stops waiting for a store; 0: it does not wait

    @property
    def is_decoding(self) -> bool:
        return self.num_computed_tokens == self.num_prompt_tokens

    @property
    def num_sequences(self) -> int:
        return self.num_choices - self.num_finished

    def compute_priority(self, now_ms: int) -> int:
        """Return the priority, plus 1 for every `AGING_MS` of waiting."""
        return self.priority + (now_ms - self.arrival_ms) // AGING_MS


@dataclass(frozen=True)
class MatchPrefix:
    """Look up the prompt of a request in the cached prefixes."""

    request: ScheduledRequest


@dataclass(frozen=True)
class Evict:
    """Evict unused prefixes until `nbytes` bytes are freed or none is left."""

    nbytes: int
    include_unwritten: bool = False  # also evict prefixes with pending store writes


@dataclass(frozen=True)
class LookUpStore:
    """Look up the prompt of a request in a store; memory for it is reserved."""

    request: ScheduledRequest


@dataclass(frozen=True)
class Prefill:
    """Prefill the next `count` tokens of the prompt of a request."""

    request: ScheduledRequest
    count: int


@dataclass(frozen=True)
class Decode:
    """Decode one token for each sequence of `requests`."""

    requests: tuple[ScheduledRequest, ...]


@dataclass(frozen=True)
class SwapOut:
    """Write the pages of a request to files and free them."""

    request: ScheduledRequest


@dataclass(frozen=True)
class SwapIn:
    """Read the pages of a swapped-out request back."""

    request: ScheduledRequest


@dataclass(frozen=True)
class FreePools:
    """Free all pools: neither a sequence nor a prefix is left in them."""


Action = MatchPrefix | Evict | LookUpStore | Prefill | Decode | SwapOut | SwapIn | FreePools


@dataclass
class Scheduler:
    """Queues of waiting and running requests, and the memory promised to them."""

    memory_model: MemoryModel
    chunk_sizer: ChunkSizer
    max_bytes: int | None = None
    max_sequences: int = 16
    overcommit: float = 1.0
    chunk_seconds: float = math.inf  # of prefill between two decodes, for each prompt in prefill
    has_store: bool = False  # if so, the next request is admitted early, to look it up
    prefix_slots: Ints | None = None  # slots of cached prefixes; None: prefixes are off
    waiting: list[ScheduledRequest] = field(default_factory=list)
    running: list[ScheduledRequest] = field(default_factory=list)
    _last_was_oldest: bool = False  # whether the last chunk was of the oldest prompt
    _decode_delay_s: float = 0.0  # prefill time since the last decode
    _prefix_version: int = 0  # raised when prefixes gain slots
    _may_evict: bool = True  # False: the last eviction found nothing to evict
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
        self.memory_budget = MemoryBudget(self.memory_model, self.max_bytes)

    def check_request(self, request: ScheduledRequest) -> None:
        """Raise an error for a request that could never be served."""
        if (n := request.num_choices) > self.max_sequences:
            raise CapacityError(
                f"n={n} with max_sequences={self.max_sequences}: lower n or raise max_sequences"
            )
        transient = self.memory_model.count_transient_slots(request.num_prompt_tokens)
        need = self.memory_budget.compute_fresh_nbytes(self._count_peak_slots(request) + transient)
        if self.max_bytes is not None and need > self.max_bytes:
            final_length = request.num_prompt_tokens + request.max_new_tokens - 1
            single = self._count_slots_at(request, final_length, 1)  # a smaller n may help
            fits = self.memory_budget.compute_fresh_nbytes(single + transient) <= self.max_bytes
            raise (CapacityError if fits else ContextError)(
                f"{request.num_prompt_tokens} tokens and {request.max_new_tokens} new ones need "
                f"{format_size(need)} of a limit of {format_size(self.max_bytes)}: use a smaller "
                "format, a window, a shorter prompt, less max_new_tokens or n, or more max_bytes"
            )

    def add(self, request: ScheduledRequest) -> None:
        """Append a request to the waiting queue."""
        self.waiting.append(request)
        self._is_head_blocked = False

    def choose_action(self, now_ms: int) -> Action | None:
        """Return the action that is due at `now_ms`; None if there is nothing to do."""
        if (first := self._admit(now_ms)) is not None:
            return first
        action = self._choose_forward()
        if action is None:
            return FreePools() if self._has_reclaimable_memory and not self.running else None
        if isinstance(action, Prefill) and self._needs_prefix_match(action.request):
            return MatchPrefix(action.request)
        if self.overcommit > 1:
            slots = self._count_slots_after(action)
            if not self.memory_budget.fits(slots):
                eviction = self._plan_eviction(slots, include_unwritten=True)
                return eviction or SwapOut(self._choose_victim(now_ms))
            self.memory_budget.record_slots(slots)
        return action

    def complete(self, action: Action) -> None:
        """Update requests and memory after `action` was performed."""
        if isinstance(action, Prefill):
            request = action.request
            if any(other.is_decoding and other.is_active for other in self.running):
                num_computed = request.num_computed_tokens
                self._decode_delay_s += self.chunk_sizer.predict_seconds(action.count, num_computed)
            request.num_computed_tokens += action.count
            request.prefill_started = True
            request.num_output_tokens += request.is_decoding  # last prompt logits give a token
            self._last_was_oldest = not self._last_was_oldest
        elif isinstance(action, Decode):
            for request in action.requests:
                request.num_output_tokens += 1
            self._decode_delay_s = 0.0
        elif isinstance(action, SwapOut):
            request = action.request
            request.is_swapped_out, request.shared_slots = True, None  # files share no pages
            request.is_active, request.store_deadline_ms = False, 0
            self.running.remove(request)
            self._is_head_blocked, self._may_evict = False, True
            self.waiting.append(request)
        elif isinstance(action, SwapIn):
            action.request.is_swapped_out = False
        elif isinstance(action, FreePools):
            self.memory_budget.reset()
            self._is_head_blocked = False

    def finish_store_lookup(self, request: ScheduledRequest, length: int) -> bool:
        """End a store lookup that found `length` tokens; return whether they may be used.

        They may be used if they fit and no chunk was prefilled yet, even after the deadline.
        """
        request.store_deadline_ms = 0
        if request.prefill_started or request not in self.running:
            return False
        slots = self._count_charged_slots()
        if self.overcommit > 1:
            slots = slots + self._count_growth(request, max(length, request.num_computed_tokens))
        return self.memory_budget.fits(slots)

    def compute_timeout(self, now_ms: int) -> float | None:
        """Return the seconds until the next store deadline; None without one."""
        deadlines = {r.store_deadline_ms for r in self.running if r.is_active} - {0}
        return max(min(deadlines) - now_ms, 0) / 1e3 if deadlines else None

    def record_prefix_match(
        self, request: ScheduledRequest, num_cached: int, checkpoint_positions: tuple[int, ...]
    ) -> None:
        """Set how many tokens of a prompt are cached, and where later chunks must end."""
        request.num_computed_tokens, request.matched_version = num_cached, self._prefix_version
        request.checkpoint_positions = checkpoint_positions

    def clear_prefix_match(self, request: ScheduledRequest) -> None:
        """Undo `record_prefix_match` of a waiting request: its pages were released."""
        request.num_computed_tokens, request.checkpoint_positions = 0, ()
        request.matched_version, request.shared_slots = None, None

    def record_eviction(self, *, any_freed: bool) -> None:
        """Note whether another eviction may help; otherwise none is tried until a change."""
        self._may_evict = any_freed

    def set_prefix_slots(self, slots: Ints) -> None:
        """Set the slots that cached prefixes hold."""
        self._prefix_version += self.prefix_slots is None or bool((slots > self.prefix_slots).any())
        self.prefix_slots = slots
        self._is_head_blocked, self._may_evict = False, True
        self.memory_budget.record_slots(self._count_charged_slots())

    def can_insert_prefix(self, request: ScheduledRequest, length: int) -> bool:
        """Return whether the first `length` tokens of a request fit as a cached prefix."""
        if request in self.running:  # it keeps sharing the pages of its prompt
            counted = self.memory_model.count_shared_slots(min(length, request.num_prompt_tokens))
        else:  # it ended: its reserved memory is free again
            counted = self._or_zeros(request.shared_slots)
        new_slots = np.maximum(self.memory_model.count_slots(length) - counted, 0)
        fits = self.memory_budget.fits(self._count_charged_slots() + new_slots)
        return self.prefix_slots is not None and fits

    def finish_sequence(self, request: ScheduledRequest) -> None:
        """Count a finished sequence of a request; remove the request after the last one."""
        request.num_finished += 1
        self._is_head_blocked, self._may_evict = False, True
        if not request.num_sequences:
            self.remove(request)

    def remove(self, request: ScheduledRequest) -> None:
        """Remove a request from both queues."""
        self._is_head_blocked, self._may_evict = False, True
        request.store_deadline_ms = 0
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)

    def load(self, tenant: str | None = None) -> dict[str, int]:
        """Count waiting and running requests, and sequences; with `tenant`, only of this one."""
        requests = [r for r in (*self.waiting, *self.running) if tenant in (None, r.tenant)]
        active = [request.num_sequences for request in requests if request.is_active]
        waiting = len(requests) - len(active)
        return {"waiting": waiting, "running": len(active), "sequences": sum(active)}

    @property
    def num_sequences(self) -> int:
        """Unfinished sequences of active requests."""
        return sum(request.num_sequences for request in self.running if request.is_active)

    # ---- internals

    def _count_charged_slots(self) -> Ints:
        """Return the slots that count towards the limit: committed; with overcommit, allocated."""
        reserves_peak = self.overcommit == 1
        return self._count_committed_slots() if reserves_peak else self._count_allocated_slots()

    def _admit(self, now_ms: int) -> Action | None:
        """Admit waiting requests that fit, in order; return an action that must come first."""
        for request in self.running:
            request.is_active = request.is_active or self._has_capacity_for(request)
            if request.is_active and request.store_deadline_ms <= now_ms:
                request.store_deadline_ms = 0
        while not self._is_head_blocked and self.waiting:
            request = min(self.waiting, key=lambda other: self._rank(other, now_ms))
            any_inactive = any(not other.is_active for other in self.running)
            can_look_up = self.has_store and not request.is_swapped_out
            if any_inactive or not (self._has_capacity_for(request) or can_look_up):
                self._is_head_blocked = True
                break
            if self._needs_prefix_match(request):
                return MatchPrefix(request)
            if not self._fits_budget(request):
                if eviction := self._plan_eviction(self._count_committed_slots(request)):
                    return eviction
                if not self.running and self._has_reclaimable_memory:
                    return FreePools()
                self._is_head_blocked = True
                break
            self.waiting.remove(request)
            request.is_active = self._has_capacity_for(request)
            self.running.append(request)
            if self.overcommit == 1:
                self.memory_budget.record_slots(self._count_committed_slots())
            if request.is_swapped_out:
                self.memory_budget.record_slots(self._count_allocated_slots())
                return SwapIn(request)
            if self._can_look_up_store(request):
                return LookUpStore(request)
        return None

    def _can_look_up_store(self, request: ScheduledRequest) -> bool:
        """Return whether there is a store, and memory to restore the whole prompt from it."""
        if not self.has_store or self.overcommit == 1:
            return self.has_store
        growth = self._count_growth(request, request.num_prompt_tokens)
        return self.memory_budget.fits(self._count_allocated_slots() + growth)

    def _needs_prefix_match(self, request: ScheduledRequest) -> bool:
        """Return whether prefixes were added since the prompt was matched."""
        is_stale = self.prefix_slots is not None and request.matched_version != self._prefix_version
        return is_stale and not (request.prefill_started or request.is_swapped_out)

    def _has_capacity_for(self, request: ScheduledRequest) -> bool:
        """Return whether all sequences of a request fit in max_sequences."""
        return self.num_sequences + request.num_sequences <= self.max_sequences

    def _plan_eviction(self, slots: Ints, *, include_unwritten: bool = False) -> Evict | None:
        """Return the eviction after which `slots` fit; None if no prefix can be evicted."""
        has_evictable = self._may_evict and self._or_zeros(self.prefix_slots).any()
        if self.max_bytes is None or not has_evictable:
            return None
        excess = self.memory_budget.compute_nbytes(slots) - self.max_bytes
        return Evict(max(excess, 1), include_unwritten)

    @property
    def _has_reclaimable_memory(self) -> bool:
        """Whether pools have memory, and no prefix is in them."""
        return self.memory_budget.has_allocations and not self._or_zeros(self.prefix_slots).any()

    def _or_zeros(self, slots: Ints | None) -> Ints:
        return self.memory_budget.zero_slots if slots is None else slots

    def _count_committed_slots(self, *extra_requests: ScheduledRequest) -> Ints:
        """Return the most slots that prefixes, running requests and `extra_requests` may need."""
        requests = (*self.running, *extra_requests)
        peaks = (self._count_peak_slots(r) - self._or_zeros(r.shared_slots) for r in requests)
        return sum(peaks, self._or_zeros(self.prefix_slots)) + self._count_transient_slots(
            *requests
        )

    def _count_transient_slots(self, *requests: ScheduledRequest) -> Ints:
        """Return the extra slots while any one of `requests` is prefilled."""
        counts = [self.memory_model.count_transient_slots(r.num_prompt_tokens) for r in requests]
        largest: Ints = np.max([self.memory_budget.zero_slots, *counts], axis=0)
        return largest

    def _count_allocated_slots(self) -> Ints:
        """Return the slots that prefixes and running requests hold now."""
        slots = (
            self._count_current_slots(r) - self._or_zeros(r.shared_slots) for r in self.running
        )
        return sum(slots, self._or_zeros(self.prefix_slots))

    def _rank(self, request: ScheduledRequest, now_ms: int) -> tuple[bool, int, int, int]:
        """Return a sort key: swapped out first, then by priority, load of the tenant, arrival."""
        load = sum(other.num_sequences for other in self.running if other.tenant == request.tenant)
        return not request.is_swapped_out, -request.compute_priority(now_ms), load, request.number

    def _fits_budget(self, request: ScheduledRequest) -> bool:
        """Return whether a waiting request may be admitted within the limit of bytes."""
        if self.max_bytes is None:
            return True
        budget, committed = self.memory_budget, self._count_committed_slots(request)
        if self.overcommit == 1:
            return budget.fits(committed)
        if request.is_swapped_out:  # a swap-in copies: its pages exist twice for a moment
            second_copy = self._count_current_slots(request) if budget.has_allocations else None
            return budget.fits(committed, extra_slots=second_copy)
        chunk_end = request.num_computed_tokens + self.chunk_sizer.max_chunk
        chunk = self.memory_model.count_slots(min(request.num_prompt_tokens, chunk_end))
        chunk = chunk - self._or_zeros(request.shared_slots) + self._count_transient_slots(request)
        if not budget.fits(self._count_allocated_slots() + chunk):
            return False
        return budget.compute_fresh_nbytes(committed) <= self.overcommit * self.max_bytes

    def _choose_forward(self) -> Prefill | Decode | None:
        """Return the next chunk if decodes can wait for it, else a decode of all that are ready."""
        active = [r for r in self.running if r.is_active and not r.store_deadline_ms]
        prefilling = [request for request in active if not request.is_decoding]
        decoding = tuple(request for request in active if request.is_decoding)
        if prefilling:
            request = self._choose_prefill(prefilling)
            num_computed = request.num_computed_tokens
            stops = [stop for stop in request.checkpoint_positions if stop > num_computed]
            stop = min([request.num_prompt_tokens, *stops])
            num_prompts = min(len(prefilling), MAX_TIMED_PROMPTS)
            max_seconds = self.chunk_seconds * num_prompts if decoding else math.inf
            count = self.chunk_sizer.choose_chunk(num_computed, stop, max_seconds)
            delay = self._decode_delay_s + self.chunk_sizer.predict_seconds(count, num_computed)
            if not self._decode_delay_s or delay <= CHUNK_TIME_TOLERANCE * max_seconds:
                return Prefill(request, count)
        return Decode(decoding) if decoding else None

    def _choose_prefill(self, prefilling: list[ScheduledRequest]) -> ScheduledRequest:
        """Return, by turns, the oldest prompt and the one with the fewest tokens left."""
        prefilling = sorted(prefilling, key=lambda request: request.number)
        if not self._last_was_oldest:
            return prefilling[0]
        return min(prefilling, key=lambda r: r.num_prompt_tokens - r.num_computed_tokens)

    def _choose_victim(self, now_ms: int) -> ScheduledRequest:
        return max(self.running, key=lambda r: (-r.compute_priority(now_ms), r.number))

    def _count_slots_after(self, action: Prefill | Decode) -> Ints:
        """Return the slots of all running requests after `action`, and while it runs."""
        slots = self._count_allocated_slots()
        if isinstance(action, Prefill):
            request = action.request
            num_computed = request.num_computed_tokens + action.count
            is_last = num_computed >= request.num_prompt_tokens
            num_sequences = request.num_choices if is_last else 1
            slots = slots + self._count_growth(request, num_computed, num_sequences)
            return slots + self._count_transient_slots(request)
        for request in action.requests:
            length = request.num_prompt_tokens + request.num_output_tokens
            slots = slots + self._count_growth(request, length, request.num_sequences)
        return slots

    def _count_growth(self, request: ScheduledRequest, length: int, num_sequences: int = 1) -> Ints:
        """Return the slots that a request at a length needs beyond its current ones."""
        slots = self._count_slots_at(request, length, num_sequences)
        return slots - self._count_current_slots(request)

    def _count_current_slots(self, request: ScheduledRequest) -> Ints:
        """Return the slots of a request, without its newest token: the next forward stores it."""
        num_prompt = request.num_prompt_tokens
        if request.is_decoding:
            length = num_prompt + request.num_output_tokens - 1
            return self._count_slots_at(request, length, request.num_sequences)
        # A store lookup reserves slots for the whole prompt.
        length = num_prompt if request.store_deadline_ms else request.num_computed_tokens
        return self._count_slots_at(request, length, 1)

    def _count_peak_slots(self, request: ScheduledRequest) -> Ints:
        final_length = request.num_prompt_tokens + request.max_new_tokens - 1
        return self._count_slots_at(request, final_length, request.num_sequences)

    def _count_slots_at(self, request: ScheduledRequest, length: int, num_sequences: int) -> Ints:
        """Return the slots of `num_sequences` sequences of a request at a length.

        They share the pages of the prompt, unless they may be swapped out: files share no pages.
        """
        slots = num_sequences * self.memory_model.count_slots(length)
        if num_sequences == 1 or self.overcommit > 1:
            return slots
        shared = self.memory_model.count_shared_slots(request.num_prompt_tokens)
        return slots - (num_sequences - 1) * shared

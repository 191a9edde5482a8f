"""Which request is served next, and with how many tokens: no model, no memory, no clock.

A request waits until all that it may need fits beside what the others may need; it is never thrown
out after that. Its prompt is read in chunks, and everybody who decodes gets a token between some of
them: the more prompts are being read, the more time they get. Who waits gains on priorities with
time, and nobody overtakes the first who does not fit: so nobody starves.

Prefixes that are kept take room, too, and are let go where a request needs it and nobody uses them.
Whoever is first in line sees what there is of its prompt: that is not read again, and its pages
count once. With a store, who has its bytes is looked for there before it is read; one request is
let in ahead of its place, to be looked for while it waits.

With `overcommit` more is promised than there is. Where it comes to that, the newest of those with
the lowest priority is put aside, pages and all, and is taken back once there is room for all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from kvant.engine.chunk_sizer import CHUNK_TIME_TOLERANCE, ChunkSizer
from kvant.engine.memory import MemoryBudget, MemoryModel
from kvant.errors import CapacityError, ContextError
from kvant.page_table import Ints
from kvant.sizes import format_size

AGING_MS = 10_000  # milliseconds of waiting that count as one step of priority
MAX_TIMED_PROMPTS = 4  # that get time of their own between two tokens, at most


@dataclass(eq=False)
class ScheduledRequest:
    """What a schedule knows of a request: counts of tokens."""

    number: int  # in the order of arrival
    num_prompt_tokens: int
    max_new_tokens: int  # tokens that it may say at most
    num_choices: int = 1  # sequences that continue the prompt
    priority: int = 0
    tenant: str = ""
    arrival_ms: int = 0  # in milliseconds
    num_computed_tokens: int = 0  # tokens of the prompt
    num_output_tokens: int = 0  # by each sequence that still goes on
    matched_version: int | None = None  # after which news of prefixes was its prompt looked for?
    prefill_started: bool = False  # was anything of its prompt read for it?
    checkpoint_positions: tuple[int, ...] = ()  # lengths of its prompt at which a chunk is to end
    shared_slots: Ints | None = None  # slots of it that prefixes hold, too
    num_finished: int = 0  # sequences that do not
    is_swapped_out: bool = False
    is_active: bool = False  # it has a place among those who are served
    store_deadline_ms: int = 0  # in milliseconds, for what a store has of its prompt; 0: not

    @property
    def is_decoding(self) -> bool:
        return self.num_computed_tokens == self.num_prompt_tokens

    @property
    def num_sequences(self) -> int:
        return self.num_choices - self.num_finished

    def compute_priority(self, now_ms: int) -> int:
        """Its priority, and what it gained by waiting."""
        return self.priority + (now_ms - self.arrival_ms) // AGING_MS


@dataclass(frozen=True)
class MatchPrefix:
    """See what there is of the prompt of a request."""

    request: ScheduledRequest


@dataclass(frozen=True)
class Evict:
    """Let go of prefixes that take so many bytes, or of all that nobody uses."""

    nbytes: int
    include_unwritten: bool = (
        False  # also of what a store is yet to have: somebody is served already
    )


@dataclass(frozen=True)
class LookUpStore:
    """Look for the prompt of a request in a store; its bytes are promised to it."""

    request: ScheduledRequest


@dataclass(frozen=True)
class Prefill:
    """Read so many tokens of the prompt of a request."""

    request: ScheduledRequest
    count: int


@dataclass(frozen=True)
class Decode:
    """One token for each sequence of these."""

    requests: tuple[ScheduledRequest, ...]


@dataclass(frozen=True)
class SwapOut:
    """Keep the pages of a request elsewhere."""

    request: ScheduledRequest


@dataclass(frozen=True)
class SwapIn:
    """Bring them back."""

    request: ScheduledRequest


@dataclass(frozen=True)
class FreePools:
    """No sequence is left: let go of all memory."""


Action = MatchPrefix | Evict | LookUpStore | Prefill | Decode | SwapOut | SwapIn | FreePools


@dataclass
class Scheduler:
    """Requests that wait, and those that are served."""

    memory_model: MemoryModel
    chunk_sizer: ChunkSizer
    max_bytes: int | None = None
    max_sequences: int = 16
    overcommit: float = 1.0
    chunk_seconds: float = math.inf  # that each prompt which is read has between two tokens
    has_store: bool = False  # is there a store? Then the next one is let in ahead, and looked for
    prefix_slots: Ints | None = None  # slots that prefixes hold; None: there are no prefixes
    waiting: list[ScheduledRequest] = field(default_factory=list)
    running: list[ScheduledRequest] = field(default_factory=list)
    _last_was_oldest: bool = False  # was the last chunk one of the oldest?
    _decode_delay_s: float = 0.0  # seconds that chunks have kept others from their next token
    _prefix_version: int = 0  # how often prefixes became more
    _may_evict: bool = True  # may there be prefixes that nobody uses?
    _is_head_blocked: bool = (
        False  # did the first who waits not fit, and has nobody come or gone since?
    )

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_sequences", "overcommit"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                raise ValueError(f"{name}={value}: 1 or more is needed")
        if not self.chunk_seconds > 0:
            raise ValueError(f"chunk_seconds={self.chunk_seconds}: more than 0 is needed")
        if self.overcommit > 1 and self.max_bytes is None:
            raise ValueError(f"overcommit={self.overcommit} of no max_bytes: give max_bytes, too")
        self.memory_budget = MemoryBudget(self.memory_model, self.max_bytes)

    def check_request(self, request: ScheduledRequest) -> None:
        """Refuse a request that could never be served."""
        if request.num_choices > self.max_sequences:
            raise CapacityError(
                f"n={request.num_choices} with max_sequences={self.max_sequences}: ask for fewer, "
                "or make an "
                "engine for more"
            )
        closing = self.memory_model.count_transient_slots(request.num_prompt_tokens)
        need = self.memory_budget.compute_fresh_nbytes(self._count_peak_slots(request) + closing)
        if self.max_bytes is not None and need > self.max_bytes:
            one = self._count_slots_at(
                request, request.num_prompt_tokens + request.max_new_tokens - 1, 1
            )
            fits = self.memory_budget.compute_fresh_nbytes(one + closing) <= self.max_bytes
            raise (CapacityError if fits else ContextError)(
                f"{request.num_prompt_tokens} tokens and {request.max_new_tokens} new ones need "
                f"{format_size(need)} of a limit "
                f"of {format_size(self.max_bytes)}: a smaller format, a window, a shorter prompt, "
                "a smaller max_new_tokens or n, or a larger max_bytes"
            )

    def add(self, request: ScheduledRequest) -> None:
        """Let a request wait."""
        self.waiting.append(request)
        self._is_head_blocked = False

    def choose_action(self, now_ms: int) -> Action | None:
        """What to do at a time in milliseconds; None where there is nothing to do."""
        admitted = self._admit(now_ms)
        if admitted is not None:
            return admitted
        action = self._choose_forward()
        if action is None:
            return FreePools() if self._has_reclaimable_memory and not self.running else None
        if isinstance(action, Prefill) and self._needs_prefix_match(action.request):
            return MatchPrefix(action.request)
        if self.overcommit > 1:
            used = self._count_slots_after(action)
            if not self.memory_budget.fits(used):
                return self._plan_eviction(used, include_unwritten=True) or SwapOut(
                    self._choose_victim(now_ms)
                )
            self.memory_budget.record_slots(used)
        return action

    def complete(self, action: Action) -> None:
        """That was done."""
        if isinstance(action, Prefill):
            if any(job.is_decoding and job.is_active for job in self.running):
                self._decode_delay_s += self.chunk_sizer.predict_seconds(
                    action.count, action.request.num_computed_tokens
                )
            action.request.num_computed_tokens += action.count
            action.request.prefill_started = True
            action.request.num_output_tokens += (
                action.request.is_decoding
            )  # the last logits of a prompt give a token
            self._last_was_oldest = not self._last_was_oldest
        elif isinstance(action, Decode):
            for job in action.requests:
                job.num_output_tokens += 1
            self._decode_delay_s = 0.0
        elif isinstance(action, SwapOut):
            action.request.is_swapped_out, action.request.shared_slots = (
                True,
                None,
            )  # files share nothing
            action.request.is_active, action.request.store_deadline_ms = False, 0
            self.running.remove(action.request)
            self._is_head_blocked, self._may_evict = False, True
            self.waiting.append(action.request)
        elif isinstance(action, SwapIn):
            action.request.is_swapped_out = False
        elif isinstance(action, FreePools):
            self.memory_budget.reset()
            self._is_head_blocked = False

    def finish_store_lookup(self, request: ScheduledRequest, length: int) -> bool:
        """So much of its prompt came from a store: can it go on from that, and is there room?

        It may be late: then nobody waits for it any more, but nothing of the prompt was read yet.
        """
        request.store_deadline_ms = 0
        if request.prefill_started or request not in self.running:
            return False
        used = self._count_charged_slots()
        if self.overcommit > 1:
            used = (
                used
                - self._count_current_slots(request)
                + self._count_slots_at(request, max(length, request.num_computed_tokens), 1)
            )
        return self.memory_budget.fits(used)

    def compute_timeout(self, now_ms: int) -> float | None:
        """The seconds after which somebody waits no longer for a store."""
        found = [
            job.store_deadline_ms for job in self.running if job.is_active and job.store_deadline_ms
        ]
        return max(min(found) - now_ms, 0) / 1e3 if found else None

    def record_prefix_match(
        self, request: ScheduledRequest, num_cached: int, checkpoint_positions: tuple[int, ...]
    ) -> None:
        """So many tokens of its prompt are there; where chunks are to end behind them."""
        request.num_computed_tokens, request.checkpoint_positions, request.matched_version = (
            num_cached,
            checkpoint_positions,
            self._prefix_version,
        )

    def clear_prefix_match(self, request: ScheduledRequest) -> None:
        """A job that waits has nothing of its prompt any more."""
        (
            request.num_computed_tokens,
            request.checkpoint_positions,
            request.matched_version,
            request.shared_slots,
        ) = 0, (), None, None

    def record_eviction(self, *, any_freed: bool) -> None:
        """Prefixes went; or there were none that could."""
        self._may_evict = any_freed

    def set_prefix_slots(self, slots: Ints) -> None:
        """Prefixes hold so many."""
        self._prefix_version += self.prefix_slots is None or bool((slots > self.prefix_slots).any())
        self.prefix_slots = slots
        self._is_head_blocked, self._may_evict = False, True
        self.memory_budget.record_slots(self._count_charged_slots())

    def can_insert_prefix(self, request: ScheduledRequest, length: int) -> bool:
        """Is there room for a prefix of such a length, which a request has?

        Whoever goes on shares pages with it; whoever was served leaves what was promised to it.
        """
        goes_on = request in self.running
        own = (
            self.memory_model.count_shared_slots(min(length, request.num_prompt_tokens))
            if goes_on
            else self._count_shared_slots(request)
        )
        more = np.maximum(self.memory_model.count_slots(length) - own, 0)
        return self.prefix_slots is not None and self.memory_budget.fits(
            self._count_charged_slots() + more
        )

    def finish_sequence(self, request: ScheduledRequest) -> None:
        """One of its sequences says no more."""
        request.num_finished += 1
        self._is_head_blocked, self._may_evict = False, True
        if not request.num_sequences:
            self.remove(request)

    def remove(self, request: ScheduledRequest) -> None:
        """Forget a request, wherever it is."""
        self._is_head_blocked, self._may_evict = False, True
        request.store_deadline_ms = 0
        for place in (self.waiting, self.running):
            if request in place:
                place.remove(request)

    def load(self, tenant: str | None = None) -> dict[str, int]:
        """Count requests that wait and that run, and sequences; with `tenant`, its own alone."""
        every = (*self.waiting, *self.running)
        jobs = [job for job in every if tenant is None or job.tenant == tenant]
        running = [job.num_sequences for job in jobs if job.is_active]
        return {
            "waiting": len(jobs) - len(running),
            "running": len(running),
            "sequences": sum(running),
        }

    @property
    def num_sequences(self) -> int:
        """That are served, or for which there is a place."""
        return sum(job.num_sequences for job in self.running if job.is_active)

    # ---- within

    def _count_charged_slots(self) -> Ints:
        """Slots that are taken, or may come to be."""
        return (
            self._count_committed_slots() if self.overcommit == 1 else self._count_allocated_slots()
        )

    def _admit(self, now_ms: int) -> Action | None:
        """Let those in that fit, in order; what has to be done before anything else is."""
        for job in self.running:
            job.is_active = job.is_active or self._has_capacity_for(job)
            if job.is_active and job.store_deadline_ms <= now_ms:
                job.store_deadline_ms = 0
        while not self._is_head_blocked and self.waiting:
            job = min(self.waiting, key=lambda one: self._rank(one, now_ms))
            ahead = any(not one.is_active for one in self.running)
            if ahead or not (
                self._has_capacity_for(job) or (self.has_store and not job.is_swapped_out)
            ):
                self._is_head_blocked = True
                break
            if self._needs_prefix_match(job):
                return MatchPrefix(job)
            if not self._fits_budget(job):
                if evict := self._plan_eviction(self._count_committed_slots(job)):
                    return evict
                if not self.running and self._has_reclaimable_memory:
                    return FreePools()
                self._is_head_blocked = True
                break
            self.waiting.remove(job)
            job.is_active = self._has_capacity_for(job)
            self.running.append(job)
            if self.overcommit == 1:
                self.memory_budget.record_slots(self._count_committed_slots())
            if job.is_swapped_out:
                self.memory_budget.record_slots(self._count_allocated_slots())
                return SwapIn(job)
            if self._can_look_up_store(job):
                return LookUpStore(job)
        return None

    def _can_look_up_store(self, request: ScheduledRequest) -> bool:
        """Is there a store, and room for all that it may have of a prompt?"""
        if not self.has_store or self.overcommit == 1:
            return self.has_store
        return self.memory_budget.fits(
            self._count_allocated_slots()
            - self._count_current_slots(request)
            + self._count_slots_at(request, request.num_prompt_tokens, 1)
        )

    def _needs_prefix_match(self, request: ScheduledRequest) -> bool:
        """May there be more of its prompt than when it was looked for?"""
        new = self.prefix_slots is not None and request.matched_version != self._prefix_version
        return new and not (request.prefill_started or request.is_swapped_out)

    def _has_capacity_for(self, request: ScheduledRequest) -> bool:
        """Is there a place for all of its sequences?"""
        return self.num_sequences + request.num_sequences <= self.max_sequences

    def _plan_eviction(self, slots: Ints, *, include_unwritten: bool = False) -> Evict | None:
        """What has to go for these to fit, if there are prefixes that could."""
        if self.prefix_slots is None or self.max_bytes is None:
            return None
        if not (self._may_evict and self.prefix_slots.any()):
            return None
        return Evict(
            max(self.memory_budget.compute_nbytes(slots) - self.max_bytes, 1), include_unwritten
        )

    @property
    def _has_reclaimable_memory(self) -> bool:
        """Is there memory that nobody uses, prefixes neither?"""
        return self.memory_budget.has_allocations and (
            self.prefix_slots is None or not self.prefix_slots.any()
        )

    @property
    def _prefix_slots_or_zeros(self) -> Ints:
        return self.memory_budget.zero_slots if self.prefix_slots is None else self.prefix_slots

    def _count_committed_slots(self, *extra_requests: ScheduledRequest) -> Ints:
        """Slots that the running jobs, and these, may come to need."""
        jobs = (*self.running, *extra_requests)
        own = sum(
            (self._count_peak_slots(job) - self._count_shared_slots(job) for job in jobs),
            self._prefix_slots_or_zeros,
        )
        return own + self._count_transient_slots(*jobs)

    def _count_transient_slots(self, *requests: ScheduledRequest) -> Ints:
        """Slots that reading a prompt of these jobs holds for a moment, one at a time."""
        found = [self.memory_model.count_transient_slots(job.num_prompt_tokens) for job in requests]
        most: Ints = np.max([self.memory_budget.zero_slots, *found], axis=0)
        return most

    def _count_shared_slots(self, request: ScheduledRequest) -> Ints:
        return (
            self.memory_budget.zero_slots if request.shared_slots is None else request.shared_slots
        )

    def _count_allocated_slots(self) -> Ints:
        """Slots that they have now."""
        own = (
            self._count_current_slots(job) - self._count_shared_slots(job) for job in self.running
        )
        return sum(own, self._prefix_slots_or_zeros)

    def _rank(self, request: ScheduledRequest, now_ms: int) -> tuple[bool, int, int, int]:
        """Who was put aside comes first, then by priority, by what a tenant has, by arrival."""
        taken = sum(one.num_sequences for one in self.running if one.tenant == request.tenant)
        return not request.is_swapped_out, -request.compute_priority(now_ms), taken, request.number

    def _fits_budget(self, request: ScheduledRequest) -> bool:
        """Is there room for all that it may need, beside what the others may need?"""
        if self.max_bytes is None:
            return True
        most = self._count_committed_slots(request)
        if self.overcommit == 1:
            return self.memory_budget.fits(most)
        if (
            request.is_swapped_out
        ):  # what comes back lies beside its place in the pools for a moment
            twice = (
                self._count_current_slots(request)
                if self.memory_budget.has_allocations
                else self.memory_budget.zero_slots
            )
            return self.memory_budget.fits(most, extra_slots=twice)
        first = self.memory_model.count_slots(
            min(request.num_prompt_tokens, request.num_computed_tokens + self.chunk_sizer.max_chunk)
        )
        first = first - self._count_shared_slots(request) + self._count_transient_slots(request)
        fits = self.memory_budget.fits(self._count_allocated_slots() + first)
        return (
            fits
            and self.memory_budget.compute_fresh_nbytes(most) <= self.overcommit * self.max_bytes
        )

    def _choose_forward(self) -> Prefill | Decode | None:
        served = [job for job in self.running if job.is_active and not job.store_deadline_ms]
        reading = [job for job in served if not job.is_decoding]
        decoding = tuple(job for job in served if job.is_decoding)
        if reading:
            job = self._choose_prefill(reading)
            stop = min(
                [
                    job.num_prompt_tokens,
                    *(stop for stop in job.checkpoint_positions if stop > job.num_computed_tokens),
                ]
            )
            most = (
                self.chunk_seconds * min(len(reading), MAX_TIMED_PROMPTS) if decoding else math.inf
            )
            count = self.chunk_sizer.choose_chunk(job.num_computed_tokens, stop, most)
            wait = self._decode_delay_s + self.chunk_sizer.predict_seconds(
                count, job.num_computed_tokens
            )
            if not self._decode_delay_s or wait <= CHUNK_TIME_TOLERANCE * most:
                return Prefill(job, count)
        return Decode(decoding) if decoding else None

    def _choose_prefill(self, prefilling: list[ScheduledRequest]) -> ScheduledRequest:
        """The one that is done soonest, and every other time the oldest."""
        if not self._last_was_oldest:
            return min(prefilling, key=lambda job: job.number)
        return min(
            prefilling,
            key=lambda job: (job.num_prompt_tokens - job.num_computed_tokens, job.number),
        )

    def _choose_victim(self, now_ms: int) -> ScheduledRequest:
        return max(self.running, key=lambda job: (-job.compute_priority(now_ms), job.number))

    def _count_slots_after(self, action: Prefill | Decode) -> Ints:
        used = self._count_allocated_slots()
        if isinstance(action, Prefill):
            job, read = action.request, action.request.num_computed_tokens + action.count
            width = 1 if read < job.num_prompt_tokens else job.num_choices
            return (
                used
                - self._count_current_slots(job)
                + self._count_slots_at(job, read, width)
                + self._count_transient_slots(job)
            )
        for job in action.requests:
            used = (
                used
                - self._count_current_slots(job)
                + self._count_slots_at(
                    job, job.num_prompt_tokens + job.num_output_tokens, job.num_sequences
                )
            )
        return used

    def _count_current_slots(self, request: ScheduledRequest) -> Ints:
        """What it holds; the newest token is not stored before the next one is computed."""
        if not request.is_decoding:  # what comes from a store takes its slots before it is here
            return self._count_slots_at(
                request,
                request.num_prompt_tokens
                if request.store_deadline_ms
                else request.num_computed_tokens,
                1,
            )
        return self._count_slots_at(
            request,
            request.num_prompt_tokens + request.num_output_tokens - 1,
            request.num_sequences,
        )

    def _count_peak_slots(self, request: ScheduledRequest) -> Ints:
        return self._count_slots_at(
            request, request.num_prompt_tokens + request.max_new_tokens - 1, request.num_sequences
        )

    def _count_slots_at(self, request: ScheduledRequest, length: int, num_sequences: int) -> Ints:
        """So many sequences of a request, at a length.

        They share what was the prompt, unless they may be put aside: files share nothing.
        """
        slots = num_sequences * self.memory_model.count_slots(length)
        if num_sequences == 1 or self.overcommit > 1:
            return slots
        return slots - (num_sequences - 1) * self.memory_model.count_shared_slots(
            request.num_prompt_tokens
        )

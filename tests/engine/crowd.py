"""Simulate an engine with many requests: the real scheduler, page tables and pools, and a clock.

A simulated store answers lookups at random times. No model, no tensors.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from engine.caches import SimulatedBatch, SimulatedSequence, Slots
from kvant.engine.actions import (
    Action,
    Decode,
    Evict,
    LookUpStore,
    MatchPrefix,
    Prefill,
    SwapIn,
    SwapOut,
)
from kvant.engine.chunk_sizer import CHUNK_ALIGNMENT, ChunkSizer
from kvant.engine.memory import MemoryModel
from kvant.engine.request import Request
from kvant.engine.scheduler import Scheduler
from kvant.page_table import LayerGroup, Paging

RAW = LayerGroup(Paging(CHUNK_ALIGNMENT, None))  # open pages of 64 tokens, nothing is sealed
SEALED = LayerGroup(Paging(CHUNK_ALIGNMENT, 0), slack=16)
WINDOW = LayerGroup(Paging(CHUNK_ALIGNMENT, 0), window=200, sinks=4, slack=16)
MAX_CHUNK = 512
OPEN_NBYTES, SEALED_NBYTES, STATE_NBYTES = 1000, 500, 10
FORWARD_MS = 5.0
DECODE_MS = 0.4  # a sequence
PREFILL_MS = 1.0  # a token
ATTENTION_MS = 1e-3  # a token, for each token before it
SWAP_MS = 50.0
CHUNK_MS = 250.0  # of prefill between two tokens, for each prompt


def make_memory_model(*groups: LayerGroup) -> MemoryModel:
    sizes = [size for group in groups for size in (OPEN_NBYTES, SEALED_NBYTES * group.seals)]
    return MemoryModel(groups, np.array([*sizes, STATE_NBYTES, 0]), MAX_CHUNK)


MEMORY_MODEL = make_memory_model(RAW)


def compute_chunk_ms(count: int, num_computed: int) -> float:
    return FORWARD_MS + count * (PREFILL_MS + ATTENTION_MS * (num_computed + count / 2))


@dataclass
class SimulatedRequest:
    """A request, its caches, and what the tests measure of it."""

    scheduled: Request
    output_lengths: list[int]  # of its unfinished sequences, in tokens
    sequences: list[SimulatedSequence] = field(default_factory=lambda: [SimulatedSequence()])
    num_swapped: int = 0  # tokens of each sequence while it is swapped out
    admitted_ms: float | None = None
    last_token_ms: float | None = None
    cancel_ms: float | None = None


@dataclass(eq=False)
class SimulatedPrefix:
    """A cached prefix: a fork of a sequence, and its pages."""

    sequence: SimulatedSequence
    slots: Slots


@dataclass
class Simulation:
    """An engine whose forwards and swaps only advance a clock."""

    scheduler: Scheduler
    now_ms: float = 0.0
    requests: dict[Request, SimulatedRequest] = field(default_factory=dict)
    prefixes: list[SimulatedPrefix] = field(default_factory=list)
    lookups: dict[Request, float] = field(default_factory=dict)  # when a store answers
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    admitted: list[SimulatedRequest] = field(default_factory=list)  # in order
    num_finished: int = 0
    num_swaps: int = 0
    peak_nbytes: int = 0
    delays_ms: list[float] = field(default_factory=list)  # of tokens, without their own forward
    num_hit_tokens: int = 0  # of prompts, in cached prefixes
    num_evicted: int = 0  # prefixes
    num_restored_tokens: int = 0
    num_late: int = 0  # lookups that finished after the prefill started
    num_overdue: int = 0  # restores that were used after the deadline of the request

    def __post_init__(self) -> None:
        self.batch = SimulatedBatch(self.scheduler.memory_model)

    def perform(self, action: Action) -> None:
        elapsed_ms = 0.0
        if isinstance(action, Prefill):
            elapsed_ms = self.prefill(action)
        elif isinstance(action, Decode):
            sequences = [s for r in action.requests for s in self.requests[r].sequences]
            elapsed_ms = FORWARD_MS + DECODE_MS * len(sequences)
            self.batch.decode(sequences)
            self.scheduler.complete(action)
        elif isinstance(action, SwapOut | SwapIn):
            elapsed_ms, self.num_swaps = SWAP_MS, self.num_swaps + 1
            self.swap(action)
            self.scheduler.complete(action)
        elif isinstance(action, MatchPrefix):
            self.match_prefix(action.request)
        elif isinstance(action, Evict):
            self.evict_prefixes(action.nbytes)
        elif isinstance(action, LookUpStore):
            action.request.store_deadline_ms = int(self.now_ms + self.rng.choice([1, 40, 400]))
            self.lookups[action.request] = self.now_ms + self.rng.choice([1, 40, 400])
        else:
            self.drop_waiting_matches()
            assert self.batch.num_used == 0
            self.batch.clear()
            self.scheduler.complete(action)
        self.now_ms += elapsed_ms
        self.check_memory()
        self.emit_tokens(action, elapsed_ms)

    def check_memory(self) -> None:
        """Compare the bytes of pools and states with the limit."""
        running = [
            r for scheduled, r in self.requests.items() if scheduled in self.scheduler.queue.running
        ]
        num_states = sum(len(request.sequences) for request in running) + len(self.prefixes)
        nbytes = self.batch.nbytes + STATE_NBYTES * num_states
        self.peak_nbytes = max(self.peak_nbytes, nbytes)
        limit = self.scheduler.max_bytes
        assert limit is None or nbytes <= limit, (
            f"{nbytes} bytes of {limit} at {self.now_ms:.0f} ms"
        )

    def prefill(self, action: Prefill) -> float:
        """Prefill a chunk and return its milliseconds."""
        scheduled, request = action.request, self.requests[action.request]
        elapsed_ms = compute_chunk_ms(action.count, scheduled.num_computed_tokens)
        self.scheduler.chunk_sizer.record_time(
            action.count, scheduled.num_computed_tokens, elapsed_ms / 1e3
        )
        prompt = request.sequences[0]
        self.batch.prefill(prompt, action.count)
        self.scheduler.complete(action)
        if scheduled.is_decoding:
            num_forks = scheduled.num_choices - 1
            request.sequences += [self.batch.fork(prompt) for _ in range(num_forks)]
        if scheduled.num_computed_tokens in scheduled.checkpoint_positions:
            self.insert_prefix(scheduled, prompt)
        return elapsed_ms

    def swap(self, action: SwapOut | SwapIn) -> None:
        request = self.requests[action.request]
        if isinstance(action, SwapOut):
            request.num_swapped = self.batch.count_tokens(request.sequences[0])
        for sequence in request.sequences:
            if isinstance(action, SwapOut):
                self.batch.release(sequence)
            elif request.num_swapped:
                self.batch.prefill(sequence, request.num_swapped)

    def emit_tokens(self, action: Action, elapsed_ms: float) -> None:
        """Record the delays of new tokens, and finish sequences at their lengths."""
        if isinstance(action, Prefill) and action.request.is_decoding:
            decoded = [self.requests[action.request]]
        elif isinstance(action, Decode):
            decoded = [self.requests[scheduled] for scheduled in action.requests]
        else:
            decoded = []
        for request in decoded:
            if request.last_token_ms is not None:
                self.delays_ms.append(self.now_ms - request.last_token_ms - elapsed_ms)
            request.last_token_ms = self.now_ms
            num_output = request.scheduled.num_output_tokens
            for length in [n for n in request.output_lengths if n <= num_output]:
                request.output_lengths.remove(length)
                sequence = request.sequences.pop()
                self.scheduler.finish_sequence(request.scheduled)
                self.insert_prefix(request.scheduled, sequence)
                self.batch.release(sequence)
            if not request.output_lengths:
                self.finish(request)

    def finish(self, request: SimulatedRequest) -> None:
        """Remove a finished or cancelled request, and insert its sequences into the prefixes."""
        self.scheduler.remove(request.scheduled)
        for sequence in request.sequences:
            self.insert_prefix(request.scheduled, sequence)
            self.batch.release(sequence)
        self.num_finished += 1
        del self.requests[request.scheduled]

    def insert_prefix(self, scheduled: Request, sequence: SimulatedSequence) -> None:
        """Insert a sequence into the prefixes, if it fits."""
        length = self.batch.count_tokens(sequence)
        if not self.scheduler.memory_budget.has_prefixes or not length:
            return
        if self.scheduler.can_insert_prefix(scheduled, length):
            fork = self.batch.fork(sequence)
            self.prefixes.append(SimulatedPrefix(fork, self.batch.list_slots(fork)))
            self.update_prefix_slots()

    def match_prefix(self, scheduled: Request) -> None:
        """Give a request the first tokens of a random prefix, or none, and random checkpoints."""
        request, match, length = self.requests[scheduled], None, 0
        if self.prefixes and self.rng.random() < 0.7:
            prefix = self.rng.choice(self.prefixes)
            max_length = self.rng.randrange(scheduled.num_prompt_tokens)
            length = self.batch.find_resumable_length(prefix.sequence, max_length)
            if length > scheduled.num_computed_tokens:
                match = self.batch.fork(prefix.sequence)
        if match is not None:
            self.batch.rewind(match, length)
            self.num_hit_tokens += length - scheduled.num_computed_tokens
            request.sequences = [match]
        num_cached = self.batch.count_tokens(request.sequences[0])
        end, next_page = scheduled.num_prompt_tokens, num_cached // CHUNK_ALIGNMENT + 1
        checkpoints = {end} if self.rng.random() < 0.3 else set()
        checkpoints |= {next_page * CHUNK_ALIGNMENT} if self.rng.random() < 0.3 else set()
        later = tuple(sorted(n for n in checkpoints if num_cached < n <= end))
        scheduled.set_match(self.scheduler.prefix_version, num_cached, later)
        self.update_prefix_slots()

    def finish_lookup(self, scheduled: Request) -> None:
        """End a store lookup that found all whole pages of a prompt, or nothing new."""
        del self.lookups[scheduled]
        sequence = self.requests[scheduled].sequences[0]
        num_cached = scheduled.num_computed_tokens
        whole_pages = (scheduled.num_prompt_tokens - 1) // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
        length = self.rng.choice([num_cached, whole_pages])
        self.num_late += scheduled.prefill_started
        is_overdue = scheduled.store_deadline_ms <= self.now_ms
        if self.scheduler.finish_store_lookup(scheduled, length) and length > num_cached:
            assert num_cached == self.batch.count_tokens(sequence)
            self.batch.prefill(sequence, length - num_cached)
            self.num_restored_tokens += length - num_cached
            self.num_overdue += is_overdue
            scheduled.num_computed_tokens = length

    def evict_prefixes(self, nbytes: int) -> None:
        """Evict the oldest unused prefixes; if none and nothing runs, those of waiting requests."""
        any_evicted = self.evict_unused(nbytes)
        if not any_evicted and not self.scheduler.queue.running:
            self.drop_waiting_matches()
            any_evicted = self.evict_unused(nbytes)
        self.update_prefix_slots()
        self.scheduler.may_evict = any_evicted

    def drop_waiting_matches(self) -> None:
        for scheduled in self.scheduler.queue.waiting:
            if scheduled.holds_match:
                self.drop_match(scheduled)

    def drop_match(self, scheduled: Request) -> None:
        self.requests[scheduled].sequences = [SimulatedSequence()]
        scheduled.set_match()

    def evict_unused(self, nbytes: int) -> bool:
        freed, num_before = 0, len(self.prefixes)
        for prefix in list(self.prefixes):
            if freed >= nbytes:
                break
            all_slots = [other.slots for other in self.prefixes]
            if not self.batch.has_outside_users(prefix.slots, all_slots):
                self.prefixes.remove(prefix)
                freed += sum(map(len, prefix.slots)) * SEALED_NBYTES
        self.num_evicted += num_before - len(self.prefixes)
        return len(self.prefixes) < num_before

    def update_prefix_slots(self) -> None:
        """Set the scheduler's slots of prefixes, and those that requests share with them."""
        if not self.scheduler.memory_budget.has_prefixes:
            return
        model = self.scheduler.memory_model
        masks = self.batch.mask_slots([prefix.slots for prefix in self.prefixes])
        for scheduled in (*self.scheduler.queue.running, *self.scheduler.queue.waiting):
            prompt = self.requests[scheduled].sequences[0]
            scheduled.shared_slots = self.batch.count_shared_pages(
                prompt, scheduled.num_prompt_tokens, masks
            )
            if scheduled.holds_match and scheduled in self.scheduler.queue.waiting:
                needed = model.count_shared_slots(scheduled.num_computed_tokens)
                if (needed > scheduled.shared_slots).any():
                    self.drop_match(scheduled)
        counts = [int(mask.sum()) for mask in masks]
        self.scheduler.set_prefix_slots(np.array([*counts, len(self.prefixes), 0]))

    def run(self, requests: list[SimulatedRequest]) -> None:
        """Add requests at their arrival times and run until all are finished."""
        arrivals = sorted(requests, key=lambda request: request.scheduled.arrival_ms)
        while arrivals or self.requests:
            while arrivals and arrivals[0].scheduled.arrival_ms <= self.now_ms:
                request = arrivals.pop(0)
                self.requests[request.scheduled] = request
                self.scheduler.add(request.scheduled)
            for request in [*self.requests.values()]:
                if (request.cancel_ms or 1e18) <= self.now_ms:
                    self.finish(request)
            for scheduled in [s for s, end_ms in self.lookups.items() if end_ms <= self.now_ms]:
                if scheduled in self.requests:
                    self.finish_lookup(scheduled)
                else:
                    del self.lookups[scheduled]
            action = self.scheduler.choose_action(int(self.now_ms))
            assert self.scheduler.queue.num_sequences <= self.scheduler.max_sequences
            for request in self.requests.values():
                if (
                    request.admitted_ms is None
                    and request.scheduled in self.scheduler.queue.running
                ):
                    request.admitted_ms = self.now_ms
                    self.admitted.append(request)
            if action is not None:
                self.perform(action)
            elif (timeout := self.scheduler.queue.compute_timeout(int(self.now_ms))) is not None:
                self.now_ms += max(1e3 * timeout, 1.0)
            else:
                assert not self.requests
                if arrivals:
                    self.now_ms = max(self.now_ms, arrivals[0].scheduled.arrival_ms)


def make_requests(
    count: int, seed: int, gap_ms: float = 900.0, widths: tuple[int, ...] = (1, 1, 1, 1, 1, 1, 3)
) -> list[SimulatedRequest]:
    """Return random requests, a tenth of which are cancelled."""
    rng = random.Random(seed)
    requests, now_ms = [], 0.0
    for number in range(count):
        now_ms += rng.expovariate(1 / gap_ms)
        max_new_tokens, width = rng.choice([1, 5, 40, 200]), rng.choice(widths)
        scheduled = Request(
            number,
            rng.choice([1, 20, 63, 64, 300, 2000]) + rng.randrange(40),
            max_new_tokens,
            width,
            rng.choice([0, 0, 0, 1, 5]),
            rng.choice("abc"),
            int(now_ms),
        )
        output_lengths = [rng.randint(1, max_new_tokens) for _ in range(width)]
        request = SimulatedRequest(scheduled, output_lengths)
        request.cancel_ms = now_ms + rng.uniform(0, 20_000) if rng.random() < 0.1 else None
        requests.append(request)
    return requests


def make_simulation(
    max_bytes: int | None,
    overcommit: float = 1.0,
    max_sequences: int = 8,
    groups: tuple[LayerGroup, ...] = (RAW,),
) -> Simulation:
    seconds = CHUNK_MS / 1e3
    return Simulation(
        Scheduler(
            make_memory_model(*groups),
            ChunkSizer(MAX_CHUNK),
            max_bytes,
            max_sequences,
            overcommit,
            seconds,
        )
    )

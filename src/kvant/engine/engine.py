"""Serve concurrent requests on one model within a limit of bytes.

One thread owns the model and all memory. Requests and cancels reach it through a queue; steps leave
it through streams. Between two forwards it asks the scheduler for the next action, so a cancel
takes effect within one step. A failed decode appends no token: it is retried one sequence at a
time, and only those that fail again end with an error.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from threading import Lock, Thread, current_thread
from typing import Any, Unpack

from torch import Tensor

from kvant.engine.batch import Batch, EngineSequence, max_idle
from kvant.engine.chunk_sizer import ChunkSizer
from kvant.engine.memory import MemoryModel
from kvant.engine.metrics import EngineMetrics
from kvant.engine.prefix_reuse import PrefixReuse, make_own_prefixes
from kvant.engine.request import (
    ChoiceOfRequest,
    Request,
    check_counts,
    clear_traceback_frames,
    sample_tokens,
)
from kvant.engine.scheduler import (
    Action,
    Decode,
    Evict,
    LookUpStore,
    MatchPrefix,
    Prefill,
    ScheduledRequest,
    Scheduler,
    SwapIn,
    SwapOut,
)
from kvant.engine.stream import Stream
from kvant.errors import CacheError, EngineError
from kvant.generation.conversation import (
    Prompt,
    encode_prompt,
    find_branch_points,
)
from kvant.generation.decoder import TransformersDecoder, make_decoder
from kvant.generation.grammar import make_matcher
from kvant.generation.loop import Step
from kvant.generation.sampling import Sampler
from kvant.generation.settings import SamplingOptions, StopConditions, make_sampling
from kvant.hf import attach, detach, get_attachments
from kvant.planner import plan
from kvant.platform import openmp
from kvant.platform.devices import warn_of_slow_weights
from kvant.platform.sizes import as_bytes, format_size
from kvant.prefixes import Prefixes
from kvant.recipes import AnySpec
from kvant.renamed import RenamedAttribute
from kvant.spec import describe_spec
from kvant.stores import Store
from kvant.weights import packing as weights

log = logging.getLogger("kvant")

MAX_PREFILL_CHUNK = 512  # tokens
MAX_CHUNK_SECONDS = {"cpu": 0.5, "cuda": 0.03}  # by which a prefill chunk may delay decodes


class Engine:
    """A thread that serves requests on one model, which stays attached until `close`.

    Change the model only while no request is open. Prefixes are keyed by its weights. The weights
    are checked when a request arrives at an idle engine, and then once a second.

    >>> with kvant.Engine(model, tokenizer, max_bytes="64MiB") as engine:
    ...     streams = [engine.submit(text, max_new_tokens=4) for text in ("import ", "def ")]
    ...     results = [stream.result() for stream in streams]
    >>> len(results)
    2
    """

    tokens_of = RenamedAttribute("encode_prompt")  # old names, which warn
    serves = RenamedAttribute("is_open")
    bytes_a_token = RenamedAttribute("nbytes_per_token")
    limits = RenamedAttribute("stop_conditions")

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        kv_cache: AnySpec = "affine8",
        *,
        max_bytes: int | str | None = None,
        max_sequences: int = 16,
        max_context: int | None = None,
        overcommit: float = 1.0,
        chunk_seconds: float | None = None,
        backend: str | None = None,
        pack: bool = True,
        prefixes: Prefixes | None = None,
        store: str | Store | Sequence[str | Store] | None = None,
    ) -> None:
        """Limit all caches to `max_bytes` (or "2GiB"), and decodes to `max_sequences` at a time.

        `overcommit` admits up to this multiple of the bytes; what does not fit is swapped to files.
        A prefill delays each token of others by about `chunk_seconds`; several, by up to 4 times.
        `pack` packs 16-bit weights on a CPU until the engine is closed. `prefixes` count within
        `max_bytes` and are evicted if needed. A `store` gives this engine prefixes of its own.
        """
        own_prefixes = make_own_prefixes(store, max_bytes, prefixes)
        self.prefixes = prefixes = prefixes if own_prefixes is None else own_prefixes
        if tokenizer is None:
            raise TypeError("tokenizer=None: pass the model's tokenizer, to encode and decode text")
        decoder = make_decoder(model)
        if not isinstance(decoder, TransformersDecoder):
            raise TypeError("an engine serves models of transformers: load one")
        self.tokenizer = tokenizer
        self.end_tokens = decoder.end_tokens
        self.model = model = decoder.model
        spec = decoder.make_cache(kv_cache, tokenizer).spec
        empty_cache = decoder.make_cache(spec.with_checkpoints(1))  # to rewind a failed forward
        self._batch = Batch(decoder, empty_cache, backend)
        memory_plan = plan(model, self._batch.spec, context=1)
        self.kv_cache = describe_spec(spec)
        self.nbytes_per_token = memory_plan.nbytes_per_token
        if max_bytes is not None and (memory_plan.uncounted_layers or not memory_plan.nbytes):
            raise CacheError(
                f"max_bytes={max_bytes} for {type(model).__name__}: some layers have state of "
                "unknown size; bound max_sequences and max_context instead"
            )
        capacities = max_context or decoder.max_context, empty_cache.capacity
        limits = [capacity for capacity in capacities if capacity is not None]
        context = min(limits, default=None)
        self.stop_conditions = StopConditions(max_context=context, vocab_size=decoder.vocab_size)
        self._chunk_sizer = ChunkSizer(
            MAX_PREFILL_CHUNK if decoder.supports_chunked_prefill else max(limits, default=1 << 20),
            supports_chunks=decoder.supports_chunked_prefill,
            fixed_size=prefixes is not None and prefixes.exact,
        )
        seconds = MAX_CHUNK_SECONDS.get(model.device.type, MAX_CHUNK_SECONDS["cpu"])
        chunk, divisor = self._chunk_sizer.max_chunk, 0 if model.device.type == "cpu" else 8
        num_idle = max_idle(max_sequences) if decoder.captures_graphs else 0
        self._scheduler = Scheduler(
            MemoryModel.from_plan(memory_plan, chunk, spare_divisor=divisor, num_idle=num_idle),
            self._chunk_sizer,
            None if max_bytes is None else as_bytes(max_bytes),
            max_sequences,
            overcommit,
            seconds if chunk_seconds is None else chunk_seconds,
            has_store=prefixes is not None and prefixes.prefix_store is not None,
        )
        self._metrics = EngineMetrics()
        self._request_numbers, self._pid = count(), os.getpid()  # a fork has no engine thread
        self._requests: dict[ScheduledRequest, Request] = {}
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._swap_folder: Path | None = None
        self._is_open = True
        self._submit_lock = Lock()  # no request is queued after the engine closed
        self._prefix_reuse = PrefixReuse(
            self._batch, self._scheduler, self._requests, tokenizer, self._inbox.put
        )
        warn_of_slow_weights(model, log.warning)
        self._cleanup = self._prepare_model(model, own_prefixes, backend, pack=pack)
        openmp.release_threads()  # the engine's thread computes from now on
        self._thread = Thread(target=self._run, name="kvant-engine", daemon=True)
        self._thread.start()

    def _prepare_model(
        self, model: Any, own_prefixes: Prefixes | None, backend: str | None, *, pack: bool
    ) -> ExitStack:
        """Attach and pack the model, and open its prefixes; return what undoes this."""
        with ExitStack() as undo:
            if own_prefixes is not None:
                undo.callback(own_prefixes.close)
            undo.callback(self._prefix_reuse.close)
            if not get_attachments(model):
                attach(model, self._batch.spec, backend=backend)
                undo.callback(detach, model)
            if pack and not weights.is_packed(model):
                undo.callback(weights.unpack, model)
                weights.pack(model, tied=True)
            if self.prefixes is not None:  # after packing, which changes the key of the weights
                self._batch.attach_prefixes(self.prefixes)
                self._prefix_reuse.update_prefix_slots()
            return undo.pop_all()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all requests, free all memory, and end the thread."""
        self._inbox.put(self._stop)
        if current_thread() is not self._thread:  # an on_step callback may close
            self._thread.join()

    def submit(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
        skip_special_tokens: bool = True,
        logprobs: int = 0,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        n: int = 1,
        on_step: Callable[[Step], None] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Request `n` continuations of a prompt: text, token ids, or messages with roles.

        The options are those of `Sampling`, or `sampling`: an instance, whose fields they
        replace. Each step has the log-probabilities of the `logprobs` likeliest tokens. Higher
        `priority` first; among equals, the `tenant` with the fewest running sequences. Prefixes are
        shared only among requests of the same `salt`.
        `on_step` is called with each step in the engine's thread; an error in it fails the request.
        Invalid arguments raise here.
        """
        check_counts(n=n, logprobs=logprobs, priority=priority, max_new_tokens=max_new_tokens)
        conditions = replace(
            self.stop_conditions,
            max_new_tokens=max_new_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            end_tokens=frozenset() if ignore_end else self.end_tokens,
            include_special_tokens=not skip_special_tokens,
        )
        sampling = make_sampling(options)
        sampling.check_tokens(conditions.vocab_size)
        tokens = self.encode_prompt(prompt)
        conditions.check_prompt(tokens)
        now, max_new = time.monotonic(), conditions.count_remaining(0, len(tokens))
        number, arrival_ms = next(self._request_numbers), int(1e3 * now)
        scheduled = ScheduledRequest(number, len(tokens), max_new, n, priority, tenant, arrival_ms)
        self._scheduler.check_request(scheduled)
        stream = Stream(
            tokens, n, lambda: self._inbox.put(lambda: self._cancel(scheduled)), on_step
        )
        samplers = [
            Sampler(
                sampling.derive_choice(index),
                len(tokens),
                make_matcher(sampling.grammar, self.tokenizer, conditions.end_tokens),
            )
            for index in range(n)
        ]
        branch_points = find_branch_points(self.tokenizer, prompt, tokens)
        sequence = EngineSequence(tokens, salt=salt)
        self._enqueue(
            Request(scheduled, sequence, samplers, conditions, logprobs, stream, branch_points, now)
        )
        return stream

    def _enqueue(self, request: Request) -> None:
        """Pass a request to the engine's thread."""
        if os.getpid() != self._pid:
            raise EngineError(
                f"submit in process {os.getpid()} to an engine of process {self._pid}: its "
                "thread does not exist after a fork; make an engine in the child"
            )
        with self._submit_lock:
            if not self._is_open:
                raise CacheError("the engine is closed: make another one")
            self._inbox.put(lambda: self._add_request(request))

    @property
    def is_open(self) -> bool:
        """Whether the engine accepts requests."""
        return self._is_open

    @property
    def max_sequences(self) -> int:
        return self._scheduler.max_sequences

    def encode_prompt(self, prompt: Prompt, limit: int | None = None) -> list[int]:
        """Return the tokens of a prompt; refuse texts far beyond `limit` (default: the context)."""
        limit = self.stop_conditions.max_context if limit is None else limit
        return encode_prompt(self.tokenizer, prompt, limit)

    def __repr__(self) -> str:
        stats = self.stats()
        limit = "" if stats["max_bytes"] is None else f" of {format_size(stats['max_bytes'])}"
        load = f"{stats['running']} running, {stats['waiting']} waiting"
        memory = f"{format_size(stats['nbytes_held'])}{limit}"
        return f"Engine({describe_spec(self._batch.spec)}: {load}, {memory})"

    def stats(self) -> dict[str, Any]:
        """Return counts of requests and tokens, latencies, and memory in bytes."""
        sequences = [s for request in [*self._requests.values()] for s in request.sequences]
        return {
            **self._scheduler.load(),
            **self._metrics.stats(),
            "max_bytes": self._scheduler.max_bytes,
            **self._batch.stats(sequences),
        }

    def load(self, tenant: str) -> dict[str, int]:
        """Count the waiting and running requests of a tenant, and its sequences."""
        return self._scheduler.load(tenant)

    # ---- in the engine's thread

    def _run(self) -> None:
        """Run the thread: handle messages and perform actions until closed."""
        error: BaseException | None = None
        try:
            while self._is_open:
                now = int(1e3 * time.monotonic())
                action = self._scheduler.choose_action(now) if self._inbox.empty() else None
                if action is None:
                    with suppress(Empty):
                        self._inbox.get(timeout=self._scheduler.compute_timeout(now))()
                else:
                    self._perform(action)
        except BaseException as failure:
            log.exception("the engine's thread failed")
            error = failure
        with self._cleanup:
            self._shut_down(error)

    def _shut_down(self, error: BaseException | None) -> None:
        """End all streams and free all memory."""
        with self._submit_lock:
            self._is_open = False
        while not self._inbox.empty():  # includes requests that were queued before the close
            self._inbox.get()()
        clear_traceback_frames(error)
        for request in self._requests.values():
            request.finish(None if error is None else EngineError(f"the engine ended: {error!r}"))
        self._requests.clear()
        self._batch.clear()

    def _stop(self) -> None:
        self._is_open = False

    def _add_request(self, request: Request) -> None:
        if not self._requests:  # while idle, the model may have been changed
            self._batch.invalidate_weights_check()
        self._requests[request.scheduled] = request
        self._scheduler.add(request.scheduled)
        self._metrics.count_request(request.scheduled)

    def _cancel(self, scheduled: ScheduledRequest) -> None:
        if scheduled in self._requests:
            self._batch.invalidate_weights_check()  # the caller may change the model after a cancel
            self._metrics.cancelled += 1
            self._finish(self._requests[scheduled])

    def _perform(self, action: Action) -> None:
        if isinstance(action, Prefill):
            self._prefill(action)
        elif isinstance(action, Decode):
            self._decode(action)
        elif isinstance(action, SwapOut | SwapIn):
            self._swap(action)
        elif isinstance(action, MatchPrefix):
            self._prefix_reuse.match_prefix(action.request)
        elif isinstance(action, LookUpStore):
            self._prefix_reuse.look_up_store(action.request)
        elif isinstance(action, Evict):
            self._prefix_reuse.evict_prefixes(
                action.nbytes, include_unwritten=action.include_unwritten
            )
        else:  # FreePools
            self._prefix_reuse.drop_waiting_matches()
            self._batch.clear()
            self._scheduler.complete(action)

    def _prefill(self, action: Prefill) -> None:
        """Prefill a chunk of a prompt; after the last one, sample a token for each continuation."""
        scheduled, request = action.request, self._requests[action.request]
        begin = time.perf_counter()
        if not request.prefill_started:
            request.prefill_started = True
            self._batch.record_lookup(scheduled.num_prompt_tokens, scheduled.num_computed_tokens)
            self._metrics.count_prefix_hits(request.stream.usage)
        self._prefix_reuse.cancel_lookup(scheduled)
        is_last = scheduled.num_computed_tokens + action.count == scheduled.num_prompt_tokens
        try:
            logits = self._batch.prefill(request.sequence, action.count)
            if is_last:
                sequences = [self._batch.fork(request.sequence) for _ in request.samplers[1:]]
                request.start_choices(self.tokenizer, sequences)
        except Exception as error:
            self._prefix_reuse.reject(request)
            self._finish(request, error)
            return
        seconds = time.perf_counter() - begin
        self._chunk_sizer.record_time(action.count, scheduled.num_computed_tokens, seconds)
        self._batch.record_prefill_time(action.count, seconds)
        self._scheduler.complete(action)
        if scheduled.num_computed_tokens in scheduled.checkpoint_positions:
            self._prefix_reuse.insert_prefix(scheduled, request.sequence)
        if is_last:
            if request.restored_range and logits.isnan().any():  # sampling will fail
                self._prefix_reuse.reject(request)
            rows = logits.expand(len(request.choices), -1)
            self._emit_tokens([(request, choice) for choice in request.choices], rows)

    def _decode(self, action: Decode) -> None:
        """Decode a token for every sequence of the action's requests."""
        requests = [self._requests[scheduled] for scheduled in action.requests]
        choices = [(request, choice) for request in requests for choice in request.choices]
        logits, errors = self._batch.decode([choice.sequence for _, choice in choices])
        for index, error in errors.items():
            request, _ = choices[index]
            if request.scheduled in self._requests:
                self._finish(request, error)
        remaining = [scheduled for scheduled in action.requests if scheduled in self._requests]
        self._scheduler.complete(Decode(tuple(remaining)))
        if len(errors) < len(choices):
            self._emit_tokens(
                [pair for index, pair in enumerate(choices) if index not in errors], logits
            )

    def _emit_tokens(self, choices: Sequence[ChoiceOfRequest], logits: Tensor) -> None:
        """Sample a token for each choice from its row of logits, and put it on its stream."""
        tokens = sample_tokens(choices, logits)
        now = time.monotonic()
        for (request, choice), token in zip(choices, tokens, strict=True):
            if request.scheduled not in self._requests:
                continue  # another continuation failed
            try:
                if isinstance(token, Exception):
                    raise token
                step = choice.output.append_token(token, choice=choice.index)
                is_first = choice.output.num_generated == 1
                self._metrics.count_token(request.last_token_time, now, first=is_first)
                request.stream.put_step(step)
            except Exception as error:
                self._finish(request, error)
                continue
            if step.finish_reason is not None:
                request.choices.remove(choice)
                self._scheduler.finish_sequence(request.scheduled)
                self._prefix_reuse.insert_prefix(request.scheduled, choice.sequence)
                self._batch.release(choice.sequence)
                if not request.choices:
                    self._metrics.finished += 1
                    self._finish(request)
        for request, _ in choices:
            request.last_token_time = now

    def _swap(self, action: SwapOut | SwapIn) -> None:
        """Write the pages of a request to files, or read them back."""
        scheduled, request = action.request, self._requests[action.request]
        self._prefix_reuse.cancel_lookup(scheduled)
        self._metrics.put_aside += isinstance(action, SwapOut)
        try:
            if self._swap_folder is None:
                folder = self._cleanup.enter_context(TemporaryDirectory(prefix="kvant-"))
                self._swap_folder = Path(folder)
            for index, sequence in enumerate(request.sequences):
                if isinstance(action, SwapOut):
                    path = self._swap_folder / f"{scheduled.number}-{index}.kv"
                    self._batch.swap_out(sequence, path)
                else:
                    self._batch.swap_in(sequence)
        except Exception as error:
            self._finish(request, error)
            return
        self._scheduler.complete(action)

    def _finish(self, request: Request, error: BaseException | None = None) -> None:
        """Free a request and end its stream, with an error if it failed."""
        if error is not None:
            self._metrics.failed += 1
            clear_traceback_frames(error)
        if not request.prefill_started:  # otherwise, counted at the first chunk
            self._metrics.count_prefix_hits(request.stream.usage)
        self._scheduler.remove(request.scheduled)
        self._prefix_reuse.cancel_lookup(request.scheduled)
        for sequence in request.sequences:
            if error is None and self._is_open:
                self._prefix_reuse.insert_prefix(request.scheduled, sequence)
            self._batch.release(sequence)
        request.finish(error)
        request.choices = []
        self._requests.pop(request.scheduled, None)

"""Many requests at once on one model, within a limit of bytes.

One thread owns the model and all memory. Requests and their ends come to it through a queue, steps
leave it through streams. Between two forwards it asks the schedule what is next; so a cancel takes
effect within one step. A forward that dies gave nobody a token: it is tried again one sequence
after the other, and only the requests that fail then fail.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from threading import Lock, Thread, current_thread
from typing import Any

from torch import Tensor

from kvant import openmp, weights
from kvant.devices import warn_of_slow_weights
from kvant.engine.batch import Batch, EngineSequence, max_idle
from kvant.engine.chunk_sizer import ChunkSizer
from kvant.engine.memory import MemoryModel
from kvant.engine.metrics import EngineMetrics
from kvant.engine.prefix_reuse import PrefixReuse
from kvant.engine.request import Request, RequestChoice, clear_traceback_frames, sample_tokens
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
    encode_text,
    find_prompt_branch_points,
    resolve_prompt,
)
from kvant.generation.decoder import TransformersDecoder, make_decoder
from kvant.generation.grammar import Grammar, compile_grammar
from kvant.generation.loop import Output, Step
from kvant.generation.sampling import Sampler
from kvant.generation.settings import Sampling, StopConditions
from kvant.hf import attach, detach, get_attachments
from kvant.planner import plan
from kvant.prefixes import Prefixes
from kvant.recipes import AnySpec
from kvant.renamed import RenamedAttribute
from kvant.sizes import as_bytes, format_size
from kvant.spec import describe_spec
from kvant.stores import Store

log = logging.getLogger("kvant")

MAX_PREFILL_CHUNK = 512  # tokens of a prompt that are read at once, where nobody waits
MAX_CHUNK_SECONDS = {"cpu": 0.5, "cuda": 0.03}  # that a chunk may keep others from their next token


class Engine:
    """Serves requests on one model, which is attached for as long; a context manager.

    Change the model only while nobody is served: prefixes are named after its weights, and those
    are looked at when a first request comes, and once a second from then on.

    >>> with kvant.Engine(model, tokenizer, max_bytes="64MiB") as engine:
    ...     streams = [engine.submit(text, max_new_tokens=4) for text in ("import ", "def ")]
    ...     results = [stream.result() for stream in streams]
    >>> len(results)
    2
    """

    tokens_of = RenamedAttribute("encode_prompt")
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
        """`max_bytes` ("2GiB" too) bounds all caches, `max_sequences` those served at a time.

        `overcommit` promises so many times the bytes: what turns out to be too much waits in files.
        Each of 4 prompts at most keeps others from their next token for about `chunk_seconds`.
        `pack` packs 16-bit weights on a CPU, for as long as the engine serves. What is kept of
        `prefixes` counts within `max_bytes`, and goes where a request needs it. A `store` is for
        prefixes of its own.
        """
        own = _make_prefixes(store, max_bytes, prefixes)
        prefixes = prefixes if own is None else own
        if tokenizer is None:
            raise TypeError("tokenizer=None: the model's own is needed, to read text and write it")
        decoder = make_decoder(model)
        if not isinstance(decoder, TransformersDecoder):
            raise TypeError("an engine serves models of transformers: load one")
        self.tokenizer = tokenizer
        self.prefixes = prefixes
        self.end_tokens = decoder.end_tokens
        self.model = model = decoder.model
        asked = decoder.make_cache(kv_cache, tokenizer).spec
        memory = decoder.make_cache(asked.with_checkpoints(1))  # of before the forward under way
        self._batch = Batch(decoder, memory, backend)
        needed = plan(model, self._batch.spec, context=1)
        self.kv_cache = describe_spec(asked)
        self.nbytes_per_token = needed.nbytes_per_token
        if max_bytes is not None and (needed.uncounted_layers or not needed.nbytes):
            raise CacheError(
                f"max_bytes={max_bytes} for {type(model).__name__}: nobody can tell what some of "
                "its layers keep; bound max_sequences and max_context in its place"
            )
        longest = [
            n for n in (max_context or decoder.max_context, memory.capacity) if n is not None
        ]
        self.stop_conditions = StopConditions(
            max_context=min(longest, default=None), vocab_size=decoder.vocab_size
        )
        chunk = (
            MAX_PREFILL_CHUNK if decoder.supports_chunked_prefill else max(longest, default=1 << 20)
        )
        fixed = prefixes is not None and prefixes.exact
        self._chunk_sizer = ChunkSizer(
            chunk, supports_chunks=decoder.supports_chunked_prefill, fixed_size=fixed
        )
        seconds = MAX_CHUNK_SECONDS.get(model.device.type, MAX_CHUNK_SECONDS["cpu"])
        spare = 0 if model.device.type == "cpu" else 8
        idle = max_idle(max_sequences) if decoder.captures_graphs else 0
        self._scheduler = Scheduler(
            MemoryModel.from_plan(needed, chunk, spare_divisor=spare, num_idle=idle),
            self._chunk_sizer,
            None if max_bytes is None else as_bytes(max_bytes),
            max_sequences,
            overcommit,
            seconds if chunk_seconds is None else chunk_seconds,
            has_store=prefixes is not None and prefixes.prefix_store is not None,
        )
        self._metrics = EngineMetrics()
        self._request_numbers = count()
        self._pid = os.getpid()  # threads do not follow into a fork of it
        self._requests: dict[ScheduledRequest, Request] = {}
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._swap_folder: Path | None = None  # of what is put aside
        self._is_open = True
        self._submit_lock = Lock()  # held by who asks, and by the thread as it ends
        self._prefix_reuse = PrefixReuse(
            self._batch, self._scheduler, self._requests, tokenizer, self._inbox.put
        )
        warn_of_slow_weights(model, log.warning)
        self._cleanup = self._prepare_model(model, own, backend, pack=pack)
        openmp.release_threads()  # the engine's thread computes from now on
        self._thread = Thread(target=self._run, name="kvant-engine", daemon=True)
        self._thread.start()

    def _prepare_model(
        self, model: Any, own_prefixes: Prefixes | None, backend: str | None, *, pack: bool
    ) -> ExitStack:
        """Attach and pack the model, and name it for prefixes; what undoes all of it."""
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
            if self.prefixes is not None:  # looks at all weights, which are others once packed
                self._batch.attach_prefixes(self.prefixes)
                self._prefix_reuse.update_prefix_slots()
            return undo.pop_all()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all that is asked, free all memory, and end the thread."""
        self._inbox.put(self._stop)
        if current_thread() is not self._thread:  # it may be called by who is told of a step
            self._thread.join()

    def submit(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        grammar: Grammar | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        ignore_end: bool = False,
        skip_special_tokens: bool = True,
        logprobs: int = 0,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        n: int = 1,
        on_step: Callable[[Step], None] | None = None,
    ) -> Stream:
        """Ask for `n` continuations of a prompt: text, token ids, or messages with roles.

        A reply follows the `grammar`. Its text leaves out special tokens, unless it shall not skip
        them. `logprobs` tells so many of the likeliest tokens with each.
        Requests of a higher `priority` are served first, and among equals those of the `tenant`
        that has least. Prefixes are shared with requests of the same `salt`, and with no others.
        `on_step` is called with each step, in the engine's thread: what it raises ends the request.
        What is wrong with the arguments is said here.
        """
        whole = {"n": n, "logprobs": logprobs, "priority": priority}
        for name, value in (whole | {"max_new_tokens": max_new_tokens}).items():
            if not isinstance(value, int):
                raise TypeError(f"{name}={value!r}: a whole number is needed")
        for name, value, least in (("n", n, 1), ("logprobs", logprobs, 0)):
            if value < least:
                raise ValueError(f"{name}={value}: {least} or more is needed")
        limits = replace(
            self.stop_conditions,
            max_new_tokens=max_new_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            end_tokens=frozenset() if ignore_end else self.end_tokens,
            include_special_tokens=not skip_special_tokens,
        )
        drawn = temperature, top_k, top_p, min_p, repetition_penalty, seed
        biases = self._check_biases(logit_bias or {})
        tokens = self.encode_prompt(prompt)
        limits.check_prompt(tokens)
        rules = compile_grammar(grammar, self.tokenizer, limits.end_tokens)
        sampling = Sampling(*drawn, presence_penalty, frequency_penalty, biases, rules)
        now, new = time.monotonic(), limits.count_remaining(0, len(tokens))
        job = ScheduledRequest(
            next(self._request_numbers),
            len(tokens),
            new,
            n,
            priority,
            tenant,
            arrival_ms=int(1e3 * now),
        )
        self._scheduler.check_request(job)
        stream = Stream(tokens, n, lambda: self._inbox.put(lambda: self._cancel(job)), on_step)
        samplers = [Sampler(sampling.derive_choice(index), len(tokens)) for index in range(n)]
        marks = find_prompt_branch_points(self.tokenizer, prompt, tokens)
        request = Request(
            job,
            EngineSequence(tokens, salt=salt),
            samplers,
            limits,
            logprobs,
            stream,
            marks,
            last_token_time=now,
        )
        if os.getpid() != self._pid:
            raise EngineError(
                f"submit in process {os.getpid()} to an engine of process {self._pid}: its "
                "thread did not follow into the fork; make an engine in the child"
            )
        with self._submit_lock:
            if not self._is_open:
                raise CacheError("an engine that was closed serves no more: make another one")
            self._inbox.put(lambda: self._add_request(request))
        return stream

    @property
    def is_open(self) -> bool:
        """Does it take requests, or was it closed?"""
        return self._is_open

    @property
    def max_sequences(self) -> int:
        return self._scheduler.max_sequences

    def encode_prompt(self, prompt: Prompt, limit: int | None = None) -> list[int]:
        """The tokens of a prompt: of text, token ids, or messages with roles.

        A text that has far more than `limit` tokens, or than the context, is refused before all
        of it is encoded.
        """
        limit = self.stop_conditions.max_context if limit is None else limit
        tokens = resolve_prompt(self.tokenizer, prompt, limit)
        return encode_text(self.tokenizer, tokens, limit) if isinstance(tokens, str) else tokens

    def _check_biases(self, biases: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
        """Of tokens of the vocabulary."""
        most = self.stop_conditions.vocab_size
        for token in biases:
            if not 0 <= token < (1 << 31 if most is None else most):
                raise ValueError(f"logit_bias of token {token}: the vocabulary has {most}")
        return tuple(sorted(biases.items()))

    def __repr__(self) -> str:
        told = self.stats()
        most = "" if told["max_bytes"] is None else f" of {format_size(told['max_bytes'])}"
        return (
            f"Engine({describe_spec(self._batch.spec)}: {told['running']} running, "
            f"{told['waiting']} waiting, {format_size(told['nbytes_held'])}{most})"
        )

    def stats(self) -> dict[str, Any]:
        """Who waits and who is served, what was said, how long it took, what memory is held."""
        schedule, requests = self._scheduler, list(self._requests.values())
        return {
            **schedule.load(),
            **self._metrics.stats(),
            "max_bytes": schedule.max_bytes,
            **self._batch.stats([seat for request in requests for seat in request.sequences]),
        }

    def load(self, tenant: str) -> dict[str, int]:
        """Count the requests of a tenant that wait and that run, and its sequences."""
        return self._scheduler.load(tenant)

    # ---- in the engine's thread

    def _run(self) -> None:
        """Take messages, do what is next, until one of them ends it."""
        error: BaseException | None = None
        try:
            while self._is_open:
                now = int(1e3 * time.monotonic())
                action = self._scheduler.choose_action(now) if self._inbox.empty() else None
                if action is None:  # where there is nothing to do, it waits for somebody
                    with suppress(Empty):
                        self._inbox.get(timeout=self._scheduler.compute_timeout(now))()
                else:
                    self._perform(action)
        except BaseException as failure:
            log.exception("the engine's thread ended")
            error = failure
        with self._cleanup:
            self._shut_down(error)

    def _shut_down(self, error: BaseException | None) -> None:
        """Tell everybody that nothing comes any more, and let go of all memory."""
        with self._submit_lock:
            self._is_open = False
        while not self._inbox.empty():  # who is told may ask for more, and is refused
            self._inbox.get()()
        clear_traceback_frames(error)
        for request in self._requests.values():
            request.finish(None if error is None else EngineError(f"the engine ended: {error!r}"))
        self._requests.clear()
        self._batch.clear()

    def _stop(self) -> None:
        self._is_open = False

    def _add_request(self, request: Request) -> None:
        if not self._requests:  # nobody was served: the model may have been changed
            self._batch.invalidate_weights_check()
        self._requests[request.scheduled] = request
        self._scheduler.add(request.scheduled)
        self._metrics.count_request(request.scheduled)

    def _cancel(self, scheduled: ScheduledRequest) -> None:
        if scheduled in self._requests:
            self._batch.invalidate_weights_check()  # whoever cancelled may change the model
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
        else:
            self._prefix_reuse.drop_waiting_matches()
            self._batch.clear()
            self._scheduler.complete(action)

    def _prefill(self, action: Prefill) -> None:
        """A chunk of a prompt; behind the last one, the first token of every continuation."""
        request, begin = self._requests[action.request], time.perf_counter()
        if not request.prefill_started:
            request.prefill_started = True
            self._batch.record_lookup(
                action.request.num_prompt_tokens, action.request.num_computed_tokens
            )
            self._metrics.count_prefix_hits(request.stream.usage)
        self._prefix_reuse.cancel_lookup(action.request)
        last = action.request.num_computed_tokens + action.count == action.request.num_prompt_tokens
        try:
            logits = self._batch.prefill(request.sequence, action.count)
            if last:
                self._fork_choices(request)
        except Exception as error:
            self._prefix_reuse.reject(request)
            self._finish(request, error)
            return
        seconds = time.perf_counter() - begin
        self._chunk_sizer.record_time(action.count, action.request.num_computed_tokens, seconds)
        self._batch.record_prefill_time(action.count, seconds)
        self._scheduler.complete(action)
        if action.request.num_computed_tokens in action.request.checkpoint_positions:
            self._prefix_reuse.insert_prefix(request.scheduled, request.sequence)
        if last:
            if request.restored_range and logits.isnan().any():  # no token will be drawn from them
                self._prefix_reuse.reject(request)
            rows = logits.expand(len(request.choices), -1)
            self._emit_tokens([(request, choice) for choice in request.choices], rows)

    def _fork_choices(self, request: Request) -> None:
        """Let every continuation of a prompt have a sequence of its own."""
        seats = [request.sequence]
        seats += [self._batch.fork(request.sequence) for _ in request.samplers[1:]]
        request.choices = [
            RequestChoice(
                index, Output(self.tokenizer, request.stop_conditions, seat.tokens), sampler, seat
            )
            for index, (seat, sampler) in enumerate(zip(seats, request.samplers, strict=True))
        ]

    def _decode(self, action: Decode) -> None:
        """A token for every sequence of these."""
        requests = [self._requests[job] for job in action.requests]
        going = [(request, choice) for request in requests for choice in request.choices]
        logits, failed = self._batch.decode([choice.sequence for _, choice in going])
        for place, error in failed.items():
            if going[place][0].scheduled in self._requests:
                self._finish(going[place][0], error)
        self._scheduler.complete(
            Decode(tuple(job for job in action.requests if job in self._requests))
        )
        if len(failed) < len(going):
            self._emit_tokens(
                [one for place, one in enumerate(going) if place not in failed], logits
            )

    def _emit_tokens(
        self, choices: Sequence[tuple[Request, RequestChoice]], logits: Tensor
    ) -> None:
        """A token for each, by its row of logits."""
        found = sample_tokens(choices, logits)
        now = time.monotonic()
        for (request, choice), one in zip(choices, found, strict=True):
            if request.scheduled not in self._requests:
                continue  # another continuation failed
            try:
                if isinstance(one, Exception):
                    raise one
                step = choice.output.append_token(one, choice=choice.index)
                self._metrics.count_token(
                    request.last_token_time, now, first=choice.output.num_generated == 1
                )
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
        """Pages of a request to files, or back."""
        request, job = self._requests[action.request], action.request
        self._prefix_reuse.cancel_lookup(job)
        self._metrics.put_aside += isinstance(action, SwapOut)
        try:
            if self._swap_folder is None:
                self._swap_folder = Path(
                    self._cleanup.enter_context(TemporaryDirectory(prefix="kvant-"))
                )
            for place, seat in enumerate(request.sequences):
                if isinstance(action, SwapOut):
                    self._batch.swap_out(seat, self._swap_folder / f"{job.number}-{place}.kv")
                else:
                    self._batch.swap_in(seat)
        except Exception as error:
            self._finish(request, error)
            return
        self._scheduler.complete(action)

    def _finish(self, request: Request, error: BaseException | None = None) -> None:
        """Let a request go, and tell it why, unless all of it was said."""
        if error is not None:
            self._metrics.failed += 1
            clear_traceback_frames(error)
        if not request.prefill_started:  # else they were counted as its first chunk was read
            self._metrics.count_prefix_hits(request.stream.usage)
        self._scheduler.remove(request.scheduled)
        self._prefix_reuse.cancel_lookup(request.scheduled)
        for seat in request.sequences:
            if error is None and self._is_open:
                self._prefix_reuse.insert_prefix(request.scheduled, seat)
            self._batch.release(seat)
        request.finish(error)
        request.choices = []
        self._requests.pop(request.scheduled, None)


def _make_prefixes(store: Any, max_bytes: int | str | None, prefixes: Any) -> Prefixes | None:
    """Prefixes of an engine's own, where it is given a store."""
    if store is not None and prefixes is not None:
        raise TypeError("prefixes and a store: give the store to kvant.Prefixes(store=...)")
    return None if store is None else Prefixes("1GiB" if max_bytes is None else None, store=store)

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
from kvant.engine.batch import Batch, Seat, most_idle
from kvant.engine.figures import Figures
from kvant.engine.pace import Pace
from kvant.engine.request import Choice, Request, clear, drawn_for
from kvant.engine.reuse import Reuse
from kvant.engine.room import Footprint
from kvant.engine.schedule import (
    Action,
    Begin,
    Decode,
    Evict,
    Fetch,
    Job,
    PutAside,
    Read,
    Schedule,
    TakeBack,
)
from kvant.engine.stream import Stream
from kvant.errors import CacheError, EngineError
from kvant.generation.conversation import Prompt, encode, marks_of_prompt, tokens_of_prompt
from kvant.generation.decoder import HostDecoder, decoder_of
from kvant.generation.grammar import Grammar, rules_of
from kvant.generation.loop import Reply, Step
from kvant.generation.sampling import Sampler
from kvant.generation.settings import Limits, Sampling
from kvant.hf import attach, attachments, detach
from kvant.planner import plan
from kvant.prefixes import Prefixes
from kvant.recipes import AnySpec
from kvant.sizes import as_bytes, format_size
from kvant.spec import words
from kvant.stores import Store

log = logging.getLogger("kvant")

CHUNK = 512  # tokens of a prompt that are read at once, where nobody waits
SECONDS = {"cpu": 0.5, "cuda": 0.03}  # that a chunk may keep others from their next token


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
        own = _prefixes_of(store, max_bytes, prefixes)
        prefixes = prefixes if own is None else own
        if tokenizer is None:
            raise TypeError("tokenizer=None: the model's own is needed, to read text and write it")
        decoder = decoder_of(model)
        if not isinstance(decoder, HostDecoder):
            raise TypeError("an engine serves models of transformers: load one")
        self.tokenizer = tokenizer
        self.prefixes = prefixes
        self.end_tokens = decoder.end_tokens
        self.model = model = decoder.model
        asked = decoder.memory(kv_cache, tokenizer).spec
        memory = decoder.memory(asked.with_checkpoints(1))  # of before the forward under way
        self._batch = Batch(decoder, memory, backend)
        needed = plan(model, self._batch.spec, context=1)
        self.kv_cache = words(asked)
        self.bytes_a_token = needed.nbytes_per_token
        if max_bytes is not None and (needed.uncounted or not needed.nbytes):
            raise CacheError(
                f"max_bytes={max_bytes} for {type(model).__name__}: nobody can tell what some of "
                "its layers keep; bound max_sequences and max_context in its place"
            )
        longest = [n for n in (max_context or decoder.context, memory.capacity) if n is not None]
        self.limits = Limits(max_context=min(longest, default=None), vocabulary=decoder.vocabulary)
        chunk = CHUNK if decoder.continues else max(longest, default=1 << 20)
        fixed = prefixes is not None and prefixes.exact
        self._pace = Pace(chunk, continues=decoder.continues, fixed=fixed)
        seconds = SECONDS.get(model.device.type, SECONDS["cpu"])
        spare = 0 if model.device.type == "cpu" else 8
        idle = most_idle(max_sequences) if decoder.captures else 0
        self._schedule = Schedule(
            Footprint.of(needed, chunk, spare=spare, idle=idle),
            self._pace,
            None if max_bytes is None else as_bytes(max_bytes),
            max_sequences,
            overcommit,
            seconds if chunk_seconds is None else chunk_seconds,
            fetches=prefixes is not None and prefixes.archive is not None,
        )
        self._figures = Figures()
        self._numbers = count()
        self._process = os.getpid()  # threads do not follow into a fork of it
        self._requests: dict[Job, Request] = {}
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._folder: Path | None = None  # of what is put aside
        self._open = True
        self._door = Lock()  # held by who asks, and by the thread as it ends
        self._reuse = Reuse(self._batch, self._schedule, self._requests, tokenizer, self._inbox.put)
        warn_of_slow_weights(model, log.warning)
        self._undo = self._prepared(model, own, backend, pack=pack)
        openmp.release()  # the engine's thread computes from now on
        self._thread = Thread(target=self._serve, name="kvant-engine", daemon=True)
        self._thread.start()

    def _prepared(
        self, model: Any, own: Prefixes | None, backend: str | None, *, pack: bool
    ) -> ExitStack:
        """Attach and pack the model, and name it for prefixes; what undoes all of it."""
        with ExitStack() as undo:
            if own is not None:
                undo.callback(own.close)
            undo.callback(self._reuse.close)
            if not attachments(model):
                attach(model, self._batch.spec, backend=backend)
                undo.callback(detach, model)
            if pack and not weights.is_packed(model):
                undo.callback(weights.unpack, model)
                weights.pack(model, tied=True)
            if self.prefixes is not None:  # looks at all weights, which are others once packed
                self._batch.share(self.prefixes)
                self._reuse.weigh()
            return undo.pop_all()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all that is asked, free all memory, and end the thread."""
        self._inbox.put(self._end)
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
            self.limits,
            max_new_tokens=max_new_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            end_tokens=frozenset() if ignore_end else self.end_tokens,
            special=not skip_special_tokens,
        )
        drawn = temperature, top_k, top_p, min_p, repetition_penalty, seed
        biases = self._biases(logit_bias or {})
        tokens = self.tokens_of(prompt)
        limits.check_prompt(tokens)
        rules = rules_of(grammar, self.tokenizer, limits.end_tokens)
        sampling = Sampling(*drawn, presence_penalty, frequency_penalty, biases, rules)
        now, new = time.monotonic(), limits.left(0, len(tokens))
        job = Job(
            next(self._numbers), len(tokens), new, n, priority, tenant, arrived=int(1e3 * now)
        )
        self._schedule.check(job)
        stream = Stream(tokens, n, lambda: self._inbox.put(lambda: self._cancel(job)), on_step)
        samplers = [Sampler(sampling.apart(index), len(tokens)) for index in range(n)]
        marks = marks_of_prompt(self.tokenizer, prompt, tokens)
        request = Request(
            job, Seat(tokens, salt=salt), samplers, limits, logprobs, stream, marks, since=now
        )
        if os.getpid() != self._process:
            raise EngineError(
                f"submit in process {os.getpid()} to an engine of process {self._process}: its "
                "thread did not follow into the fork; make an engine in the child"
            )
        with self._door:
            if not self._open:
                raise CacheError("an engine that was closed serves no more: make another one")
            self._inbox.put(lambda: self._enter(request))
        return stream

    @property
    def serves(self) -> bool:
        """Does it take requests, or was it closed?"""
        return self._open

    @property
    def max_sequences(self) -> int:
        return self._schedule.max_sequences

    def tokens_of(self, prompt: Prompt, limit: int | None = None) -> list[int]:
        """The tokens of a prompt: of text, token ids, or messages with roles.

        A text that has far more than `limit` tokens, or than the context, is refused before all
        of it is encoded.
        """
        limit = self.limits.max_context if limit is None else limit
        tokens = tokens_of_prompt(self.tokenizer, prompt, limit)
        return encode(self.tokenizer, tokens, limit) if isinstance(tokens, str) else tokens

    def _biases(self, given: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
        """Of tokens of the vocabulary."""
        most = self.limits.vocabulary
        for token in given:
            if not 0 <= token < (1 << 31 if most is None else most):
                raise ValueError(f"logit_bias of token {token}: the vocabulary has {most}")
        return tuple(sorted(given.items()))

    def __repr__(self) -> str:
        told = self.stats()
        most = "" if told["max_bytes"] is None else f" of {format_size(told['max_bytes'])}"
        return (
            f"Engine({words(self._batch.spec)}: {told['running']} running, "
            f"{told['waiting']} waiting, {format_size(told['nbytes_held'])}{most})"
        )

    def stats(self) -> dict[str, Any]:
        """Who waits and who is served, what was said, how long it took, what memory is held."""
        schedule, requests = self._schedule, list(self._requests.values())
        return {
            **schedule.load(),
            **self._figures.told(),
            "max_bytes": schedule.max_bytes,
            **self._batch.stats([seat for request in requests for seat in request.seats]),
        }

    def load(self, tenant: str) -> dict[str, int]:
        """Count the requests of a tenant that wait and that run, and its sequences."""
        return self._schedule.load(tenant)

    # ---- in the engine's thread

    def _serve(self) -> None:
        """Take messages, do what is next, until one of them ends it."""
        error: BaseException | None = None
        try:
            while self._open:
                now = int(1e3 * time.monotonic())
                action = self._schedule.next(now) if self._inbox.empty() else None
                if action is None:  # where there is nothing to do, it waits for somebody
                    with suppress(Empty):
                        self._inbox.get(timeout=self._schedule.wakes(now))()
                else:
                    self._do(action)
        except BaseException as failure:
            log.exception("the engine's thread ended")
            error = failure
        with self._undo:
            self._leave(error)

    def _leave(self, error: BaseException | None) -> None:
        """Tell everybody that nothing comes any more, and let go of all memory."""
        with self._door:
            self._open = False
        while not self._inbox.empty():  # who is told may ask for more, and is refused
            self._inbox.get()()
        clear(error)
        for request in self._requests.values():
            request.end(None if error is None else EngineError(f"the engine ended: {error!r}"))
        self._requests.clear()
        self._batch.clear()

    def _end(self) -> None:
        self._open = False

    def _enter(self, request: Request) -> None:
        if not self._requests:  # nobody was served: the model may have been changed
            self._batch.doubt()
        self._requests[request.job] = request
        self._schedule.add(request.job)
        self._figures.asked(request.job)

    def _cancel(self, job: Job) -> None:
        if job in self._requests:
            self._batch.doubt()  # whoever cancelled may change the model
            self._figures.cancelled += 1
            self._finish(self._requests[job])

    def _do(self, action: Action) -> None:
        if isinstance(action, Read):
            self._read(action)
        elif isinstance(action, Decode):
            self._decode(action)
        elif isinstance(action, PutAside | TakeBack):
            self._move(action)
        elif isinstance(action, Begin):
            self._reuse.begin(action.job)
        elif isinstance(action, Fetch):
            self._reuse.fetch(action.job)
        elif isinstance(action, Evict):
            self._reuse.evict(action.nbytes, at_once=action.at_once)
        else:
            self._reuse.forget()
            self._batch.clear()
            self._schedule.done(action)

    def _read(self, action: Read) -> None:
        """A chunk of a prompt; behind the last one, the first token of every continuation."""
        request, begin = self._requests[action.job], time.perf_counter()
        if not request.served:
            request.served = True
            self._batch.count(action.job.prompt, action.job.read)
            self._figures.found(request.stream.usage)
        self._reuse.leave(action.job)
        last = action.job.read + action.count == action.job.prompt
        try:
            logits = self._batch.read(request.seat, action.count)
            if last:
                self._split(request)
        except Exception as error:
            self._reuse.reject(request)
            self._finish(request, error)
            return
        seconds = time.perf_counter() - begin
        self._pace.took(action.count, action.job.read, seconds)
        self._batch.took(action.count, seconds)
        self._schedule.done(action)
        if action.job.read in action.job.stops:
            self._reuse.keep(request.job, request.seat)
        if last:
            if request.came and logits.isnan().any():  # no token will be drawn from them
                self._reuse.reject(request)
            rows = logits.expand(len(request.choices), -1)
            self._say([(request, choice) for choice in request.choices], rows)

    def _split(self, request: Request) -> None:
        """Let every continuation of a prompt have a sequence of its own."""
        seats = [request.seat]
        seats += [self._batch.fork(request.seat) for _ in request.samplers[1:]]
        request.choices = [
            Choice(index, Reply(self.tokenizer, request.limits, seat.tokens), sampler, seat)
            for index, (seat, sampler) in enumerate(zip(seats, request.samplers, strict=True))
        ]

    def _decode(self, action: Decode) -> None:
        """A token for every sequence of these."""
        requests = [self._requests[job] for job in action.jobs]
        going = [(request, choice) for request in requests for choice in request.choices]
        logits, failed = self._batch.decode([choice.seat for _, choice in going])
        for place, error in failed.items():
            if going[place][0].job in self._requests:
                self._finish(going[place][0], error)
        self._schedule.done(Decode(tuple(job for job in action.jobs if job in self._requests)))
        if len(failed) < len(going):
            self._say([one for place, one in enumerate(going) if place not in failed], logits)

    def _say(self, going: Sequence[tuple[Request, Choice]], logits: Tensor) -> None:
        """A token for each, by its row of logits."""
        found = drawn_for(going, logits)
        now = time.monotonic()
        for (request, choice), one in zip(going, found, strict=True):
            if request.job not in self._requests:
                continue  # another continuation failed
            try:
                if isinstance(one, Exception):
                    raise one
                step = choice.reply.add(one, choice=choice.index)
                self._figures.said(request.since, now, first=choice.reply.said == 1)
                request.stream.put(step)
            except Exception as error:
                self._finish(request, error)
                continue
            if step.finish_reason is not None:
                request.choices.remove(choice)
                self._schedule.ended(request.job)
                self._reuse.keep(request.job, choice.seat)
                self._batch.drop(choice.seat)
                if not request.choices:
                    self._figures.finished += 1
                    self._finish(request)
        for request, _ in going:
            request.since = now

    def _move(self, action: PutAside | TakeBack) -> None:
        """Pages of a request to files, or back."""
        request, job = self._requests[action.job], action.job
        self._reuse.leave(job)
        self._figures.put_aside += isinstance(action, PutAside)
        try:
            if self._folder is None:
                self._folder = Path(self._undo.enter_context(TemporaryDirectory(prefix="kvant-")))
            for place, seat in enumerate(request.seats):
                if isinstance(action, PutAside):
                    self._batch.put_aside(seat, self._folder / f"{job.number}-{place}.kv")
                else:
                    self._batch.take_back(seat)
        except Exception as error:
            self._finish(request, error)
            return
        self._schedule.done(action)

    def _finish(self, request: Request, error: BaseException | None = None) -> None:
        """Let a request go, and tell it why, unless all of it was said."""
        if error is not None:
            self._figures.failed += 1
            clear(error)
        if not request.served:  # else they were counted as its first chunk was read
            self._figures.found(request.stream.usage)
        self._schedule.remove(request.job)
        self._reuse.leave(request.job)
        for seat in request.seats:
            if error is None and self._open:
                self._reuse.keep(request.job, seat)
            self._batch.drop(seat)
        request.end(error)
        request.choices = []
        self._requests.pop(request.job, None)


def _prefixes_of(store: Any, max_bytes: int | str | None, prefixes: Any) -> Prefixes | None:
    """Prefixes of an engine's own, where it is given a store."""
    if store is not None and prefixes is not None:
        raise TypeError("prefixes and a store: give the store to kvant.Prefixes(store=...)")
    return None if store is None else Prefixes("1GiB" if max_bytes is None else None, store=store)

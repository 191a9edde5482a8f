"""The engine's thread: it owns a model and all memory, and carries out the scheduler's actions.

Requests and cancels reach the thread through a queue; steps leave it through streams. Between two
forwards it asks the scheduler for the next action, so a cancel takes effect within one step. A
failed decode appends no token: it is retried one sequence at a time, and only those that fail again
end with an error.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from threading import Lock, Thread, current_thread
from typing import Any

from torch import Tensor

from kvant.engine.actions import (
    Action,
    Decode,
    EncodeImage,
    Evict,
    LookUpStore,
    MatchPrefix,
    Prefill,
    Repeat,
    SwapIn,
    SwapOut,
)
from kvant.engine.batch import Batch
from kvant.engine.drafts import DraftChooser
from kvant.engine.future import RequestFuture
from kvant.engine.metrics import EngineMetrics
from kvant.engine.prefix_reuse import Inbox, PrefixReuse, StoreLookups
from kvant.engine.request import (
    Request,
    Sequence,
    clear_traceback_frames,
    is_accepted,
    sample_tokens,
)
from kvant.engine.scheduler import Scheduler
from kvant.errors import CacheError, EngineError
from kvant.generation.loop import Step
from kvant.generation.sampling import SampledToken

log = logging.getLogger("kvant")


class EngineWorker:
    """A thread that serves the requests of one model; other threads submit and cancel."""

    def __init__(self, batch: Batch, scheduler: Scheduler, drafts: DraftChooser) -> None:
        self.batch = batch
        self.scheduler = scheduler
        self.drafts = drafts
        self.requests: dict[Request, RequestFuture[Any]] = {}  # open ones, with the client's side
        self.is_open = True
        self._failure: str | None = None  # the error that ended the thread
        self.swap_folder: Path | None = None
        self.pid = os.getpid()  # a fork of the process does not have the thread
        self._inbox: Inbox = SimpleQueue()
        self._metrics = EngineMetrics()
        self._submit_lock = Lock()  # no request is queued after the close
        self._cleanup = ExitStack()
        self._thread = Thread(target=self._run, name="kvant-engine", daemon=True)
        self.prefix_reuse = PrefixReuse(batch, scheduler, self.requests, self._inbox)
        self.store_lookups = StoreLookups(self.prefix_reuse)

    # ---- in any thread

    def start(self, cleanup: ExitStack) -> None:
        """Start the thread, which closes `cleanup` when it ends."""
        self._cleanup = cleanup
        self._thread.start()

    def close(self) -> None:
        """End all requests and the thread, and wait for it."""
        self._inbox.put(self._stop)
        if current_thread() is not self._thread:  # an on_step callback may call this
            self._thread.join()

    def submit(self, request: Request, future: RequestFuture[Any]) -> None:
        """Pass a request to the thread."""

        def add() -> None:
            if not self.requests:  # while idle, the model may have been changed
                self.prefix_reuse.invalidate_weights_check()
            self.requests[request] = future
            self._metrics.requests += 1
            self._metrics.prompt_tokens += request.num_prompt_tokens
            try:
                self.prefix_reuse.open_namespace(request)
                self.scheduler.add(request)
            except Exception as error:
                self._finish(request, error)

        if os.getpid() != self.pid:
            raise EngineError(
                f"submit in process {os.getpid()} to an engine of process {self.pid}: its "
                "thread does not exist after a fork; make an engine in the child"
            )
        with self._submit_lock:
            if self._failure is not None:
                raise EngineError(f"{self._failure}: make another one")
            if not self.is_open:
                raise CacheError("the engine is closed: make another one")
            self._inbox.put(add)

    def make_cancel(self, request: Request) -> Callable[[], None]:
        """Return a function that ends a request after its current token, if it is open.

        It has only the number, so that it does not keep the sequences alive.
        """
        return partial(self._cancel, request.number)

    def _cancel(self, number: int) -> None:
        def end() -> None:
            for request in [request for request in self.requests if request.number == number]:
                # The caller may change the model after a cancel.
                self.prefix_reuse.invalidate_weights_check()
                self._metrics.cancelled += 1
                self._finish(request)

        self._inbox.put(end)

    def stats(self) -> dict[str, Any]:
        """Return counts of requests and tokens, latencies, and memory in bytes."""
        sequences = [s for request in [*self.requests] for s in request.sequences]
        return {
            **self.scheduler.queue.load(),
            **self._metrics.stats(),
            "max_bytes": self.scheduler.max_bytes,
            **self.batch.caches.stats(sequences),
            "nbytes_drafts": self.drafts.nbytes,
        }

    # ---- in the thread

    def _run(self) -> None:
        """Run the thread: handle messages and perform actions until closed."""
        error: BaseException | None = None
        try:
            while self.is_open:
                now = int(1e3 * time.monotonic())
                action = self.scheduler.choose_action(now) if self._inbox.empty() else None
                if action is None:
                    with suppress(Empty):
                        self._inbox.get(timeout=self.scheduler.queue.compute_timeout(now))()
                else:
                    self._perform(action)
        except BaseException as failure:
            log.exception("the engine's thread failed")
            error = failure
        with self._cleanup:
            self._shut_down(error)

    def _shut_down(self, error: BaseException | None) -> None:
        """End all streams and free all memory."""
        reason = None if error is None else f"the engine ended: {error!r}"
        with self._submit_lock:
            self.is_open, self._failure = False, reason
        while not self._inbox.empty():  # includes requests that were queued before the close
            try:
                self._inbox.get()()
            except Exception:  # all requests must end
                log.exception("a message to the ended engine failed")
        clear_traceback_frames(error)
        failure = None if reason is None else EngineError(reason)
        for request, future in self.requests.items():
            future.finish(failure, request.flush_outputs())
            request.sequences.clear()  # a logged error may keep its requests alive
            request.free()
        self.requests.clear()
        self.batch.clear()
        self.drafts.clear()

    def _stop(self) -> None:
        self.is_open = False

    def _perform(self, action: Action) -> None:
        if isinstance(action, Prefill):
            self._prefill(action)
        elif isinstance(action, EncodeImage):
            self._encode_image(action)
        elif isinstance(action, Repeat):
            self._repeat(action)
        elif isinstance(action, Decode):
            self._decode(action)
        elif isinstance(action, SwapOut | SwapIn):
            self._swap(action)
        elif isinstance(action, MatchPrefix):
            self.store_lookups.cancel(action.request)
            action.request.timeline.begin_phase("prefix_lookup")
            self.prefix_reuse.match_prefix(action.request)
            action.request.timeline.end_phase("prefix_lookup")
        elif isinstance(action, LookUpStore):
            self.store_lookups.add(action.request)
        elif isinstance(action, Evict):
            self.prefix_reuse.evict_prefixes(action)
        else:  # FreePools
            self.prefix_reuse.drop_waiting_matches()
            self.batch.clear()
            self.drafts.clear()
            self.scheduler.complete(action)

    def _prefill(self, action: Prefill) -> None:
        """Prefill a chunk; after the last one, sample first tokens or finish the embedding."""
        request, prompt = action.request, action.request.sequences[0]
        self._start_prefill(request)
        begin = time.perf_counter()
        is_last = request.num_computed_tokens + action.count == request.num_prompt_tokens
        try:
            output = self.batch.prefill(prompt, action.count, request.run_chunk)
            if is_last and request.repetition is None:
                self._fork_choices(request)
        except Exception as error:
            self.prefix_reuse.reject_restored_prefix(request)
            self._finish(request, error)
            return
        seconds = time.perf_counter() - begin
        self.scheduler.chunk_sizer.record_time(action.count, request.num_computed_tokens, seconds)
        self.prefix_reuse.record_prefill_time(action.count, seconds)
        self.scheduler.complete(action)
        if request.num_computed_tokens in request.checkpoint_positions:
            self.prefix_reuse.insert_prefix(request, prompt)
        if is_last and request.is_embedding:
            self._finish_embedding(request, output)
        elif is_last and request.repetition is not None:
            request.prompt_logits = output
        elif is_last:
            self._start_decoding(request, output)

    def _start_prefill(self, request: Request) -> None:
        """Cancel a pending store lookup; before the first forward, begin the prefill phase."""
        self.store_lookups.cancel(request)
        if not request.prefill_started:
            request.prefill_started = True
            request.timeline.end_phase("queue")
            request.timeline.begin_phase("prefill")
            self.prefix_reuse.record_lookup(request)
            self._metrics.count_prefix_hits(self.requests[request].usage)

    def _encode_image(self, action: EncodeImage) -> None:
        """Compute the features of an image that the next chunk needs."""
        request, image = action.request, action.image
        self._start_prefill(request)
        begin = time.perf_counter()
        try:
            is_new = self.batch.encode_image(request, image)
        except Exception as error:
            self._finish(request, error)
            return
        if is_new:
            seconds = time.perf_counter() - begin
            self.scheduler.chunk_sizer.record_image_time(image.num_tokens, seconds)
        self.scheduler.complete(action)

    def _repeat(self, action: Repeat) -> None:
        """Run a forward of a second pass; after the last one, sample first tokens."""
        request = action.request
        begin = time.perf_counter()
        assert request.repetition is not None and request.prompt_logits is not None
        try:
            self.batch.repeat(request.sequences[0], request.repetition, action.count)
            if request.is_decoding:
                self._fork_choices(request)
        except Exception as error:
            self._finish(request, error)
            return
        seconds = time.perf_counter() - begin
        self.scheduler.chunk_sizer.record_time(action.count, action.position, seconds)
        self.scheduler.complete(action)
        if request.is_decoding:
            self._start_decoding(request, request.prompt_logits)

    def _fork_choices(self, request: Request) -> None:
        """Fork the prompt's cache for its other continuations, unless each is just one token."""
        if request.max_new_tokens == 1:
            return
        for sequence in request.sequences[1:]:
            self.batch.caches.fork(request.sequences[0], sequence)

    def _start_decoding(self, request: Request, logits: Tensor) -> None:
        request.repetition = request.prompt_logits = None
        self._sample_first_tokens(request, logits)
        if request in self.requests:  # more tokens follow
            request.timeline.end_phase("prefill")
            request.timeline.begin_phase("decode")

    def _finish_embedding(self, request: Request, embedding: Tensor) -> None:
        try:
            self.requests[request].put(embedding)
        except Exception as error:
            self._finish(request, error)
            return
        self._metrics.finished += 1
        self._finish(request)

    def _sample_first_tokens(self, request: Request, logits: Tensor) -> None:
        """Sample the first token of each continuation of a prompt."""
        if request.restored_range and logits.isnan().any():  # sampling will fail
            self.prefix_reuse.reject_restored_prefix(request)
        pairs = [(request, sequence) for sequence in request.sequences]
        rows, no_drafts = logits.expand(len(pairs), 1, -1), [list[int]()] * len(pairs)
        steps = self._append_all(pairs, sample_tokens(pairs, rows, no_drafts), no_drafts)
        self._put_all(pairs, steps)

    def _decode(self, action: Decode) -> None:
        """Decode a token for every sequence of the action's requests, and verify its drafts."""
        pairs = [
            (request, sequence) for request in action.requests for sequence in request.sequences
        ]
        sequences, drafts = [sequence for _, sequence in pairs], self.drafts.choose_drafts(pairs)
        begin, num_unsteady = time.perf_counter(), self.batch.decoder.num_unsteady_forwards
        num_new = 1 + max(map(len, drafts))
        logits, errors = self.batch.decode(sequences, drafts)
        for index, error in errors.items():
            request, _ = pairs[index]
            if request in self.requests:
                self._finish(request, error)
        remaining = [request for request in action.requests if request in self.requests]
        self.scheduler.complete(Decode(tuple(remaining)))
        if len(errors) == len(pairs):
            return
        decoded = [index for index in range(len(pairs)) if index not in errors]
        pairs, drafts = [pairs[i] for i in decoded], [drafts[i] for i in decoded]
        drafts = [row[: logits.shape[1] - 1] for row in drafts]  # [] each if none were verified
        steps = self._append_all(pairs, sample_tokens(pairs, logits, drafts), drafts)
        if logits.shape[1] < num_new:
            self.drafts.record_failure(len(sequences), num_new)
        else:
            is_steady = self.batch.decoder.num_unsteady_forwards == num_unsteady
            seconds = time.perf_counter() - begin
            self.drafts.record_decode(len(pairs), num_new, seconds, is_steady=is_steady)
        self._put_all(pairs, steps)

    def _append_all(
        self,
        pairs: list[tuple[Request, Sequence]],
        tokens: list[list[SampledToken | Exception]],
        drafts: list[list[int]],
    ) -> list[list[Step | Exception]]:
        """Append the tokens of each sequence to its output, and drop its rejected drafts.

        If drafts cannot be dropped, the requests end with the error.
        """
        steps = [
            self._append_tokens(request, sequence, sampled, verified)
            for (request, sequence), sampled, verified in zip(pairs, tokens, drafts, strict=True)
        ]
        self._metrics.drafts += sum(map(len, drafts))
        try:
            if any(drafts):
                self.batch.caches.rewind([sequence for _, sequence in pairs])
        except Exception as error:
            for request in dict.fromkeys(request for request, _ in pairs):
                if request in self.requests:  # none of its sequences failed before
                    self._finish(request, error)
        return steps

    def _put_all(
        self, pairs: list[tuple[Request, Sequence]], steps: list[list[Step | Exception]]
    ) -> None:
        """Put the newest steps of each sequence on its stream."""
        now = time.monotonic()
        for (request, sequence), new_steps in zip(pairs, steps, strict=True):
            if request in self.requests:  # no other sequence of it failed
                self._put_steps(request, sequence, new_steps, now)
        for request in dict.fromkeys(request for request, _ in pairs):
            if request in self.requests:
                request.last_token_time = now
                lengths = [request.outputs[s.choice].num_generated for s in request.sequences]
                self.scheduler.set_output_length(request, max(lengths))

    def _append_tokens(
        self,
        request: Request,
        sequence: Sequence,
        tokens: list[SampledToken | Exception],
        drafts: list[int],
    ) -> list[Step | Exception]:
        """Append the tokens of a sequence to its output, up to the one that ends it."""
        steps, output = list[Step | Exception](), request.outputs[sequence.choice]
        for index, token in enumerate(tokens):
            try:
                if isinstance(token, Exception):
                    raise token
                drafted = is_accepted(token, drafts[index:])
                step = output.append_token(token, drafted=drafted, choice=sequence.choice)
            except Exception as error:
                return [*steps, error]
            steps.append(step)
            if step.finish_reason is not None:
                break
        return steps

    def _put_steps(
        self, request: Request, sequence: Sequence, steps: list[Step | Exception], now: float
    ) -> None:
        """Put the newest steps of a sequence on its stream; finish the sequence after the last."""
        num_before = request.outputs[sequence.choice].num_generated
        num_before -= sum(isinstance(step, Step) for step in steps)
        for index, step in enumerate(steps):
            try:
                if isinstance(step, Exception):
                    raise step
                since = now if index else request.last_token_time
                self._metrics.count_token(since, now, first=num_before + index == 0)
                self._metrics.drafts_accepted += step.drafted
                self.requests[request].put(step)
            except Exception as error:
                self._finish(request, error)
                return
            if step.finish_reason is not None:
                request.sequences.remove(sequence)
                self.scheduler.finish_sequence(request)
                self.prefix_reuse.insert_prefix(request, sequence)
                self.batch.caches.release([sequence])
                self.drafts.forget([sequence])
                if not request.sequences:
                    self._metrics.finished += 1
                    self._finish(request)

    def _swap(self, action: SwapOut | SwapIn) -> None:
        """Write the pages of a request to files, or read them back."""
        request = action.request
        self.store_lookups.cancel(request)
        self._metrics.put_aside += isinstance(action, SwapOut)
        request.timeline.num_swaps += isinstance(action, SwapOut)
        try:
            if self.swap_folder is None:
                folder = self._cleanup.enter_context(TemporaryDirectory(prefix="kvant-"))
                self.swap_folder = Path(folder)
            if request.repetition is not None:
                request.repetition.drop_fork()
            if request.images is not None and isinstance(action, SwapOut):
                request.images.features.clear()
            for index, sequence in enumerate(request.sequences):
                if isinstance(action, SwapOut):
                    self.drafts.release_caches([sequence])
                    path = self.swap_folder / f"{request.number}-{index}.kv"
                    self.batch.caches.swap_out(sequence, path, is_decoding=request.is_decoding)
                else:
                    self.batch.caches.swap_in(sequence, self.batch.decoder.model)
        except Exception as error:
            self._finish(request, error)
            return
        self.scheduler.complete(action)

    def _finish(self, request: Request, error: BaseException | None = None) -> None:
        """Free a request and end its client's side, with an error if it failed."""
        future = self.requests[request]
        if error is not None:
            self._metrics.failed += 1
            clear_traceback_frames(error)
        if not request.prefill_started:  # otherwise, counted at the first chunk
            self._metrics.count_prefix_hits(future.usage)
        self.scheduler.remove(request)
        self.store_lookups.cancel(request)
        for sequence in request.sequences:
            if error is None and self.is_open:
                self.prefix_reuse.insert_prefix(request, sequence)
            self.batch.caches.release([sequence])
        self.drafts.forget(request.sequences)
        request.free()
        future.finish(error, request.flush_outputs())
        del self.requests[request]

"""Serve concurrent requests on one model within a limit of bytes: the callers' side.

`submit` makes a `Request` for the engine's thread, in worker.py, and a `Stream` for the client.
"""

from __future__ import annotations

import logging
import time
from collections import abc
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from os import PathLike
from typing import Any, Unpack

from kvant.adapters import Adapter, find_adapter, load_adapters
from kvant.checkpoints.pooling import BIDIRECTIONAL_MESSAGE, Pooling
from kvant.engine.batch import Batch, max_idle
from kvant.engine.chunk_sizer import ChunkSizer
from kvant.engine.drafts import DraftChooser, DraftMethod
from kvant.engine.embedding import EmbeddingFuture, Pooler
from kvant.engine.memory import MemoryModel
from kvant.engine.prefix_reuse import make_own_prefixes
from kvant.engine.request import Request, Sequence, check_counts, check_texts
from kvant.engine.scheduler import Scheduler
from kvant.engine.stream import Stream
from kvant.engine.worker import EngineWorker
from kvant.errors import CacheError, PromptError, RenamedAttribute
from kvant.generation.conversation import (
    Prompt,
    describe_prefix_miss,
    encode_prompt,
    find_branch_points,
    parse_messages,
)
from kvant.generation.decoder import TransformersDecoder, make_decoder
from kvant.generation.images import ImageReader
from kvant.generation.loop import Step
from kvant.generation.second_pass import SecondPass
from kvant.generation.settings import SamplingOptions, StopConditions, make_sampling
from kvant.generation.speculation import DRAFT_SPEC
from kvant.hf import attach, detach, get_attachments, get_hidden_width, is_bidirectional
from kvant.planner import Plan, plan
from kvant.platform import c_libraries
from kvant.platform.devices import warn_of_slow_weights
from kvant.platform.sizes import as_bytes, format_size
from kvant.prefixes import Prefixes
from kvant.recipes import RAW_WEIGHTS, AnySpec, WeightFormats
from kvant.spec import describe_spec
from kvant.stores import Store
from kvant.vision import VisionModel
from kvant.vision.processing import has_images
from kvant.weights import packing

log = logging.getLogger("kvant")

MAX_PREFILL_CHUNK = 512  # tokens
DEFAULT_CHUNK_SECONDS = {"cpu": 0.5, "cuda": 0.03}  # by which a prefill chunk may delay decodes


class Engine:
    """A thread that serves requests on one model, attached (`kvant.attach`) until `close`.

    Change the model only while no request is open. Prefixes are keyed by its weights. When a prompt
    is matched or inserted, the weights are checked if the last check is a second old. After the
    engine was idle, or a request was cancelled, they are checked at the next use.

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
        weights: WeightFormats | None = None,
        prefixes: Prefixes | None = None,
        store: str | Store | abc.Sequence[str | Store] | None = None,
        adapters: abc.Mapping[str, str | PathLike[str]] | None = None,
        draft: Any = None,
        max_drafts: int = 8,
    ) -> None:
        """Limit all caches to `max_bytes`, and decodes to `max_sequences` sequences at a time.

        `max_bytes` is a number, or text like "2GiB". Admitted requests may need up to
        `overcommit` times `max_bytes` in the end; what does not fit is swapped to files. The
        prefill of one prompt delays each token of other requests by about `chunk_seconds`. The
        prefills of several prompts delay it by up to 4 times as much.
        `pack` packs 16-bit weights for CPU kernels until the engine is closed; `weights` quantizes
        them for good, as `kvant.pack(model, weights)` does. `prefixes` count within
        `max_bytes` and are evicted if needed. With a `store`, the engine makes its own
        prefixes, which are also written to the store and restored from it.
        `adapters` are LoRA adapters: folders of PEFT by name. `draft` is a smaller model, or
        "ngram": propose what followed an earlier copy of the last tokens. A decode verifies up to
        `max_drafts` proposed tokens where that is faster. Replies stay equal, up to rounding.
        """
        _check_packing(weights, pack=pack)
        own_prefixes = make_own_prefixes(store, max_bytes, prefixes)
        self.prefixes = prefixes = prefixes if own_prefixes is None else own_prefixes
        decoder = make_decoder(model)
        if not isinstance(decoder, TransformersDecoder):
            raise TypeError("an engine serves models of transformers: load one")
        draft_method = DraftMethod.make(draft, max_drafts, decoder)
        tokenizer, self._image_reader = ImageReader.from_processor(tokenizer, decoder.model)
        self.tokenizer, self.end_tokens = tokenizer, decoder.end_tokens
        self.model = model = decoder.model
        self.adapters = load_adapters(adapters or {}, model)
        spec = decoder.make_cache(kv_cache, tokenizer).spec
        empty_cache = decoder.make_cache(spec.with_checkpoints(1))  # to rewind a failed forward
        empty_cache.ensure_slack(1 + draft_method.max_drafts)
        self._spec = empty_cache.spec
        memory_plan = plan(model, self._spec, context=1)
        self.kv_cache = describe_spec(spec)
        self.nbytes_per_token = memory_plan.nbytes_per_token
        _check_plan(memory_plan, model, max_bytes)
        limits = _list_limits(max_context, decoder.max_context, empty_cache.capacity)
        self._chunk_alignment = None if prefixes is None else prefixes.memory.alignment
        self._second_pass = SecondPass.from_spec(spec, tokenizer, decoder.max_context)
        context = min(limits, default=None)
        self.stop_conditions = StopConditions(max_context=context, vocab_size=decoder.vocab_size)
        chunk_sizer = _make_chunk_sizer(decoder, limits, prefixes)
        seconds = DEFAULT_CHUNK_SECONDS.get(model.device.type, DEFAULT_CHUNK_SECONDS["cpu"])
        num_idle = _count_idle(decoder, self.adapters, max_sequences)
        scheduler = Scheduler(
            _make_memory_model(
                memory_plan, model, chunk_sizer, num_idle, draft_method, self.vision_model
            ),
            chunk_sizer,
            None if max_bytes is None else as_bytes(max_bytes),
            max_sequences,
            overcommit,
            seconds if chunk_seconds is None else chunk_seconds,
            has_store=prefixes is not None and prefixes.prefix_store is not None,
        )
        self._request_numbers, self.max_sequences = count(), max_sequences
        batch = Batch(decoder, empty_cache, backend)
        self._worker = EngineWorker(batch, scheduler, DraftChooser(batch, draft_method))
        _round_weights(model, weights)
        cleanup = self._prepare_models(model, draft_method, own_prefixes, backend, pack=pack)
        warn_of_slow_weights(model, log.warning)
        c_libraries.release_threads()  # the engine's thread computes from now on
        self._worker.start(cleanup)

    def _prepare_models(
        self,
        model: Any,
        draft_method: DraftMethod,
        own_prefixes: Prefixes | None,
        backend: str | None,
        *,
        pack: bool,
    ) -> ExitStack:
        """Attach and pack the models, and open the prefixes; return what undoes this."""
        specs: dict[Any, AnySpec] = {model: self._spec}
        if draft_method.decoder is not None:
            specs[draft_method.decoder.model] = DRAFT_SPEC
        with ExitStack() as undo:
            if own_prefixes is not None:
                undo.callback(own_prefixes.close)
            undo.callback(self._worker.store_lookups.close)
            for prepared, spec in specs.items():
                if not get_attachments(prepared):
                    attach(prepared, spec, backend=backend)
                    undo.callback(detach, prepared)
                if pack and not packing.is_packed(prepared):
                    undo.callback(packing.unpack, prepared)
                    packing.pack(prepared)
            if self.prefixes is not None:  # after packing, which changes the key of the weights
                self._worker.prefix_reuse.attach(self.prefixes)
            return undo.pop_all()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all requests, free all memory, and end the thread."""
        self._worker.close()

    def submit(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        stop: str | abc.Sequence[str] = (),
        ignore_end: bool = False,
        skip_special_tokens: bool = True,
        logprobs: int = 0,
        priority: int = 0,
        tenant: str = "",
        salt: str = "",
        n: int = 1,
        adapter: str | None = None,
        on_step: Callable[[Step], None] | None = None,
        **options: Unpack[SamplingOptions],
    ) -> Stream:
        """Request `n` continuations of a prompt: text, token ids, or messages with roles.

        Messages may have images if the engine has a processor. The `options` are fields of
        `Sampling`; `sampling=` passes a whole one, whose fields the other options replace. Each
        step has the log-probabilities of the `logprobs` likeliest tokens. Higher `priority` first;
        among equals, the `tenant` with the fewest running sequences. Prefixes are shared only among
        requests of the same `salt` and `adapter`.
        `adapter` is the name of one of the engine's adapters.
        `on_step` is called with each step in the engine's thread; an error in it fails the request.
        Invalid arguments raise here.
        """
        check_counts(n=n, logprobs=logprobs, priority=priority, max_new_tokens=max_new_tokens)
        check_texts(tenant=tenant, salt=salt)
        conditions = replace(
            self.stop_conditions,
            max_new_tokens=max_new_tokens,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            end_tokens=frozenset() if ignore_end else self.end_tokens,
            include_special_tokens=not skip_special_tokens,
        )
        sampling = make_sampling(options)
        sampling.check_tokens(conditions.vocab_size)
        max_context = self.stop_conditions.max_context
        prompt = self._image_reader.process_images(prompt, max_context)
        tokens = self.encode_prompt(prompt)
        conditions.check_prompt(tokens)
        now, max_new = time.monotonic(), conditions.count_new_tokens(len(tokens))
        request = Request(
            next(self._request_numbers),
            len(tokens),
            max_new,
            n,
            priority,
            tenant,
            int(1e3 * now),
            find_adapter(self.adapters, adapter),
            logprobs=logprobs,
            salt=salt,
            last_token_time=now,
        )
        # The second pass scores the prompt's rows, to choose which a prune keeps. The first token
        # does not depend on it, so a request of one token skips it.
        second_pass = None if max_new == 1 else self._second_pass
        if (images := self._image_reader.locate_images(prompt, tokens)) is not None:
            images.check_cache(second_pass, self._chunk_alignment)
            request.images, request.layout = images, images.layout
            request.run_chunk = images.run_chunk
        if second_pass is not None and second_pass.drops_rows(len(tokens)):
            request.repetition = second_pass.start(tokens)
        self._worker.scheduler.check_request(request)
        request.add_choices(tokens, self.tokenizer, sampling, conditions)
        request.branch_points = find_branch_points(self.tokenizer, prompt, tokens)
        # The caller may change the messages before a miss is described.
        messages = None if self.prefixes is None else deepcopy(parse_messages(prompt))
        describe_miss = partial(describe_prefix_miss, self.tokenizer, messages)
        cancel = self._worker.make_cancel(request)
        stream = Stream(tokens, n, cancel, request.timeline, describe_miss, on_step)
        self._worker.submit(request, stream)
        return stream

    def embed(
        self,
        prompt: Prompt,
        pooling: Pooling,
        *,
        priority: int = 0,
        tenant: str = "",
        adapter: str | None = None,
    ) -> EmbeddingFuture:
        """Request the embedding of a prompt: text, token ids, or messages with roles.

        It is pooled from the hidden states after the model's last norm, as `pooling` says;
        `kvant.checkpoints.find_pooling(name).require()` returns the pooling of a checkpoint. The
        prompt is prefilled like any other, in this engine's format, but shares no prefix: every
        token is computed.
        Invalid arguments raise here.
        """
        check_counts(priority=priority)
        check_texts(tenant=tenant)
        if self.is_bidirectional:
            raise ValueError(f"{type(self.model).__name__}: {BIDIRECTIONAL_MESSAGE}")
        if (messages := parse_messages(prompt)) is not None and has_images(messages.messages):
            raise PromptError("an image in a prompt to embed: only text is embedded")
        tokens = self.encode_prompt(prompt)
        self.stop_conditions.check_prompt(tokens, num_new=0)
        used_adapter = find_adapter(self.adapters, adapter)
        request = Request(
            next(self._request_numbers),
            len(tokens),
            0,
            priority=priority,
            tenant=tenant,
            arrival_ms=int(1e3 * time.monotonic()),
            adapter=used_adapter,
            run_chunk=Pooler(pooling).pool_chunk,
            sequences=[Sequence(tokens, adapter=used_adapter)],
        )
        self._worker.scheduler.check_request(request)
        future = EmbeddingFuture(tokens, self._worker.make_cancel(request), request.timeline)
        self._worker.submit(request, future)
        return future

    @property
    def is_open(self) -> bool:
        """Whether the engine accepts requests."""
        return self._worker.is_open

    @property
    def vision_model(self) -> VisionModel | None:
        """The image side of the model; None if this engine reads text alone."""
        return self._image_reader.vision_model

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens see later ones; such a model has no embeddings here."""
        return is_bidirectional(self.model)

    @property
    def embedding_width(self) -> int:
        return get_hidden_width(self.model)

    def encode_prompt(self, prompt: Prompt, limit: int | None = None) -> list[int]:
        """Return the tokens of a prompt; refuse texts far beyond `limit` (default: the context)."""
        limit = self.stop_conditions.max_context if limit is None else limit
        prompt = self._image_reader.process_images(prompt, limit)
        return encode_prompt(self.tokenizer, prompt, limit)

    def __repr__(self) -> str:
        stats = self.stats()
        limit = "" if stats["max_bytes"] is None else f" of {format_size(stats['max_bytes'])}"
        load = f"{stats['running']} running, {stats['waiting']} waiting"
        memory = f"{format_size(stats['nbytes_held'])}{limit}"
        return f"Engine({describe_spec(self._spec)}: {load}, {memory})"

    def stats(self) -> dict[str, Any]:
        """Return counts of requests and tokens, latencies, and memory in bytes."""
        nbytes = sum(adapter.nbytes for adapter in {*self.adapters.values()})
        return {**self._worker.stats(), "nbytes_adapters": nbytes}

    def load(self, tenant: str) -> dict[str, int]:
        """Count the waiting and running requests of a tenant, and its sequences."""
        return self._worker.scheduler.queue.load(tenant)


def _make_chunk_sizer(
    decoder: TransformersDecoder, limits: list[int], prefixes: Prefixes | None
) -> ChunkSizer:
    """Return the chunk sizer of a model.

    Without chunked prefill, a chunk is a whole prompt; the largest of `limits` bounds its tokens.
    """
    supports_chunks = decoder.supports_chunked_prefill
    return ChunkSizer(
        MAX_PREFILL_CHUNK if supports_chunks else max(limits, default=1 << 20),
        supports_chunks=supports_chunks,
        fixed_size=prefixes is not None and prefixes.exact,
    )


def _list_limits(
    max_context: int | None, model_limit: int | None, capacity: int | None
) -> list[int]:
    """Return the limits on tokens: `max_context` or else the model's, and the cache's capacity."""
    limits = model_limit if max_context is None else max_context, capacity
    return [limit for limit in limits if limit is not None]


def _count_idle(
    decoder: TransformersDecoder, adapters: abc.Mapping[str, Adapter], max_sequences: int
) -> int:
    """Return how many sequences may pad the batches of the model and of its adapters."""
    num_padded_batches = (1 + len({*adapters.values()})) * decoder.captures_graphs
    return num_padded_batches * max_idle(max_sequences)


def _make_memory_model(
    memory_plan: Plan,
    model: Any,
    chunk_sizer: ChunkSizer,
    num_idle: int,
    draft_method: DraftMethod,
    vision_model: VisionModel | None,
) -> MemoryModel:
    spare_divisor = 0 if model.device.type == "cpu" else 8
    return MemoryModel.from_plan(
        memory_plan,
        chunk_sizer.max_chunk,
        spare_divisor=spare_divisor,
        num_idle=num_idle,
        max_drafts=draft_method.max_drafts,
        draft_memory=draft_method.make_memory_model(num_idle, spare_divisor),
        image_token_nbytes=0 if vision_model is None else vision_model.token_nbytes,
    )


def _check_plan(memory_plan: Plan, model: Any, max_bytes: int | str | None) -> None:
    """Raise if bytes are limited, and the plan of a model does not count all of its caches."""
    if max_bytes is not None and (memory_plan.uncounted_layers or not memory_plan.nbytes):
        raise CacheError(
            f"max_bytes={max_bytes} for {type(model).__name__}: some layers have state of "
            "unknown size; bound max_sequences and max_context instead"
        )


def _check_packing(weights: WeightFormats | None, *, pack: bool) -> None:
    """Raise ValueError if weights have formats but are not packed."""
    if weights is not None and not pack:
        raise ValueError(f"weights={weights!r} with pack=False: drop one of them")


def _round_weights(model: Any, weights: WeightFormats | None) -> None:
    """Round a model's weights to formats, if any are requested."""
    if weights in (None, RAW_WEIGHTS):
        return
    if model.device.type != "cpu":
        raise ValueError(f"weights={weights!r}: they are rounded for a CPU, not for {model.device}")
    packing.pack(model, weights)

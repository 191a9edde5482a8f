"""The service between HTTP routes and an engine.

Limits the requests under way per tenant, encodes prompts, submits them to the engine, and merges
the streams of a request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from kvant import checkpoints
from kvant.checkpoints.pooling import BIDIRECTIONAL_MESSAGE, DeclaredPooling, Pooling
from kvant.engine import EmbeddingFuture, Engine, RequestFuture, Stream, Usage
from kvant.errors import CacheError, CapacityError, GrammarError
from kvant.generation import Grammar, Messages, Step
from kvant.generation.conversation import encode_truncated, supports_tools
from kvant.generation.grammar import make_matcher
from kvant.hf import compute_model_fingerprint
from kvant.platform import c_libraries
from kvant.prefixes import Prefixes
from kvant.recipes import AnySpec
from kvant.server.errors import BadRequest, ServerBusy, ServerClosing, describe_error
from kvant.server.metrics import ServerMetrics, TenantStats
from kvant.server.output_parsing import OutputParser, ReplyFormat, find_template
from kvant.server.protocol import SamplingParams
from kvant.server.response_writers import ResponseWriter
from kvant.server.settings import ApiKeys, ServerSettings, check_model_names
from kvant.server.tokenizing import Prompt, TokenizerPool
from kvant.vision.processing import has_images

log = logging.getLogger("kvant")

# The settings that are keyword arguments of Engine, under the same names.
ENGINE_SETTINGS = {"max_bytes", "max_sequences", "max_context", "chunk_seconds", "backend", "pack"}
ENGINE_SETTINGS |= {"adapters"}
MAX_ENCODED_TOKENS = 1 << 17  # limit of /tokenize, unless the context is longer
TEMPLATE_LOOKBACK_TOKENS = 512  # at the end of a prompt, searched for the start of a reply
MAX_OPEN_INPUTS = 4  # of a request for embeddings: prompts are prefilled one at a time


@dataclass(frozen=True)
class Embeddings:
    """The embeddings of the inputs of one request, in their order."""

    vectors: Sequence[Tensor]
    pooling: Pooling
    num_tokens: int
    seconds: float


class Service:
    """Access of one or several tenants to one engine, with limits on choices under way."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        keys: ApiKeys,
        *,
        max_waiting: int = 256,
        max_new_tokens: int = 1024,
        declared_pooling: DeclaredPooling | None = None,
    ) -> None:
        self.engine = engine
        self.declared_pooling = declared_pooling or DeclaredPooling()
        if engine.is_bidirectional:
            self.declared_pooling = DeclaredPooling(refusal=BIDIRECTIONAL_MESSAGE)
        check_model_names([model, *engine.adapters])
        self.model = model
        self.keys = keys
        self.max_new_tokens = max_new_tokens
        self.metrics = ServerMetrics(engine, model)
        self.created = int(time.time())
        self._template = find_template(engine.model, engine.tokenizer)
        with suppress(GrammarError):  # compile now: the first grammar of a model takes a second
            make_matcher(Grammar.json(), engine.tokenizer, engine.end_tokens)
        self._tokenizer_pool = TokenizerPool()
        self._is_closing = False
        self._max_choices = engine.max_sequences + max_waiting
        self._num_choices: Counter[str] = Counter()  # running and waiting, by tenant
        self._tenants: defaultdict[str, TenantStats] = defaultdict(TenantStats)

    @property
    def is_ready(self) -> bool:
        return self.engine.is_open and not self._is_closing

    def close(self) -> None:
        """Reject new requests; running requests continue."""
        self._is_closing = True

    def stats(self) -> dict[str, Any]:
        """Memory use of the engine, and the totals of all tenants."""
        prefixes = self.engine.prefixes
        return {
            **self._describe_model(),
            **self.engine.stats(),
            "prefixes": None if prefixes is None else prefixes.stats(),
        }

    def tenant_stats(self, tenant: str) -> dict[str, Any]:
        """Request and token counts of one tenant."""
        counts = self._tenants[tenant].counts()
        return {**self._describe_model(), **self.engine.load(tenant), **counts}

    def _describe_model(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "model": self.model,
            "kv_cache": engine.kv_cache,
            "bytes_a_token": engine.nbytes_per_token,
            "reads_images": engine.vision_model is not None,
        }

    @property
    def model_names(self) -> list[str]:
        """The names that requests may give as their model: this one alone, or with an adapter."""
        return [self.model, *self.engine.adapters]

    def find_model(self, name: str | None) -> str:
        """Return the served name that a request gives; raise BadRequest for an unknown one."""
        if name and name not in self.model_names:
            known = ", ".join(map(repr, self.model_names))
            message = f"model {name!r}: this server has {known}"
            raise BadRequest(message, "model", 404, "model_not_found")
        return name or self.model

    def _find_adapter(self, name: str | None) -> str | None:
        model = self.find_model(name)
        return None if model == self.model else model

    def make_prompt(self, messages: Messages) -> Prompt:
        """Return messages for the model's chat template; without one, their concatenated text."""
        has_template = getattr(self.engine.tokenizer, "chat_template", None) is not None
        needs_template = messages.tools or messages.options or has_images(messages.messages)
        if has_template or needs_template:
            return messages  # without a template, the engine rejects tools, options and images
        return "".join(str(message["content"]) for message in messages.messages)

    def refuse_image_tokens(self, tokens: Sequence[int], param: str) -> None:
        """Refuse token ids that stand for images, whose pixels are not in the request."""
        vision_model = self.engine.vision_model
        if vision_model is not None and not vision_model.processor.image_tokens.isdisjoint(tokens):
            message = f"{param}: it has tokens of images without the images; send messages instead"
            raise BadRequest(message, param)

    @cached_property
    def model_digest(self) -> str:
        """A hash of the model's weights."""
        return compute_model_fingerprint(self.engine.model)

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the model may choose to call tools: its calls can be parsed."""
        if getattr(self.engine.tokenizer, "chat_template", None) is None:
            return False
        has_calls = self._template is not None and self._template.has_calls
        return has_calls or not supports_tools(self.engine.tokenizer)

    def has_template_variable(self, name: str) -> bool:
        """Whether the model's chat template reads a variable, as far as its text tells."""
        return name in str(getattr(self.engine.tokenizer, "chat_template", None))

    async def tokenize(self, prompt: Prompt, tenant: str) -> list[int]:
        """Encode a prompt; it may exceed the context, since clients measure it to shorten it."""
        limit = max(MAX_ENCODED_TOKENS, self.engine.stop_conditions.max_context or 0)
        encode = partial(self.engine.encode_prompt, prompt, limit)
        return await self._tokenizer_pool.run(prompt, tenant, encode)

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, tenant: str
    ) -> RequestStreams:
        """Submit all prompts of a request to the engine; raise an error if one is invalid."""
        choices_per_prompt, limit = params.n or 1, self._max_tenant_choices
        coming = len(prompts) * choices_per_prompt
        if coming > limit and len(prompts) > 1:
            raise CapacityError(
                f"{coming} choices in one request, at most {limit} are allowed: split the request"
            )
        self._check_load(coming, tenant)
        reply_format, salt = self._choose_format(prompts[0], params), params.cache_salt
        options = params.to_engine_options() | {
            "tenant": tenant,
            "adapter": self._find_adapter(params.model),
            # The salt of a client restricts sharing within its tenant only.
            "salt": tenant if salt is None else json.dumps([tenant, salt]),
            "max_new_tokens": (
                self.max_new_tokens if params.max_new_tokens is None else params.max_new_tokens
            ),
            "skip_special_tokens": reply_format.template is None,
        }
        start_time, streams, parsers = time.monotonic(), list[Stream](), list[OutputParser]()
        self._num_choices[tenant] += coming
        try:
            for prompt in prompts:
                submit = partial(self.engine.submit, prompt, **options)
                stream = await self._tokenizer_pool.run(
                    prompt, tenant, submit, has_grammar="grammar" in options
                )
                self._count_request(stream, tenant)
                _call_when_done(stream, partial(self._free_choices, tenant, choices_per_prompt))
                streams.append(stream)
                prompt_end = stream.prompt[-TEMPLATE_LOOKBACK_TOKENS:]
                parsers += reply_format.make_parsers(
                    choices_per_prompt, partial(self.engine.tokenizer.decode, prompt_end)
                )
        except BaseException:
            self._free_choices(tenant, choices_per_prompt * (len(prompts) - len(streams)))
            for stream in streams:
                stream.cancel()
            raise
        return RequestStreams(streams, parsers, self.metrics, start_time)

    @property
    def _max_tenant_choices(self) -> int:
        """Limit on the choices of one tenant: with several, half of all."""
        return self._max_choices if len(self.keys) < 2 else max(1, self._max_choices // 2)

    def _check_load(self, coming: int, tenant: str) -> None:
        """Raise if the server is closing, or too busy for more choices of a tenant."""
        if not self.is_ready:
            raise ServerClosing("this server is shutting down: send the request to another one")
        total = sum(self._num_choices.values())
        if total and (
            total + coming > self._max_choices
            or self._num_choices[tenant] + coming > self._max_tenant_choices
        ):
            waits = self.engine.stats()["first_token_seconds"]  # an estimate of when there is room
            raise ServerBusy(max(1, math.ceil(waits.get("median", 1.0))))

    def _count_request(self, future: RequestFuture[Any], tenant: str) -> None:
        """Count a request for its tenant, now and when it ends."""
        self._tenants[tenant].begin(future)
        _call_when_done(future, partial(self._tenants[tenant].end, future))

    def _free_choices(self, tenant: str, count: int) -> None:
        self._num_choices[tenant] -= count

    async def embed(
        self,
        inputs: Sequence[Prompt],
        tenant: str,
        *,
        model: str | None = None,
        truncates: bool = False,
    ) -> Embeddings:
        """Embed the inputs, at most `MAX_OPEN_INPUTS` at a time, so that others are not delayed.

        With `truncates`, texts are cut to the context. A cancel of the caller cancels all.
        """
        pooling, start_time = self.declared_pooling.require(), time.monotonic()
        encode: Callable[[Prompt], list[int]] = self.engine.encode_prompt
        context, adapter = self.engine.stop_conditions.max_context, self._find_adapter(model)
        if truncates and context is not None:
            encode = partial(encode_truncated, self.engine.tokenizer, limit=context)
        num_open = min(len(inputs), MAX_OPEN_INPUTS, self._max_tenant_choices)
        self._check_load(num_open, tenant)
        self._num_choices[tenant] += num_open
        open_futures, vectors, num_tokens = deque[EmbeddingFuture](), list[Tensor](), 0
        try:
            for prompt in inputs:
                if len(open_futures) == num_open:
                    vectors.append(await _wait_for_first(open_futures))
                tokens = await self._tokenizer_pool.run(prompt, tenant, partial(encode, prompt))
                future = self.engine.embed(tokens, pooling, tenant=tenant, adapter=adapter)
                self._count_request(future, tenant)
                open_futures.append(future)
                num_tokens += len(future.prompt)
            while open_futures:
                vectors.append(await _wait_for_first(open_futures))
        finally:
            self._free_choices(tenant, num_open - len(open_futures))
            for future in open_futures:  # the engine may still compute a chunk of it
                _call_when_done(future, partial(self._free_choices, tenant, 1))
                future.cancel()
        return Embeddings(vectors, pooling, num_tokens, time.monotonic() - start_time)

    def _choose_format(self, prompt: Prompt, params: SamplingParams) -> ReplyFormat:
        """Return the format of the replies; raise an error if it cannot be parsed."""
        tools, template = params.template_tools, self._template if params.is_free_form else None
        renders_tools = (
            bool(tools)
            and isinstance(prompt, Messages)
            and supports_tools(self.engine.tokenizer, prompt.messages, prompt.options)
        )
        has_calls = template is not None and template.has_calls
        if params.is_free_form and renders_tools and not has_calls:
            raise ValueError(
                "tools: the format of this model's calls is unknown (its tokenizer has no "
                "response_template); force the call: tool_choice required, or one function"
            )
        # The calls are a JSON list if a grammar forces it, or if the prompt describes the tools.
        lists_calls = params.requires_calls or (bool(tools) and not renders_tools)
        continues = isinstance(prompt, Messages) and prompt.continues
        return ReplyFormat(template, tools, params.max_calls, lists_calls, continues)


@contextmanager
def open_service(
    settings: ServerSettings,
    model: Any,
    tokenizer: Any,
    spec: AnySpec,
    prefixes: Prefixes | None,
    keys: ApiKeys,
) -> Iterator[Service]:
    """Open an engine and yield its service; close the engine at the end."""
    c_libraries.keep_freed_memory()
    if prefixes is None and settings.shares_prefixes:
        prefixes = Prefixes(settings.max_prefix_bytes)
    options = settings.model_dump(include=ENGINE_SETTINGS) | {"draft": settings.load_draft()}
    processor = settings.load_processor(model, tokenizer)
    with Engine(model, processor, spec, prefixes=prefixes, **options) as engine:
        yield Service(
            engine,
            settings.served_model_name,
            keys,
            max_waiting=settings.max_waiting,
            max_new_tokens=settings.max_new_tokens,
            declared_pooling=checkpoints.find_pooling(settings.model),
        )


def _call_when_done(future: RequestFuture[Any], call: Callable[[], None]) -> None:
    """Call a function in this event loop when a request has ended."""
    loop = asyncio.get_running_loop()

    def call_in_loop() -> None:
        with suppress(RuntimeError):  # at shutdown, the loop may close before its requests end
            loop.call_soon_threadsafe(call)

    future.add_done_callback(call_in_loop)


async def _wait_for_first(futures: deque[EmbeddingFuture]) -> Tensor:
    """Return the first embedding and remove its future; on a cancel, the future stays.

    What is no fault of the client is raised as CacheError.
    """
    try:
        vector = await futures[0]
    except (ValueError, TypeError) as error:  # the input was valid: an error of the server
        raise CacheError(f"an embedding failed: {error!r}") from error
    futures.popleft()
    return vector


class RequestStreams:
    """The streams of one request, with the choices of all prompts numbered in order.

    With two prompts and n = 3:

        prompt 0    stream 0    choices 0, 1, 2
        prompt 1    stream 1    choices 3, 4, 5
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        parsers: Sequence[OutputParser],
        metrics: ServerMetrics,
        start_time: float,
    ) -> None:
        """Take one parser per choice of every stream."""
        self.parsers = parsers
        self.streams = streams
        self._choices_per_stream = len(parsers) // len(streams)
        self._metrics = metrics
        self.start_time = start_time
        self.first_step_time: float | None = None

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        return [stream.prompt for stream in self.streams]

    @property
    def usages(self) -> list[Usage]:
        return [stream.usage for stream in self.streams]

    def cancel(self) -> None:
        """Cancel generation of all streams."""
        for stream in self.streams:
            stream.cancel()

    async def iterate_steps(self) -> AsyncIterator[tuple[int, Step]]:
        """Yield every step with the number of its choice, in order of arrival."""
        queue: asyncio.Queue[tuple[int, Step] | BaseException | None] = asyncio.Queue()
        readers = [
            asyncio.create_task(self._forward_steps(index, stream, queue))
            for index, stream in enumerate(self.streams)
        ]
        try:
            num_open = len(readers)
            while num_open:
                item = await queue.get()
                if item is None:
                    num_open -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        finally:
            self._metrics.request_latency.observe(time.monotonic() - self.start_time)
            self.cancel()
            for reader in readers:
                reader.cancel()

    async def _forward_steps(
        self,
        index: int,
        stream: Stream,
        queue: asyncio.Queue[tuple[int, Step] | BaseException | None],
    ) -> None:
        """Put the steps of a stream into `queue`, then an error, or None at the end."""
        last_times: dict[int, float] = {}  # by choice
        try:
            async for step in stream:
                now = time.monotonic()
                self.first_step_time = self.first_step_time or now
                if not last_times:
                    self._metrics.time_to_first_token.observe(now - self.start_time)
                elif step.choice in last_times:
                    self._metrics.inter_token_latency.observe(now - last_times[step.choice])
                last_times[step.choice] = now
                queue.put_nowait((index * self._choices_per_stream + step.choice, step))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    async def collect_steps(self) -> list[list[Step]]:
        """Wait for the end of all streams, and return the steps of each choice."""
        steps_by_choice: list[list[Step]] = [[] for _ in self.parsers]
        async for index, step in self.iterate_steps():
            steps_by_choice[index].append(step)
        return steps_by_choice

    async def iterate_events(self, writer: ResponseWriter) -> AsyncIterator[str]:
        """Yield events, or lines of JSON, as steps arrive; an error becomes the last one."""
        try:
            if begin := writer.write_begin():
                yield begin
            async for index, step in self.iterate_steps():
                if events := writer.write_step(index, step):
                    yield events
            yield writer.write_end()
        except Exception as error:
            log.warning("a response stream failed: %r", error)
            yield writer.write_error(describe_error(error, started=True)[1])

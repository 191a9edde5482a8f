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
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from kvant.engine import Engine, Stream, Usage
from kvant.errors import CacheError, CapacityError, EngineError, GrammarError
from kvant.generation import Grammar, Messages, Step
from kvant.generation.grammar import make_matcher
from kvant.generation.tools import supports_tools
from kvant.server.access import ApiKeys, TenantStats
from kvant.server.metrics import ServerMetrics
from kvant.server.output_parsing import (
    CallListParser,
    OutputParser,
    PlainParser,
    PromptedCallParser,
    ResponseTemplate,
    TemplateParser,
    find_template,
)
from kvant.server.protocol import SamplingParams
from kvant.server.response_writers import ResponseWriter
from kvant.server.tokenizer_pool import Prompt, ServerBusy, TokenizerPool

log = logging.getLogger("kvant")

MAX_ENCODED_TOKENS = 1 << 17  # limit of /tokenize, unless the context is longer
TEMPLATE_LOOKBACK_TOKENS = 512  # at the end of a prompt, searched for the start of a reply


class ServerClosing(CacheError):
    """The server is shutting down."""


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
    ) -> None:
        self.engine = engine
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
        }

    def make_prompt(self, messages: Messages) -> Prompt:
        """Return messages for the model's chat template; without one, their concatenated text."""
        has_template = getattr(self.engine.tokenizer, "chat_template", None) is not None
        if has_template or messages.tools or messages.options:
            return messages  # without a template, the engine rejects tools and options
        return "".join(str(message["content"]) for message in messages.messages)

    async def tokenize(self, prompt: Prompt, tenant: str) -> list[int]:
        """Encode a prompt; it may exceed the context, since clients measure it to shorten it."""
        limit = max(MAX_ENCODED_TOKENS, self.engine.stop_conditions.max_context or 0)
        encode = partial(self.engine.encode_prompt, prompt, limit)
        return await self._tokenizer_pool.run(prompt, tenant, encode)

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, tenant: str
    ) -> RequestStreams:
        """Submit all prompts of a request to the engine; raise an error if one is invalid."""
        if not self.is_ready:
            raise ServerClosing("this server is shutting down: send the request to another one")
        total, choices_per_prompt = sum(self._num_choices.values()), params.n or 1
        # With several tenants, each may use at most half of the limit.
        limit = self._max_choices if len(self.keys) < 2 else max(1, self._max_choices // 2)
        coming = len(prompts) * choices_per_prompt
        if coming > limit and len(prompts) > 1:
            raise CapacityError(
                f"{coming} choices in one request, at most {limit} are allowed: split the request"
            )
        if total and (
            total + coming > self._max_choices or self._num_choices[tenant] + coming > limit
        ):
            raise ServerBusy(self._estimate_retry_seconds())
        renders_tools = self._renders_tools(prompts[0], params)
        template = self._find_template(params, renders_tools)
        options = params.to_engine_options() | {
            "tenant": tenant,
            "salt": _make_salt(tenant, params.cache_salt),
            "max_new_tokens": (
                self.max_new_tokens if params.max_new_tokens is None else params.max_new_tokens
            ),
            "skip_special_tokens": template is None,
        }
        start_time, streams, parsers = time.monotonic(), list[Stream](), list[OutputParser]()
        self._num_choices[tenant] += coming
        loop = asyncio.get_running_loop()

        def end(stream: Stream) -> None:
            self._num_choices[tenant] -= choices_per_prompt
            self._tenants[tenant].end(stream)

        def end_in_loop(stream: Stream) -> None:
            with suppress(RuntimeError):  # at shutdown, the loop may close before its streams end
                loop.call_soon_threadsafe(end, stream)

        try:
            for prompt in prompts:
                submit = partial(self.engine.submit, prompt, **options)
                stream = await self._tokenizer_pool.run(prompt, tenant, submit)
                self._tenants[tenant].begin(stream)
                stream.add_done_callback(partial(end_in_loop, stream))
                streams.append(stream)
                parsers += self._make_parsers(params, stream, template, renders_tools)
        except BaseException:
            self._num_choices[tenant] -= choices_per_prompt * (len(prompts) - len(streams))
            for stream in streams:
                stream.cancel()
            raise
        return RequestStreams(streams, parsers, self.metrics, start_time)

    def _renders_tools(self, prompt: Prompt, params: SamplingParams) -> bool:
        """Whether the chat template renders tools, given these messages and options."""
        if not params.template_tools or not isinstance(prompt, Messages):
            return False
        return supports_tools(self.engine.tokenizer, prompt.messages, prompt.options)

    def _make_parsers(
        self,
        params: SamplingParams,
        stream: Stream,
        template: ResponseTemplate | None,
        renders_tools: bool,
    ) -> list[OutputParser]:
        """Make a parser for each choice of a prompt."""
        num_choices, tools = params.n or 1, params.template_tools
        if params.requires_calls:
            return [CallListParser() for _ in range(num_choices)]
        describes_tools = bool(tools) and not renders_tools  # the prompt describes them as text
        parsers: list[OutputParser] = [PlainParser() for _ in range(num_choices)]
        if template is not None:
            prompt = self.engine.tokenizer.decode(stream.prompt[-TEMPLATE_LOOKBACK_TOKENS:])
            template_tools = [] if describes_tools else tools
            parsers = [
                TemplateParser(template, prompt, template_tools, params.max_calls)
                for _ in range(num_choices)
            ]
        if describes_tools:
            return [PromptedCallParser(parser, tools, params.max_calls) for parser in parsers]
        return parsers

    def _find_template(
        self, params: SamplingParams, renders_tools: bool
    ) -> ResponseTemplate | None:
        """Return the response template to parse the reply with, None for plain text."""
        template = self._template if params.is_free_form else None
        has_calls = template is not None and template.has_calls
        if params.is_free_form and params.template_tools and renders_tools and not has_calls:
            raise ValueError(
                "tools: the format of this model's calls is unknown (its tokenizer has no "
                "response_template); force the call: tool_choice required, or one function"
            )
        return template

    def _estimate_retry_seconds(self) -> int:
        """Return the median wait for a first token, an estimate of when there is room."""
        waits: Mapping[str, float] = self.engine.stats()["first_token_seconds"]
        return max(1, math.ceil(waits.get("median", 1.0)))


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
        self._streams = streams
        self._choices_per_stream = len(parsers) // len(streams)
        self._metrics = metrics
        self._start_time = start_time

    @property
    def usages(self) -> list[Usage]:
        return [stream.usage for stream in self._streams]

    def cancel(self) -> None:
        """Cancel generation of all streams."""
        for stream in self._streams:
            stream.cancel()

    async def iterate_steps(self) -> AsyncIterator[tuple[int, Step]]:
        """Yield every step with the number of its choice, in order of arrival."""
        queue: asyncio.Queue[tuple[int, Step] | BaseException | None] = asyncio.Queue()
        readers = [
            asyncio.create_task(self._forward_steps(index, stream, queue))
            for index, stream in enumerate(self._streams)
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
            self._metrics.request_latency.observe(time.monotonic() - self._start_time)
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
                if not last_times:
                    self._metrics.time_to_first_token.observe(now - self._start_time)
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
        """Yield server-sent events as steps arrive."""
        if begin := writer.write_begin():
            yield begin
        async for index, step in self.iterate_steps():
            if events := writer.write_step(index, step):
                yield events
        yield writer.write_end(self.usages)


def _make_salt(tenant: str, client_salt: str | None) -> str:
    """Combine a client's salt with its tenant: it restricts sharing within the tenant only."""
    return tenant if client_salt is None else json.dumps([tenant, client_salt])


def find_status(error: BaseException, *, started: bool) -> tuple[int, str]:
    """Return the HTTP status and OpenAI's type of an error.

    Before generation starts, an error is the client's (400). Later it is the server's (500), except
    for a grammar that grows too large during generation.
    """
    if isinstance(error, ServerBusy):
        return 429, "rate_limit_error"
    if isinstance(error, ServerClosing | EngineError):
        return 503, "server_error"
    if isinstance(error, GrammarError) or (
        isinstance(error, CapacityError | ValueError | TypeError) and not started
    ):
        return 400, "invalid_request_error"
    return 500, "server_error"

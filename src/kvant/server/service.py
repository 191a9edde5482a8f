"""Between HTTP and an engine: who may ask, how much waits, and what a request becomes."""

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
from kvant.generation.grammar import compile_grammar
from kvant.generation.tools import knows_tools
from kvant.server.access import ApiKeys
from kvant.server.metrics import ServerMetrics
from kvant.server.output_parsing import (
    CallListParser,
    DescribedCalls,
    OutputParser,
    PlainParser,
    ResponseTemplate,
    TemplateParser,
    find_template,
)
from kvant.server.protocol import SamplingParams
from kvant.server.response_writers import ResponseWriter
from kvant.server.tenants import TenantFigures
from kvant.server.tokenizer_pool import Prompt, ServerBusy, TokenizerPool

log = logging.getLogger("kvant")

MAX_ENCODED_TOKENS = (
    1 << 17
)  # tokens of a prompt that is only encoded, unless the context is longer
TEMPLATE_LOOKBACK_TOKENS = 512  # tokens of a prompt at its end, which may begin a reply


class ServerClosing(CacheError):
    """The server ends."""


class Service:
    """One model behind an engine, for clients of one or several tenants."""

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
        with suppress(GrammarError):  # the first one of a model takes a second
            compile_grammar(Grammar.json(), engine.tokenizer, engine.end_tokens)
        self._tokenizer_pool = TokenizerPool()
        self._is_closing = False
        self._max_continuations = engine.max_sequences + max_waiting
        self._num_under_way: Counter[str] = Counter()  # continuations under way, by tenant
        self._tenants: defaultdict[str, TenantFigures] = defaultdict(TenantFigures)

    @property
    def is_ready(self) -> bool:
        return self.engine.is_open and not self._is_closing

    def close(self) -> None:
        """Let nobody in any more; what is under way goes on."""
        self._is_closing = True

    def stats(self) -> dict[str, Any]:
        """Where the memory goes, and the totals of all tenants."""
        prefixes = self.engine.prefixes
        return {
            **self._model_facts(),
            **self.engine.stats(),
            "prefixes": None if prefixes is None else prefixes.stats(),
        }

    def stats_of(self, tenant: str) -> dict[str, Any]:
        """The figures of the requests of one tenant."""
        own = self._tenants[tenant].counts()
        return {**self._model_facts(), **self.engine.load(tenant), **own}

    def _model_facts(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "model": self.model,
            "kv_cache": engine.kv_cache,
            "bytes_a_token": engine.nbytes_per_token,
        }

    def make_prompt(self, messages: Messages) -> Prompt:
        """Messages for the template of the model; without one, their texts one behind the other."""
        templated = getattr(self.engine.tokenizer, "chat_template", None) is not None
        if templated or messages.tools or messages.options:
            return messages
        return "".join(str(message["content"]) for message in messages.messages)

    async def tokenize(self, prompt: Prompt, tenant: str) -> list[int]:
        """Encode a prompt that may be longer than the context: clients ask in order to cut it."""
        limit = max(MAX_ENCODED_TOKENS, self.engine.stop_conditions.max_context or 0)
        encode = partial(self.engine.encode_prompt, prompt, limit)
        return await self._tokenizer_pool.run(prompt, tenant, encode)

    async def submit(
        self, prompts: Sequence[Prompt], params: SamplingParams, tenant: str
    ) -> RequestStreams:
        """Have the engine continue all of these prompts; what is wrong with one is said now."""
        if not self.is_ready:
            raise ServerClosing("the server ends: ask another one")
        under_way, width = sum(self._num_under_way.values()), params.n or 1
        # Where there are several tenants, none may fill all places.
        own = (
            self._max_continuations if len(self.keys) < 2 else max(1, self._max_continuations // 2)
        )
        coming = len(prompts) * width
        if coming > own and len(prompts) > 1:
            raise CapacityError(
                f"{coming} continuations in one request, {own} at most: ask in several"
            )
        if under_way and (
            under_way + coming > self._max_continuations
            or self._num_under_way[tenant] + coming > own
        ):
            raise ServerBusy(self._estimate_retry_seconds())
        knows = self._renders_tools(prompts[0], params)
        template = self._find_template(params, knows)
        given = params.to_engine_options() | {
            "tenant": tenant,
            "salt": _make_salt(tenant, params.cache_salt),
        }
        given |= {
            "max_new_tokens": self.max_new_tokens
            if params.max_new_tokens is None
            else params.max_new_tokens
        }
        given |= {"skip_special_tokens": template is None}
        began, streams, listeners = time.monotonic(), list[Stream](), list[OutputParser]()
        self._num_under_way[tenant] += coming
        loop = asyncio.get_running_loop()

        def end(stream: Stream) -> None:
            self._num_under_way[tenant] -= width
            self._tenants[tenant].end(stream)

        def end_in_loop(stream: Stream) -> None:
            with suppress(RuntimeError):  # the loop ended before its requests
                loop.call_soon_threadsafe(end, stream)

        try:
            for prompt in prompts:
                submit = partial(self.engine.submit, prompt, **given)
                stream = await self._tokenizer_pool.run(prompt, tenant, submit)
                self._tenants[tenant].begin(stream)
                stream.add_done_callback(partial(end_in_loop, stream))
                streams.append(stream)
                listeners += self._make_parsers(params, stream, template, knows)
        except BaseException:
            self._num_under_way[tenant] -= width * (len(prompts) - len(streams))
            for stream in streams:
                stream.cancel()
            raise
        return RequestStreams(streams, listeners, self.metrics, began)

    def _renders_tools(self, prompt: Prompt, asked: SamplingParams) -> bool:
        """Whether the chat template renders the tools of a request, by its messages and options."""
        if not asked.template_tools or not isinstance(prompt, Messages):
            return False
        return knows_tools(self.engine.tokenizer, prompt.messages, prompt.options)

    def _make_parsers(
        self, params: SamplingParams, stream: Stream, template: ResponseTemplate | None, knows: bool
    ) -> list[OutputParser]:
        """Those of all continuations of a prompt."""
        width, tools = params.n or 1, params.template_tools
        if params.requires_calls:
            return [CallListParser() for _ in range(width)]
        described = bool(tools) and not knows
        found: list[OutputParser] = [PlainParser() for _ in range(width)]
        if template is not None:
            prompt = self.engine.tokenizer.decode(stream.prompt[-TEMPLATE_LOOKBACK_TOKENS:])
            known = [] if described else tools
            found = [
                TemplateParser(template, prompt, known, params.max_calls) for _ in range(width)
            ]
        if described:
            return [DescribedCalls(one, tools, params.max_calls) for one in found]
        return found

    def _find_template(self, params: SamplingParams, knows: bool) -> ResponseTemplate | None:
        """By which a reply is read; None: it is read as it is."""
        template = self._template if params.is_free_form else None
        has_calls = template is not None and template.has_calls
        if params.is_free_form and params.template_tools and knows and not has_calls:
            raise ValueError(
                "tools: the way in which this model writes calls is unknown (its tokenizer has no "
                "response_template); force the call: tool_choice required, or of one function"
            )
        return template

    def _estimate_retry_seconds(self) -> int:
        """Seconds after which there may be room: what requests wait for their first token now."""
        waits: Mapping[str, float] = self.engine.stats()["first_token_seconds"]
        return max(1, math.ceil(waits.get("median", 1.0)))


class RequestStreams:
    """What is said to a request, of all its prompts and continuations."""

    def __init__(
        self,
        streams: Sequence[Stream],
        parsers: Sequence[OutputParser],
        metrics: ServerMetrics,
        start_time: float,
    ) -> None:
        """A listener for every continuation of every stream."""
        self.parsers = parsers
        self._streams = streams
        self._num_choices = len(parsers) // len(streams)
        self._metrics = metrics
        self._start_time = start_time

    @property
    def usages(self) -> list[Usage]:
        return [stream.usage for stream in self._streams]

    def cancel(self) -> None:
        """Nobody listens any more."""
        for stream in self._streams:
            stream.cancel()

    async def iterate_steps(self) -> AsyncIterator[tuple[int, Step]]:
        """Every step with the number of its continuation, as they come."""
        coming: asyncio.Queue[tuple[int, Step] | BaseException | None] = asyncio.Queue()
        readers = [
            asyncio.create_task(self._forward_steps(place, stream, coming))
            for place, stream in enumerate(self._streams)
        ]
        try:
            left = len(readers)
            while left:
                one = await coming.get()
                if one is None:
                    left -= 1
                elif isinstance(one, BaseException):
                    raise one
                else:
                    yield one
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
        last: dict[int, float] = {}
        try:
            async for step in stream:
                now = time.monotonic()
                if not last:
                    self._metrics.time_to_first_token.observe(now - self._start_time)
                elif step.choice in last:
                    self._metrics.inter_token_latency.observe(now - last[step.choice])
                last[step.choice] = now
                queue.put_nowait((index * self._num_choices + step.choice, step))
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    async def collect_steps(self) -> list[list[Step]]:
        """All of them, once they are whole."""
        found: list[list[Step]] = [[] for _ in self.parsers]
        async for index, step in self.iterate_steps():
            found[index].append(step)
        return found

    async def iterate_events(self, writer: ResponseWriter) -> AsyncIterator[str]:
        """As server-sent events."""
        if begin := writer.write_begin():
            yield begin
        async for index, step in self.iterate_steps():
            if told := writer.write_step(index, step):
                yield told
        yield writer.write_end(self.usages)


def _make_salt(tenant: str, client_salt: str | None) -> str:
    """A client may share prefixes with fewer than its tenant does, and never with more."""
    return tenant if client_salt is None else json.dumps([tenant, client_salt])


def find_status(error: BaseException, *, started: bool) -> tuple[int, str]:
    """The status of an error, and its kind in OpenAI's words.

    What is wrong with a request is said before it began; later it is the server's fault, but of a
    grammar that turns out to be too large on the way.
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

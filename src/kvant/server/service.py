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
from kvant.generation.grammar import rules_of
from kvant.generation.tools import knows_tools
from kvant.server.access import Keys
from kvant.server.metrics import Metrics
from kvant.server.protocol import Drawing
from kvant.server.replies import Reply
from kvant.server.speech import (
    DescribedCalls,
    Listed,
    Listener,
    Parsed,
    Plainly,
    Template,
    template_of,
)
from kvant.server.tenants import TenantFigures
from kvant.server.tokenizing import Busy, Prompt, Tokenizing

log = logging.getLogger("kvant")

MAX_TOKENIZED = 1 << 17  # tokens of a prompt that is only encoded, unless the context is longer
NEAR = 512  # tokens of a prompt at its end, which may begin a reply


class Closing(CacheError):
    """The server ends."""


class Service:
    """One model behind an engine, for clients of one or several tenants."""

    def __init__(
        self,
        engine: Engine,
        model: str,
        keys: Keys,
        *,
        max_waiting: int = 256,
        max_new_tokens: int = 1024,
    ) -> None:
        self.engine = engine
        self.model = model
        self.keys = keys
        self.max_new_tokens = max_new_tokens
        self.metrics = Metrics(engine, model)
        self.created = int(time.time())
        self._template = template_of(engine.model, engine.tokenizer)
        with suppress(GrammarError):  # the first one of a model takes a second
            rules_of(Grammar.json(), engine.tokenizer, engine.end_tokens)
        self._tokenizing = Tokenizing()
        self._closing = False
        self._most = engine.max_sequences + max_waiting
        self._asked: Counter[str] = Counter()  # continuations under way, by tenant
        self._tenants: defaultdict[str, TenantFigures] = defaultdict(TenantFigures)

    @property
    def ready(self) -> bool:
        return self.engine.serves and not self._closing

    def close(self) -> None:
        """Let nobody in any more; what is under way goes on."""
        self._closing = True

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
            "bytes_a_token": engine.bytes_a_token,
        }

    def prompt(self, asked: Messages) -> Prompt:
        """Messages for the template of the model; without one, their texts one behind the other."""
        templated = getattr(self.engine.tokenizer, "chat_template", None) is not None
        if templated or asked.tools or asked.options:
            return asked
        return "".join(str(message["content"]) for message in asked.messages)

    async def tokens(self, prompt: Prompt, tenant: str) -> list[int]:
        """Encode a prompt that may be longer than the context: clients ask in order to cut it."""
        limit = max(MAX_TOKENIZED, self.engine.limits.max_context or 0)
        encode = partial(self.engine.tokens_of, prompt, limit)
        return await self._tokenizing.run(prompt, tenant, encode)

    async def ask(self, prompts: Sequence[Prompt], asked: Drawing, tenant: str) -> Replies:
        """Have the engine continue all of these prompts; what is wrong with one is said now."""
        if not self.ready:
            raise Closing("the server ends: ask another one")
        under_way, width = sum(self._asked.values()), asked.n or 1
        # Where there are several tenants, none may fill all places.
        own = self._most if len(self.keys) < 2 else max(1, self._most // 2)
        coming = len(prompts) * width
        if coming > own and len(prompts) > 1:
            raise CapacityError(
                f"{coming} continuations in one request, {own} at most: ask in several"
            )
        if under_way and (under_way + coming > self._most or self._asked[tenant] + coming > own):
            raise Busy(self._patience())
        knows = self._renders_tools(prompts[0], asked)
        template = self._template_for(asked, knows)
        given = asked.sampling() | {"tenant": tenant, "salt": _salt(tenant, asked.cache_salt)}
        given |= {"max_new_tokens": self.max_new_tokens if asked.most is None else asked.most}
        given |= {"skip_special_tokens": template is None}
        began, streams, listeners = time.monotonic(), list[Stream](), list[Listener]()
        self._asked[tenant] += coming
        loop = asyncio.get_running_loop()

        def end(stream: Stream) -> None:
            self._asked[tenant] -= width
            self._tenants[tenant].end(stream)

        def end_in_loop(stream: Stream) -> None:
            with suppress(RuntimeError):  # the loop ended before its requests
                loop.call_soon_threadsafe(end, stream)

        try:
            for prompt in prompts:
                submit = partial(self.engine.submit, prompt, **given)
                stream = await self._tokenizing.run(prompt, tenant, submit)
                self._tenants[tenant].begin(stream)
                stream.add_done_callback(partial(end_in_loop, stream))
                streams.append(stream)
                listeners += self._listeners(asked, stream, template, knows)
        except BaseException:
            self._asked[tenant] -= width * (len(prompts) - len(streams))
            for stream in streams:
                stream.cancel()
            raise
        return Replies(streams, listeners, self.metrics, began)

    def _renders_tools(self, prompt: Prompt, asked: Drawing) -> bool:
        """Whether the chat template renders the tools of a request, by its messages and options."""
        if not asked.tools_shown or not isinstance(prompt, Messages):
            return False
        return knows_tools(self.engine.tokenizer, prompt.messages, prompt.options)

    def _listeners(
        self, asked: Drawing, stream: Stream, template: Template | None, knows: bool
    ) -> list[Listener]:
        """Those of all continuations of a prompt."""
        width, tools = asked.n or 1, asked.tools_shown
        if asked.must_call:
            return [Listed() for _ in range(width)]
        described = bool(tools) and not knows
        found: list[Listener] = [Plainly() for _ in range(width)]
        if template is not None:
            prompt = self.engine.tokenizer.decode(stream.prompt[-NEAR:])
            known = [] if described else tools
            found = [Parsed(template, prompt, known, asked.most_calls) for _ in range(width)]
        if described:
            return [DescribedCalls(one, tools, asked.most_calls) for one in found]
        return found

    def _template_for(self, asked: Drawing, knows: bool) -> Template | None:
        """By which a reply is read; None: it is read as it is."""
        template = self._template if asked.is_parsed else None
        has_calls = template is not None and template.has_calls
        if asked.is_parsed and asked.tools_shown and knows and not has_calls:
            raise ValueError(
                "tools: the way in which this model writes calls is unknown (its tokenizer has no "
                "response_template); force the call: tool_choice required, or of one function"
            )
        return template

    def _patience(self) -> int:
        """Seconds after which there may be room: what requests wait for their first token now."""
        waits: Mapping[str, float] = self.engine.stats()["first_token_seconds"]
        return max(1, math.ceil(waits.get("median", 1.0)))


class Replies:
    """What is said to a request, of all its prompts and continuations."""

    def __init__(
        self,
        streams: Sequence[Stream],
        listeners: Sequence[Listener],
        metrics: Metrics,
        began: float,
    ) -> None:
        """A listener for every continuation of every stream."""
        self.listeners = listeners
        self._streams = streams
        self._width = len(listeners) // len(streams)
        self._metrics = metrics
        self._began = began

    @property
    def usage(self) -> list[Usage]:
        return [stream.usage for stream in self._streams]

    def cancel(self) -> None:
        """Nobody listens any more."""
        for stream in self._streams:
            stream.cancel()

    async def steps(self) -> AsyncIterator[tuple[int, Step]]:
        """Every step with the number of its continuation, as they come."""
        coming: asyncio.Queue[tuple[int, Step] | BaseException | None] = asyncio.Queue()
        readers = [
            asyncio.create_task(self._read(place, stream, coming))
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
            self._metrics.whole.observe(time.monotonic() - self._began)
            self.cancel()
            for reader in readers:
                reader.cancel()

    async def _read(
        self,
        place: int,
        stream: Stream,
        coming: asyncio.Queue[tuple[int, Step] | BaseException | None],
    ) -> None:
        last: dict[int, float] = {}
        try:
            async for step in stream:
                now = time.monotonic()
                if not last:
                    self._metrics.first.observe(now - self._began)
                elif step.choice in last:
                    self._metrics.between.observe(now - last[step.choice])
                last[step.choice] = now
                coming.put_nowait((place * self._width + step.choice, step))
        except Exception as error:
            coming.put_nowait(error)
        else:
            coming.put_nowait(None)

    async def spoken(self) -> list[list[Step]]:
        """All of them, once they are whole."""
        found: list[list[Step]] = [[] for _ in self.listeners]
        async for index, step in self.steps():
            found[index].append(step)
        return found

    async def events(self, reply: Reply) -> AsyncIterator[str]:
        """As server-sent events."""
        if begin := reply.begin():
            yield begin
        async for index, step in self.steps():
            if told := reply.step(index, step):
                yield told
        yield reply.end(self.usage)


def _salt(tenant: str, own: str | None) -> str:
    """A client may share prefixes with fewer than its tenant does, and never with more."""
    return tenant if own is None else json.dumps([tenant, own])


def status_of(error: BaseException, *, began: bool) -> tuple[int, str]:
    """The status of an error, and its kind in OpenAI's words.

    What is wrong with a request is said before it began; later it is the server's fault, but of a
    grammar that turns out to be too large on the way.
    """
    if isinstance(error, Busy):
        return 429, "rate_limit_error"
    if isinstance(error, Closing | EngineError):
        return 503, "server_error"
    if isinstance(error, GrammarError) or (
        isinstance(error, CapacityError | ValueError | TypeError) and not began
    ):
        return 400, "invalid_request_error"
    return 500, "server_error"

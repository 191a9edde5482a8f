"""Write generated steps as OpenAI responses: one JSON object, or server-sent events."""

from __future__ import annotations

import json
import math
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Any, Protocol

from kvant.engine import Usage
from kvant.generation import Step
from kvant.server.errors import MESSAGES_PATH, OLLAMA_PATH, shape_error
from kvant.server.output_parsing import (
    CallPart,
    ContentPart,
    OutputParser,
    OutputPart,
    ReasoningPart,
)
from kvant.server.protocol import SamplingParams

INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"
DONE_EVENT = "data: [DONE]\n\n"
# Line separators that JSON allows within a string.
LINE_SEPARATOR_ESCAPES = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
CANCELLED_REASON = "length"  # finish reason of a request that a server's shutdown cuts short


def find_finish_reason(steps: Sequence[Step]) -> str:
    """Return the finish reason of a choice."""
    reason = steps[-1].finish_reason if steps else None
    return CANCELLED_REASON if reason in (None, "cancelled") else str(reason)


class Reply(Protocol):
    """What writers need of a request under way."""

    @property
    def parsers(self) -> Sequence[OutputParser]:
        """One parser per choice."""

    @property
    def prompts(self) -> Sequence[Sequence[int]]:
        """The tokens of each prompt."""

    @property
    def usages(self) -> Sequence[Usage]:
        """The tokens so far, by prompt."""

    @property
    def start_time(self) -> float:
        """When the request arrived, in seconds of `time.monotonic`."""

    @property
    def first_step_time(self) -> float | None:
        """When the first step arrived; None before."""


class ResponseWriter(ABC):
    """Writes the response to one request, whole or as events."""

    media_type = "text/event-stream"  # of events

    def __init__(self, tokenizer: Any, model: str, params: SamplingParams, reply: Reply) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.num_logprobs = params.num_logprobs
        self.includes_usage = params.includes_usage
        self.reply = reply
        self._unfinished = set(range(len(reply.parsers)))

    @abstractmethod
    def write_all(self, steps_by_choice: Sequence[Sequence[Step]]) -> dict[str, Any]:
        """Return the whole response, from all steps of every choice."""

    def write_begin(self) -> str:
        """Return the events before the first step."""
        return ""

    @abstractmethod
    def write_step(self, index: int, step: Step | None) -> str:
        """Return the events of a step; with None, the last ones of an unfinished choice."""

    @abstractmethod
    def write_end(self) -> str:
        """Return the events after the last step."""

    def write_error(self, body: Mapping[str, Any]) -> str:
        """Return the event of an error, which ends the stream."""
        return format_event(body)

    def parse_step(self, index: int, step: Step | None) -> list[OutputPart]:
        """Return the parts that a step adds to a choice; `step` None ends an unfinished choice."""
        parser = self.reply.parsers[index]
        parts = [] if step is None else parser.feed(step.text)
        if step is None or step.finish_reason:
            self._unfinished.discard(index)
            parts += parser.finish()
        return parts

    def list_unfinished(self) -> list[int]:
        """Return the choices without a finish reason, which a shutdown cut short."""
        return sorted(self._unfinished)


class ChoicesWriter(ResponseWriter):
    """Base of the APIs whose responses have a list of choices: chat and completions."""

    id_prefix = ""
    object_type = ""
    chunk_object_type = ""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._header = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": f"kvant-{version('kvant')}",
        }

    def write_all(self, steps_by_choice: Sequence[Sequence[Step]]) -> dict[str, Any]:
        choices = [self.make_choice(index, steps) for index, steps in enumerate(steps_by_choice)]
        return self._header | {
            "object": self.object_type,
            "choices": choices,
            "usage": make_usage(self.reply.usages),
        }

    def write_end(self) -> str:
        events = "".join(self.write_step(index, None) for index in self.list_unfinished())
        if self.includes_usage:
            events += self.write_chunk([], usage=make_usage(self.reply.usages))
        return events + DONE_EVENT

    @abstractmethod
    def make_choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        """Return a whole choice."""

    def write_chunk(self, choices: list[dict[str, Any]], **extra: Any) -> str:
        return format_event(
            self._header | {"object": self.chunk_object_type, "choices": choices} | extra
        )

    def _decode_token(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))


class ChatWriter(ChoicesWriter):
    id_prefix = "chatcmpl"
    object_type = "chat.completion"
    chunk_object_type = "chat.completion.chunk"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._num_calls = Counter[int]()  # by choice

    def write_begin(self) -> str:
        delta = {"role": "assistant"}
        return "".join(
            self.write_chunk([self._make_chunk_choice(index, delta, None)])
            for index in range(len(self.reply.parsers))
        )

    def make_choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        parts = [part for step in steps for part in self.parse_step(index, step)]
        if index in self.list_unfinished():
            parts += self.parse_step(index, None)
        calls = self._make_calls(index, parts)
        content = "".join(part.text for part in parts if isinstance(part, ContentPart))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        if reasoning := "".join(part.text for part in parts if isinstance(part, ReasoningPart)):
            message["reasoning_content"] = reasoning
        return {
            "index": index,
            "message": message,
            "logprobs": self._make_logprobs(steps),
            "finish_reason": self._find_finish_reason(index, steps),
        }

    def write_step(self, index: int, step: Step | None) -> str:
        steps, is_last = ([], True) if step is None else ([step], step.finish_reason is not None)
        delta = self._make_delta(index, self.parse_step(index, step))
        if not (delta or is_last or self.num_logprobs is not None):
            return ""
        reason = self._find_finish_reason(index, steps) if is_last else None
        logprobs = self._make_logprobs(steps) if steps else None
        return self.write_chunk([self._make_chunk_choice(index, delta, reason, logprobs)])

    def _make_delta(self, index: int, parts: Sequence[OutputPart]) -> dict[str, Any]:
        """Return the delta that adds these parts to a message."""
        delta: dict[str, Any] = {}
        for name, part_type in (("content", ContentPart), ("reasoning_content", ReasoningPart)):
            if text := "".join(part.text for part in parts if isinstance(part, part_type)):
                delta[name] = text
        first_index = self._num_calls[index]
        if calls := self._make_calls(index, parts):
            delta["tool_calls"] = [
                {"index": call_index} | call for call_index, call in enumerate(calls, first_index)
            ]
        return delta

    def _make_calls(self, index: int, parts: Iterable[OutputPart]) -> list[dict[str, Any]]:
        calls = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": part.name, "arguments": part.arguments},
            }
            for part in parts
            if isinstance(part, CallPart)
        ]
        self._num_calls[index] += len(calls)
        return calls

    def _find_finish_reason(self, index: int, steps: Sequence[Step]) -> str:
        reason = find_finish_reason(steps)
        return "tool_calls" if reason == "stop" and self._num_calls[index] else reason

    def _make_chunk_choice(
        self,
        index: int,
        delta: Mapping[str, Any],
        reason: str | None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _make_logprobs(self, steps: Iterable[Step]) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        content = [
            self._make_token_logprob(step.token, step.logprob)
            | {"top_logprobs": [self._make_token_logprob(*pair) for pair in step.likeliest]}
            for step in steps
        ]
        return {"content": content, "refusal": None}

    def _make_token_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode_token(token)
        # The bytes of a token that is only part of a character are unknown.
        token_bytes = None if INCOMPLETE_CHARACTER in text else list(text.encode())
        return {"token": text, "logprob": clamp_logprob(logprob), "bytes": token_bytes}


class CompletionWriter(ChoicesWriter):
    id_prefix = "cmpl"
    object_type = chunk_object_type = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._num_characters = Counter[int]()  # of the decoded tokens, by choice

    def make_choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(step.text for step in steps),
            "logprobs": self._make_logprobs(index, steps),
            "finish_reason": find_finish_reason(steps),
        }

    def write_step(self, index: int, step: Step | None) -> str:
        self.parse_step(index, step)
        choice = self.make_choice(index, [] if step is None else [step])
        if step is not None and not step.finish_reason:
            if not (step.text or self.num_logprobs is not None):
                return ""
            choice["finish_reason"] = None
        return self.write_chunk([choice])

    def _make_logprobs(self, index: int, steps: Sequence[Step]) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        texts = [self._decode_token(step.token) for step in steps]
        *offsets, self._num_characters[index] = accumulate(
            map(len, texts), initial=self._num_characters[index]
        )
        top_logprobs = [
            {self._decode_token(t): clamp_logprob(p) for t, p in step.likeliest} for step in steps
        ]
        return {
            "tokens": texts,
            "token_logprobs": [clamp_logprob(step.logprob) for step in steps],
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }


def make_usage(usages: Iterable[Usage]) -> dict[str, Any]:
    """Sum the usage of all prompts of a request."""
    per_prompt = list(usages)
    prompt, completion, cached, restored = (
        sum(getattr(usage, name) for usage in per_prompt)
        for name in ("prompt_tokens", "completion_tokens", "cached_tokens", "restored_tokens")
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "restored_tokens": restored},
    }


def format_event(data: Mapping[str, Any]) -> str:
    """Format data as a server-sent event."""
    return f"data: {format_json(data)}\n\n"


def format_json(data: Mapping[str, Any]) -> str:
    """Format data in one line, also for clients that split lines as `str.splitlines` does."""
    return json.dumps(data, ensure_ascii=False).translate(LINE_SEPARATOR_ESCAPES)


def format_stream_error(path: str, body: Mapping[str, Any]) -> str:
    """Format an error in OpenAI's shape as the end of a stream of the API of a path."""
    error = shape_error(path, 500, body)
    if path.startswith(OLLAMA_PATH):
        return format_json(error) + "\n"
    return ("event: error\n" if path.startswith(MESSAGES_PATH) else "") + format_event(error)


def parse_arguments(call: CallPart) -> dict[str, Any]:
    """Return the arguments of a call as an object that JSON and UTF-8 can encode.

    What is no object becomes its field `arguments`.
    """

    def parse_finite(number: str) -> Any:
        return value if math.isfinite(value := float(number)) else number

    try:
        value = json.loads(call.arguments or "{}", parse_float=parse_finite, parse_constant=str)
    except (ValueError, RecursionError):
        value = call.arguments
    value = value if isinstance(value, dict) else {"arguments": value}
    text = format_json(value).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    arguments: dict[str, Any] = json.loads(text)
    return arguments


def clamp_logprob(logprob: float) -> float:
    """Clamp minus infinity, which JSON does not have, to OpenAI's -9999."""
    return max(logprob, -9999.0)

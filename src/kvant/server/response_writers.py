"""What an engine said, in OpenAI's words."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from typing import Any

from pydantic import BaseModel

from kvant.engine import Usage
from kvant.generation import Step
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
CANCELLED_REASON = "length"  # what is cut short by a server that ends


def find_finish_reason(steps: Sequence[Step]) -> str:
    """Why a continuation ended."""
    reason = steps[-1].finish_reason if steps else None
    return CANCELLED_REASON if reason in (None, "cancelled") else str(reason)


class ResponseWriter(ABC):
    """What is said to one request, as a whole or in events."""

    def __init__(
        self, tokenizer: Any, params: SamplingParams, parsers: Sequence[OutputParser]
    ) -> None:
        """Each continuation has a listener of its own."""
        self.tokenizer = tokenizer
        self.num_logprobs = params.num_logprobs
        self.includes_usage = params.includes_usage
        self.parsers = parsers
        self._unfinished = set(range(len(parsers)))

    @abstractmethod
    def write_all(
        self, steps_by_choice: Sequence[Sequence[Step]], usages: Iterable[Usage]
    ) -> dict[str, Any]:
        """Every continuation from its first step to its last."""

    @abstractmethod
    def write_begin(self) -> str:
        """The events before the first step."""

    @abstractmethod
    def write_step(self, index: int, step: Step) -> str:
        """The events of a step; nothing for one that adds nothing."""

    @abstractmethod
    def write_end(self, usages: Iterable[Usage]) -> str:
        """The events behind the last step."""

    @abstractmethod
    def write_error(self, body: Mapping[str, Any]) -> str:
        """The event of an error, after which nothing comes."""

    def parse_step(self, index: int, step: Step | None) -> list[OutputPart]:
        """What a step adds to a continuation; None: nothing comes any more."""
        listener = self.parsers[index]
        found = [] if step is None else listener.feed(step.text)
        if step is None or step.finish_reason:
            self._unfinished.discard(index)
            found += listener.finish()
        return found

    def list_unfinished(self) -> list[int]:
        """Continuations without an end of their own: the server ended before."""
        return sorted(self._unfinished)


class ChoicesWriter(ResponseWriter):
    """Continuations beside each other; `Chatted` and `Completed` say what one is."""

    id_prefix = ""
    object_type = ""
    chunk_object_type = ""

    def __init__(
        self, tokenizer: Any, model: str, params: SamplingParams, parsers: Sequence[OutputParser]
    ) -> None:
        super().__init__(tokenizer, params, parsers)
        self._header = {
            "id": f"{self.id_prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"kvant-{version('kvant')}",
        }

    def write_all(
        self, steps_by_choice: Sequence[Sequence[Step]], usages: Iterable[Usage]
    ) -> dict[str, Any]:
        choices = [self.make_choice(index, steps) for index, steps in enumerate(steps_by_choice)]
        return self._header | {
            "object": self.object_type,
            "choices": choices,
            "usage": make_usage(usages),
        }

    def write_begin(self) -> str:
        return ""

    def write_end(self, usages: Iterable[Usage]) -> str:
        told = "".join(self.write_last(index) for index in self.list_unfinished())
        return (
            told
            + (self.write_chunk([], usage=make_usage(usages)) if self.includes_usage else "")
            + DONE_EVENT
        )

    def write_error(self, body: Mapping[str, Any]) -> str:
        return format_event(body)

    @abstractmethod
    def make_choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        """A whole continuation."""

    @abstractmethod
    def write_last(self, index: int) -> str:
        """The event of a continuation that is cut short."""

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
        self._num_calls = Counter[int]()  # calls of each continuation

    def write_begin(self) -> str:
        delta = {"role": "assistant"}
        return "".join(
            self.write_chunk([self._make_chunk_choice(index, delta, None)])
            for index in range(len(self.parsers))
        )

    def make_choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        parts = [part for step in steps for part in self.parse_step(index, step)]
        if index in self.list_unfinished():
            parts += self.parse_step(index, None)
        calls = self._make_calls(index, parts)
        content = "".join(one.text for one in parts if isinstance(one, ContentPart))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        if thought := "".join(one.text for one in parts if isinstance(one, ReasoningPart)):
            message["reasoning_content"] = thought
        return {
            "index": index,
            "message": message,
            "logprobs": self._make_logprobs(steps),
            "finish_reason": self._find_finish_reason(index, steps),
        }

    def write_step(self, index: int, step: Step) -> str:
        delta = self._make_delta(index, self.parse_step(index, step))
        reason = None if step.finish_reason is None else self._find_finish_reason(index, [step])
        if not (delta or reason or self.num_logprobs is not None):
            return ""
        return self.write_chunk(
            [self._make_chunk_choice(index, delta, reason, self._make_logprobs([step]))]
        )

    def write_last(self, index: int) -> str:
        delta = self._make_delta(index, self.parse_step(index, None))
        return self.write_chunk(
            [self._make_chunk_choice(index, delta, self._find_finish_reason(index, []))]
        )

    def _make_delta(self, index: int, parts: Sequence[OutputPart]) -> dict[str, Any]:
        """What these add to a message."""
        delta: dict[str, Any] = {}
        for name, kind in (("content", ContentPart), ("reasoning_content", ReasoningPart)):
            if text := "".join(one.text for one in parts if isinstance(one, kind)):
                delta[name] = text
        before = self._num_calls[index]
        if calls := self._make_calls(index, parts):
            delta["tool_calls"] = [
                {"index": before + place} | one for place, one in enumerate(calls)
            ]
        return delta

    def _make_calls(self, index: int, parts: Iterable[OutputPart]) -> list[dict[str, Any]]:
        found = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": one.name, "arguments": one.arguments},
            }
            for one in parts
            if isinstance(one, CallPart)
        ]
        self._num_calls[index] += len(found)
        return found

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
        told = [
            self._make_token_logprob(step.token, step.logprob)
            | {"top_logprobs": [self._make_token_logprob(*pair) for pair in step.likeliest]}
            for step in steps
        ]
        return {"content": told, "refusal": None}

    def _make_token_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode_token(token)
        whole = INCOMPLETE_CHARACTER not in text  # of a character there is no telling which bytes
        told = list(text.encode()) if whole else None
        return {"token": text, "logprob": _clamp_logprob(logprob), "bytes": told}


class CompletionWriter(ChoicesWriter):
    id_prefix = "cmpl"
    object_type = chunk_object_type = "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._num_characters = Counter[int]()  # characters of each continuation, by its tokens

    def make_choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(step.text for step in steps),
            "logprobs": self._make_logprobs(index, steps),
            "finish_reason": find_finish_reason(steps),
        }

    def write_step(self, index: int, step: Step) -> str:
        self.parse_step(index, step)
        if not (step.text or step.finish_reason or self.num_logprobs is not None):
            return ""
        one = {"index": index, "text": step.text, "logprobs": self._make_logprobs(index, [step])}
        return self.write_chunk(
            [one | {"finish_reason": find_finish_reason([step]) if step.finish_reason else None}]
        )

    def write_last(self, index: int) -> str:
        return self.write_chunk([self.make_choice(index, [])])

    def _make_logprobs(self, index: int, steps: Sequence[Step]) -> dict[str, Any] | None:
        if self.num_logprobs is None:
            return None
        texts = [self._decode_token(step.token) for step in steps]
        *begins, self._num_characters[index] = accumulate(
            map(len, texts), initial=self._num_characters[index]
        )
        tops = [
            {self._decode_token(t): _clamp_logprob(p) for t, p in step.likeliest} for step in steps
        ]
        return {
            "tokens": texts,
            "token_logprobs": [_clamp_logprob(step.logprob) for step in steps],
            "top_logprobs": tops,
            "text_offset": begins,
        }


def make_usage(usages: Iterable[Usage]) -> dict[str, Any]:
    """Tokens of one request, of one prompt or several."""
    some = list(usages)
    prompt, completion = (
        sum(getattr(one, name) for one in some) for name in ("prompt_tokens", "completion_tokens")
    )
    cached, restored = (
        sum(getattr(one, name) for one in some) for name in ("cached_tokens", "restored_tokens")
    )
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "restored_tokens": restored},
    }


def format_event(data: Mapping[str, Any]) -> str:
    """Of a stream of server-sent events."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """An error in OpenAI's shape."""

    error: ErrorBody


def make_error(message: str, kind: str, param: str | None = None, code: str | None = None) -> Any:
    return ErrorResponse(
        error=ErrorBody(message=message, type=kind, param=param, code=code)
    ).model_dump()


def _clamp_logprob(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI has this for it."""
    return max(logprob, -9999.0)

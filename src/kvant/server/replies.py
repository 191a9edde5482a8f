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
from kvant.server.protocol import Drawing
from kvant.server.speech import Call, Content, Listener, Part, Thought

PART = "\N{REPLACEMENT CHARACTER}"
DONE = "data: [DONE]\n\n"
CANCELLED = "length"  # what is cut short by a server that ends


def finished(steps: Sequence[Step]) -> str:
    """Why a continuation ended."""
    reason = steps[-1].finish_reason if steps else None
    return CANCELLED if reason in (None, "cancelled") else str(reason)


class Reply(ABC):
    """What is said to one request, as a whole or in events."""

    def __init__(self, tokenizer: Any, asked: Drawing, listeners: Sequence[Listener]) -> None:
        """Each continuation has a listener of its own."""
        self.tokenizer = tokenizer
        self.likeliest = asked.likeliest
        self.tells_usage = asked.tells_usage
        self.listeners = listeners
        self._going = set(range(len(listeners)))

    @abstractmethod
    def all(self, spoken: Sequence[Sequence[Step]], usages: Iterable[Usage]) -> dict[str, Any]:
        """Every continuation from its first step to its last."""

    @abstractmethod
    def begin(self) -> str:
        """The events before the first step."""

    @abstractmethod
    def step(self, index: int, step: Step) -> str:
        """The events of a step; nothing for one that adds nothing."""

    @abstractmethod
    def end(self, usages: Iterable[Usage]) -> str:
        """The events behind the last step."""

    @abstractmethod
    def failed(self, told: Mapping[str, Any]) -> str:
        """The event of an error, after which nothing comes."""

    def heard(self, index: int, step: Step | None) -> list[Part]:
        """What a step adds to a continuation; None: nothing comes any more."""
        listener = self.listeners[index]
        found = [] if step is None else listener.hear(step.text)
        if step is None or step.finish_reason:
            self._going.discard(index)
            found += listener.end()
        return found

    def cut(self) -> list[int]:
        """Continuations without an end of their own: the server ended before."""
        return sorted(self._going)


class Choices(Reply):
    """Continuations beside each other; `Chatted` and `Completed` say what one is."""

    kind = ""
    whole = ""
    chunk = ""

    def __init__(
        self, tokenizer: Any, model: str, asked: Drawing, listeners: Sequence[Listener]
    ) -> None:
        super().__init__(tokenizer, asked, listeners)
        self._head = {
            "id": f"{self.kind}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"kvant-{version('kvant')}",
        }

    def all(self, spoken: Sequence[Sequence[Step]], usages: Iterable[Usage]) -> dict[str, Any]:
        choices = [self.choice(index, steps) for index, steps in enumerate(spoken)]
        return self._head | {"object": self.whole, "choices": choices, "usage": used(usages)}

    def begin(self) -> str:
        return ""

    def end(self, usages: Iterable[Usage]) -> str:
        told = "".join(self.last(index) for index in self.cut())
        return told + (self.part([], usage=used(usages)) if self.tells_usage else "") + DONE

    def failed(self, told: Mapping[str, Any]) -> str:
        return event(told)

    @abstractmethod
    def choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        """A whole continuation."""

    @abstractmethod
    def last(self, index: int) -> str:
        """The event of a continuation that is cut short."""

    def part(self, choices: list[dict[str, Any]], **beside: Any) -> str:
        return event(self._head | {"object": self.chunk, "choices": choices} | beside)

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))


class Chatted(Choices):
    kind = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._called = Counter[int]()  # calls of each continuation

    def begin(self) -> str:
        delta = {"role": "assistant"}
        return "".join(
            self.part([self._delta(index, delta, None)]) for index in range(len(self.listeners))
        )

    def choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        parts = [part for step in steps for part in self.heard(index, step)]
        if index in self.cut():
            parts += self.heard(index, None)
        calls = self._calls(index, parts)
        content = "".join(one.text for one in parts if isinstance(one, Content))
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if calls:
            message |= {"content": content or None, "tool_calls": calls}
        if thought := "".join(one.text for one in parts if isinstance(one, Thought)):
            message["reasoning_content"] = thought
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(steps),
            "finish_reason": self._reason(index, steps),
        }

    def step(self, index: int, step: Step) -> str:
        delta = self._grown(index, self.heard(index, step))
        reason = None if step.finish_reason is None else self._reason(index, [step])
        if not (delta or reason or self.likeliest is not None):
            return ""
        return self.part([self._delta(index, delta, reason, self._logprobs([step]))])

    def last(self, index: int) -> str:
        delta = self._grown(index, self.heard(index, None))
        return self.part([self._delta(index, delta, self._reason(index, []))])

    def _grown(self, index: int, parts: Sequence[Part]) -> dict[str, Any]:
        """What these add to a message."""
        delta: dict[str, Any] = {}
        for name, kind in (("content", Content), ("reasoning_content", Thought)):
            if text := "".join(one.text for one in parts if isinstance(one, kind)):
                delta[name] = text
        before = self._called[index]
        if calls := self._calls(index, parts):
            delta["tool_calls"] = [
                {"index": before + place} | one for place, one in enumerate(calls)
            ]
        return delta

    def _calls(self, index: int, parts: Iterable[Part]) -> list[dict[str, Any]]:
        found = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": one.name, "arguments": one.arguments},
            }
            for one in parts
            if isinstance(one, Call)
        ]
        self._called[index] += len(found)
        return found

    def _reason(self, index: int, steps: Sequence[Step]) -> str:
        reason = finished(steps)
        return "tool_calls" if reason == "stop" and self._called[index] else reason

    def _delta(
        self,
        index: int,
        delta: Mapping[str, Any],
        reason: str | None,
        logprobs: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, steps: Iterable[Step]) -> dict[str, Any] | None:
        if self.likeliest is None:
            return None
        told = [
            self._one(step.token, step.logprob)
            | {"top_logprobs": [self._one(*pair) for pair in step.likeliest]}
            for step in steps
        ]
        return {"content": told, "refusal": None}

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        whole = PART not in text  # of a character there is no telling which bytes
        told = list(text.encode()) if whole else None
        return {"token": text, "logprob": _number(logprob), "bytes": told}


class Completed(Choices):
    kind = "cmpl"
    whole = chunk = "text_completion"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._said = Counter[int]()  # characters of each continuation, by its tokens

    def choice(self, index: int, steps: Sequence[Step]) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(step.text for step in steps),
            "logprobs": self._logprobs(index, steps),
            "finish_reason": finished(steps),
        }

    def step(self, index: int, step: Step) -> str:
        self.heard(index, step)
        if not (step.text or step.finish_reason or self.likeliest is not None):
            return ""
        one = {"index": index, "text": step.text, "logprobs": self._logprobs(index, [step])}
        return self.part(
            [one | {"finish_reason": finished([step]) if step.finish_reason else None}]
        )

    def last(self, index: int) -> str:
        return self.part([self.choice(index, [])])

    def _logprobs(self, index: int, steps: Sequence[Step]) -> dict[str, Any] | None:
        if self.likeliest is None:
            return None
        texts = [self._text(step.token) for step in steps]
        *begins, self._said[index] = accumulate(map(len, texts), initial=self._said[index])
        tops = [{self._text(t): _number(p) for t, p in step.likeliest} for step in steps]
        return {
            "tokens": texts,
            "token_logprobs": [_number(step.logprob) for step in steps],
            "top_logprobs": tops,
            "text_offset": begins,
        }


def used(usages: Iterable[Usage]) -> dict[str, Any]:
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


def event(told: Mapping[str, Any]) -> str:
    """Of a stream of server-sent events."""
    return f"data: {json.dumps(told, ensure_ascii=False)}\n\n"


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Refused(BaseModel):
    """An error in OpenAI's shape."""

    error: Error


def refused(message: str, kind: str, param: str | None = None, code: str | None = None) -> Any:
    return Refused(error=Error(message=message, type=kind, param=param, code=code)).model_dump()


def _number(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI has this for it."""
    return max(logprob, -9999.0)

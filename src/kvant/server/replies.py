"""What an engine said, in OpenAI's words."""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from kvant.engine import Usage
from kvant.generation import Step

PART = "\N{REPLACEMENT CHARACTER}"
DONE = "data: [DONE]\n\n"
CANCELLED = "length"  # what is cut short by a server that ends


@dataclass
class Spoken:
    """One continuation as it comes."""

    steps: list[Step] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(step.text for step in self.steps)

    @property
    def finish_reason(self) -> str:
        return finished(self.steps[-1]) or CANCELLED if self.steps else CANCELLED


def finished(step: Step) -> str | None:
    return CANCELLED if step.finish_reason == "cancelled" else step.finish_reason


class Reply(ABC):
    """Whole replies and chunks of them; `Chatted` and `Completed` say what is in a choice."""

    kind = ""
    whole = ""
    chunk = ""

    def __init__(self, tokenizer: Any, model: str, likeliest: int | None) -> None:
        self.tokenizer = tokenizer
        self.likeliest = likeliest
        self._head = {
            "id": f"{self.kind}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def all(self, spoken: Sequence[Spoken], usage: Mapping[str, Any]) -> dict[str, Any]:
        choices = [self.choice(index, one) for index, one in enumerate(spoken)]
        return self._head | {"object": self.whole, "choices": choices, "usage": usage}

    def part(self, choices: list[dict[str, Any]], **beside: Any) -> str:
        return event(self._head | {"object": self.chunk, "choices": choices} | beside)

    def begin(self, index: int) -> str:
        """What comes before the first token."""
        return ""

    @abstractmethod
    def choice(self, index: int, spoken: Spoken) -> dict[str, Any]:
        """A whole continuation."""

    @abstractmethod
    def step(self, index: int, step: Step) -> str:
        """A chunk of a token; nothing for one that adds nothing."""

    def _text(self, token: int) -> str:
        return str(self.tokenizer.decode([token]))


class Chatted(Reply):
    kind = "chatcmpl"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def begin(self, index: int) -> str:
        delta = {"role": "assistant", "content": ""}
        return self.part([self._delta(index, delta, None)])

    def choice(self, index: int, spoken: Spoken) -> dict[str, Any]:
        message = {"role": "assistant", "content": spoken.text, "refusal": None}
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(spoken.steps),
            "finish_reason": spoken.finish_reason,
        }

    def step(self, index: int, step: Step) -> str:
        reason = finished(step)
        if not (step.text or reason or self.likeliest is not None):
            return ""
        delta = {"content": step.text} if step.text or reason is None else {}
        return self.part([self._delta(index, delta, reason, self._logprobs([step]))])

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


class Completed(Reply):
    kind = "cmpl"
    whole = chunk = "text_completion"

    def choice(self, index: int, spoken: Spoken) -> dict[str, Any]:
        return {
            "index": index,
            "text": spoken.text,
            "logprobs": self._logprobs(spoken.steps),
            "finish_reason": spoken.finish_reason,
        }

    def step(self, index: int, step: Step) -> str:
        if not (step.text or step.finish_reason or self.likeliest is not None):
            return ""
        one = {"index": index, "text": step.text, "logprobs": self._logprobs([step])}
        return self.part([one | {"finish_reason": finished(step)}])

    def _logprobs(self, steps: Sequence[Step]) -> dict[str, Any] | None:
        if self.likeliest is None:
            return None
        texts = [self._text(step.token) for step in steps]
        ends = [*accumulate(map(len, texts), initial=0)]
        tops = [{self._text(t): _number(p) for t, p in step.likeliest} for step in steps]
        return {
            "tokens": texts,
            "token_logprobs": [_number(step.logprob) for step in steps],
            "top_logprobs": tops,
            "text_offset": ends[:-1],
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


def refused(message: str, kind: str, param: str | None = None, code: str | None = None) -> Any:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _number(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI has this for it."""
    return max(logprob, -9999.0)

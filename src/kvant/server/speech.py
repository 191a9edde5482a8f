"""What a reply is made of: content, what a model thought before it, and calls of tools.

How a model writes these is told by the `response_template` of its tokenizer, which transformers
reads; for some families it knows one itself. A call that cannot be read is content as it stands.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names that templates have for it
CALLS = "tool_calls"


@dataclass(frozen=True)
class Content:
    text: str


@dataclass(frozen=True)
class Thought:
    text: str


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON


Part = Content | Thought | Call


class Listener(ABC):
    """Hears one reply as it comes."""

    @abstractmethod
    def hear(self, text: str) -> list[Part]:
        """What is certain now and was not before."""

    def end(self) -> list[Part]:
        """What was held back, now that nothing comes any more."""
        return []


class Plainly(Listener):
    """All of it is content."""

    def hear(self, text: str) -> list[Part]:
        return [Content(text)] if text else []


class Listed(Listener):
    """A list of calls, as the grammar of `protocol.calls` writes it."""

    def __init__(self) -> None:
        self._text = ""

    def hear(self, text: str) -> list[Part]:
        self._text += text
        return []

    def end(self) -> list[Part]:
        try:
            return [_called(one) for one in json.loads(self._text)]
        except ValueError:  # it was cut short
            return [Content(self._text)] if self._text else []


class Parsed(Listener):
    """By the response template of a model."""

    def __init__(
        self, template: Mapping[str, Any], prompt: str, tools: Sequence[Mapping[str, Any]]
    ) -> None:
        """A prompt may begin a reply itself. Without tools nothing is a call."""
        fields = {k: one for k, one in template["fields"].items() if tools or k != CALLS}
        told = load_response_template({**template, "fields": fields})
        begun = told.truncate_past_last_anchor(prompt)
        begun = "" if begun == prompt else begun  # it is not there
        self._parser = ResponseParser(told, prefix=begun, tools=list(tools) or None)
        self._unread = ""  # what may be a call, and is not told yet
        self._failed = False

    def hear(self, text: str) -> list[Part]:
        if self._failed:
            return [Content(text)] if text else []
        try:
            events = self._parser.feed(text)
            return self._parts(events, text)
        except Exception:  # a parser and its templates are programs of others
            return self._give_up(text)

    def end(self) -> list[Part]:
        if self._failed:
            return []
        try:
            return self._parts(self._parser.finalize()[1], "")
        except Exception:
            return self._give_up("")

    def _parts(self, events: Sequence[Mapping[str, Any]], text: str) -> list[Part]:
        found: list[Part] = []
        self._unread += text
        for event in events:
            kind, field = event["type"], event["field"]
            if field == CALLS:
                if kind == "region_close":
                    found.append(_called(event["value"]["function"]))
                    self._unread = ""
            elif kind == "region_close" and field in THOUGHTS:
                self._unread = ""
            elif kind == "region_chunk" and (said := event["text"]):
                found.append((Thought if field in THOUGHTS else Content)(said))
                self._unread = self._unread.rpartition(said)[2]
        return found

    def _give_up(self, text: str) -> list[Part]:
        self._failed = True
        left = self._unread + text
        return [Content(left)] if left else []


def response_template(model: Any, tokenizer: Any) -> Mapping[str, Any] | None:
    """How a model writes what is not content; None: nobody told, or it knows no messages."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    found: Mapping[str, Any] | None = get_response_template(tokenizer, model)
    if found is not None:
        load_response_template(found)  # refuses one that cannot be used
    return found


def _called(told: Mapping[str, Any]) -> Call:
    arguments = told["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return Call(str(told["name"]), arguments)

"""What a reply is made of: content, what a model thought before it, and calls of tools.

How a model writes these is told by the `response_template` of its tokenizer, which transformers
reads; for some families it knows one itself. Where the chat template knows no tools, calls are a
JSON list, as the description of the tools asks. A call that cannot be read is content as it stands.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # names that templates have for it
CALLS = "tool_calls"
HEAD = 256  # characters that show whether content is a list of calls
SURROGATE = re.compile("[\ud800-\udfff]")
FIRST_CALL = '[{"name":'  # what a list of calls begins with, without spaces


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
    """A list of calls, as `Grammar.calls` has it."""

    def __init__(self) -> None:
        self._text = ""

    def hear(self, text: str) -> list[Part]:
        self._text += text
        return []

    def end(self) -> list[Part]:
        try:
            return [_called(one) for one in _parse(self._text)]
        except (ValueError, RecursionError):  # it was cut short
            return [Content(self._text)] if self._text else []


class DescribedCalls(Listener):
    """Calls in the form that a description of tools asks for: a JSON list, and no other content.

    Content is kept back for as long as it may become such a list.
    """

    def __init__(self, inner: Listener, tools: Sequence[Mapping[str, Any]], most: int | None):
        """`inner` tells content from thoughts; `most` bounds the calls."""
        self._inner = inner
        self._names = {tool["function"]["name"] for tool in tools}
        self._most = most
        self._kept = ""  # content that may become a list
        self._is_text = False

    def hear(self, text: str) -> list[Part]:
        return self._sort(self._inner.hear(text))

    def end(self) -> list[Part]:
        parts = self._sort(self._inner.end())
        kept, self._kept = self._kept, ""
        return parts + (self._calls(kept) if kept else [])

    def _sort(self, parts: Sequence[Part]) -> list[Part]:
        found: list[Part] = []
        for part in parts:
            if self._is_text or not isinstance(part, Content):
                found.append(part)
                continue
            self._kept += part.text
            begun = "".join(self._kept[:HEAD].split())
            if not (begun.startswith(FIRST_CALL) or FIRST_CALL.startswith(begun)):
                self._is_text = True
                found.append(Content(self._kept))
                self._kept = ""
        return found

    def _calls(self, text: str) -> list[Part]:
        try:
            listed = _parse(text)
        except (ValueError, RecursionError):  # it was cut short, or is no list after all
            return [Content(text)]
        if not all(map(self._is_call, listed)):
            return [Content(text)]
        return [*map(_called, listed[: self._most])]

    def _is_call(self, value: Any) -> bool:
        if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
            return False
        name, arguments = value["name"], value["arguments"]
        return isinstance(name, str) and name in self._names and isinstance(arguments, dict)


class Template:
    """How a model writes what is not content: the response template of its tokenizer."""

    def __init__(self, told: Mapping[str, Any]) -> None:
        """Refuses one that cannot be used."""
        content = {name: one for name, one in told["fields"].items() if name != CALLS}
        self.whole = load_response_template(dict(told))
        self.without_calls = load_response_template({**told, "fields": content})

    @property
    def has_calls(self) -> bool:
        return CALLS in self.whole.fields

    @property
    def calls_end_in_themselves(self) -> bool:
        """Does what is within a call tell whether it is whole?"""
        return self.has_calls and self.whole.fields[CALLS].content == "json"


class Parsed(Listener):
    """By the template of a model."""

    def __init__(
        self,
        template: Template,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        most: int | None = None,
    ) -> None:
        """A prompt may begin a reply itself. Without tools nothing is a call; at `most` so many."""
        told = template.whole if tools else template.without_calls
        begun = told.truncate_past_last_anchor(prompt)
        begun = "" if begun == prompt else begun  # it is not there
        self._parser = ResponseParser(told, prefix=begun, tools=list(tools) or None)
        self._left = most  # calls that may still come
        self._ends = template.calls_end_in_themselves
        self._bare: set[type] = {Content, Thought}  # of which nothing was told yet
        self._unread = ""  # what may be a call, and is not told yet
        self._failed = False

    def hear(self, text: str) -> list[Part]:
        if self._failed:
            return [Content(text)] if text else []
        self._unread += text
        return self._told(lambda: self._parser.feed(text))

    def end(self) -> list[Part]:
        """Calls that end with the reply are whole only if they tell so themselves."""

        def rest() -> Sequence[Mapping[str, Any]]:
            events: Sequence[Mapping[str, Any]] = self._parser.finalize()[1]
            if not self._ends and any(one["field"] == CALLS for one in events):
                raise ValueError("a call that is cut short")
            return events

        return [] if self._failed else self._told(rest)

    def _told(self, events: Callable[[], Sequence[Mapping[str, Any]]]) -> list[Part]:
        """What came of these; who parses is a program of others, and may fail."""
        found: list[Part] = []
        try:
            for event in events():
                found += self._parts(event)
        except Exception:
            self._failed = True
            found += [Content(self._unread)] if self._unread else []
        return found

    def _parts(self, event: Mapping[str, Any]) -> list[Part]:
        kind, field = event["type"], event["field"]
        if field == CALLS:
            return self._calls(event["value"]) if kind == "region_close" else []
        if kind == "region_close" and field in THOUGHTS:
            self._unread = ""
        if kind != "region_chunk" or not event["text"]:
            return []
        self._unread = self._unread.rpartition(event["text"])[2]
        said = Thought if field in THOUGHTS else Content
        text = event["text"].lstrip() if said in self._bare else event["text"]
        self._bare -= {said} if text else set()
        return [said(text)] if text else []

    def _calls(self, value: Any) -> list[Part]:
        values = value if isinstance(value, list) else [value]
        calls = [_called(one["function"]) for one in values][: self._left]
        self._left = None if self._left is None else self._left - len(calls)
        self._unread = ""
        return [*calls]


def template_of(model: Any, tokenizer: Any) -> Template | None:
    """None: nobody told how the model writes calls and thoughts, or it knows no messages."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    found = get_response_template(tokenizer, model)
    return None if found is None else Template(found)


def _parse(text: str) -> Any:
    """Parse JSON; numbers that JSON does not have, or that a float cannot hold, are an error."""

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{number}: no finite number")
        return value

    return json.loads(text, parse_float=finite, parse_constant=finite)


def _called(call: Mapping[str, Any]) -> Call:
    arguments = call.get("arguments", {})
    whole = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return Call(_without_surrogates(str(call["name"])), _without_surrogates(whole))


def _without_surrogates(text: str) -> str:
    """Escape halves of surrogate pairs, which are no Unicode text: JSON strings may have them."""
    return SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)

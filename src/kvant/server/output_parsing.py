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

REASONING_FIELDS = (
    "reasoning_content",
    "thinking",
    "reasoning",
)  # names that templates have for it
CALLS_FIELD = "tool_calls"
HEAD = 256  # characters that show whether content is a list of calls
SURROGATE = re.compile("[\ud800-\udfff]")
FIRST_CALL = '[{"name":'  # what a list of calls begins with, without spaces


@dataclass(frozen=True)
class ContentPart:
    text: str


@dataclass(frozen=True)
class ReasoningPart:
    text: str


@dataclass(frozen=True)
class CallPart:
    name: str
    arguments: str  # JSON


OutputPart = ContentPart | ReasoningPart | CallPart


class OutputParser(ABC):
    """Hears one reply as it comes."""

    @abstractmethod
    def feed(self, text: str) -> list[OutputPart]:
        """What is certain now and was not before."""

    def finish(self) -> list[OutputPart]:
        """What was held back, now that nothing comes any more."""
        return []


class PlainParser(OutputParser):
    """All of it is content."""

    def feed(self, text: str) -> list[OutputPart]:
        return [ContentPart(text)] if text else []


class CallListParser(OutputParser):
    """A list of calls, as `Grammar.calls` has it."""

    def __init__(self) -> None:
        self._text = ""

    def feed(self, text: str) -> list[OutputPart]:
        self._text += text
        return []

    def finish(self) -> list[OutputPart]:
        try:
            return [_make_call(one) for one in _parse(self._text)]
        except (ValueError, RecursionError):  # it was cut short
            return [ContentPart(self._text)] if self._text else []


class DescribedCalls(OutputParser):
    """Calls in the form that a description of tools asks for: a JSON list, and no other content.

    Content is kept back for as long as it may become such a list.
    """

    def __init__(self, inner: OutputParser, tools: Sequence[Mapping[str, Any]], most: int | None):
        """`inner` tells content from thoughts; `most` bounds the calls."""
        self._inner = inner
        self._names = {tool["function"]["name"] for tool in tools}
        self._most = most
        self._kept = ""  # content that may become a list
        self._is_text = False

    def feed(self, text: str) -> list[OutputPart]:
        return self._sort(self._inner.feed(text))

    def finish(self) -> list[OutputPart]:
        parts = self._sort(self._inner.finish())
        kept, self._kept = self._kept, ""
        return parts + (self._calls(kept) if kept else [])

    def _sort(self, parts: Sequence[OutputPart]) -> list[OutputPart]:
        found: list[OutputPart] = []
        for part in parts:
            if self._is_text or not isinstance(part, ContentPart):
                found.append(part)
                continue
            self._kept += part.text
            begun = "".join(self._kept[:HEAD].split())
            if not (begun.startswith(FIRST_CALL) or FIRST_CALL.startswith(begun)):
                self._is_text = True
                found.append(ContentPart(self._kept))
                self._kept = ""
        return found

    def _calls(self, text: str) -> list[OutputPart]:
        try:
            listed = _parse(text)
        except (ValueError, RecursionError):  # it was cut short, or is no list after all
            return [ContentPart(text)]
        if not all(map(self._is_call, listed)):
            return [ContentPart(text)]
        return [*map(_make_call, listed[: self._most])]

    def _is_call(self, value: Any) -> bool:
        if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
            return False
        name, arguments = value["name"], value["arguments"]
        return isinstance(name, str) and name in self._names and isinstance(arguments, dict)


class ResponseTemplate:
    """How a model writes what is not content: the response template of its tokenizer."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        """Refuses one that cannot be used."""
        content = {name: one for name, one in definition["fields"].items() if name != CALLS_FIELD}
        self.with_calls = load_response_template(dict(definition))
        self.without_calls = load_response_template({**definition, "fields": content})

    @property
    def has_calls(self) -> bool:
        return CALLS_FIELD in self.with_calls.fields

    @property
    def has_self_delimiting_calls(self) -> bool:
        """Does what is within a call tell whether it is whole?"""
        return self.has_calls and self.with_calls.fields[CALLS_FIELD].content == "json"


class TemplateParser(OutputParser):
    """By the template of a model."""

    def __init__(
        self,
        template: ResponseTemplate,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        max_calls: int | None = None,
    ) -> None:
        """A prompt may begin a reply itself. Without tools nothing is a call; at `most` so many."""
        told = template.with_calls if tools else template.without_calls
        begun = told.truncate_past_last_anchor(prompt)
        begun = "" if begun == prompt else begun  # it is not there
        self._parser = ResponseParser(told, prefix=begun, tools=list(tools) or None)
        self._num_calls_left = max_calls  # calls that may still come
        self._has_self_delimiting_calls = template.has_self_delimiting_calls
        self._kinds_not_started: set[type] = {
            ContentPart,
            ReasoningPart,
        }  # of which nothing was told yet
        self._pending_text = ""  # what may be a call, and is not told yet
        self._has_failed = False

    def feed(self, text: str) -> list[OutputPart]:
        if self._has_failed:
            return [ContentPart(text)] if text else []
        self._pending_text += text
        return self._parse_events(lambda: self._parser.feed(text))

    def finish(self) -> list[OutputPart]:
        """Calls that end with the reply are whole only if they tell so themselves."""

        def rest() -> Sequence[Mapping[str, Any]]:
            events: Sequence[Mapping[str, Any]] = self._parser.finalize()[1]
            if not self._has_self_delimiting_calls and any(
                one["field"] == CALLS_FIELD for one in events
            ):
                raise ValueError("a call that is cut short")
            return events

        return [] if self._has_failed else self._parse_events(rest)

    def _parse_events(
        self, get_events: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> list[OutputPart]:
        """What came of these; who parses is a program of others, and may fail."""
        found: list[OutputPart] = []
        try:
            for event in get_events():
                found += self._parse_event(event)
        except Exception:
            self._has_failed = True
            found += [ContentPart(self._pending_text)] if self._pending_text else []
        return found

    def _parse_event(self, event: Mapping[str, Any]) -> list[OutputPart]:
        kind, field = event["type"], event["field"]
        if field == CALLS_FIELD:
            return self._make_calls(event["value"]) if kind == "region_close" else []
        if kind == "region_close" and field in REASONING_FIELDS:
            self._pending_text = ""
        if kind != "region_chunk" or not event["text"]:
            return []
        self._pending_text = self._pending_text.rpartition(event["text"])[2]
        said = ReasoningPart if field in REASONING_FIELDS else ContentPart
        text = event["text"].lstrip() if said in self._kinds_not_started else event["text"]
        self._kinds_not_started -= {said} if text else set()
        return [said(text)] if text else []

    def _make_calls(self, value: Any) -> list[OutputPart]:
        values = value if isinstance(value, list) else [value]
        calls = [_make_call(one["function"]) for one in values][: self._num_calls_left]
        self._num_calls_left = (
            None if self._num_calls_left is None else self._num_calls_left - len(calls)
        )
        self._pending_text = ""
        return [*calls]


def find_template(model: Any, tokenizer: Any) -> ResponseTemplate | None:
    """None: nobody told how the model writes calls and thoughts, or it knows no messages."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    found = get_response_template(tokenizer, model)
    return None if found is None else ResponseTemplate(found)


def _parse(text: str) -> Any:
    """Parse JSON; numbers that JSON does not have, or that a float cannot hold, are an error."""

    def finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{number}: no finite number")
        return value

    return json.loads(text, parse_float=finite, parse_constant=finite)


def _make_call(call: Mapping[str, Any]) -> CallPart:
    arguments = call.get("arguments", {})
    whole = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return CallPart(_without_surrogates(str(call["name"])), _without_surrogates(whole))


def _without_surrogates(text: str) -> str:
    """Escape halves of surrogate pairs, which are no Unicode text: JSON strings may have them."""
    return SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)

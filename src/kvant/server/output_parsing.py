"""Split generated text into content, reasoning and tool calls while it streams.

The `response_template` of a tokenizer describes how its model writes them. transformers reads that
template, and has built-in ones for some families. If the chat template renders no tools, the
prompt describes them as text and asks for calls as a JSON list. A call that cannot be parsed
stays content.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers.cli.serving.utils import get_response_template
from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # names in response templates
CALLS_FIELD = "tool_calls"
MAX_PREFIX_CHARACTERS = 256  # of content, compared with CALL_LIST_PREFIX
SURROGATE = re.compile("[\ud800-\udfff]")
CALL_LIST_PREFIX = '[{"name":'  # of a JSON list of calls, without spaces


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


class OutputParser:
    """Incremental parser of one generated text; this base takes all of it as content."""

    def feed(self, text: str) -> list[OutputPart]:
        """Return the parts that are certain after this text; buffer the rest."""
        return [ContentPart(text)] if text else []

    def finish(self) -> list[OutputPart]:
        """Return the parts still buffered at the end of the text."""
        return []


class CallListParser(OutputParser):
    """Parse calls in content that is one JSON list: of `Grammar.calls`, or as a prompt asks for.

    Buffers content while it may still become such a list.
    """

    def __init__(
        self, inner: OutputParser, tools: Sequence[Mapping[str, Any]], max_calls: int | None
    ):
        """Take content from `inner`, which separates it from reasoning; drop calls over the limit.

        `max_calls` None: no limit.
        """
        self._inner = inner
        self._names = {tool["function"]["name"] for tool in tools}
        self._max_calls = max_calls
        self._buffer = ""  # content that may become a list of calls
        self._is_text = False

    def feed(self, text: str) -> list[OutputPart]:
        return self._buffer_content(self._inner.feed(text))

    def finish(self) -> list[OutputPart]:
        parts = self._buffer_content(self._inner.finish())
        content, self._buffer = self._buffer, ""
        return parts + (self._parse_calls(content) if content else [])

    def _buffer_content(self, parts: Sequence[OutputPart]) -> list[OutputPart]:
        """Buffer content that may become a list of calls, and return the other parts."""
        output: list[OutputPart] = []
        for part in parts:
            if self._is_text or not isinstance(part, ContentPart):
                output.append(part)
                continue
            self._buffer += part.text
            prefix = "".join(self._buffer[:MAX_PREFIX_CHARACTERS].split())
            if not (prefix.startswith(CALL_LIST_PREFIX) or CALL_LIST_PREFIX.startswith(prefix)):
                self._is_text = True
                output.append(ContentPart(self._buffer))
                self._buffer = ""
        return output

    def _parse_calls(self, text: str) -> list[OutputPart]:
        try:
            calls = _parse_json(text)
        except (ValueError, RecursionError):  # the list is incomplete, or not JSON after all
            return [ContentPart(text)]
        if not all(map(self._is_call, calls)):
            return [ContentPart(text)]
        return [*map(_make_call, calls[: self._max_calls])]

    def _is_call(self, value: Any) -> bool:
        if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
            return False
        name, arguments = value["name"], value["arguments"]
        return isinstance(name, str) and name in self._names and isinstance(arguments, dict)


class ResponseTemplate:
    """The response template of a tokenizer: how its model marks reasoning and tool calls."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        """Load the template; raise an error if it is invalid."""
        other_fields = {
            name: field for name, field in definition["fields"].items() if name != CALLS_FIELD
        }
        self.with_calls = load_response_template(dict(definition))
        self.without_calls = load_response_template({**definition, "fields": other_fields})

    @property
    def has_calls(self) -> bool:
        return CALLS_FIELD in self.with_calls.fields

    @property
    def has_self_delimiting_calls(self) -> bool:
        """Whether the content of a call shows that it is complete, as JSON does."""
        return self.has_calls and self.with_calls.fields[CALLS_FIELD].content == "json"


class TemplateParser(OutputParser):
    """Parse text by the response template of its model."""

    def __init__(
        self,
        template: ResponseTemplate,
        prompt: str,
        tools: Sequence[Mapping[str, Any]],
        max_calls: int | None = None,
        *,
        continues: bool = False,
    ) -> None:
        """Start after `prompt`, whose end may already open the reply, for example its reasoning.

        Without tools, nothing is parsed as a call. Calls beyond `max_calls` are dropped. If the
        reply `continues` the text of the prompt, its leading spaces are kept.
        """
        response_template = template.with_calls if tools else template.without_calls
        prefix = response_template.truncate_past_last_anchor(prompt)
        prefix = "" if prefix == prompt else prefix  # the prompt has no anchor
        self._parser = ResponseParser(response_template, prefix=prefix, tools=list(tools) or None)
        self._num_calls_left = max_calls
        self._has_self_delimiting_calls = template.has_self_delimiting_calls
        # Part types without any text yet: the first text loses its leading spaces.
        self._types_not_started: set[type] = {ReasoningPart} | (
            set() if continues else {ContentPart}
        )
        self._pending_text = ""  # text not returned in any part yet; content if parsing fails
        self._has_failed = False

    def feed(self, text: str) -> list[OutputPart]:
        if self._has_failed:
            return super().feed(text)
        self._pending_text += text
        return self._parse_events(lambda: self._parser.feed(text))

    def finish(self) -> list[OutputPart]:
        """Return the remaining parts.

        A call that ends with the text is accepted only if its content shows that it is complete.
        """

        def finalize() -> Sequence[Mapping[str, Any]]:
            events: Sequence[Mapping[str, Any]] = self._parser.finalize()[1]
            if not self._has_self_delimiting_calls and any(
                event["field"] == CALLS_FIELD for event in events
            ):
                raise ValueError("incomplete call")
            return events

        return [] if self._has_failed else self._parse_events(finalize)

    def _parse_events(
        self, get_events: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> list[OutputPart]:
        """Convert parser events to parts; if the parser raises, all further text is content."""
        parts: list[OutputPart] = []
        try:
            for event in get_events():
                parts += self._parse_event(event)
        except Exception:  # transformers may raise anything on malformed output
            self._has_failed = True
            parts += [ContentPart(self._pending_text)] if self._pending_text else []
        return parts

    def _parse_event(self, event: Mapping[str, Any]) -> list[OutputPart]:
        event_type, field = event["type"], event["field"]
        if field == CALLS_FIELD:
            return self._make_calls(event["value"]) if event_type == "region_close" else []
        if event_type == "region_close" and field in REASONING_FIELDS:
            self._pending_text = ""
        if event_type != "region_chunk" or not event["text"]:
            return []
        _, found, rest = self._pending_text.partition(event["text"])
        self._pending_text = rest if found else self._pending_text
        part_type = ReasoningPart if field in REASONING_FIELDS else ContentPart
        text = event["text"].lstrip() if part_type in self._types_not_started else event["text"]
        self._types_not_started -= {part_type} if text else set()
        return [part_type(text)] if text else []

    def _make_calls(self, value: Any) -> list[OutputPart]:
        values = value if isinstance(value, list) else [value]
        calls = [_make_call(call["function"]) for call in values][: self._num_calls_left]
        self._num_calls_left = (
            None if self._num_calls_left is None else self._num_calls_left - len(calls)
        )
        self._pending_text = ""
        return [*calls]


@dataclass(frozen=True)
class ReplyFormat:
    """How the replies to a request are parsed."""

    template: ResponseTemplate | None  # None: plain text
    tools: Sequence[Mapping[str, Any]]
    max_calls: int | None
    lists_calls: bool  # calls are a JSON list; else they are as the template says
    continues: bool = False  # the reply continues a message of the prompt

    def make_parsers(self, count: int, decode_prompt: Callable[[], str]) -> list[OutputParser]:
        """Make a parser for each choice of a prompt, of whose text the template needs the end."""
        tools, max_calls = self.tools, self.max_calls
        parsers: list[OutputParser] = [OutputParser() for _ in range(count)]
        if self.template is not None:
            template, prompt = self.template, decode_prompt()
            template_tools = [] if self.lists_calls else tools
            parsers = [
                TemplateParser(
                    template, prompt, template_tools, max_calls, continues=self.continues
                )
                for _ in range(count)
            ]
        if self.lists_calls:
            return [CallListParser(parser, tools, max_calls) for parser in parsers]
        return parsers


def find_template(model: Any, tokenizer: Any) -> ResponseTemplate | None:
    """Find the response template of a model, None if it has none or no chat template."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    definition = get_response_template(tokenizer, model)
    return None if definition is None else ResponseTemplate(definition)


def _parse_json(text: str) -> Any:
    """Parse JSON; raise ValueError for NaN, Infinity and numbers over the range of a float."""

    def parse_finite(number: str) -> float:
        if not math.isfinite(value := float(number)):
            raise ValueError(f"{number}: not a finite number")
        return value

    return json.loads(text, parse_float=parse_finite, parse_constant=parse_finite)


def _make_call(call: Mapping[str, Any]) -> CallPart:
    arguments = call.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return CallPart(_escape_surrogates(str(call["name"])), _escape_surrogates(text))


def _escape_surrogates(text: str) -> str:
    """Escape lone surrogates: JSON strings may contain them, but UTF-8 cannot encode them."""
    return SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)

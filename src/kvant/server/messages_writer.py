"""The replies of POST /v1/messages, Anthropic's API: messages of blocks, whole or as events."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from kvant.generation import Step
from kvant.server.errors import MESSAGES_PATH
from kvant.server.messages_api import MessagesRequest
from kvant.server.output_parsing import CallPart, OutputPart, ReasoningPart
from kvant.server.response_writers import (
    ResponseWriter,
    find_finish_reason,
    format_event,
    format_json,
    format_stream_error,
    parse_arguments,
)


class ReplyBlocks:
    """The blocks of a reply: thinking, text and calls. Each method returns its events.

    thinking, text    content_block_start, content_block_delta ..., content_block_stop
    tool_use          content_block_start, content_block_delta, content_block_stop
    """

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._is_open = False  # whether the last block gets more text

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def add_part(self, part: OutputPart) -> str:
        if isinstance(part, CallPart):
            return self.close_block() + self._add_call(part)
        name = "thinking" if isinstance(part, ReasoningPart) else "text"
        events = ""
        if not (self._is_open and self.blocks[-1]["type"] == name):
            events = self.close_block() + self._begin_block(
                {"type": name, name: ""} | ({"signature": ""} if name == "thinking" else {})
            )
            self._is_open = True
        self.blocks[-1][name] += part.text
        return events + self._write_delta({"type": f"{name}_delta", name: part.text})

    def close_block(self) -> str:
        """Complete the block that gets text, if any."""
        was_open, self._is_open = self._is_open, False
        return self._write_event("stop") if was_open else ""

    def _add_call(self, call: CallPart) -> str:
        """Append a complete call."""
        header = {"type": "tool_use", "id": f"toolu_{secrets.token_hex(12)}", "name": call.name}
        events = self._begin_block(header | {"input": {}})
        arguments = parse_arguments(call)
        delta = {"type": "input_json_delta", "partial_json": format_json(arguments)}
        events += self._write_delta(delta)
        self.blocks[-1]["input"] = arguments
        return events + self._write_event("stop")

    def _begin_block(self, block: dict[str, Any]) -> str:
        self.blocks.append(block)
        return self._write_event("start", content_block=block)

    def _write_delta(self, delta: Mapping[str, Any]) -> str:
        return self._write_event("delta", delta=delta)

    def _write_event(self, action: str, **fields: Any) -> str:
        return write_event(f"content_block_{action}", index=len(self.blocks) - 1, **fields)


def write_event(event_type: str, **fields: Any) -> str:
    return f"event: {event_type}\n{format_event({'type': event_type} | fields)}"


class MessagesWriter(ResponseWriter):
    """Writes one choice as a message of blocks."""

    def __init__(self, request: MessagesRequest, *args: Any) -> None:
        super().__init__(*args)
        self._has_marks = request.has_marks
        self._omits_thinking = (
            request.thinking is not None and request.thinking.display == "omitted"
        )
        self._id = f"msg_{secrets.token_hex(12)}"
        self._blocks = ReplyBlocks()
        self._last_step: Step | None = None
        self._has_begun = False

    def write_all(self, steps_by_choice: Sequence[Sequence[Step]]) -> dict[str, Any]:
        for step in steps_by_choice[0]:
            self.write_step(0, step)
        self._finish_blocks()
        return self._make_message(self._blocks.blocks) | self._make_stop()

    def write_begin(self) -> str:
        """Return a ping: the message starts with its first token, when cached tokens are known."""
        return write_event("ping")

    def write_step(self, index: int, step: Step | None) -> str:
        self._last_step = step or self._last_step
        parts = self.parse_step(index, step)
        if self._omits_thinking:
            parts = [part for part in parts if not isinstance(part, ReasoningPart)]
        return self._begin_message() + "".join(map(self._blocks.add_part, parts))

    def write_end(self) -> str:
        events = self._begin_message() + self._finish_blocks()
        delta, usage = self._make_stop(), self._make_usage()
        events += write_event("message_delta", delta=delta, usage=usage)
        return events + write_event("message_stop")

    def write_error(self, body: Mapping[str, Any]) -> str:
        return format_stream_error(MESSAGES_PATH, body)

    def _begin_message(self) -> str:
        """Start the message, once the tokens of its prompt that were cached are known."""
        if self._has_begun:
            return ""
        self._has_begun = True
        open_end = {"stop_reason": None, "stop_sequence": None}
        return write_event("message_start", message=self._make_message([]) | open_end)

    def _finish_blocks(self) -> str:
        """Add the parts that the parser still buffers, and close the last block."""
        events = "".join(self.write_step(index, None) for index in self.list_unfinished())
        return events + self._blocks.close_block()

    def _make_message(self, content: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [*content],
            "usage": self._make_usage(),
        }

    def _make_stop(self) -> dict[str, Any]:
        steps = [] if self._last_step is None else [self._last_step]
        stop_string = steps[0].stop_string if steps else None
        if find_finish_reason(steps) == "length":
            reason = "max_tokens"
        elif self._blocks.has_calls:
            reason = "tool_use"
        else:
            reason = "end_turn" if stop_string is None else "stop_sequence"
        return {
            "stop_reason": reason,
            "stop_sequence": stop_string if reason == "stop_sequence" else None,
        }

    def _make_usage(self) -> dict[str, Any]:
        """Count the tokens; those that were not cached were written to the cache if marked."""
        [usage] = self.reply.usages
        num_new = usage.prompt_tokens - usage.cached_tokens
        num_created = num_new if self._has_marks else 0
        return {
            "input_tokens": num_new - num_created,
            "cache_creation_input_tokens": num_created,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

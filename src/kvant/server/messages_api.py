"""POST /v1/messages: converts Anthropic's requests to chat requests, and writes replies as blocks.

A mark (`cache_control`) makes the end of its message a branch point, so that models with windows or
recurrent states can resume there; other models can resume at every page. Marks after tools or
system text are those of the system message.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from kvant.generation import Messages, Step
from kvant.server.errors import MessagesError
from kvant.server.output_parsing import CallPart, OutputPart, ReasoningPart
from kvant.server.protocol import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    ChatRequest,
    RequestBody,
    Schema,
    check_tools_size,
    join_text,
)
from kvant.server.response_writers import (
    ResponseWriter,
    find_finish_reason,
    format_event,
    format_json,
    parse_arguments,
)

MAX_MARKS = 4  # of a request, as in Anthropic's API
# Claude Code begins system prompts with this text; a prefix that has it is never shared.
ACCOUNTING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
TEMPLATE_OPTION = "enable_thinking"  # a variable of chat templates


class CacheControl(RequestBody):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None  # unused: prefixes are evicted by last use


class Block(RequestBody):
    """A part of a message, of a system prompt or of a list of tools."""

    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class ThinkingBlock(Block):
    """Reasoning of an earlier reply, sent back by the client."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""  # unused


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    @property
    def template_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": format_json(self.input)}
        return {"id": self.id, "type": "function", "function": function}


Texts = str | Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts | None = None
    is_error: bool | None = None

    @property
    def template_dict(self) -> dict[str, Any]:
        text = join_text(self.content)
        content = f"Error: {text}" if self.is_error else text
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


ContentBlock = Annotated[
    TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")
]
BLOCKS_BY_ROLE: dict[str, tuple[type[Block], ...]] = {
    "user": (TextBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, ToolUseBlock),
    "system": (TextBlock,),
}


class MarkedMessage(NamedTuple):
    """A chat message, and whether one of its blocks has a mark."""

    message: dict[str, Any]
    is_marked: bool


class InputMessage(RequestBody):
    role: Literal["user", "assistant", "system"]
    content: (
        str | Annotated[list[ContentBlock], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)]
    )

    @model_validator(mode="after")
    def _check_blocks(self) -> InputMessage:
        for block in self.blocks:
            if not isinstance(block, BLOCKS_BY_ROLE[self.role]):
                raise ValueError(f"content: a block of type {block.type} with role {self.role}")
        return self

    @property
    def blocks(self) -> Sequence[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content

    def iterate_chat_messages(self) -> Iterator[MarkedMessage]:
        """Yield one message of the assistant; for a user, one per result or run of text."""
        if self.role == "assistant":
            yield MarkedMessage(self._make_reply(), any(b.cache_control for b in self.blocks))
            return
        texts: list[TextBlock] = []
        for block in self.blocks:
            if isinstance(block, TextBlock):
                texts.append(block)
                continue
            if texts:
                yield _join_texts(self.role, texts)
                texts = []
            if isinstance(block, ToolResultBlock):
                yield MarkedMessage(block.template_dict, block.cache_control is not None)
        if texts:
            yield _join_texts(self.role, texts)

    def _make_reply(self) -> dict[str, Any]:
        texts = [block.text for block in self.blocks if isinstance(block, TextBlock)]
        reply: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
        if calls := [b.template_dict for b in self.blocks if isinstance(b, ToolUseBlock)]:
            reply["tool_calls"] = calls
        thoughts = [block.thinking for block in self.blocks if isinstance(block, ThinkingBlock)]
        return reply | ({"reasoning_content": "".join(thoughts)} if thoughts else {})


def _join_system(system: str | Sequence[TextBlock] | None) -> str:
    """Join the system text without the accounting line, which changes with each request."""
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    return "".join(ACCOUNTING_LINE.sub("", text) for text in texts)


def _join_texts(role: str, texts: Sequence[TextBlock]) -> MarkedMessage:
    message = {"role": role, "content": join_text([*texts])}
    return MarkedMessage(message, any(text.cache_control for text in texts))


class MessagesTool(Block):
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: Schema
    strict: bool | None = None
    eager_input_streaming: bool | None = None  # unused: a call is sent in one piece
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=1)] | None = None

    @property
    def template_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "parameters": self.input_schema}
        about = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": function | about}


class MessagesToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> MessagesToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("name: required with type tool, and only there")
        return self

    @property
    def chat_choice(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class ThinkingOptions(RequestBody):
    type: Literal["enabled", "disabled", "adaptive"]  # adaptive: the template's default
    budget_tokens: Annotated[int | None, Field(ge=1)] = None  # unused: max_tokens is the limit
    display: Literal["summarized", "omitted"] | None = None  # summarized: all of it is sent


class OutputFormat(RequestBody):
    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(RequestBody):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None  # unused


class ContextEdit(RequestBody):
    """The edit that changes nothing: all thinking is kept."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(RequestBody):
    edits: Annotated[list[ContextEdit], Field(max_length=1)] | None = None


class MessagesMetadata(RequestBody):
    user_id: str | None = None


class PromptRequest(RequestBody):
    """Body of POST /v1/messages/count_tokens: what determines a prompt."""

    model: str
    messages: Annotated[
        list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    system: Texts | None = None
    tools: (
        Annotated[
            list[MessagesTool],
            Field(max_length=MAX_TOOLS, fail_fast=True),
            AfterValidator(check_tools_size),
        ]
        | None
    ) = None
    tool_choice: MessagesToolChoice | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None  # the end of a prompt is always a branch point
    context_management: ContextManagement | None = None
    # Not supported here, but some clients send what stands for none.
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _check_request(self) -> PromptRequest:
        if (count := len(self._list_marks())) > MAX_MARKS:
            raise ValueError(f"cache_control: {count} blocks have it, at most {MAX_MARKS} may")
        return self

    @property
    def has_marks(self) -> bool:
        return self.cache_control is not None or bool(self._list_marks())

    @property
    def chat_request(self) -> ChatRequest:
        """The equivalent chat request."""
        return ChatRequest.model_validate(self.make_chat_fields())

    def make_chat_fields(self) -> dict[str, Any]:
        """Return the fields of the equivalent chat request."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": [message for message, _ in self._convert_messages()],
        }
        if self.tools:
            fields["tools"] = [tool.template_dict for tool in self.tools]
        if (choice := self.tool_choice) is not None:
            fields["tool_choice"] = choice.chat_choice
            fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        if self.output_config is not None and (form := self.output_config.format) is not None:
            schema = {"name": "reply", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        if self.thinking is not None and self.thinking.type != "adaptive":
            enabled = self.thinking.type == "enabled"
            fields["chat_template_kwargs"] = {TEMPLATE_OPTION: enabled}
        return fields

    def add_marks(self, messages: Messages) -> Messages:
        """Return the messages of the chat request with the marks, and the beginning of a reply."""
        marked = enumerate(self._convert_messages(), 1)
        marks = [number for number, message in marked if message.is_marked]
        return replace(messages, marks=marks, continues=self.messages[-1].role == "assistant")

    def _convert_messages(self) -> list[MarkedMessage]:
        system = _join_system(self.system)
        first = [MarkedMessage({"role": "system", "content": system}, False)] if system else []
        return first + [m for message in self.messages for m in message.iterate_chat_messages()]

    def _list_marks(self) -> list[CacheControl]:
        system = [] if self.system is None or isinstance(self.system, str) else self.system
        parts: list[Block] = [*(self.tools or ()), *system]
        parts += [block for message in self.messages for block in message.blocks]
        return [part.cache_control for part in parts if part.cache_control is not None]


class MessagesRequest(PromptRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    # Accepted and ignored:
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Literal["standard", "fast"] | None = None
    inference_geo: str | None = None
    # Not supported here, but some clients send an explicit null.
    container: None = None
    diagnostics: None = None

    def make_chat_fields(self) -> dict[str, Any]:
        fields = super().make_chat_fields() | {
            "max_completion_tokens": self.max_tokens,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        return fields | ({"stop": self.stop_sequences} if self.stop_sequences else {})


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
        events += self._write_delta({"type": "input_json_delta", "partial_json": call.arguments})
        self.blocks[-1]["input"] = parse_arguments(call)
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
        """Show the connection to be alive: the message begins with its first token."""
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
        error = MessagesError.convert(500, body)
        return f"event: error\n{format_event(error.model_dump())}"

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

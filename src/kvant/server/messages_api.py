"""The requests of POST /v1/messages, Anthropic's API, converted to chat requests.

A mark (`cache_control`) makes the end of its message a branch point, so that models with windows or
recurrent states can resume there; other models can resume at every page. The end of the system
messages is always a branch point, so marks on tools or system text add none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from kvant.generation import Messages
from kvant.server.content import RequestBody, join_text, make_image_part
from kvant.server.protocol import (
    ACCOUNTING_LINE,
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    TEMPLATE_OPTION,
    ChatRequest,
    Schema,
    check_tools_size,
)
from kvant.server.response_writers import (
    format_json,
)

MAX_MARKS = 4  # of a request, as in Anthropic's API


class CacheControl(RequestBody):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None  # unused: eviction has one rule


class Block(RequestBody):
    """A part of a message, of a system prompt or of a list of tools."""

    cache_control: CacheControl | None = None

    def list_marks(self) -> list[CacheControl]:
        """Return the marks of this block and of those in it."""
        return [] if self.cache_control is None else [self.cache_control]


class TextBlock(Block):
    type: Literal["text"]
    text: str
    citations: Annotated[list[Any], Field(max_length=0)] | None = None

    @property
    def chat_part(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class Base64Source(RequestBody):
    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/webp", "image/gif"]
    data: str


class ImageBlock(Block):
    type: Literal["image"]
    source: Base64Source

    @property
    def chat_part(self) -> dict[str, Any]:
        return make_image_part(self.source.media_type, self.source.data)


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
    caller: Any = None  # this and the next: fields of replies, which clients send back
    toolset_name: None = None

    @property
    def template_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": format_json(self.input)}
        return {"id": self.id, "type": "function", "function": function}


Texts = str | Annotated[list[TextBlock], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        str
        | Annotated[
            list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]],
            Field(max_length=MAX_CONTENT_PARTS, fail_fast=True),
        ]
        | None
    ) = None
    is_error: bool | None = None

    @property
    def blocks(self) -> Sequence[TextBlock | ImageBlock]:
        return self.content if isinstance(self.content, list) else []

    @property
    def images(self) -> list[ImageBlock]:
        """The images, for a user message that follows all results: these have text alone."""
        return [block for block in self.blocks if isinstance(block, ImageBlock)]

    def list_marks(self) -> list[CacheControl]:
        return [mark for part in (self, *self.blocks) for mark in Block.list_marks(part)]

    @property
    def template_dict(self) -> dict[str, Any]:
        texts = [block for block in self.blocks if isinstance(block, TextBlock)]
        text = self.content if isinstance(self.content, str) else join_text(texts)
        content = f"Error: {text}" if self.is_error else text
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


ContentBlock = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
BLOCKS_BY_ROLE: dict[str, tuple[type[Block], ...]] = {
    "user": (TextBlock, ImageBlock, ToolResultBlock),
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
    def blocks(
        self,
    ) -> Sequence[TextBlock | ImageBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock]:
        if isinstance(self.content, str):
            return [TextBlock(type="text", text=self.content)]
        return self.content

    def iterate_chat_messages(self) -> Iterator[MarkedMessage]:
        """Yield one message of the assistant; for a user, one per result or run of other parts."""
        if self.role == "assistant":
            yield MarkedMessage(self._make_reply(), any(b.cache_control for b in self.blocks))
            return
        images: list[ImageBlock] = []  # of the results so far
        parts: list[TextBlock | ImageBlock] = []
        for block in self.blocks:
            if isinstance(block, TextBlock | ImageBlock):
                parts.append(block)
            elif isinstance(block, ToolResultBlock):
                if parts:
                    yield _join_parts(self.role, [*images, *parts])
                    images, parts = [], []
                yield MarkedMessage(block.template_dict, bool(block.list_marks()))
                images += block.images
        if images or parts:
            yield _join_parts(self.role, [*images, *parts])

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


def _join_parts(role: str, parts: Sequence[TextBlock | ImageBlock]) -> MarkedMessage:
    content: str | list[dict[str, Any]]
    if any(isinstance(part, ImageBlock) for part in parts):
        content = [part.chat_part for part in parts]
    else:
        content = join_text([*parts])
    message = {"role": role, "content": content}
    return MarkedMessage(message, any(part.cache_control for part in parts))


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
        last = self.messages[-1]
        if last.role == "assistant" and any(isinstance(b, ToolUseBlock) for b in last.blocks):
            raise ValueError("messages: the last one calls tools, and their results are missing")
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
        return [mark for part in parts for mark in part.list_marks()]


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

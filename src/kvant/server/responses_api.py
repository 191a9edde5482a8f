"""POST /v1/responses: converts requests to chat requests, and writes replies as lists of items.

No response is stored, so `previous_response_id` and `conversation` are not supported.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from kvant.generation import Step
from kvant.server.content import RequestBody, join_text
from kvant.server.output_parsing import (
    CallPart,
    ContentPart,
    OutputPart,
    ReasoningPart,
)
from kvant.server.protocol import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    FunctionDefinition,
    GenerationRequest,
    JsonObjectFormat,
    JsonSchema,
    Metadata,
    TextFormat,
    check_tools_size,
)
from kvant.server.response_writers import (
    ResponseWriter,
    find_finish_reason,
    format_event,
    make_usage,
)


class ResponsesText(RequestBody):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None

    @property
    def chat_part(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class ResponsesImage(RequestBody):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "high"] | None = None
    file_id: None = None

    @property
    def chat_part(self) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": self.image_url}}


ResponsesContent = (
    str | Annotated[list[ResponsesText], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)]
)


class ResponsesItem(RequestBody):
    id: str | None = None
    status: str | None = None


class MessageItem(ResponsesItem):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: (
        str
        | Annotated[
            list[Annotated[ResponsesText | ResponsesImage, Field(discriminator="type")]],
            Field(max_length=MAX_CONTENT_PARTS, fail_fast=True),
        ]
    )
    phase: str | None = None

    @property
    def template_dict(self) -> dict[str, Any]:
        parts = self.content if isinstance(self.content, list) else []
        if not any(isinstance(part, ResponsesImage) for part in parts):
            return {"role": self.role, "content": join_text(self.content)}
        return {"role": self.role, "content": [part.chat_part for part in parts]}


class FunctionCall(ResponsesItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: None = None

    @property
    def template_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class FunctionCallOutput(ResponsesItem):
    """The result of a function call."""

    type: Literal["function_call_output"]
    call_id: str
    output: ResponsesContent

    @property
    def template_dict(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": join_text(self.output)}


class ReasoningText(RequestBody):
    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(ResponsesItem):
    """Reasoning of an earlier reply, sent back by the client."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: (
        Annotated[list[ReasoningText], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)] | None
    ) = None
    encrypted_content: None = None


class ResponsesTool(FunctionDefinition):
    type: Literal["function"]

    @property
    def template_dict(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


ResponsesTools = Annotated[
    list[ResponsesTool],
    Field(max_length=MAX_TOOLS, fail_fast=True),
    AfterValidator(check_tools_size),
]


class ResponsesToolChoice(RequestBody):
    type: Literal["function"]
    name: str


class ResponsesJsonSchema(JsonSchema):
    type: Literal["json_schema"]


class ResponsesTextOptions(RequestBody):
    format: Annotated[
        TextFormat | JsonObjectFormat | ResponsesJsonSchema | None, Field(discriminator="type")
    ] = None
    verbosity: Literal["medium"] | None = None


ResponsesItems = Annotated[
    list[MessageItem | FunctionCall | FunctionCallOutput | ReasoningItem],
    Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
]


# Fields with the same name and meaning in a chat request.
CHAT_FIELDS = ("model", "temperature", "top_p", "stream", "parallel_tool_calls")


class ResponsesRequest(GenerationRequest):
    """Body of POST /v1/responses."""

    input: str | ResponsesItems
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    text: ResponsesTextOptions | None = None
    tools: ResponsesTools | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    store: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    # Accepted and ignored; reasoning is always sent, as plain text.
    client_metadata: Metadata | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] | None = (
        None
    )
    background: Literal[False] | None = None
    # Not supported here, but some clients send an explicit null.
    reasoning: None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    top_logprobs: None = None
    max_tool_calls: None = None
    prompt_cache_retention: None = None

    @property
    def chat_request(self) -> ChatRequest:
        """The equivalent chat request."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in CHAT_FIELDS}
        fields["messages"] = self._make_messages()
        fields["max_completion_tokens"] = self.max_output_tokens
        if self.tools:
            fields["tools"] = [tool.template_dict for tool in self.tools]
        choice = self.tool_choice
        if isinstance(choice, ResponsesToolChoice):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif choice is not None:
            fields["tool_choice"] = choice
        if self.text is not None and self.text.format is not None:
            details = self.text.format.model_dump(by_alias=True)
            format_type = details.pop("type")
            fields["response_format"] = {"type": format_type} | (
                {format_type: details} if details else {}
            )
        return ChatRequest.model_validate(fields)

    def _make_messages(self) -> list[dict[str, Any]]:
        """Convert the items to chat messages; calls and reasoning join an assistant message."""
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        reasoning = ""  # precedes the message or call it belongs to
        for item in self.input:
            if isinstance(item, ReasoningItem):
                reasoning += join_text(item.content)
                continue
            if isinstance(item, FunctionCall):
                if not messages or messages[-1]["role"] != "assistant" or reasoning:
                    messages.append({"role": "assistant", "content": None})
                messages[-1].setdefault("tool_calls", []).append(item.template_dict)
            else:
                messages.append(item.template_dict)
            if reasoning and messages[-1]["role"] == "assistant":
                messages[-1]["reasoning_content"] = reasoning
            reasoning = ""
        return messages


class ItemLayout(NamedTuple):
    """The fixed fields of an item with text."""

    item_type: str
    id_prefix: str
    item_fields: dict[str, Any]
    text_type: str
    text_fields: dict[str, Any]
    event_fields: dict[str, Any]  # of events about its text


NO_LOGPROBS: dict[str, Any] = {"logprobs": []}
ITEM_LAYOUTS = {
    ContentPart: ItemLayout(
        "message",
        "msg",
        {"role": "assistant"},
        "output_text",
        {"annotations": []} | NO_LOGPROBS,
        NO_LOGPROBS,
    ),
    ReasoningPart: ItemLayout("reasoning", "rs", {"summary": []}, "reasoning_text", {}, {}),
}


class ResponseItems:
    """The items of a response: reasoning, messages and calls. Each method returns its events.

    Events of an item, in order:

        message, reasoning    output_item.added, content_part.added, <text>.delta ...,
                              <text>.done, content_part.done, output_item.done
        function_call         output_item.added, function_call_arguments.delta and .done,
                              output_item.done
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._num_events = 0
        self._layout: ItemLayout | None = None  # of the last item, while it gets more text

    def write_event(self, event_type: str, **fields: Any) -> str:
        event = {"type": event_type, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return f"event: {event_type}\n{format_event(event)}"

    def add_part(self, part: OutputPart) -> str:
        if isinstance(part, CallPart):
            return self.close_item() + self._add_call(part)
        layout = ITEM_LAYOUTS[type(part)]
        events = "" if layout is self._layout else self.close_item() + self._begin_item(layout)
        self.items[-1]["content"][0]["text"] += part.text
        return events + self._write_text_event(layout, "delta", delta=part.text)

    def _begin_item(self, layout: ItemLayout) -> str:
        """Append an empty message or reasoning item."""
        self._layout = layout
        item_id = f"{layout.id_prefix}_{secrets.token_hex(12)}"
        header = {"id": item_id, "type": layout.item_type, "status": "in_progress"}
        item: dict[str, Any] = header | {"content": []} | layout.item_fields
        self.items.append(item)
        events = self._write_item_event("added")
        item["content"] = [{"type": layout.text_type, "text": ""} | layout.text_fields]
        return events + self._write_content_event("added")

    def close_item(self) -> str:
        """Complete the item that gets text, if any."""
        layout, self._layout = self._layout, None
        if layout is None:
            return ""
        item = self.items[-1]
        events = self._write_text_event(layout, "done", text=item["content"][0]["text"])
        events += self._write_content_event("done")
        item["status"] = "completed"
        return events + self._write_item_event("done")

    def _add_call(self, call: CallPart) -> str:
        """Append a complete call."""
        function = {"name": call.name, "arguments": call.arguments}
        ids = {"id": f"fc_{secrets.token_hex(12)}", "call_id": f"call_{secrets.token_hex(12)}"}
        item = ids | {"type": "function_call", "status": "in_progress"} | function
        self.items.append(item | {"arguments": ""})
        events = self._write_item_event("added")
        self.items[-1] = item
        event_type = "response.function_call_arguments"
        events += self.write_event(f"{event_type}.delta", **self._location, delta=call.arguments)
        events += self.write_event(f"{event_type}.done", **self._location, **function)
        item["status"] = "completed"
        return events + self._write_item_event("done")

    @property
    def _location(self) -> dict[str, Any]:
        """The fields that locate the last item."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _write_item_event(self, action: str) -> str:
        event_type = f"response.output_item.{action}"
        return self.write_event(event_type, output_index=len(self.items) - 1, item=self.items[-1])

    def _write_content_event(self, action: str) -> str:
        event_type, part = f"response.content_part.{action}", self.items[-1]["content"][0]
        return self.write_event(event_type, **self._location, content_index=0, part=part)

    def _write_text_event(self, layout: ItemLayout, action: str, **fields: Any) -> str:
        event_type = f"response.{layout.text_type}.{action}"
        fields = {"content_index": 0} | layout.event_fields | fields
        return self.write_event(event_type, **self._location, **fields)


class ResponsesWriter(ResponseWriter):
    """Writes one choice as a list of items."""

    def __init__(self, request: ResponsesRequest, *args: Any) -> None:
        super().__init__(*args)
        self._items = ResponseItems()
        self._last_steps: list[Step] = []  # at most one: it has the finish reason
        self._num_reasoning_tokens = 0
        self._header = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": self.model,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "tools": [tool.model_dump(mode="json") for tool in request.tools or ()],
            "tool_choice": _dump_model(request.tool_choice) or "auto",
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "text": _dump_model(request.text) or {"format": {"type": "text"}},
            "metadata": request.metadata or {},
            "previous_response_id": None,
            "store": False,
        }

    def write_all(self, steps_by_choice: Sequence[Sequence[Step]]) -> dict[str, Any]:
        for step in steps_by_choice[0]:
            self.write_step(0, step)
        self._finish_items()
        return self._make_response(find_finish_reason(steps_by_choice[0]))

    def write_begin(self) -> str:
        response = self._make_response(None)
        return "".join(
            self._items.write_event(event_type, response=response)
            for event_type in ("response.created", "response.in_progress")
        )

    def write_step(self, index: int, step: Step | None) -> str:
        parts = self.parse_step(index, step)
        if step is not None:
            self._num_reasoning_tokens += any(isinstance(part, ReasoningPart) for part in parts)
            self._last_steps = [step]
        return "".join(map(self._items.add_part, parts))

    def write_end(self) -> str:
        events = self._finish_items()
        response = self._make_response(find_finish_reason(self._last_steps))
        return events + self._items.write_event(f"response.{response['status']}", response=response)

    def _finish_items(self) -> str:
        """Add the parts that the parser still buffers, and close the last item."""
        events = "".join(self.write_step(index, None) for index in self.list_unfinished())
        return events + self._items.close_item()

    def write_error(self, body: Mapping[str, Any]) -> str:
        error = {"code": "server_error", "message": body["error"]["message"]}
        failed = self._make_response(None) | {"status": "failed", "error": error}
        return self._items.write_event("response.failed", response=failed)

    def _make_response(self, reason: str | None) -> dict[str, Any]:
        """Return the response with all items so far; a finish `reason` completes it."""
        status = "in_progress" if reason is None else "completed"
        is_truncated = reason == "length"
        return self._header | {
            "status": "incomplete" if is_truncated else status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_truncated else None,
            "error": None,
            "output": [*self._items.items],
            "usage": None if reason is None else self._make_usage(),
        }

    def _make_usage(self) -> dict[str, Any]:
        usage = make_usage(self.reply.usages)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }


def _dump_model(value: RequestBody | str | None) -> Any:
    return value.model_dump(by_alias=True, mode="json") if isinstance(value, RequestBody) else value

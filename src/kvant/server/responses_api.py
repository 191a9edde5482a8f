"""POST /v1/responses: converts requests to chat requests, and writes replies as lists of items.

No response is stored, so `previous_response_id` and `conversation` are not supported.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field

from kvant.engine import Usage
from kvant.generation import Step
from kvant.server.output_parsing import (
    CallPart,
    ContentPart,
    OutputParser,
    OutputPart,
    ReasoningPart,
)
from kvant.server.protocol import (
    MAX_CONTENT_PARTS,
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatRequest,
    FunctionDefinition,
    JsonObjectFormat,
    JsonSchema,
    Metadata,
    RequestBody,
    StreamOptions,
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


class ResponsesItem(RequestBody):
    id: str | None = None
    status: str | None = None


class MessageItem(ResponsesItem):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: (
        str | Annotated[list[ResponsesText], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)]
    )
    phase: str | None = None

    @property
    def template_dict(self) -> dict[str, Any]:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


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
    output: (
        str | Annotated[list[ResponsesText], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)]
    )

    @property
    def template_dict(self) -> dict[str, Any]:
        output = self.output
        text = output if isinstance(output, str) else "".join(part.text for part in output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": text}


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

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())


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


class ResponsesRequest(RequestBody):
    """Body of POST /v1/responses."""

    model: str | None = None
    input: str | ResponsesItems
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    stream: bool | None = None
    text: ResponsesTextOptions | None = None
    tools: ResponsesTools | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    metadata: Metadata | None = None  # repeated in the response
    store: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    # Accepted and ignored: reasoning is always sent, as plain text.
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] | None = (
        None
    )
    background: Literal[False] | None = None
    stream_options: StreamOptions | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
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
        names = "model", "temperature", "top_p", "stream", "parallel_tool_calls"
        fields = {name: getattr(self, name) for name in names}
        fields |= {
            "messages": self._make_messages(),
            "max_completion_tokens": self.max_output_tokens,
        }
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
                reasoning += item.text
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


class ResponsesWriter(ResponseWriter):
    """Writes one choice as a list of items: reasoning, messages and calls.

    Events of an item, in order:

        message, reasoning    output_item.added, content_part.added, <text>.delta ...,
                              <text>.done, content_part.done, output_item.done
        function_call         output_item.added, function_call_arguments.delta and .done,
                              output_item.done
    """

    def __init__(
        self,
        tokenizer: Any,
        model: str,
        request: ResponsesRequest,
        params: ChatRequest,
        parsers: Sequence[OutputParser],
    ) -> None:
        super().__init__(tokenizer, params, parsers)
        self._num_events = 0
        self._items: list[dict[str, Any]] = []
        self._open_item: dict[str, Any] | None = None  # the last item, while it gets more text
        self._last_steps: list[Step] = []  # at most one: it has the finish reason
        self._num_reasoning_tokens = 0
        self._header = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
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

    def write_all(
        self, steps_by_choice: Sequence[Sequence[Step]], usages: Iterable[Usage]
    ) -> dict[str, Any]:
        for step in steps_by_choice[0]:
            self.write_step(0, step)
        self._finish_items()
        return self._make_response(find_finish_reason(steps_by_choice[0]), usages)

    def write_begin(self) -> str:
        response = self._make_response(None)
        event_types = "response.created", "response.in_progress"
        return "".join(
            self._write_event(event_type, response=response) for event_type in event_types
        )

    def write_step(self, index: int, step: Step) -> str:
        parts = self.parse_step(index, step)
        self._num_reasoning_tokens += any(isinstance(part, ReasoningPart) for part in parts)
        self._last_steps = [step]
        return "".join(map(self._add_part, parts))

    def write_end(self, usages: Iterable[Usage]) -> str:
        events = self._finish_items()
        response = self._make_response(find_finish_reason(self._last_steps), usages)
        return events + self._write_event(f"response.{response['status']}", response=response)

    def _finish_items(self) -> str:
        """Add the parts that the parser still buffers, and close the last item."""
        parts = [part for index in self.list_unfinished() for part in self.parse_step(index, None)]
        return "".join(map(self._add_part, parts)) + self._close_item()

    def write_error(self, body: Mapping[str, Any]) -> str:
        error = {"code": "server_error", "message": body["error"]["message"]}
        failed = self._make_response(None) | {"status": "failed", "error": error}
        return self._write_event("response.failed", response=failed)

    def _make_response(self, reason: str | None, usages: Iterable[Usage] = ()) -> dict[str, Any]:
        """Return the response with all items so far; a finish `reason` completes it."""
        status = "in_progress" if reason is None else "completed"
        is_truncated = reason == "length"
        return self._header | {
            "status": "incomplete" if is_truncated else status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_truncated else None,
            "error": None,
            "output": [*self._items],
            "usage": None if reason is None else self._make_usage(usages),
        }

    def _make_usage(self, usages: Iterable[Usage]) -> dict[str, Any]:
        usage = make_usage(usages)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
        }

    # ---- items

    def _add_part(self, part: OutputPart) -> str:
        if isinstance(part, CallPart):
            return self._close_item() + self._write_call(part)
        item_type = ITEM_TYPES[type(part)]
        events = ""
        if self._open_item is None or self._open_item["type"] != item_type:
            events = self._close_item() + self._begin_item(item_type)
        assert self._open_item is not None
        content = self._open_item["content"][0]
        content["text"] += part.text
        return events + self._write_text_event("delta", delta=part.text)

    def _begin_item(self, item_type: str) -> str:
        """Append an empty message or reasoning item."""
        layout = ITEM_LAYOUTS[item_type]
        item_id = f"{layout.id_prefix}_{secrets.token_hex(12)}"
        header = {"id": item_id, "type": item_type, "status": "in_progress"}
        self._open_item = header | {"content": []} | layout.item_fields
        self._items.append(self._open_item)
        event = self._write_item_event("added")
        self._open_item["content"] = [{"type": layout.text_type, "text": ""} | layout.text_fields]
        return event + self._write_content_event("added")

    def _close_item(self) -> str:
        """Complete the open item, if any."""
        if self._open_item is None:
            return ""
        text = self._open_item["content"][0]["text"]
        events = self._write_text_event("done", text=text) + self._write_content_event("done")
        self._open_item["status"] = "completed"
        events += self._write_item_event("done")
        self._open_item = None
        return events

    def _write_call(self, call: CallPart) -> str:
        """Append a complete call."""
        function = {"name": call.name, "arguments": call.arguments}
        ids = {"id": f"fc_{secrets.token_hex(12)}", "call_id": f"call_{secrets.token_hex(12)}"}
        item = ids | {"type": "function_call", "status": "in_progress"} | function
        self._items.append(item | {"arguments": ""})
        events = self._write_item_event("added")
        self._items[-1] = item
        location = {"item_id": ids["id"], "output_index": len(self._items) - 1}
        event_type = "response.function_call_arguments"
        events += self._write_event(f"{event_type}.delta", **location, delta=call.arguments)
        events += self._write_event(f"{event_type}.done", **location, **function)
        item["status"] = "completed"
        return events + self._write_item_event("done")

    # ---- events

    def _write_item_event(self, action: str) -> str:
        return self._write_event(
            f"response.output_item.{action}",
            output_index=len(self._items) - 1,
            item=self._items[-1],
        )

    def _write_content_event(self, action: str) -> str:
        part = self._items[-1]["content"][0]
        return self._write_event(
            f"response.content_part.{action}", **self._locate_text(), part=part
        )

    def _write_text_event(self, action: str, **fields: Any) -> str:
        text_type = ITEM_LAYOUTS[self._items[-1]["type"]].text_type
        logprobs: dict[str, Any] = {"logprobs": []} if text_type == "output_text" else {}
        return self._write_event(
            f"response.{text_type}.{action}", **self._locate_text(), **logprobs, **fields
        )

    def _locate_text(self) -> dict[str, Any]:
        output_index = len(self._items) - 1
        return {"item_id": self._items[-1]["id"], "output_index": output_index, "content_index": 0}

    def _write_event(self, event_type: str, **fields: Any) -> str:
        event = {"type": event_type, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return f"event: {event_type}\n{format_event(event)}"


class ItemLayout(NamedTuple):
    """The fixed fields of an item with text."""

    id_prefix: str
    text_type: str
    text_fields: dict[str, Any]
    item_fields: dict[str, Any]


ITEM_TYPES: dict[type, str] = {ContentPart: "message", ReasoningPart: "reasoning"}
ITEM_LAYOUTS = {
    "message": ItemLayout(
        "msg", "output_text", {"annotations": [], "logprobs": []}, {"role": "assistant"}
    ),
    "reasoning": ItemLayout("rs", "reasoning_text", {}, {"summary": []}),
}


def _dump_model(value: RequestBody | str | None) -> Any:
    return value.model_dump(by_alias=True, mode="json") if isinstance(value, RequestBody) else value

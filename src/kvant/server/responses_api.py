"""POST /v1/responses: the same replies as of a chat, in other words. Nothing is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

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
    """What a function gave."""

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
    """Sent back as it came."""

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
    metadata: Metadata | None = None  # told again
    store: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None
    include: Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=1)] | None = (
        None  # thoughts are told as they are
    )
    background: Literal[False] | None = None
    stream_options: StreamOptions | None = None
    service_tier: Literal["auto", "default"] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # What OpenAI has and this server has not, as clients send it who do not ask for it.
    reasoning: None = None
    previous_response_id: None = None
    conversation: None = None
    prompt: None = None
    top_logprobs: None = None
    max_tool_calls: None = None
    prompt_cache_retention: None = None

    @property
    def chat_request(self) -> ChatRequest:
        """The same request as a chat."""
        names = "model", "temperature", "top_p", "stream", "parallel_tool_calls"
        asked = {name: getattr(self, name) for name in names}
        asked |= {
            "messages": self._make_messages(),
            "max_completion_tokens": self.max_output_tokens,
        }
        if self.tools:
            asked["tools"] = [tool.template_dict for tool in self.tools]
        chosen = self.tool_choice
        if isinstance(chosen, ResponsesToolChoice):
            asked["tool_choice"] = {"type": "function", "function": {"name": chosen.name}}
        elif chosen is not None:
            asked["tool_choice"] = chosen
        if self.text is not None and self.text.format is not None:
            told = self.text.format.model_dump(by_alias=True)
            kind = told.pop("type")
            asked["response_format"] = {"type": kind} | ({kind: told} if told else {})
        return ChatRequest.model_validate(asked)

    def _make_messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        thought = ""
        for item in self.input:
            if isinstance(item, ReasoningItem):  # of the message or the call behind it
                thought += item.text
                continue
            if isinstance(item, FunctionCall):
                if not found or found[-1]["role"] != "assistant" or thought:
                    found.append({"role": "assistant", "content": None})
                found[-1].setdefault("tool_calls", []).append(item.template_dict)
            else:
                found.append(item.template_dict)
            if thought and found[-1]["role"] == "assistant":
                found[-1]["reasoning_content"] = thought
            thought = ""
        return found


class ResponsesWriter(ResponseWriter):
    """One continuation as a list of items: thoughts, a message, calls."""

    def __init__(
        self,
        tokenizer: Any,
        model: str,
        request: ResponsesRequest,
        params: ChatRequest,
        parsers: Sequence[OutputParser],
    ) -> None:
        super().__init__(tokenizer, params, parsers)
        self._num_events = 0  # events so far
        self._items: list[dict[str, Any]] = []
        self._open_item: dict[str, Any] | None = None  # the last of them, as long as it grows
        self._last_steps: list[Step] = []  # the last one
        self._num_reasoning_tokens = 0  # tokens
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
        told = self._make_response(None)
        events = "response.created", "response.in_progress"
        return "".join(self._write_event(kind, response=told) for kind in events)

    def write_step(self, index: int, step: Step) -> str:
        parts = self.parse_step(index, step)
        self._num_reasoning_tokens += any(isinstance(part, ReasoningPart) for part in parts)
        self._last_steps = [step]
        return "".join(map(self._add_part, parts))

    def write_end(self, usages: Iterable[Usage]) -> str:
        closed = self._finish_items()
        told = self._make_response(find_finish_reason(self._last_steps), usages)
        return closed + self._write_event(f"response.{told['status']}", response=told)

    def _finish_items(self) -> str:
        """What was held back, and the end of the last item."""
        left = [part for index in self.list_unfinished() for part in self.parse_step(index, None)]
        return "".join(map(self._add_part, left)) + self._close_item()

    def write_error(self, body: Mapping[str, Any]) -> str:
        error = {"code": "server_error", "message": body["error"]["message"]}
        failed = self._make_response(None) | {"status": "failed", "error": error}
        return self._write_event("response.failed", response=failed)

    def _make_response(self, reason: str | None, usages: Iterable[Usage] = ()) -> dict[str, Any]:
        """As it stands; with a reason it is at its end."""
        status = "in_progress" if reason is None else "completed"
        cut = reason == "length"
        return self._header | {
            "status": "incomplete" if cut else status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "output": [*self._items],
            "usage": None if reason is None else self._make_usage(usages),
        }

    def _make_usage(self, usages: Iterable[Usage]) -> dict[str, Any]:
        told = make_usage(usages)
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": told["prompt_tokens_details"],
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
            "total_tokens": told["total_tokens"],
        }

    # ---- items as they grow

    def _add_part(self, part: OutputPart) -> str:
        if isinstance(part, CallPart):
            return self._close_item() + self._write_call(part)
        kind = ITEM_TYPES[type(part)]
        told = ""
        if self._open_item is None or self._open_item["type"] != kind:
            told = self._close_item() + self._begin_item(kind)
        assert self._open_item is not None
        content = self._open_item["content"][0]
        content["text"] += part.text
        return told + self._write_text_event("delta", delta=part.text)

    def _begin_item(self, kind: str) -> str:
        """A message or a thought, of which there is no text yet."""
        short, name, more, beside = ITEM_LAYOUTS[kind]
        head = {"id": f"{short}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        self._open_item = head | {"content": []} | beside
        self._items.append(self._open_item)
        added = self._write_item_event("added")
        self._open_item["content"] = [{"type": name, "text": ""} | more]
        return added + self._write_content_event("added")

    def _close_item(self) -> str:
        """The last item grows no more."""
        if self._open_item is None:
            return ""
        text = self._open_item["content"][0]["text"]
        told = self._write_text_event("done", text=text) + self._write_content_event("done")
        self._open_item["status"] = "completed"
        told += self._write_item_event("done")
        self._open_item = None
        return told

    def _write_call(self, call: CallPart) -> str:
        told = {"name": call.name, "arguments": call.arguments}
        one = {"id": f"fc_{secrets.token_hex(12)}", "call_id": f"call_{secrets.token_hex(12)}"}
        item = one | {"type": "function_call", "status": "in_progress"} | told
        self._items.append(item | {"arguments": ""})
        begun = self._write_item_event("added")
        self._items[-1] = item
        place = {"item_id": one["id"], "output_index": len(self._items) - 1}
        kind = "response.function_call_arguments"
        begun += self._write_event(f"{kind}.delta", **place, delta=call.arguments)
        begun += self._write_event(f"{kind}.done", **place, **told)
        item["status"] = "completed"
        return begun + self._write_item_event("done")

    # ---- events

    def _write_item_event(self, action: str) -> str:
        place = len(self._items) - 1
        return self._write_event(
            f"response.output_item.{action}", output_index=place, item=self._items[-1]
        )

    def _write_content_event(self, action: str) -> str:
        part = self._items[-1]["content"][0]
        return self._write_event(
            f"response.content_part.{action}", **self._locate_text(), part=part
        )

    def _write_text_event(self, action: str, **fields: Any) -> str:
        name = ITEM_LAYOUTS[self._items[-1]["type"]][1]
        beside: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
        return self._write_event(
            f"response.{name}.{action}", **self._locate_text(), **beside, **fields
        )

    def _locate_text(self) -> dict[str, Any]:
        place = len(self._items) - 1
        return {"item_id": self._items[-1]["id"], "output_index": place, "content_index": 0}

    def _write_event(self, kind: str, **fields: Any) -> str:
        whole = {"type": kind, "sequence_number": self._num_events} | fields
        self._num_events += 1
        return f"event: {kind}\n{format_event(whole)}"


ITEM_TYPES: dict[type, str] = {ContentPart: "message", ReasoningPart: "reasoning"}
ITEM_LAYOUTS: dict[
    str, tuple[str, str, dict[str, Any], dict[str, Any]]
] = {  # by the kind of an item
    "message": ("msg", "output_text", {"annotations": [], "logprobs": []}, {"role": "assistant"}),
    "reasoning": ("rs", "reasoning_text", {}, {"summary": []}),
}


def _dump_model(value: RequestBody | str | None) -> Any:
    return value.model_dump(by_alias=True, mode="json") if isinstance(value, RequestBody) else value

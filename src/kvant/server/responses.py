"""POST /v1/responses: the same replies as of a chat, in other words. Nothing is stored."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from kvant.engine import Usage
from kvant.generation import Step
from kvant.server.protocol import (
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOOLS,
    Asked,
    Chat,
    Function,
    JsonSchema,
    Metadata,
    ObjectFormat,
    StreamOptions,
    TextFormat,
    together,
)
from kvant.server.replies import Reply, event, finished, used
from kvant.server.speech import Call, Content, Listener, Part, Thought


class Text(Asked):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class Item(Asked):
    id: str | None = None
    status: str | None = None


class Said(Item):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Text], Field(max_length=MOST_PARTS, fail_fast=True)]
    phase: str | None = None

    @property
    def shown(self) -> dict[str, Any]:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        return {"role": self.role, "content": text}


class Calling(Item):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    namespace: None = None

    @property
    def shown(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class Answer(Item):
    """What a function gave."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | Annotated[list[Text], Field(max_length=MOST_PARTS, fail_fast=True)]

    @property
    def shown(self) -> dict[str, Any]:
        output = self.output
        text = output if isinstance(output, str) else "".join(part.text for part in output)
        return {"role": "tool", "tool_call_id": self.call_id, "content": text}


class Thoughts(Asked):
    type: Literal["reasoning_text"]
    text: str


class Thinking(Item):
    """Sent back as it came."""

    type: Literal["reasoning"]
    summary: list[Any] | None = None
    content: Annotated[list[Thoughts], Field(max_length=MOST_PARTS, fail_fast=True)] | None = None
    encrypted_content: None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or ())


class FlatTool(Function):
    type: Literal["function"]

    @property
    def shown(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


FlatTools = Annotated[
    list[FlatTool], Field(max_length=MOST_TOOLS, fail_fast=True), AfterValidator(together)
]


class FlatName(Asked):
    type: Literal["function"]
    name: str


class FlatSchema(JsonSchema):
    type: Literal["json_schema"]


class TextOptions(Asked):
    format: Annotated[
        TextFormat | ObjectFormat | FlatSchema | None, Field(discriminator="type")
    ] = None
    verbosity: Literal["medium"] | None = None


Items = Annotated[
    list[Said | Calling | Answer | Thinking],
    Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True),
]


class Respond(Asked):
    model: str | None = None
    input: str | Items
    instructions: str | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    stream: bool | None = None
    text: TextOptions | None = None
    tools: FlatTools | None = None
    tool_choice: Literal["none", "auto", "required"] | FlatName | None = None
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
    def chat(self) -> Chat:
        """The same request as a chat."""
        names = "model", "temperature", "top_p", "stream", "parallel_tool_calls"
        asked = {name: getattr(self, name) for name in names}
        asked |= {"messages": self._messages(), "max_completion_tokens": self.max_output_tokens}
        if self.tools:
            asked["tools"] = [tool.shown for tool in self.tools]
        chosen = self.tool_choice
        if isinstance(chosen, FlatName):
            asked["tool_choice"] = {"type": "function", "function": {"name": chosen.name}}
        elif chosen is not None:
            asked["tool_choice"] = chosen
        if self.text is not None and self.text.format is not None:
            told = self.text.format.model_dump(by_alias=True)
            kind = told.pop("type")
            asked["response_format"] = {"type": kind} | ({kind: told} if told else {})
        return Chat.model_validate(asked)

    def _messages(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        if self.instructions is not None:
            found.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*found, {"role": "user", "content": self.input}]
        thought = ""
        for item in self.input:
            if isinstance(item, Thinking):  # of the message or the call behind it
                thought += item.text
                continue
            if isinstance(item, Calling):
                if not found or found[-1]["role"] != "assistant" or thought:
                    found.append({"role": "assistant", "content": None})
                found[-1].setdefault("tool_calls", []).append(item.shown)
            else:
                found.append(item.shown)
            if thought and found[-1]["role"] == "assistant":
                found[-1]["reasoning_content"] = thought
            thought = ""
        return found


class Responded(Reply):
    """One continuation as a list of items: thoughts, a message, calls."""

    def __init__(
        self, tokenizer: Any, model: str, told: Respond, asked: Chat, listeners: Sequence[Listener]
    ) -> None:
        super().__init__(tokenizer, asked, listeners)
        self._count = 0  # events so far
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the last of them, as long as it grows
        self._steps: list[Step] = []  # the last one
        self._thought = 0  # tokens
        self._head = {
            "id": f"resp_{secrets.token_hex(12)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "instructions": told.instructions,
            "max_output_tokens": told.max_output_tokens,
            "temperature": 1.0 if told.temperature is None else told.temperature,
            "top_p": 1.0 if told.top_p is None else told.top_p,
            "tools": [tool.model_dump(mode="json") for tool in told.tools or ()],
            "tool_choice": _plain(told.tool_choice) or "auto",
            "parallel_tool_calls": told.parallel_tool_calls is not False,
            "text": _plain(told.text) or {"format": {"type": "text"}},
            "metadata": told.metadata or {},
            "previous_response_id": None,
            "store": False,
        }

    def all(self, spoken: Sequence[Sequence[Step]], usages: Iterable[Usage]) -> dict[str, Any]:
        for step in spoken[0]:
            self.step(0, step)
        self._end()
        return self._response(finished(spoken[0]), usages)

    def begin(self) -> str:
        told = self._response(None)
        events = "response.created", "response.in_progress"
        return "".join(self._event(kind, response=told) for kind in events)

    def step(self, index: int, step: Step) -> str:
        parts = self.heard(index, step)
        self._thought += any(isinstance(part, Thought) for part in parts)
        self._steps = [step]
        return "".join(map(self._add, parts))

    def end(self, usages: Iterable[Usage]) -> str:
        closed = self._end()
        told = self._response(finished(self._steps), usages)
        return closed + self._event(f"response.{told['status']}", response=told)

    def _end(self) -> str:
        """What was held back, and the end of the last item."""
        left = [part for index in self.cut() for part in self.heard(index, None)]
        return "".join(map(self._add, left)) + self._close()

    def failed(self, told: Mapping[str, Any]) -> str:
        error = {"code": "server_error", "message": told["error"]["message"]}
        failed = self._response(None) | {"status": "failed", "error": error}
        return self._event("response.failed", response=failed)

    def _response(self, reason: str | None, usages: Iterable[Usage] = ()) -> dict[str, Any]:
        """As it stands; with a reason it is at its end."""
        status = "in_progress" if reason is None else "completed"
        cut = reason == "length"
        return self._head | {
            "status": "incomplete" if cut else status,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "error": None,
            "output": [*self._items],
            "usage": None if reason is None else self._used(usages),
        }

    def _used(self, usages: Iterable[Usage]) -> dict[str, Any]:
        told = used(usages)
        return {
            "input_tokens": told["prompt_tokens"],
            "input_tokens_details": told["prompt_tokens_details"],
            "output_tokens": told["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._thought},
            "total_tokens": told["total_tokens"],
        }

    # ---- items as they grow

    def _add(self, part: Part) -> str:
        if isinstance(part, Call):
            return self._close() + self._call(part)
        kind = KINDS[type(part)]
        told = ""
        if self._open is None or self._open["type"] != kind:
            told = self._close() + self._begin(kind)
        assert self._open is not None
        content = self._open["content"][0]
        content["text"] += part.text
        return told + self._of_text("delta", delta=part.text)

    def _begin(self, kind: str) -> str:
        """A message or a thought, of which there is no text yet."""
        short, name, more, beside = PARTS[kind]
        head = {"id": f"{short}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"}
        self._open = head | {"content": []} | beside
        self._items.append(self._open)
        added = self._of_item("added")
        self._open["content"] = [{"type": name, "text": ""} | more]
        return added + self._of_content("added")

    def _close(self) -> str:
        """The last item grows no more."""
        if self._open is None:
            return ""
        text = self._open["content"][0]["text"]
        told = self._of_text("done", text=text) + self._of_content("done")
        self._open["status"] = "completed"
        told += self._of_item("done")
        self._open = None
        return told

    def _call(self, call: Call) -> str:
        told = {"name": call.name, "arguments": call.arguments}
        one = {"id": f"fc_{secrets.token_hex(12)}", "call_id": f"call_{secrets.token_hex(12)}"}
        item = one | {"type": "function_call", "status": "in_progress"} | told
        self._items.append(item | {"arguments": ""})
        begun = self._of_item("added")
        self._items[-1] = item
        place = {"item_id": one["id"], "output_index": len(self._items) - 1}
        kind = "response.function_call_arguments"
        begun += self._event(f"{kind}.delta", **place, delta=call.arguments)
        begun += self._event(f"{kind}.done", **place, **told)
        item["status"] = "completed"
        return begun + self._of_item("done")

    # ---- events

    def _of_item(self, what: str) -> str:
        place = len(self._items) - 1
        return self._event(f"response.output_item.{what}", output_index=place, item=self._items[-1])

    def _of_content(self, what: str) -> str:
        part = self._items[-1]["content"][0]
        return self._event(f"response.content_part.{what}", **self._place(), part=part)

    def _of_text(self, what: str, **told: Any) -> str:
        name = PARTS[self._items[-1]["type"]][1]
        beside: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
        return self._event(f"response.{name}.{what}", **self._place(), **beside, **told)

    def _place(self) -> dict[str, Any]:
        place = len(self._items) - 1
        return {"item_id": self._items[-1]["id"], "output_index": place, "content_index": 0}

    def _event(self, kind: str, **told: Any) -> str:
        whole = {"type": kind, "sequence_number": self._count} | told
        self._count += 1
        return f"event: {kind}\n{event(whole)}"


KINDS: dict[type, str] = {Content: "message", Thought: "reasoning"}
PARTS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {  # by the kind of an item
    "message": ("msg", "output_text", {"annotations": [], "logprobs": []}, {"role": "assistant"}),
    "reasoning": ("rs", "reasoning_text", {}, {"summary": []}),
}


def _plain(told: Asked | str | None) -> Any:
    return told.model_dump(by_alias=True, mode="json") if isinstance(told, Asked) else told

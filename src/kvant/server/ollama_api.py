"""Ollama's API: /api/chat and /api/generate, whose replies are lines of JSON, and the served model.

Unset, `temperature`, `top_k` and `top_p` have Ollama's defaults; `num_predict` is the server's, and
nothing is penalized. Hints about the machine, such as `num_gpu`, and about loading, such as
`keep_alive`, change nothing. `num_ctx` neither: prompts are never truncated.
"""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from kvant.generation import Step
from kvant.platform.devices import count_stored_nbytes
from kvant.server.content import RequestBody, make_image_part, make_parts
from kvant.server.errors import OLLAMA_PATH
from kvant.server.output_parsing import CallPart, ContentPart, OutputPart, ReasoningPart
from kvant.server.protocol import (
    MAX_MESSAGES,
    MAX_STOPS,
    MAX_TOOLS,
    TEMPLATE_OPTION,
    ChatRequest,
    CompletionRequest,
    SamplingParams,
    Schema,
    Tools,
)
from kvant.server.response_writers import (
    ResponseWriter,
    clamp_logprob,
    find_finish_reason,
    format_json,
    format_stream_error,
    parse_arguments,
)
from kvant.server.service import Service
from kvant.vision.image_file import MAX_IMAGES
from kvant.weights.packed_weight import PackedWeight
from kvant.weights.packing import named_weights

API_VERSION = "0.12.0"  # of Ollama, whose API this is: clients require versions
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
# The options that are fields of a chat or completion request, under the same names.
SAMPLING_FIELDS = {"temperature", "top_k", "top_p", "min_p", "seed", "stop"}
SAMPLING_FIELDS |= {"presence_penalty", "frequency_penalty"}
UNLIMITED = 1 << 30  # tokens: a reply ends with the context

EmptyText = Literal[""]


class OllamaOptions(RequestBody):
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_k: Annotated[int | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    seed: int | None = None
    num_predict: Annotated[int | None, Field(ge=-2)] = None  # 0 and less: up to the context
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    repeat_penalty: Annotated[float | None, Field(gt=0)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    # Accepted only with the value that changes nothing:
    repeat_last_n: Literal[-1] | None = None  # penalties count all tokens
    mirostat: Literal[0] | None = None
    typical_p: Annotated[float | None, Field(ge=1, le=1)] = None
    tfs_z: Annotated[float | None, Field(ge=1, le=1)] = None
    # Hints:
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    f16_kv: bool | None = None
    vocab_only: Literal[False] | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None

    def make_sampling_fields(self) -> dict[str, Any]:
        """Return the fields of a chat or completion request."""
        fields = self.model_dump(include=SAMPLING_FIELDS)
        fields["repetition_penalty"] = self.repeat_penalty
        fields["seed"] = None if self.seed == -1 else self.seed  # -1: random
        if (count := self.num_predict) is not None:
            fields["max_tokens"] = UNLIMITED if count <= 0 else count
        return DEFAULTS | {name: value for name, value in fields.items() if value is not None}


class ShowRequest(RequestBody):
    """Body of POST /api/show."""

    model: str | None = None
    name: str | None = None  # of older clients, for `model`
    verbose: bool | None = None  # a hint


class OllamaRequest(RequestBody):
    """Fields of both requests that generate text."""

    model: str
    stream: bool | None = None  # default: true
    format: EmptyText | Literal["json"] | Schema | None = None
    options: OllamaOptions | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    keep_alive: float | str | None = None  # a hint

    @model_validator(mode="after")
    def _check_logprobs(self) -> OllamaRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: logprobs is needed with it")
        return self

    @property
    def streams(self) -> bool:
        return self.stream is not False

    @property
    def sampling_fields(self) -> dict[str, Any]:
        options = OllamaOptions() if self.options is None else self.options
        return {"stream": self.streams} | options.make_sampling_fields()

    def make_chat_request(self, **fields: Any) -> ChatRequest:
        fields |= self.sampling_fields
        if self.logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.think is not None:
            options: dict[str, Any] = {TEMPLATE_OPTION: self.think is not False}
            if isinstance(self.think, str):
                options["reasoning_effort"] = self.think  # of gpt-oss
            fields["chat_template_kwargs"] = options
        if self.format == "json":
            fields["response_format"] = {"type": "json_object"}
        elif self.format:
            schema = {"name": "reply", "schema": self.format}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return ChatRequest.model_validate(fields)


class OllamaFunction(RequestBody):
    name: str
    arguments: dict[str, Any]
    index: int | None = None
    description: str | None = None


class OllamaCall(RequestBody):
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: OllamaFunction

    def make_chat_call(self, number: int) -> dict[str, Any]:
        """Return the call with an id."""
        arguments = format_json(self.function.arguments)
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id or f"call_{number}", "type": "function", "function": function}


Images = Annotated[list[str], Field(max_length=MAX_IMAGES, fail_fast=True)]  # files in base64


def make_image_parts(images: list[str] | None) -> list[dict[str, Any]]:
    """Return the parts of a chat message for image files in base64; their type is unknown."""
    return [make_image_part("image/*", data) for data in images or ()]


class OllamaMessage(RequestBody):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_name: Annotated[str | None, Field(max_length=256)] = None
    tool_call_id: str | None = None
    images: Images | None = None


class OllamaChatRequest(OllamaRequest):
    """Body of POST /api/chat."""

    messages: (
        Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None
    ) = None
    tools: Tools | None = None

    @property
    def chat_request(self) -> ChatRequest:
        """The equivalent chat request."""
        tools = {"tools": [tool.template_dict for tool in self.tools]} if self.tools else {}
        return self.make_chat_request(messages=self._make_messages(), **tools)

    def _make_messages(self) -> list[dict[str, Any]]:
        """Convert the messages; calls get ids, and results those of the calls before them."""
        messages, open_calls, num_calls = [], list[tuple[str, str]](), 0
        for message in self.messages or ():
            content = make_parts(message.content or "", make_image_parts(message.images))
            chat: dict[str, Any] = {"role": message.role, "content": content}
            if message.thinking:
                chat["reasoning_content"] = message.thinking
            if message.tool_calls:
                calls = [
                    call.make_chat_call(i) for i, call in enumerate(message.tool_calls, num_calls)
                ]
                open_calls = [(call["function"]["name"], call["id"]) for call in calls]
                num_calls += len(calls)
                chat["tool_calls"] = calls
            if message.role == "tool":
                call_id = message.tool_call_id or _take_call(open_calls, message.tool_name)
                chat["tool_call_id"] = call_id
                chat |= {"name": message.tool_name} if message.tool_name else {}
            messages.append(chat)
        return messages


def _take_call(open_calls: list[tuple[str, str]], name: str | None) -> str:
    """Remove the first open call of a function, or of any, and return its id."""
    index = next((i for i, call in enumerate(open_calls) if name in (None, call[0])), None)
    return f"call_{name}" if index is None else open_calls.pop(index)[1]


class OllamaGenerateRequest(OllamaRequest):
    """Body of POST /api/generate."""

    prompt: str = ""
    system: str | None = None
    context: (  # tokens before the prompt, as an earlier reply returned them
        Annotated[list[Annotated[int, Field(ge=0)]], Field(fail_fast=True)] | None
    ) = None
    raw: bool | None = None
    suffix: EmptyText | None = None
    template: EmptyText | None = None
    images: Images | None = None

    @model_validator(mode="after")
    def _check_raw(self) -> OllamaGenerateRequest:
        if self.raw and (self.format or self.system or self.think is not None or self.images):
            raise ValueError("raw: not with format, system, think or images")
        return self

    @model_validator(mode="after")
    def _check_context(self) -> OllamaGenerateRequest:
        if self.context and self.images:  # the prompt of a context is token ids
            raise ValueError("context: not with images; send earlier messages to /api/chat")
        return self

    @property
    def params(self) -> SamplingParams:
        """The equivalent completion request of a raw prompt, else chat request."""
        if self.raw:
            fields = self.sampling_fields | {"prompt": self.prompt}
            if self.logprobs:
                fields["logprobs"] = self.top_logprobs or 0
            return CompletionRequest.model_validate(fields)
        content = make_parts(self.prompt, make_image_parts(self.images))
        messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return self.make_chat_request(messages=messages)


# ---- replies


class LineWriter(ResponseWriter):
    """Writes one choice as lines of JSON."""

    media_type = "application/x-ndjson"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._steps: list[Step] = []

    @classmethod
    def describe_load(cls, model: str) -> dict[str, Any]:
        """Return the reply to a request that only loads the model."""
        end = {"done": True, "done_reason": "load"}
        return make_header(model) | cls.make_content([]) | end

    def write_all(self, steps_by_choice: Sequence[Sequence[Step]]) -> dict[str, Any]:
        parts = [part for step in steps_by_choice[0] for part in self._add_step(step)]
        parts += [part for index in self.list_unfinished() for part in self.parse_step(index, None)]
        return self._make_line(parts, steps_by_choice[0]) | self._make_end()

    def write_step(self, index: int, step: Step | None) -> str:
        parts = self.parse_step(index, None) if step is None else self._add_step(step)
        steps = [] if step is None else [step]
        if not parts and (self.num_logprobs is None or not steps):
            return ""
        return format_json(self._make_line(parts, steps) | {"done": False}) + "\n"

    def write_end(self) -> str:
        lines = "".join(self.write_step(index, None) for index in self.list_unfinished())
        return lines + format_json(self._make_line([], []) | self._make_end()) + "\n"

    def write_error(self, body: Mapping[str, Any]) -> str:
        return format_stream_error(OLLAMA_PATH, body)

    @staticmethod
    @abstractmethod
    def make_content(parts: Sequence[OutputPart]) -> dict[str, Any]:
        """Return the fields of a line that hold the reply."""

    def _add_step(self, step: Step) -> list[OutputPart]:
        self._steps.append(step)
        return self.parse_step(0, step)

    def _make_line(self, parts: Sequence[OutputPart], steps: Iterable[Step]) -> dict[str, Any]:
        line = make_header(self.model) | self.make_content(parts)
        if self.num_logprobs is not None:
            line["logprobs"] = [
                self._make_logprob(step.token, step.logprob)
                | {"top_logprobs": [self._make_logprob(*pair) for pair in step.likeliest]}
                for step in steps
            ]
        return line

    def _make_logprob(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": str(self.tokenizer.decode([token])), "logprob": clamp_logprob(logprob)}

    def _make_end(self) -> dict[str, Any]:
        [usage], end, start = self.reply.usages, time.monotonic(), self.reply.start_time
        first = self.reply.first_step_time or end
        return {
            "done": True,
            "done_reason": find_finish_reason(self._steps),
            "total_duration": to_ns(end - start),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": to_ns(first - start),
            "eval_count": usage.completion_tokens,
            "eval_duration": to_ns(end - first),
        }


def to_ns(seconds: float) -> int:
    return int(1e9 * seconds)


def join_parts(parts: Iterable[OutputPart], part_type: type[ContentPart | ReasoningPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, part_type))


class ChatLineWriter(LineWriter):
    """Writes the lines of /api/chat."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._num_calls = 0

    def _make_line(self, parts: Sequence[OutputPart], steps: Iterable[Step]) -> dict[str, Any]:
        line = super()._make_line(parts, steps)
        for call in line["message"].get("tool_calls", ()):
            call["id"] = f"call_{secrets.token_hex(12)}"
            call["function"]["index"] = self._num_calls
            self._num_calls += 1
        return line

    @staticmethod
    def make_content(parts: Sequence[OutputPart]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": join_parts(parts, ContentPart)}
        if thinking := join_parts(parts, ReasoningPart):
            message["thinking"] = thinking
        if calls := [part for part in parts if isinstance(part, CallPart)]:
            message["tool_calls"] = [
                {"function": {"name": call.name, "arguments": parse_arguments(call)}}
                for call in calls
            ]
        return {"message": message}


class GenerateLineWriter(LineWriter):
    """Writes the lines of /api/generate; the last has the tokens of prompt and reply."""

    @staticmethod
    def make_content(parts: Sequence[OutputPart]) -> dict[str, Any]:
        thinking = join_parts(parts, ReasoningPart)
        content = {"response": join_parts(parts, ContentPart)}
        return content | ({"thinking": thinking} if thinking else {})

    def _make_end(self) -> dict[str, Any]:
        [prompt] = self.reply.prompts
        return super()._make_end() | {"context": [*prompt, *(step.token for step in self._steps)]}


# ---- the model


def make_header(model: str) -> dict[str, str]:
    """Return the fields that every reply begins with."""
    return {"model": model, "created_at": datetime.now(UTC).isoformat()}


def describe_details(service: Service, name: str) -> dict[str, Any]:
    """Return the model's family, its number of parameters and their formats."""
    model = service.engine.model
    count = sum(weight.numel() for _, weight in named_weights(model))
    family = model.config.model_type
    return {
        "parent_model": "" if name == service.model else service.model,
        "family": family,
        "families": [family],
        "parameter_size": f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M",
        "quantization_level": _find_main_format(model),
    }


def _find_main_format(model: Any) -> str:
    """Return the format of most values: that of codes, or a dtype."""
    counts = Counter[str]()
    for _, weight in named_weights(model):
        name = weight.matrix.format if isinstance(weight, PackedWeight) else str(weight.dtype)
        counts[name.removeprefix("torch.")] += weight.numel()
    return counts.most_common(1)[0][0]


def describe_models(service: Service) -> list[dict[str, Any]]:
    """Return what lists say of the model, alone and with each adapter."""
    nbytes = sum(count_stored_nbytes(weight) for _, weight in named_weights(service.engine.model))
    models = [_describe_model(service, service.model, nbytes, service.model_digest)]
    for name, adapter in service.engine.adapters.items():
        digest = sha256(f"{service.model_digest} {adapter.key}".encode()).hexdigest()
        models.append(_describe_model(service, name, nbytes + adapter.nbytes, digest))
    return models


def _describe_model(service: Service, name: str, nbytes: int, digest: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "size": nbytes,
        "digest": digest,
        "details": describe_details(service, name),
    }


def describe_running(service: Service) -> list[dict[str, Any]]:
    """Return what /api/ps says of all models: they are never unloaded."""
    device = service.engine.model.device.type
    return [
        description
        | {
            "expires_at": datetime.max.replace(tzinfo=UTC).isoformat(),
            "size_vram": 0 if device == "cpu" else description["size"],
            "context_length": service.engine.stop_conditions.max_context,
        }
        for description in describe_models(service)
    ]


def describe_capabilities(service: Service, name: str) -> dict[str, Any]:
    """Return what /api/show says of a model."""
    template = getattr(service.engine.tokenizer, "chat_template", None)
    capabilities = ["completion"]
    capabilities += ["embedding"] if service.declared_pooling.pooling is not None else []
    capabilities += ["tools"] if service.takes_tools else []
    capabilities += ["vision"] if service.engine.vision_model is not None else []
    capabilities += ["thinking"] if service.has_template_variable(TEMPLATE_OPTION) else []
    details = describe_details(service, name)
    family, context = details["family"], service.engine.stop_conditions.max_context
    return {
        "modified_at": datetime.fromtimestamp(service.created, UTC).isoformat(),
        "template": str(template or ""),
        "details": details,
        "model_info": {"general.architecture": family, f"{family}.context_length": context},
        "capabilities": capabilities,
    }

"""Request bodies of OpenAI's API, validated by pydantic; unknown fields are rejected by name."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from kvant.generation import Grammar, Messages
from kvant.server.content import (
    MAX_FIELDS,
    MessagePart,
    RequestBody,
    check_num_fields,
    join_text,
)

MAX_MESSAGES = 4096
MAX_STOPS = 16
MAX_BIASES = 1024
MAX_CONTENT_PARTS = 256  # per message
MAX_PROMPTS = 128
MAX_TOOLS = 128
MAX_FORCED_CALLS = 8  # per reply, under tool_choice "required"
MAX_SCHEMA_CHARACTERS = 64 << 10  # of one schema, or of all that a grammar is made of
MAX_TOOLS_CHARACTERS = 512 << 10  # with their descriptions: agents send about 100 KiB
# The fields that are keyword arguments of `Engine.submit`, under the same names.
ENGINE_FIELDS = {"top_p", "min_p", "seed", "stop", "n"}
ENGINE_FIELDS |= {"repetition_penalty", "presence_penalty", "frequency_penalty"}
# The schema of a function without parameters.
EMPTY_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
TEMPLATE_OPTION = "enable_thinking"  # a variable of chat templates
# Claude Code begins system prompts with this text; a prefix that has it is never shared.
OLLAMA_TAG = ":latest"  # may follow the name of a model
ACCOUNTING_LINE = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
# fail_fast: one error per list, so that a huge invalid list makes no huge response.
TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
Prompts = list[str | list[int]]
PROMPT_LIST = Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)


def check_schema_size(schema: Any) -> Any:
    """Limit the characters of one or several schemas, serialized as JSON."""
    if (size := len(json.dumps(schema))) > MAX_SCHEMA_CHARACTERS:
        raise ValueError(
            f"a schema of {size} characters: at most {MAX_SCHEMA_CHARACTERS} are allowed"
        )
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(check_schema_size)]
FIELD_LIMIT = BeforeValidator(partial(check_num_fields, MAX_FIELDS))
Metadata = Annotated[dict[str, str], FIELD_LIMIT]


class StreamOptions(RequestBody):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class GenerationRequest(RequestBody):
    """Fields of every request that generates text."""

    model: str | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: Metadata | None = None
    # Accepted and ignored:
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None


class SamplingParams(GenerationRequest):
    """Fields of chat requests and completion requests."""

    top_k: Annotated[int | None, Field(ge=-1)] = None  # 0 and -1: no limit, as in vLLM
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            BeforeValidator(partial(check_num_fields, MAX_BIASES)),
        ]
        | None
    ) = None
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 63)] = None
    stop: str | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    n: Annotated[int | None, Field(ge=1)] = None
    ignore_eos: bool = False
    cache_salt: Annotated[str | None, Field(max_length=256)] = None  # restricts prefix sharing

    @property
    def max_new_tokens(self) -> int | None:
        """Limit on generated tokens; None: the server's default."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens to report per token; None: no logprobs at all."""
        return None

    @property
    def grammar(self) -> Grammar | None:
        """Grammar that constrains the reply."""
        return None

    @property
    def is_free_form(self) -> bool:
        """Whether the reply is unconstrained and may contain reasoning and calls."""
        return False

    @property
    def requires_calls(self) -> bool:
        """Whether the reply must be a list of calls."""
        return False

    @property
    def max_calls(self) -> int | None:
        """Limit on the calls of a reply."""
        return None

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        """Callable tools, in the format of chat templates."""
        return []

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def to_engine_options(self) -> dict[str, Any]:
        """Return the keyword arguments of `Engine.submit`."""
        options = self.model_dump(include=ENGINE_FIELDS, exclude_none=True)
        options["temperature"] = 1.0 if self.temperature is None else self.temperature
        if self.top_k is not None and self.top_k > 0:
            options["top_k"] = self.top_k
        if (grammar := self.grammar) is not None:
            options["grammar"] = grammar
        if self.num_logprobs is not None:
            options["logprobs"] = self.num_logprobs
        if self.logit_bias:
            options["logit_bias"] = {
                parse_token_id(token): bias for token, bias in self.logit_bias.items()
            }
        return options | {"ignore_end": self.ignore_eos}


class CompletionRequest(SamplingParams):
    """Body of POST /v1/completions."""

    prompt: (
        str | TokenIds | Annotated[list[str], PROMPT_LIST] | Annotated[list[TokenIds], PROMPT_LIST]
    )
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Prompts:
        """The prompts as a list, also if there is only one."""
        return list_prompts(self.prompt)


def list_prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> Prompts:
    """Return a list of prompts, from one or several texts or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else [*prompt]


class ToolCallFunction(RequestBody):
    name: str
    arguments: str
    parsed_arguments: Any = None  # sent back by OpenAI's client; ignored


class ToolCall(RequestBody):
    """A call that the model made earlier in the conversation."""

    id: str
    type: Literal["function"] = "function"
    function: ToolCallFunction
    index: int | None = None

    @property
    def template_dict(self) -> dict[str, Any]:
        """The call in the format of chat templates, with parsed arguments if they are JSON."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class ChatMessage(RequestBody):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str
        | Annotated[list[MessagePart], Field(max_length=MAX_CONTENT_PARTS, fail_fast=True)]
        | None
    ) = None
    name: Annotated[str | None, Field(max_length=256)] = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    parsed: Any = None  # this and the rest: fields of replies, which clients send back
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _check_message(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls with role {self.role}: only role assistant may have them")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id: required with role tool, and only there")
        if self.content is None and not self.tool_calls:
            raise ValueError("content: required, except in an assistant message with tool_calls")
        if self.has_images and self.role != "user":
            raise ValueError(f"content: an image with role {self.role}: only role user may have it")
        return self

    @property
    def has_images(self) -> bool:
        parts = self.content if isinstance(self.content, list) else []
        return any(part.type == "image_url" for part in parts)

    @property
    def _template_content(self) -> str | list[dict[str, Any]]:
        """One text, or with images a list of parts."""
        if isinstance(self.content, list) and self.has_images:
            return [part.template_dict for part in self.content]
        return join_text(self.content)

    @property
    def template_dict(self) -> dict[str, Any]:
        """The message in the format of chat templates."""
        calls = [call.template_dict for call in self.tool_calls or ()]
        optional = {
            "name": self.name,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": self._template_content}
        return message | {name: value for name, value in optional.items() if value is not None}


Conversation = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
]


class FunctionDefinition(RequestBody):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(RequestBody):
    type: Literal["function"]
    function: FunctionDefinition

    @property
    def template_dict(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude={"strict"}, exclude_none=True)
        return {"type": "function", "function": {"parameters": EMPTY_PARAMETERS} | function}


def check_tools_size(tools: list[Any]) -> list[Any]:
    """Limit the characters of all tools, which become part of the prompt."""
    if (size := len(json.dumps([tool.template_dict for tool in tools]))) > MAX_TOOLS_CHARACTERS:
        raise ValueError(f"tools of {size} characters: at most {MAX_TOOLS_CHARACTERS} are allowed")
    return tools


Tools = Annotated[
    list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True), AfterValidator(check_tools_size)
]


class FunctionName(RequestBody):
    name: str


class NamedToolChoice(RequestBody):
    type: Literal["function"]
    function: FunctionName


class TextFormat(RequestBody):
    type: Literal["text"]


class JsonObjectFormat(RequestBody):
    type: Literal["json_object"]


class JsonSchema(RequestBody):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class JsonSchemaFormat(RequestBody):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")
]


class ChatRequest(SamplingParams):
    """Body of POST /v1/chat/completions."""

    messages: Conversation
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: ResponseFormat | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, bool | int | float | str], FIELD_LIMIT] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = None
    store: Literal[False] | None = None
    # Not supported here, but some clients send an explicit null.
    reasoning_effort: None = None
    verbosity: None = None
    prompt_cache_retention: None = None
    prediction: None = None
    audio: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_request(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: logprobs is needed with it")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice: there are no tools")
        if isinstance(self.tool_choice, NamedToolChoice):
            name = self.tool_choice.function.name
            if name not in {function.name for function in self.callable_functions}:
                raise ValueError(f"tool_choice: {name!r} is none of the tools")
        check_schema_size([function.parameters for function in self.required_functions])
        if self.requires_json and self.callable_functions:
            raise ValueError("response_format with tools: allowed only with tool_choice none")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def requires_json(self) -> bool:
        """Whether the reply must be JSON."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def callable_functions(self) -> list[FunctionDefinition]:
        """Functions that the reply may call."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools or ()]

    @property
    def required_functions(self) -> list[FunctionDefinition]:
        """Functions of which the reply must call at least one; empty if it need not call any."""
        if isinstance(self.tool_choice, NamedToolChoice):
            name = self.tool_choice.function.name
            return [function for function in self.callable_functions if function.name == name][:1]
        return self.callable_functions if self.tool_choice == "required" else []

    @property
    def requires_calls(self) -> bool:
        return bool(self.required_functions)

    @property
    def max_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False else None

    @property
    def grammar(self) -> Grammar | None:
        if self.required_functions:
            schemas = {
                function.name: function.parameters or EMPTY_PARAMETERS
                for function in self.required_functions
            }
            is_named = isinstance(self.tool_choice, NamedToolChoice)
            return Grammar.calls(schemas, 1 if is_named else self.max_calls or MAX_FORCED_CALLS)
        if isinstance(self.response_format, JsonSchemaFormat):
            return Grammar.json(self.response_format.json_schema.schema_)
        return Grammar.json() if self.requires_json else None

    @property
    def is_free_form(self) -> bool:
        return not (self.required_functions or self.requires_json)

    @property
    def template_tools(self) -> list[dict[str, Any]]:
        return [tool.template_dict for tool in self.tools or () if self.callable_functions]

    @property
    def template_messages(self) -> Messages:
        """The conversation, tools and options in the format of chat templates."""
        messages = [message.template_dict for message in self.messages]
        return Messages(messages, self.template_tools, self.chat_template_kwargs or {})


class TokenizeRequest(RequestBody):
    """Body of POST /tokenize."""

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    tools: Tools | None = None


def parse_token_id(name: str) -> int:
    """Read a key of `logit_bias`: a token id in decimal digits, without leading zeros."""
    if not re.fullmatch("0|[1-9][0-9]{0,8}", name):
        raise ValueError(
            f'logit_bias: {name!r} is not a token id: use decimal digits, such as "17"'
        )
    return int(name)

"""What clients ask for, in OpenAI's words; a field that is not here is refused by its name."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvant.generation import Grammar, Messages

MOST_FIELDS = 64
MOST_MESSAGES = 4096
MOST_STOPS = 16
MOST_BIASES = 1024
MOST_PARTS = 256  # of a message
MOST_PROMPTS = 128
MOST_TOOLS = 128
MOST_CALLS = 8  # of one reply, where it must call
LARGEST_SCHEMA = 64 << 10  # characters
# The schema of a function without parameters.
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
# Of a list that is wrong the first wrong item is told, and no other is looked at.
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
Several = Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)


def at_most(count: int, given: Any) -> Any:
    """A mapping, counted before anything in it is looked at."""
    if isinstance(given, dict) and len(given) > count:
        raise ValueError(f"{len(given)} fields: {count} at most")
    return given


def bounded(schema: Any) -> Any:
    """A schema, or several of them, of so many characters at most."""
    if (size := len(json.dumps(schema))) > LARGEST_SCHEMA:
        raise ValueError(f"a schema of {size} characters: {LARGEST_SCHEMA} at most")
    return schema


Schema = Annotated[dict[str, Any], AfterValidator(bounded)]
FEW = BeforeValidator(partial(at_most, MOST_FIELDS))
Metadata = Annotated[dict[str, str], FEW]


class Asked(BaseModel):
    """JSON as it is: no text for a number, and nothing that nobody knows."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, given: Any) -> Any:
        return at_most(MOST_FIELDS, given)


class StreamOptions(Asked):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Drawing(Asked):
    """What all requests for text have in common."""

    model: str | None = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1)] = None  # 0 and -1, as vLLM has it: all
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]],
            BeforeValidator(partial(at_most, MOST_BIASES)),
        ]
        | None
    ) = None
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 63)] = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    n: Annotated[int | None, Field(ge=1)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    cache_salt: Annotated[str | None, Field(max_length=256)] = None  # shares prefixes within it
    user: str | None = None  # these are taken, and not used
    metadata: Metadata | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    @property
    def most(self) -> int | None:
        """Tokens that it asks for at most."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many likely tokens it wants beside each; None: no logprobs at all."""
        return None

    @property
    def grammar(self) -> Grammar | None:
        """What a reply may be."""
        return None

    @property
    def is_parsed(self) -> bool:
        """Does a model write it in words of its own, with thoughts and calls?"""
        return False

    @property
    def must_call(self) -> bool:
        """Is it a list of calls?"""
        return False

    @property
    def most_calls(self) -> int | None:
        """Calls that a reply may have."""
        return None

    @property
    def tools_shown(self) -> list[dict[str, Any]]:
        """Tools that may be called, as a template knows them."""
        return []

    @property
    def tells_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self) -> dict[str, Any]:
        """As an engine is asked."""
        given = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k if self.top_k is not None and self.top_k > 0 else None,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "seed": self.seed,
            "stop": self.stop,
            "n": self.n,
            "grammar": self.grammar,
            "logprobs": self.likeliest,
        }
        found: dict[str, Any] = {name: one for name, one in given.items() if one is not None}
        if self.logit_bias:
            found["logit_bias"] = {token_of(one): by for one, by in self.logit_bias.items()}
        return found | {"ignore_end": self.ignore_eos}


class Completion(Drawing):
    """POST /v1/completions"""

    prompt: str | Tokens | Annotated[list[str], Several] | Annotated[list[Tokens], Several]
    logprobs: Annotated[int | None, Field(ge=0, le=20)] = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        first = self.prompt[0]
        return [self.prompt] if isinstance(first, int) else [*self.prompt]  # type: ignore[list-item]


class TextPart(Asked):
    type: Literal["text"]
    text: str


class Called(Asked):
    name: str
    arguments: str
    parsed_arguments: Any = None  # beside them, as OpenAI's client keeps them: not used


class ToolCall(Asked):
    """What a model asked for, as clients send it back."""

    id: str
    type: Literal["function"] = "function"
    function: Called
    index: int | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """Templates know the arguments as what the JSON says."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        told = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": told}


class Message(Asked):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: (
        str | Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)] | None
    ) = None
    name: Annotated[str | None, Field(max_length=256)] = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    parsed: Any = None  # as replies have it, which clients send back
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Message:
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"tool_calls of {self.role}: only an assistant calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            raise ValueError("tool_call_id: a message of a tool needs it, and no other one has it")
        if self.content is None and not self.tool_calls:
            raise ValueError("content: needed, but where an assistant calls tools")
        return self

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    @property
    def shown(self) -> dict[str, Any]:
        """As a template knows it."""
        calls = [call.shown for call in self.tool_calls or ()]
        beside = {
            "name": self.name,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content,
        }
        role = "system" if self.role == "developer" else self.role
        told = {"role": role, "content": self.text}
        return told | {name: one for name, one in beside.items() if one is not None}


Conversation = Annotated[
    list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)
]


class Function(Asked):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(Asked):
    type: Literal["function"]
    function: Function

    @property
    def shown(self) -> dict[str, Any]:
        told = self.function.model_dump(exclude={"strict"}, exclude_none=True)
        return {"type": "function", "function": {"parameters": NOTHING} | told}


def together(tools: list[Any]) -> list[Any]:
    bounded([tool.shown for tool in tools])
    return tools


Tools = Annotated[
    list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True), AfterValidator(together)
]


class Named(Asked):
    name: str


class OneTool(Asked):
    type: Literal["function"]
    function: Named


class TextFormat(Asked):
    type: Literal["text"]


class ObjectFormat(Asked):
    type: Literal["json_object"]


class JsonSchema(Asked):
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    strict: bool | None = None


class SchemaFormat(Asked):
    type: Literal["json_schema"]
    json_schema: JsonSchema


Format = Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")]


class Chat(Drawing):
    """POST /v1/chat/completions"""

    messages: Conversation
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: Format | None = None
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | OneTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Annotated[dict[str, bool | int | float | str], FEW] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1, fail_fast=True)] | None = None
    store: Literal[False] | None = None
    # What OpenAI has and this server has not, as clients send it who do not ask for it.
    reasoning_effort: None = None
    verbosity: None = None
    prompt_cache_retention: None = None
    prediction: None = None
    audio: None = None
    web_search_options: None = None
    functions: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _fits(self) -> Chat:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: logprobs is needed with it")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice: there are no tools")
        if isinstance(self.tool_choice, OneTool):
            name, known = self.tool_choice.function.name, {one.name for one in self.offered}
            if name not in known:
                raise ValueError(f"tool_choice: {name!r} is none of the tools")
        if self.formats and self.offered:
            raise ValueError("response_format beside tools: only with tool_choice none")
        return self

    @property
    def most(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def formats(self) -> bool:
        """Is a reply to be JSON?"""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def offered(self) -> list[Function]:
        """Those that may be called."""
        return [] if self.tool_choice == "none" else [one.function for one in self.tools or ()]

    @property
    def forced(self) -> list[Function]:
        """Those of which one at least must be called."""
        if isinstance(self.tool_choice, OneTool):
            return [one for one in self.offered if one.name == self.tool_choice.function.name][:1]
        return self.offered if self.tool_choice == "required" else []

    @property
    def must_call(self) -> bool:
        return bool(self.forced)

    @property
    def most_calls(self) -> int | None:
        return 1 if self.parallel_tool_calls is False else None

    @property
    def grammar(self) -> Grammar | None:
        if self.forced:
            functions = {one.name: one.parameters or NOTHING for one in self.forced}
            one = isinstance(self.tool_choice, OneTool)
            return Grammar.calls(functions, 1 if one else self.most_calls or MOST_CALLS)
        if isinstance(self.response_format, SchemaFormat):
            return Grammar.json(self.response_format.json_schema.schema_)
        return Grammar.json() if self.formats else None

    @property
    def is_parsed(self) -> bool:
        return not (self.forced or self.formats)

    @property
    def tools_shown(self) -> list[dict[str, Any]]:
        return [one.shown for one in self.tools or () if self.offered]

    @property
    def shown(self) -> Messages:
        """As a template knows it."""
        messages = [message.shown for message in self.messages]
        return Messages(messages, self.tools_shown, self.chat_template_kwargs or {})


class Tokenize(Asked):
    """POST /tokenize"""

    model: str | None = None
    prompt: str | None = None
    messages: Conversation | None = None
    tools: Tools | None = None


def token_of(name: str) -> int:
    """Read a key of `logit_bias`: a token id in decimal digits, without leading zeros."""
    if not re.fullmatch("0|[1-9][0-9]{0,8}", name):
        raise ValueError(
            f'logit_bias: {name!r} is no token id; a number in digits 0 to 9, such as "17"'
        )
    return int(name)

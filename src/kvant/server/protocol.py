"""What clients ask for, in OpenAI's words; a field that is not here is refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MOST_FIELDS = 64
MOST_MESSAGES = 4096
MOST_STOPS = 16
MOST_BIASES = 1024
MOST_PARTS = 256  # of a message
MOST_PROMPTS = 128
# Of a list that is wrong the first wrong item is told, and no other is looked at.
Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]
Several = Field(min_length=1, max_length=MOST_PROMPTS, fail_fast=True)


class Asked(BaseModel):
    """JSON as it is: no text for a number, and nothing that nobody knows."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few(cls, given: Any) -> Any:
        if isinstance(given, dict) and len(given) > MOST_FIELDS:
            raise ValueError(f"{len(given)} fields: {MOST_FIELDS} at most")
        return given


class StreamOptions(Asked):
    include_usage: bool = False


class TextFormat(Asked):
    type: Literal["text"]


class Drawing(Asked):
    """What all requests for text have in common."""

    model: str | None = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    top_k: Annotated[int | None, Field(ge=-1)] = None  # 0 and -1, as vLLM has it: all
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    repetition_penalty: Annotated[float | None, Field(gt=0)] = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2)] = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES)
        ]
        | None
    ) = None
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 63)] = None
    stop: str | Annotated[list[str], Field(max_length=MOST_STOPS, fail_fast=True)] | None = None
    n: Annotated[int | None, Field(ge=1)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    user: str | None = None  # taken, and not used

    @property
    def most(self) -> int | None:
        """Tokens that it asks for at most."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many likely tokens it wants beside each; None: no logprobs at all."""
        return None

    @property
    def tells_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

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


class Message(Asked):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(max_length=MOST_PARTS, fail_fast=True)]
    name: None = None
    refusal: None = None  # as replies have it, which clients send back

    @property
    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    @property
    def shown(self) -> dict[str, str]:
        """As a template knows it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.text}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]


class Chat(Drawing):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    response_format: TextFormat | None = None

    @property
    def most(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likeliest(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class Tokenize(Asked):
    """POST /tokenize"""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None


def token_of(name: str) -> int:
    """The keys of `logit_bias` are numbers as text."""
    if not name.isdecimal() or len(name) > 9:
        raise ValueError(f"logit_bias: {name!r} is no token id")
    return int(name)

"""Conversations as tokens, and as JSON in the header of a cache file.

A prompt becomes tokens by the model's chat template, or as one continuous text. It always holds
the whole conversation; reusing the cached part is the prefiller's task.

Files are not trusted: missing fields, another model or values that do not fit together raise an
error with the file's name, before anything changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvant.errors import CacheError, CacheFileError, ContextError, PromptError
from kvant.generation.decoder import count_shared_prefix
from kvant.generation.tools import (
    Message,
    convert_tools_to_text,
    has_tools,
    supports_system_message,
    supports_tools,
)

CHARACTERS_PER_TOKEN = 4  # initial estimate
MAX_CUT_TOKENS = 64  # tokens that cutting a text may add, compared with the uncut text


@dataclass(frozen=True)
class Turn:
    """A message, its reply, and all tokens up to the end of the reply.

        0            shared          begin         end
        |-- last turn --|--- prompt ---|--- reply ---|
                        |---------- tokens ----------|

    The first `shared` tokens are those of the previous turn: a template may render past messages
    in another way than new ones.
    """

    message: str
    reply: str
    shared: int
    tokens: tuple[int, ...]
    begin: int

    @property
    def end(self) -> int:
        return self.shared + len(self.tokens)


def join_turns(turns: Sequence[Turn]) -> list[int]:
    """Return all tokens of a conversation up to the end of its last turn."""
    tokens: list[int] = []
    for turn in turns:
        tokens[turn.shared :] = turn.tokens
    return tokens


class PromptFormat:
    """Renders a conversation as tokens.

    Messages have roles, which the chat template renders. Without a template they are one continuous
    text: a message follows the previous tokens directly.
    """

    def __init__(self, tokenizer: Any, system: str | None = None, template: bool = True) -> None:
        self.tokenizer = tokenizer
        self.system = system
        self.uses_template = template and getattr(tokenizer, "chat_template", None) is not None

    def make_prompt(
        self, turns: Sequence[Turn], previous_tokens: Sequence[int], message: str
    ) -> list[int]:
        """Return all tokens before the reply to `message`."""
        if self.uses_template:
            return encode_messages(self.tokenizer, Messages(self._make_messages(turns, message)))
        if previous_tokens:
            return [*previous_tokens, *self.tokenizer.encode(message, add_special_tokens=False)]
        return list(self.tokenizer.encode((self.system or "") + message))

    def find_branch_points(
        self, turns: Sequence[Turn], message: str, prompt: Sequence[int]
    ) -> list[int]:
        """Return the lengths of a prompt at which other conversations may differ."""
        if self.uses_template:
            messages = Messages(self._make_messages(turns, message))
            return find_branch_points(self.tokenizer, messages, prompt)
        return [turns[-1].end] if turns else []

    def _make_messages(self, turns: Sequence[Turn], message: str) -> list[dict[str, str]]:
        messages = [] if self.system is None else [("system", self.system)]
        for turn in turns:
            messages += [("user", turn.message), ("assistant", turn.reply)]
        return [{"role": role, "content": text} for role, text in (*messages, ("user", message))]


@dataclass(frozen=True)
class Messages:
    """Messages with roles, and the tools and options of the chat template.

    >>> tokenizer.chat_template = "{{ messages[0].content }}"  # chat models have their own
    >>> prompt = kvant.Messages([{"role": "user", "content": "import "}])
    >>> steps = kvant.generate(model, tokenizer, prompt, max_new_tokens=4, ignore_end=True)
    >>> len(list(steps))
    4
    """

    messages: Sequence[Message]
    tools: Sequence[Any] = ()  # functions that the model may call, as JSON or in Python
    options: Mapping[str, Any] = field(default_factory=dict)  # of the template: enable_thinking

    def __post_init__(self) -> None:
        reserved = signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        if invalid := sorted(set(self.options) & set(reserved)):
            raise PromptError(f"{invalid[0]!r} is not an option of a chat template")

    def adapt_to(self, tokenizer: Any) -> Messages:
        """Return these messages with tools as text, if the template does not support tools."""
        if not (self.tools or has_tools(self.messages)):
            return self
        if supports_tools(tokenizer, self.messages, self.options):
            return self
        system = supports_system_message(tokenizer, self.options)
        plain = convert_tools_to_text(self.messages, self.tools, system=system)
        return replace(self, messages=plain, tools=())

    def render_text(self, tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
        """Render messages with the chat template and its options."""
        more = dict(self.options) | ({"tools": list(self.tools)} if self.tools else {})
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **more, **options)
        return text


def encode_text(
    tokenizer: Any, text: str, limit: int | None = None, *, add_special_tokens: bool = True
) -> list[int]:
    """Encode a prompt; raise if it is not valid Unicode, early if it far exceeds `limit` tokens.

    A tokenizer needs hundreds of bytes per token while it works. So growing slices of a long text
    are encoded, each twice as long, until one exceeds the limit.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt has U+{ord(text[error.start]):04X} at character {error.start}: half of a "
            "surrogate pair is no Unicode text; send the character itself, or both halves"
        ) from None
    options = {} if add_special_tokens else {"add_special_tokens": False}
    size = len(text) if limit is None else CHARACTERS_PER_TOKEN * (limit + MAX_CUT_TOKENS)
    while size < len(text):
        count = len(tokenizer.encode(text[:size], **options))
        if limit is not None and count - MAX_CUT_TOKENS >= limit:
            raise ContextError(
                f"a prompt of {len(text)} characters: its first {size} have {limit} tokens or "
                "more, which is the limit; shorten it, or keep a window (window=N in the spec) "
                "and allow a longer context"
            )
        size *= 2
    return list(tokenizer.encode(text, **options))


def encode_messages(
    tokenizer: Any, conversation: Messages, max_context: int | None = None
) -> list[int]:
    """Return the tokens before the reply to the last message."""
    if getattr(tokenizer, "chat_template", None) is None:
        if conversation.tools:
            raise PromptError(
                "tools for a tokenizer without a chat template: describe them in one text"
            )
        raise PromptError("messages for a tokenizer without a chat template: give one text")
    try:
        adapted = conversation.adapt_to(tokenizer)
        text = adapted.render_text(tokenizer, adapted.messages, add_generation_prompt=True)
    except PromptError:  # content that cannot be rendered as text
        raise
    except Exception as error:  # a template is a program and may raise anything
        raise PromptError(f"the chat template of the model refuses this: {error}") from error
    return encode_text(tokenizer, text, max_context, add_special_tokens=False)


def find_branch_points(tokenizer: Any, prompt: Prompt, tokens: Sequence[int]) -> list[int]:
    """Return the lengths after the system messages and before the last message of a prompt.

    Other prompts may differ there. A prompt without messages has none.
    """
    conversation = _parse_messages(prompt)
    if conversation is None:
        return []
    conversation = conversation.adapt_to(tokenizer)
    messages = conversation.messages
    roles = [message.get("role") for message in messages]
    num_system = next((i for i, role in enumerate(roles) if role != "system"), 0)
    branch_points = set()
    for head in (messages[:num_system], messages[:-1]):
        if head:
            with suppress(Exception):  # a template may reject a part of the messages
                ids = tokenizer.encode(
                    conversation.render_text(tokenizer, head), add_special_tokens=False
                )
                branch_points.add(count_shared_prefix(ids, tokens))
    return sorted(branch_points)


ONE_PROMPT_MESSAGE = (
    "one prompt at a time is generated; for several, "
    "[list(kvant.generate(model, tokenizer, one)) for one in prompts]"
)
Prompt = str | Sequence[int] | Tensor | Sequence[Message] | Messages


def encode_prompt(tokenizer: Any, prompt: Prompt, max_context: int | None = None) -> list[int]:
    """Return the tokens of a prompt: text, token ids [T] or [1, T], or messages."""
    if isinstance(prompt, str):
        return encode_text(tokenizer, prompt, max_context)
    if (messages := _parse_messages(prompt)) is not None:
        return encode_messages(tokenizer, messages, max_context)
    if isinstance(prompt, Mapping):
        raise PromptError("a mapping is no prompt: from a tokenizer's output give ['input_ids']")
    parts: Any = prompt if isinstance(prompt, list | tuple) else [prompt]
    if any(isinstance(part, str) or (len(parts) > 1 and _is_batch(part)) for part in parts):
        raise PromptError(ONE_PROMPT_MESSAGE)
    return _parse_token_ids(prompt)


def _parse_messages(prompt: Any) -> Messages | None:
    if isinstance(prompt, list | tuple) and prompt:
        is_messages = all(isinstance(message, Mapping) for message in prompt)
        return Messages(prompt) if is_messages else None
    return prompt if isinstance(prompt, Messages) else None


def _is_batch(part: Any) -> bool:
    return isinstance(part, list | tuple) or (isinstance(part, Tensor) and part.ndim > 0)


def _parse_token_ids(prompt: Any) -> list[int]:
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PromptError(
            f"{type(prompt).__name__} is no prompt: text, token ids or messages are needed: {error}"
        ) from None
    if ids.numel() and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
        raise PromptError(f"a prompt of {ids.dtype}: token ids are whole numbers")
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1:
        raise PromptError(
            ONE_PROMPT_MESSAGE if ids.ndim == 2 else f"token ids {list(ids.shape)}: [T] or [1, T]"
        )
    return [int(token) for token in ids.tolist()]


HEADER_KEY = "session"


@dataclass(frozen=True)
class Transcript:
    """All turns of a conversation, and how they were rendered."""

    turns: tuple[Turn, ...]
    system: str | None
    template: bool
    model: str | None  # fingerprint of the model, if known

    def to_header(self) -> dict[str, Any]:
        """Return the transcript as JSON for the header of a file."""
        return {HEADER_KEY: asdict(self)}

    @classmethod
    def from_header(cls, path: str | os.PathLike[str], header: Mapping[str, Any]) -> Transcript:
        if HEADER_KEY not in header:
            raise CacheFileError(f"{path}: a cache without a conversation: kvant.load reads it")
        with convert_errors(path):
            fields = header[HEADER_KEY]
            turns = [Turn(**turn | {"tokens": tuple(turn["tokens"])}) for turn in fields["turns"]]
            transcript = cls(tuple(turns), fields["system"], fields["template"], fields["model"])
            transcript._check_fields()
        return transcript

    def check_model(self, path: str | os.PathLike[str], model: str | None) -> None:
        if None not in (self.model, model) and self.model != model:
            raise CacheFileError(
                f"{path}: a conversation with another model, or with this one in another dtype: "
                "load the model that wrote it"
            )

    def get_tokens(self, cache_length: int, vocab_size: int | None) -> list[int]:
        """Return all tokens; raise if the cache's length or the vocabulary does not fit."""
        tokens = join_turns(self.turns)
        if cache_length > len(tokens):
            raise ValueError(f"{cache_length} tokens in the cache, {len(tokens)} in the turns")
        if vocab_size is not None and max(tokens, default=0) >= vocab_size:
            raise ValueError(f"token {max(tokens)} for a vocabulary of {vocab_size}")
        return tokens

    def _check_fields(self) -> None:
        if not isinstance(self.template, bool):
            raise ValueError(f"template={self.template!r}: true or false is needed")
        if not all(isinstance(text, str | None) for text in (self.system, self.model)):
            raise ValueError("a system message or a model that is no text")
        previous_end = 0
        for turn in self.turns:
            _check_turn(turn, previous_end)
            previous_end = turn.end


def _check_turn(turn: Turn, previous_end: int) -> None:
    numbers = (turn.shared, turn.begin, *turn.tokens)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a turn whose tokens or counts are not whole numbers from 0 on")
    if not (turn.shared <= previous_end and turn.begin <= turn.end):
        raise ValueError("a turn that does not fit after the previous one")
    if not isinstance(turn.message, str) or not isinstance(turn.reply, str):
        raise ValueError("a turn that is no text")


@contextmanager
def convert_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise errors about the contents of a file as `CacheFileError` with its name."""
    try:
        yield
    except CacheFileError:
        raise
    except (CacheError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CacheFileError(f"{path}: not a conversation to continue: {error}") from error

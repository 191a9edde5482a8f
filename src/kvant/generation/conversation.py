"""A conversation in tokens, and what it says about itself in the file of its memory.

Prompts or messages become tokens by the chat template of a model, or as one text that goes on. What
a model is shown is all of a conversation every time; that the memory holds most of it already is
somebody else's business.

A file is somebody's word: what is missing, of another model or does not fit together is refused
with the file's name, before anything changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvant.errors import CacheError, CacheFileError, ContextError, PromptError
from kvant.generation.prefill import count_shared_prefix
from kvant.generation.tools import Message, has_tools, knows_tools, takes_system, tools_as_text

CHARACTERS_PER_TOKEN = 4  # of a token, as a first guess
MAX_CUT_TOKENS = (
    64  # tokens by which a part of a text may have more than the same part of the whole
)


@dataclass(frozen=True)
class Turn:
    """A message and its reply, and all tokens that the model was shown and said, up to its end.

    Those are the first `shared` tokens of the turn before, and `tokens` behind them: a template
    may lay out what is past in another way than what is new. The reply begins at `begin`.
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
    """All tokens of a conversation, at the end of its last turn."""
    tokens: list[int] = []
    for turn in turns:
        tokens[turn.shared :] = turn.tokens
    return tokens


class PromptFormat(Protocol):
    """How a conversation is shown to a model."""

    system: str | None
    uses_template: bool

    def make_prompt(
        self, turns: Sequence[Turn], previous_tokens: Sequence[int], message: str
    ) -> list[int]:
        """All tokens before the reply to `message`, behind `turns` that took `tokens`."""

    def find_branch_points(
        self, turns: Sequence[Turn], message: str, prompt: Sequence[int]
    ) -> list[int]:
        """The lengths of that prompt at which another conversation may begin to differ."""


class PlainTextFormat:
    """One text: a message stands right behind what was said before it."""

    uses_template = False

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.system = system

    def make_prompt(
        self, turns: Sequence[Turn], previous_tokens: Sequence[int], message: str
    ) -> list[int]:
        if previous_tokens:
            return [*previous_tokens, *self.tokenizer.encode(message, add_special_tokens=False)]
        return list(self.tokenizer.encode((self.system or "") + message))

    def find_branch_points(
        self, turns: Sequence[Turn], message: str, prompt: Sequence[int]
    ) -> list[int]:
        return [turns[-1].end] if turns else []


class ChatTemplateFormat:
    """Messages with roles, laid out as the model learned them."""

    uses_template = True

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.system = system

    def make_prompt(
        self, turns: Sequence[Turn], previous_tokens: Sequence[int], message: str
    ) -> list[int]:
        return encode_messages(self.tokenizer, Messages(self._make_messages(turns, message)))

    def find_branch_points(
        self, turns: Sequence[Turn], message: str, prompt: Sequence[int]
    ) -> list[int]:
        return find_branch_points(
            self.tokenizer, Messages(self._make_messages(turns, message)), prompt
        )

    def _make_messages(self, turns: Sequence[Turn], message: str) -> list[dict[str, str]]:
        said = [] if self.system is None else [("system", self.system)]
        for turn in turns:
            said += [("user", turn.message), ("assistant", turn.reply)]
        return [{"role": role, "content": text} for role, text in (*said, ("user", message))]


@dataclass(frozen=True)
class Messages:
    """Messages with roles, and what a chat template is told beside them.

    >>> tokenizer.chat_template = "{{ messages[0].content }}"  # a chat model brings its own
    >>> asked = kvant.Messages([{"role": "user", "content": "import "}])
    >>> steps = kvant.generate(model, tokenizer, asked, max_new_tokens=4, ignore_end=True)
    >>> len(list(steps))
    4
    """

    messages: Sequence[Message]
    tools: Sequence[Any] = ()  # functions that the model may call, as JSON or in Python
    options: Mapping[str, Any] = field(default_factory=dict)  # of the template: enable_thinking

    def __post_init__(self) -> None:
        taken = signature(PreTrainedTokenizerBase.apply_chat_template).parameters
        if wrong := sorted(set(self.options) & set(taken)):
            raise PromptError(f"{wrong[0]!r} is no option of a template")

    def adapt_to(self, tokenizer: Any) -> Messages:
        """Return these messages as text alone, where the template of a tokenizer knows no tools."""
        if not (self.tools or has_tools(self.messages)):
            return self
        if knows_tools(tokenizer, self.messages, self.options):
            return self
        system = takes_system(tokenizer, self.options)
        plain = tools_as_text(self.messages, self.tools, system=system)
        return replace(self, messages=plain, tools=())

    def render_text(self, tokenizer: Any, messages: Sequence[Message], **options: Any) -> str:
        """Some of the messages as the template of a tokenizer lays them out."""
        told = dict(self.options) | ({"tools": list(self.tools)} if self.tools else {})
        text: str = tokenizer.apply_chat_template(list(messages), tokenize=False, **told, **options)
        return text


def check_unicode(text: str) -> str:
    """Return a prompt as it is; refuse one that is no Unicode text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt has U+{ord(text[error.start]):04X} at character {error.start}: half of a "
            "surrogate pair is no Unicode text; send the character itself, or both halves"
        ) from None
    return text


def encode_text(
    tokenizer: Any, text: str, limit: int | None = None, *, add_special_tokens: bool = True
) -> list[int]:
    """Encode a prompt, and refuse one that has far more than `limit` tokens by its front.

    A tokenizer takes hundreds of bytes a token while it works. So a long text is encoded in slices
    that double, from its front, until that passes the limit.
    """
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
    """The tokens before the reply to the last of these."""
    if getattr(tokenizer, "chat_template", None) is None:
        if conversation.tools:
            raise PromptError(
                "tools for a tokenizer without a chat template: describe them in one text"
            )
        raise PromptError("messages for a tokenizer without a chat template: give one text")
    try:
        shown = conversation.adapt_to(tokenizer)
        text = shown.render_text(tokenizer, shown.messages, add_generation_prompt=True)
    except PromptError:  # of what cannot be shown as text
        raise
    except Exception as error:  # a template is a program of the model's, and may raise anything
        raise PromptError(f"the chat template of the model refuses this: {error}") from error
    return encode_text(tokenizer, check_unicode(text), max_context, add_special_tokens=False)


def find_branch_points(tokenizer: Any, conversation: Messages, prompt: Sequence[int]) -> list[int]:
    """The lengths of a prompt behind what the system says, and before the last message."""
    conversation = conversation.adapt_to(tokenizer)
    messages = conversation.messages
    first = next((i for i, one in enumerate(messages) if one.get("role") != "system"), 0)
    found = set()
    for head in (messages[:first], messages[:-1]):
        if head:
            with suppress(Exception):  # a template may want more messages than these
                ids = tokenizer.encode(
                    conversation.render_text(tokenizer, head), add_special_tokens=False
                )
                found.add(count_shared_prefix(ids, prompt))
    return sorted(found)


def make_prompt_format(
    tokenizer: Any, system: str | None = None, template: bool = True
) -> PromptFormat:
    """By the tokenizer's own template where it has one."""
    templated = template and getattr(tokenizer, "chat_template", None) is not None
    return (ChatTemplateFormat if templated else PlainTextFormat)(tokenizer, system)


ONE_PROMPT_MESSAGE = (
    "one prompt at a time is generated; of several, "
    "[list(kvant.generate(model, tokenizer, one)) for one in prompts]"
)
Prompt = str | Sequence[int] | Tensor | Sequence[Message] | Messages


def resolve_prompt(
    tokenizer: Any, prompt: Prompt, max_context: int | None = None
) -> str | list[int]:
    """Text as it is; of ids [T] or [1, T] the numbers; of messages what the template makes."""
    if isinstance(prompt, str):
        return check_unicode(prompt)
    if (asked := _parse_messages(prompt)) is not None:
        return encode_messages(tokenizer, asked, max_context)
    if isinstance(prompt, Mapping):
        raise PromptError("a mapping is no prompt: of a tokenizer's output give ['input_ids']")
    parts: Any = prompt if isinstance(prompt, list | tuple) else [prompt]
    if any(isinstance(part, str) or (len(parts) > 1 and _is_batch(part)) for part in parts):
        raise PromptError(ONE_PROMPT_MESSAGE)
    return _parse_token_ids(prompt)


def find_prompt_branch_points(
    tokenizer: Any, prompt: Prompt, tokens: str | Sequence[int]
) -> list[int]:
    """Where other prompts may begin to differ from one of messages; of others nobody knows."""
    asked = _parse_messages(prompt)
    if asked is None or isinstance(tokens, str):
        return []
    return find_branch_points(tokenizer, asked, tokens)


def _parse_messages(prompt: Any) -> Messages | None:
    if isinstance(prompt, list | tuple) and prompt:
        whole = all(isinstance(one, Mapping) for one in prompt)
        return Messages(prompt) if whole else None
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
    """All turns of a conversation, and how they came about."""

    turns: tuple[Turn, ...]
    system: str | None
    template: bool
    model: str | None  # whose tokens and rows they are, where that is known

    def to_header(self) -> dict[str, Any]:
        """As JSON, for the header of a file."""
        return {HEADER_KEY: asdict(self)}

    @classmethod
    def from_header(cls, path: str | os.PathLike[str], header: Mapping[str, Any]) -> Transcript:
        if HEADER_KEY not in header:
            raise CacheFileError(f"{path}: a cache, but no conversation: kvant.load reads it")
        with convert_errors(path):
            said = header[HEADER_KEY]
            turns = [Turn(**turn | {"tokens": tuple(turn["tokens"])}) for turn in said["turns"]]
            made = cls(tuple(turns), said["system"], said["template"], said["model"])
            made._check_fields()
        return made

    def check_model(self, path: str | os.PathLike[str], model: str | None) -> None:
        if None not in (self.model, model) and self.model != model:
            raise CacheFileError(
                f"{path}: a conversation with another model, or with this one in another dtype: "
                "load the model that wrote it"
            )

    def get_tokens(self, cache_length: int, vocab_size: int | None) -> list[int]:
        """All of them, if a memory of `held` tokens and a model of that vocabulary fit."""
        tokens = join_turns(self.turns)
        if cache_length > len(tokens):
            raise ValueError(f"{cache_length} tokens in memory, {len(tokens)} were said")
        if vocab_size is not None and max(tokens, default=0) >= vocab_size:
            raise ValueError(f"token {max(tokens)} of a vocabulary of {vocab_size}")
        return tokens

    def _check_fields(self) -> None:
        if not isinstance(self.template, bool):
            raise ValueError(f"template={self.template!r}: true or false is needed")
        if not all(isinstance(text, str | None) for text in (self.system, self.model)):
            raise ValueError("a system message or a model that is no text")
        before = 0
        for turn in self.turns:
            _check_turn(turn, before)
            before = turn.end


def _check_turn(turn: Turn, previous_end: int) -> None:
    numbers = (turn.shared, turn.begin, *turn.tokens)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a turn whose tokens or counts are not whole numbers from 0 on")
    if not (turn.shared <= previous_end and turn.begin <= turn.end):
        raise ValueError("a turn that does not fit behind the one before")
    if not isinstance(turn.message, str) or not isinstance(turn.reply, str):
        raise ValueError("a turn that is no text")


@contextmanager
def convert_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """What does not fit within is the file's fault, and said of it."""
    try:
        yield
    except CacheFileError:
        raise
    except (CacheError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CacheFileError(f"{path}: not a conversation to continue: {error}") from error

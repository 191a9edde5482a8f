"""From messages to tokens: by the chat template of a model, or as one text that goes on.

What a model is shown is all of the conversation every time; that the memory holds most of it
already is somebody else's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvant.errors import PromptError


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


def tokens_of(turns: Sequence[Turn]) -> list[int]:
    """All tokens of a conversation, at the end of its last turn."""
    tokens: list[int] = []
    for turn in turns:
        tokens[turn.shared :] = turn.tokens
    return tokens


class Dialogue(Protocol):
    """How a conversation is shown to a model."""

    system: str | None
    template: bool

    def prompt(self, turns: Sequence[Turn], tokens: Sequence[int], message: str) -> list[int]:
        """All tokens before the reply to `message`, behind `turns` that took `tokens`."""


class Continuation:
    """One text: a message stands right behind what was said before it."""

    template = False

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.system = system

    def prompt(self, turns: Sequence[Turn], tokens: Sequence[int], message: str) -> list[int]:
        if tokens:
            return [*tokens, *self.tokenizer.encode(message, add_special_tokens=False)]
        return list(self.tokenizer.encode((self.system or "") + message))


class Template:
    """Messages with roles, laid out as the model learned them."""

    template = True

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.system = system

    def prompt(self, turns: Sequence[Turn], tokens: Sequence[int], message: str) -> list[int]:
        return templated(self.tokenizer, self._messages(turns, message))

    def _messages(self, turns: Sequence[Turn], message: str) -> list[dict[str, str]]:
        said = [] if self.system is None else [("system", self.system)]
        for turn in turns:
            said += [("user", turn.message), ("assistant", turn.reply)]
        return [{"role": role, "content": text} for role, text in (*said, ("user", message))]


def templated(tokenizer: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The tokens before the reply to the last of these."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise PromptError("messages for a tokenizer without a chat template: give one text")
    try:
        text = tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template is a program of the model's, and may raise anything
        raise PromptError(f"the chat template of the model refuses this: {error}") from error
    return list(tokenizer.encode(text, add_special_tokens=False))


def dialogue_of(tokenizer: Any, system: str | None = None, template: bool = True) -> Dialogue:
    """By the tokenizer's own template where it has one."""
    templated = template and getattr(tokenizer, "chat_template", None) is not None
    return (Template if templated else Continuation)(tokenizer, system)

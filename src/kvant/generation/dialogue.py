"""From messages to tokens: by the chat template of a model, or as one text that goes on.

What a model is shown is all of the conversation every time; that the memory holds most of it
already is somebody else's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Turn:
    """A message and its reply; the reply is tokens [begin, end) of the conversation."""

    message: str
    reply: str
    begin: int
    end: int


class Dialogue(Protocol):
    """How a conversation is shown to a model."""

    system: str | None

    def prompt(self, turns: Sequence[Turn], tokens: Sequence[int], message: str) -> list[int]:
        """All tokens before the reply to `message`, behind `turns` that took `tokens`."""

    def addressing(self, system: str | None) -> Dialogue:
        """The same with another system message."""


class Continuation:
    """One text: a message stands right behind what was said before it."""

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.system = system

    def prompt(self, turns: Sequence[Turn], tokens: Sequence[int], message: str) -> list[int]:
        if tokens:
            return [*tokens, *self.tokenizer.encode(message, add_special_tokens=False)]
        return list(self.tokenizer.encode((self.system or "") + message))

    def addressing(self, system: str | None) -> Continuation:
        return Continuation(self.tokenizer, system)


class Template:
    """Messages with roles, laid out as the model learned them."""

    def __init__(self, tokenizer: Any, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.system = system

    def prompt(self, turns: Sequence[Turn], tokens: Sequence[int], message: str) -> list[int]:
        text = self.tokenizer.apply_chat_template(
            self._messages(turns, message), tokenize=False, add_generation_prompt=True
        )
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def addressing(self, system: str | None) -> Template:
        return Template(self.tokenizer, system)

    def _messages(self, turns: Sequence[Turn], message: str) -> list[dict[str, str]]:
        said = [] if self.system is None else [("system", self.system)]
        for turn in turns:
            said += [("user", turn.message), ("assistant", turn.reply)]
        return [{"role": role, "content": text} for role, text in (*said, ("user", message))]


def dialogue_of(tokenizer: Any, system: str | None = None, template: bool = True) -> Dialogue:
    """By the tokenizer's own template where it has one."""
    templated = template and getattr(tokenizer, "chat_template", None) is not None
    return (Template if templated else Continuation)(tokenizer, system)

"""The turns of a conversation, how they are rendered as tokens, and what a file says of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from kvant.errors import CacheError, CacheFileError, RewindError
from kvant.generation.conversation import Message, Messages, encode_messages, find_branch_points
from kvant.prefixes.tree import count_shared_prefix
from kvant.vision import ProcessedImage
from kvant.vision.processing import make_content

HEADER_KEY = "session"


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
    images: tuple[ProcessedImage, ...] = ()  # of the message, before its text

    @property
    def end(self) -> int:
        return self.shared + len(self.tokens)


@dataclass(frozen=True)
class Transcript:
    """The turns of a conversation, and how they are rendered as tokens.

    Messages have roles, which the chat template renders. Without a template they are one continuous
    text: a message follows the previous tokens directly.
    """

    turns: tuple[Turn, ...]
    system: str | None
    template: bool
    model: str | None = None  # fingerprint of the model that wrote a file, if known

    @classmethod
    def from_header(cls, path: str | os.PathLike[str], header: Mapping[str, Any]) -> Transcript:
        if HEADER_KEY not in header:
            raise CacheFileError(f"{path}: a cache without a conversation: kvant.load reads it")
        with convert_errors(path):
            fields = header[HEADER_KEY]
            if any("images" in turn for turn in fields["turns"]):
                raise ValueError("a turn with images, for which a file has no place")
            turns = [Turn(**turn | {"tokens": tuple(turn["tokens"])}) for turn in fields["turns"]]
            transcript = cls(tuple(turns), fields["system"], fields["template"], fields["model"])
            transcript._check_fields()
        return transcript

    def to_header(self) -> dict[str, Any]:
        """Return the fields that `from_header` reads."""
        fields = asdict(self)
        for turn in fields["turns"]:
            del turn["images"]  # there are none
        return fields

    @cached_property
    def tokens(self) -> list[int]:
        """All tokens up to the end of the last turn."""
        tokens: list[int] = []
        for turn in self.turns:
            tokens[turn.shared :] = turn.tokens
        return tokens

    @property
    def last_prompt(self) -> Messages | None:
        """The messages before the last reply; None without a template."""
        if not (self.turns and self.template):
            return None
        last = self.turns[-1]
        return replace(self, turns=self.turns[:-1]).make_messages(last.message, last.images)

    def adapt_to(self, tokenizer: Any) -> Transcript:
        """Return this without a template if the tokenizer has none."""
        has_template = getattr(tokenizer, "chat_template", None) is not None
        return replace(self, template=self.template and has_template)

    def make_prompt(
        self,
        tokenizer: Any,
        message: str | Sequence[int],
        images: Sequence[ProcessedImage] = (),
    ) -> list[int]:
        """Return all tokens before the reply to a message, or to tokens as they are."""
        if not isinstance(message, str):
            if self.template:
                raise ValueError(
                    "tokens as a message: a chat template takes text (or template=False)"
                )
            return [*self.tokens, *(int(token) for token in message)]
        if self.template:
            return encode_messages(tokenizer, self.make_messages(message, images))
        if self.tokens:
            return [*self.tokens, *tokenizer.encode(message, add_special_tokens=False)]
        return list(tokenizer.encode((self.system or "") + message))

    def find_branch_points(
        self,
        tokenizer: Any,
        message: str,
        prompt: Sequence[int],
        images: Sequence[ProcessedImage] = (),
    ) -> list[int]:
        """Return the lengths of a prompt at which other conversations may differ."""
        if self.template:
            return find_branch_points(tokenizer, self.make_messages(message, images), prompt)
        return [self.turns[-1].end] if self.turns else []

    def add_turn(
        self,
        message: str,
        reply: str,
        tokens: list[int],
        begin: int,
        images: Sequence[ProcessedImage] = (),
    ) -> Transcript:
        """Append a turn; `tokens` are all tokens, those of the reply from `begin` on."""
        shared = count_shared_prefix(self.tokens, tokens[:begin])
        turn = Turn(message, reply, shared, tuple(tokens[shared:]), begin, tuple(images))
        return replace(self, turns=(*self.turns, turn))

    def truncate(self, tokenizer: Any, to: int) -> Transcript:
        """Cut the turns at length `to`, of several possible cuts at the newest."""
        if to == 0:
            return replace(self, turns=())
        for index in reversed(range(len(self.turns))):
            turn, earlier_turns = self.turns[index], self.turns[:index]
            if to == turn.end or turn.begin < to < turn.end:
                cut_turn = replace(turn, tokens=turn.tokens[: to - turn.shared])
                cut = replace(self, turns=(*earlier_turns, cut_turn))
                if to == turn.end:
                    return cut
                reply = tokenizer.decode(cut.tokens[turn.begin :], skip_special_tokens=True)
                return replace(self, turns=(*earlier_turns, replace(cut_turn, reply=reply)))
        ends = [0, *(turn.end for turn in self.turns)]
        raise RewindError(
            f"length {to}: replies can be cut short, but a message is removed as a whole; the "
            f"turns end at {ends}"
        )

    def check_model(self, path: str | os.PathLike[str], model: str | None) -> None:
        if None not in (self.model, model) and self.model != model:
            raise CacheFileError(
                f"{path}: a conversation with another model, or with this one in another dtype: "
                "load the model that wrote it"
            )

    def check_tokens(self, cache_length: int, vocab_size: int | None) -> None:
        """Raise if the tokens do not fit the cache's length or the vocabulary."""
        if cache_length > len(self.tokens):
            raise ValueError(f"{cache_length} tokens in the cache, {len(self.tokens)} in the turns")
        if vocab_size is not None and max(self.tokens, default=0) >= vocab_size:
            raise ValueError(f"token {max(self.tokens)} for a vocabulary of {vocab_size}")

    @property
    def has_images(self) -> bool:
        return any(turn.images for turn in self.turns)

    def make_messages(self, message: str, images: Sequence[ProcessedImage] = ()) -> Messages:
        """Return all messages before the reply to this one."""
        messages: list[Message] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        for turn in self.turns:
            messages.append({"role": "user", "content": make_content(turn.message, turn.images)})
            messages.append({"role": "assistant", "content": turn.reply})
        return Messages([*messages, {"role": "user", "content": make_content(message, images)}])

    def _check_fields(self) -> None:
        if not isinstance(self.template, bool):
            raise ValueError(f"template={self.template!r}: true or false is needed")
        if not all(isinstance(text, str | None) for text in (self.system, self.model)):
            raise ValueError("a system message or a model that is no text")
        previous_end = 0
        for turn in self.turns:
            numbers = (turn.shared, turn.begin, *turn.tokens)
            if any(type(number) is not int or number < 0 for number in numbers):
                raise ValueError("a turn whose tokens or counts are not whole numbers from 0 on")
            if not (turn.shared <= previous_end and turn.begin <= turn.end):
                raise ValueError("a turn that does not fit after the previous one")
            if not isinstance(turn.message, str) or not isinstance(turn.reply, str):
                raise ValueError("a turn that is no text")
            previous_end = turn.end


@contextmanager
def convert_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raise errors about the contents of a file as `CacheFileError` with its name."""
    try:
        yield
    except CacheFileError:
        raise
    except (CacheError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CacheFileError(f"{path}: not a conversation to continue: {error}") from error

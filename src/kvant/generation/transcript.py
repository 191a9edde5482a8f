"""What a conversation says about itself in the header of its memory's file, and back.

A file is somebody's word: what is missing, of another model or does not fit together is refused
with the file's name, before anything changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kvant.errors import CacheError, CacheFileError
from kvant.generation.prompts import Turn, tokens_of

ENTRY = "session"


@dataclass(frozen=True)
class Transcript:
    """All turns of a conversation, and how they came about."""

    turns: tuple[Turn, ...]
    system: str | None
    template: bool
    model: str | None  # whose tokens and rows they are, where that is known

    def about(self) -> dict[str, Any]:
        """As JSON, for the header of a file."""
        return {ENTRY: asdict(self)}

    @classmethod
    def of(cls, path: str | os.PathLike[str], about: Mapping[str, Any]) -> Transcript:
        if ENTRY not in about:
            raise CacheFileError(f"{path}: a cache, but no conversation: kvant.load reads it")
        with refusing(path):
            said = about[ENTRY]
            turns = [Turn(**turn | {"tokens": tuple(turn["tokens"])}) for turn in said["turns"]]
            made = cls(tuple(turns), said["system"], said["template"], said["model"])
            made._check()
        return made

    def check_model(self, path: str | os.PathLike[str], model: str | None) -> None:
        if None not in (self.model, model) and self.model != model:
            raise CacheFileError(
                f"{path}: a conversation with another model, or with this one in another dtype: "
                "load the model that wrote it"
            )

    def tokens(self, held: int, vocabulary: int | None) -> list[int]:
        """All of them, if a memory of `held` tokens and a model of that vocabulary fit."""
        tokens = tokens_of(self.turns)
        if held > len(tokens):
            raise ValueError(f"{held} tokens in memory, {len(tokens)} were said")
        if vocabulary is not None and max(tokens, default=0) >= vocabulary:
            raise ValueError(f"token {max(tokens)} of a vocabulary of {vocabulary}")
        return tokens

    def _check(self) -> None:
        if not isinstance(self.template, bool):
            raise ValueError(f"template={self.template!r}: true or false is needed")
        if not all(isinstance(text, str | None) for text in (self.system, self.model)):
            raise ValueError("a system message or a model that is no text")
        before = 0
        for turn in self.turns:
            _check_turn(turn, before)
            before = turn.end


def _check_turn(turn: Turn, before: int) -> None:
    numbers = (turn.shared, turn.begin, *turn.tokens)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError("a turn whose tokens or counts are not whole numbers from 0 on")
    if not (turn.shared <= before and turn.begin < turn.end):
        raise ValueError("a turn that does not fit behind the one before")
    if not isinstance(turn.message, str) or not isinstance(turn.reply, str):
        raise ValueError("a turn that is no text")


@contextmanager
def refusing(path: str | os.PathLike[str]) -> Iterator[None]:
    """What does not fit within is the file's fault, and said of it."""
    try:
        yield
    except CacheFileError:
        raise
    except (CacheError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CacheFileError(f"{path}: not a conversation to continue: {error}") from error

"""What a conversation says about itself in the header of its memory's file, and back.

A file is somebody's word: what is missing, of another model or does not fit together is refused
with the file's name, before anything changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from kvant.errors import CacheError, CacheFileError
from kvant.generation.dialogue import Turn

ENTRY = "session"
MAX_TOKEN = 1 << 31


@dataclass(frozen=True)
class Transcript:
    """All tokens of a conversation, and how they came about."""

    tokens: tuple[int, ...]
    turns: tuple[Turn, ...]
    system: str | None
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
            turns = tuple(Turn(**turn) for turn in said["turns"])
            made = cls(tuple(said["tokens"]), turns, said["system"], said["model"])
            made._check()
        return made

    def check_model(self, path: str | os.PathLike[str], model: str | None) -> None:
        if None not in (self.model, model) and self.model != model:
            raise CacheFileError(
                f"{path}: a conversation with another model, or with this one in another dtype: "
                "load the model that wrote it"
            )

    def check_held(self, held: int) -> None:
        """Does a memory of so many tokens belong to it?"""
        if held > len(self.tokens):
            raise ValueError(f"{held} tokens in memory, {len(self.tokens)} were said")

    def _check(self) -> None:
        if any(type(token) is not int or not 0 <= token < MAX_TOKEN for token in self.tokens):
            raise ValueError("tokens that are no numbers of tokens")
        if not all(isinstance(text, str | None) for text in (self.system, self.model)):
            raise ValueError("a system message or a model that is no text")
        places = [place for turn in self.turns for place in (turn.begin, turn.end)]
        if any(type(place) is not int for place in places) or places != sorted(places):
            raise ValueError("turns that are out of order")
        if places and not 0 <= places[0] <= places[-1] == len(self.tokens):
            raise ValueError("turns that are not those of the tokens")
        if not all(isinstance(text, str) for text in _texts(self.turns)):
            raise ValueError("turns that are no text")


def _texts(turns: Sequence[Turn]) -> list[Any]:
    return [text for turn in turns for text in (turn.message, turn.reply)]


@contextmanager
def refusing(path: str | os.PathLike[str]) -> Iterator[None]:
    """What does not fit within is the file's fault, and said of it."""
    try:
        yield
    except CacheFileError:
        raise
    except (CacheError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CacheFileError(f"{path}: not a conversation to continue: {error}") from error

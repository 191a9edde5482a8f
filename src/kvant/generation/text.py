"""From tokens to text, piece by piece, and the strings that end it.

A token may be part of a character: what is not yet certain is held back. So is text that may turn
out to be the beginning of a stop string, which is never shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
CONTEXT = 8  # tokens that a tokenizer may look back at when it puts text together


class Text:
    """The text of a growing list of tokens."""

    def __init__(
        self, tokenizer: Any, stop: Sequence[str] = (), before: Sequence[int] = ()
    ) -> None:
        """`before` are tokens that it stands behind: a tokenizer may join words to them."""
        self.tokenizer = tokenizer
        self.stop = tuple(stop)
        self.stopped = False
        self._tokens = list(before[-CONTEXT:])
        self._first = 0  # of the tokens that are decoded again
        self._said = len(self._tokens)  # tokens whose text is certain
        self._held = ""  # text that may become a stop string

    def add(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._tokens.append(token)
        before = self._decoded(self._first, self._said)
        after = self._decoded(self._first, len(self._tokens))
        if after.endswith(UNFINISHED) or len(after) < len(before):
            return ""
        self._first = max(self._first, self._said - CONTEXT)
        piece = after[len(before) :]
        self._said = len(self._tokens)
        return self._until_stop(piece) if self.stop else piece

    def rest(self) -> str:
        """What was held back, now that nothing comes any more."""
        if self.stopped:
            return ""
        before = self._decoded(self._first, self._said)
        piece = self._decoded(self._first, len(self._tokens))[len(before) :]
        self._said = len(self._tokens)
        text = self._until_stop(piece)
        text, self._held = text + self._held, ""
        return text

    def _decoded(self, first: int, stop: int) -> str:
        text: str = self.tokenizer.decode(self._tokens[first:stop], skip_special_tokens=True)
        return text

    def _until_stop(self, piece: str) -> str:
        text = self._held + piece
        ends = [at for at in (text.find(string) for string in self.stop) if at >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, string) for string in self.stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, string: str) -> int:
    """How many of the last characters are a beginning of the string."""
    most = min(len(text), len(string) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(string[:n])), 0)

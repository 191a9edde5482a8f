"""What comes out of a reply: steps, and the text that is certain.

Steps are computed as they are taken, or all at once for whoever takes them later. A token may be
part of a character: what is not yet certain is held back. So is text that may turn out to be the
beginning of a stop string, which is never shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, Literal

FinishReason = Literal["stop", "length"]  # an end token or stop string; a limit


@dataclass(frozen=True)
class Step:
    """`text` is what the token adds to what was said before: it may be nothing, or a late part."""

    token: int
    text: str
    logprob: float  # of the token, under the distribution that it was drawn from
    finish_reason: FinishReason | None = None
    drafted: bool = False  # guessed before, and verified together with others


class Stream(Iterator[Step]):
    """An iterator over steps. Who drops it, or closes it, has ended the reply."""

    def __init__(self, steps: Generator[Step, None, None]) -> None:
        self._steps = steps
        self._ready: deque[Step] = deque()  # computed, and not taken yet

    def __next__(self) -> Step:
        return self._ready.popleft() if self._ready else next(self._steps)

    def finish(self) -> None:
        """Compute what is left; it can still be taken."""
        self._ready.extend(self._steps)

    def close(self) -> None:
        """End the reply here, unless it is asked for this from within."""
        if getgeneratorstate(self._steps) != GEN_RUNNING:
            self._steps.close()


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

"""A memory and the tokens in it: what was read once is not read again.

Asked for the logits after some tokens, a reader goes back to the longest beginning that the memory
shares with them, and reads the rest; at least one token is always read, for its logits. Turns of a
conversation and drafts that were refused are the same to it. Knows neither text nor sampling.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from kvant.generation.decoder import Decoder, Memory
from kvant.generation.strategy import ALWAYS, Strategy

Progress = Callable[[int, int], None]  # tokens of a prompt that are read, and all of them


class Shared(Protocol):
    """What readers of one model have in common."""

    @property
    def chunk(self) -> int | None:
        """Tokens at whose multiples prompts are to be cut; None: anywhere."""

    def fork(self) -> Shared:
        """The same for another reader."""

    def reachable(self, memory: Any, to: int) -> int:
        """To where a memory may go back."""

    def needs_shapes(self, memory: Any) -> bool:
        """Whether the model is to read a token, for its shapes, before `fetch`."""

    def fetch(self, tokens: Sequence[int], memory: Any) -> range:
        """Bring what there is elsewhere of a prompt that is to begin; the tokens that came."""

    def reject(self, tokens: Sequence[int]) -> None:
        """Drop what `fetch` brought of these tokens: the model failed with it."""

    def begin(self, tokens: Sequence[int], memory: Any, prompt: int) -> tuple[Any, int]:
        """The memory to read tokens with, and how many of those in it were read as prompts."""

    def count(self, asked: int, held: int) -> None:
        """Of a prompt of so many tokens, so many were there."""

    def took(self, count: int, seconds: float) -> None:
        """So many tokens of a prompt were read in so long."""

    def stops(self, tokens: Sequence[int], begin: int, marks: Sequence[int]) -> list[int]:
        """The lengths at which to `keep` what is read, in order."""

    def keep(self, tokens: Sequence[int], memory: Any, prompt: int) -> None:
        """Let others go on from this memory of these tokens."""

    def told(self, tokenizer: Any) -> str | None:
        """Where the last prompt left what there is, in words."""


class Alone:
    """Nothing is in common."""

    chunk = None

    def fork(self) -> Alone:
        return self

    def reachable(self, memory: Any, to: int) -> int:
        return int(memory.reachable(to))

    def needs_shapes(self, memory: Any) -> bool:
        return False

    def fetch(self, tokens: Sequence[int], memory: Any) -> range:
        return range(0)

    def reject(self, tokens: Sequence[int]) -> None:
        """Nothing is brought."""

    def begin(self, tokens: Sequence[int], memory: Any, prompt: int) -> tuple[Any, int]:
        return memory, prompt

    def count(self, asked: int, held: int) -> None:
        """Nobody asks for it."""

    def took(self, count: int, seconds: float) -> None:
        """Nobody asks for it."""

    def stops(self, tokens: Sequence[int], begin: int, marks: Sequence[int]) -> list[int]:
        return []

    def keep(self, tokens: Sequence[int], memory: Any, prompt: int) -> None:
        """Nobody asks for it."""

    def told(self, tokenizer: Any) -> str | None:
        return None


class Reader:
    """One sequence, and how far the memory has come with it."""

    def __init__(
        self,
        decoder: Decoder,
        memory: Memory,
        strategy: Strategy = ALWAYS,
        chunk: int = 512,
        prefixes: Shared | None = None,
    ) -> None:
        if chunk < 1:
            raise ValueError(f"prefill_chunk={chunk}: 1 or more is needed")
        self.prefixes = Alone() if prefixes is None else prefixes
        chunk = self.prefixes.chunk or chunk
        if not decoder.continues:
            chunk = sys.maxsize
        self.decoder = decoder
        self.memory = memory
        self.strategy = strategy
        self.chunk = chunk  # tokens at once: bounds the memory that reading a prompt takes
        one = decoder.continues and self.prefixes.chunk is None
        self._first = strategy.first(chunk) if one else chunk
        self.asked = 0  # tokens of all prompts,
        self.reused = 0  # and those of them that the memory held,
        self.restored = 0  # and of these, those that came from a store
        self._tokens: list[int] = []  # what the memory holds, or more where a forward died
        self._prompt = 0  # of those, so many were read in chunks: what was decoded is behind them

    @property
    def tokens(self) -> list[int]:
        """Those that the memory holds."""
        return self._tokens[: self.memory.length]

    def prompt(
        self,
        tokens: Sequence[int],
        progress: Progress | None = None,
        marks: Sequence[int] = (),
    ) -> Tensor:
        """The logits [vocabulary] after a prompt, read in chunks; at `marks` others may differ."""
        self.asked += len(tokens)
        self.align(tokens)
        if not self.strategy.remembers(len(tokens)):
            return self.decoder.logits(list(tokens), None)[-1]
        if self.prefixes.needs_shapes(self.memory):  # a store may hold anything
            self._forward(tokens, 0, 1, last=1)
            self.reset()
        came = self.prefixes.fetch(tokens, self.memory)
        self.memory, self._prompt = self.prefixes.begin(tokens, self.memory, self._prompt)
        begin = self.memory.length
        self._tokens = list(tokens[:begin])
        self.reused += begin
        self.restored += len(range(came.start, min(came.stop, begin)))
        self.prefixes.count(len(tokens), begin)
        stops = self.prefixes.stops(tokens, begin, marks)
        try:
            logits = self._read(tokens, progress, stops, prompt=True)[-1]
        except Exception:
            self._reject(tokens[: came.stop])
            raise
        if came and logits.isnan().any():  # no token will be drawn from them
            self._reject(tokens[: came.stop])
        return logits

    def keep(self) -> None:
        """Let others go on from here who begin with the same tokens."""
        self.align(self.tokens, last=0)  # where a forward died, that is undone first
        self.prefixes.keep(self.tokens, self.memory, self._prompt)

    def next(self, tokens: Sequence[int], last: int = 1) -> Tensor:
        """The logits [last, vocabulary] after each of the newest tokens.

        A chunk of them is read as one token after the other would be: they may be drafts.
        """
        if not self.strategy.remembers(len(tokens)):
            return self.decoder.logits(list(tokens), None, last)
        held, behind = self.memory.length, tokens[: len(tokens) - last]
        if last == 1 and held == len(behind):
            return self._forward(tokens, held, len(tokens), last)
        if held == 0 and behind:
            self._read(behind)  # a strategy that begins to remember
        if self.memory.length > len(behind):
            self.align(tokens, last)
        with self.memory.speculating():
            if self.memory.length < len(behind):
                self._read(behind)
            if last > 1:
                self.memory.checkpoint()
            return self._forward(tokens, self.memory.length, len(tokens), last)

    def align(self, tokens: Sequence[int], last: int = 1) -> None:
        """Go back to what the memory shares with `tokens`, without the newest `last` of them."""
        shared = max(0, min(shared_prefix(self.tokens, tokens), len(tokens) - last))
        self.memory.rewind(self.prefixes.reachable(self.memory, shared))
        del self._tokens[self.memory.length :]
        self._prompt = min(self._prompt, len(self._tokens))
        if self.prefixes.chunk is not None:  # what is read from here on is cut otherwise
            self._prompt -= self._prompt % self.prefixes.chunk

    def fork(self) -> Reader:
        """A second reader of the same tokens, independent of this one from now on."""
        self.align(self.tokens, last=0)  # where a forward died, that is undone first
        memory = self.memory.fork()
        twin = Reader(self.decoder, memory, self.strategy, self.chunk, self.prefixes.fork())
        twin.adopt(self.tokens)
        twin._prompt = self._prompt
        twin.asked, twin.reused, twin.restored = self.asked, self.reused, self.restored
        return twin

    def reset(self) -> None:
        """Forget all, also where a memory cannot go back."""
        self.memory.reset()
        self._tokens, self._prompt = [], 0

    def adopt(self, tokens: Sequence[int]) -> None:
        """Know what a memory holds that others have filled."""
        self._tokens = list(tokens)

    def _reject(self, tokens: Sequence[int]) -> None:
        """Drop what a store had of a prompt, if anything, here and for other readers."""
        if tokens:
            self.prefixes.reject(tokens)
            self.reset()

    def _read(
        self,
        tokens: Sequence[int],
        progress: Progress | None = None,
        stops: Sequence[int] = (),
        *,
        prompt: bool = False,
    ) -> Tensor:
        """Everything that is unread, chunk by chunk; the logits after the last token.

        Chunks end at multiples of their size, at `stops`, where what is read is kept, and where it
        ends.
        """
        logits = None
        while (begin := self.memory.length) < len(tokens):
            chunk = self.chunk if begin else self._first
            ends = ((begin // chunk + 1) * chunk, len(tokens), *stops)
            stop = min(end for end in ends if end > begin)
            since = time.perf_counter()
            with self.memory.prompting():
                logits = self._forward(tokens, begin, stop, last=1)
            self.prefixes.took(stop - begin, time.perf_counter() - since)
            if prompt and self._prompt == begin:
                self._prompt = stop
            if stop in stops:
                self.keep()
            if progress is not None:
                progress(stop, len(tokens))
        assert logits is not None
        return logits

    def _forward(self, tokens: Sequence[int], begin: int, stop: int, last: int) -> Tensor:
        self._tokens[begin:] = tokens[begin:stop]
        self.strategy.make_room(self.memory, stop - begin)
        logits = self.decoder.logits(list(tokens[begin:stop]), self.memory, last)
        if begin == 0:  # now it is known how large rows are
            self.strategy.make_room(self.memory, 0)
        return logits


def shared_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many of the first tokens are the same."""
    count = min(len(one), len(other))
    if list(one[:count]) == list(other[:count]):
        return count
    return next(i for i in range(count) if one[i] != other[i])

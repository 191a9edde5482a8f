"""The loop: prompt in, tokens out, one `Step` each, with the text that is certain.

The memory is always one token behind: after N steps it holds the prompt and N - 1 tokens, and the
next step is computed when it is asked for, or all at once for whoever takes them later. So a caller
may stop at any step, and memory and tokens agree. While the drafts of one forward are handed out
the memory is ahead by those that are left; closing the stream takes them back. A token may be part
of a character: what is not yet certain is held back. So is text that may turn out to be the
beginning of a stop string, which is never shown. Knows neither transformers nor a format.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import GEN_RUNNING, getgeneratorstate
from typing import Any, Literal

from torch import Tensor

from kvant.generation.drafts import Aim, Drafter, NoDrafts
from kvant.generation.reader import Progress, Reader
from kvant.generation.sampling import Draft, Drawn, Sampler
from kvant.generation.settings import Limits, Sampling

# An end token or stop string; a limit; the one who asked.
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Step:
    """`text` is what the token adds to what was said before: it may be nothing, or a late part.

    >>> step = next(kvant.generate(model, tokenizer, "import "))
    >>> isinstance(step.text, str), step.logprob <= 0, step.finish_reason
    (True, True, None)
    """

    token: int
    text: str
    logprob: float  # of the token, under the distribution that it was drawn from
    finish_reason: FinishReason | None = None
    drafted: bool = False  # guessed before, and verified together with others
    likeliest: tuple[tuple[int, float], ...] = ()  # tokens and logprobs, where they were asked for
    choice: int = 0  # which of several continuations of a prompt


class Steps(Iterator[Step]):
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
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        before: Sequence[int] = (),
        *,
        special: bool = False,
    ) -> None:
        """`before` are tokens that it stands behind: a tokenizer may join words to them.

        With `special` the names of special tokens are part of the text.
        """
        self.tokenizer = tokenizer
        self.special = special
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
        tokens = self._tokens[first:stop]
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=not self.special)
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


@dataclass
class Reply:
    """What is said behind a prompt: tokens become steps, and end somewhere."""

    tokenizer: Any
    limits: Limits
    tokens: list[int]  # prompt and all that was said
    said: int = 0

    def __post_init__(self) -> None:
        limits = self.limits
        self.text = Text(self.tokenizer, limits.stop, self.tokens, special=limits.special)

    @property
    def left(self) -> int:
        """How many tokens may still come."""
        return self.limits.left(self.said, len(self.tokens))

    def add(self, drawn: Drawn, *, drafted: bool = False, choice: int = 0) -> Step:
        """The next token: the step it makes, which ends the reply where it has a finish reason."""
        token, text = drawn.token, self.text
        self.tokens.append(token)
        self.said += 1
        reason: FinishReason | None = None
        if token in self.limits.end_tokens:
            piece, reason = text.rest(), "stop"
        else:
            piece = text.add(token)
            if text.stopped or self.left <= 0:
                piece += text.rest()
                reason = "stop" if text.stopped else "length"
        return Step(token, piece, drawn.logprob, reason, drafted, drawn.likeliest, choice)


@dataclass
class Run:
    """One generation: the tokens so far, and how the next one comes about."""

    reader: Reader
    sampling: Sampling
    limits: Limits
    tokenizer: Any
    drafter: Drafter = field(default_factory=NoDrafts)
    reply: Reply | None = None
    drafts: int = 0
    drafts_accepted: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and all that was said."""
        return [] if self.reply is None else self.reply.tokens

    @property
    def said(self) -> int:
        return 0 if self.reply is None else self.reply.said

    def steps(
        self,
        prompt: Sequence[int],
        progress: Progress | None = None,
        marks: Sequence[int] = (),
    ) -> Generator[Step, None, None]:
        """Continue `prompt`; what the memory shares with it is not read again.

        At `marks`, lengths, other prompts may begin to differ from this one.
        """
        self.limits.check_prompt(prompt)
        self.reply = reply = Reply(self.tokenizer, self.limits, list(prompt))
        sampler, drafts = Sampler(self.sampling, len(prompt)), list[Draft]()
        try:
            rows = self.reader.prompt(reply.tokens, progress, marks)[None]
            while True:
                for logits, draft in zip(rows, [*drafts, None], strict=True):
                    step = self._step(sampler, logits, draft, reply)
                    yield step
                    if step.finish_reason is not None:
                        return
                    if not step.drafted:
                        break
                drafts = self._drafts(Aim(sampler, rows.shape[-1]), reply)
                ahead = [*reply.tokens, *(draft.token for draft in drafts)]
                rows = self.reader.next(ahead, len(drafts) + 1)
        finally:
            self.reader.align(reply.tokens)

    def _step(self, sampler: Sampler, logits: Tensor, draft: Draft | None, reply: Reply) -> Step:
        if draft is None:
            return reply.add(sampler.draw(logits, reply.tokens))
        drawn = sampler.verify(logits, reply.tokens, draft)
        self.drafts_accepted += drawn.token == draft.token
        return reply.add(drawn, drafted=drawn.token == draft.token)

    def _drafts(self, aim: Aim, reply: Reply) -> list[Draft]:
        """Guesses, where at least one and the token behind it may still be said."""
        length, capacity = len(reply.tokens), self.reader.memory.capacity
        most = min(self.limits.max_drafts, reply.left - 1)
        if capacity is not None:
            most = min(most, capacity - length)
        if (room := self.reader.memory.before_prune) is not None:  # and the token before them
            most = min(most, room - 1)
        drafts = self.drafter.drafts(reply.tokens, most, aim) if most > 0 else []
        self.drafts += len(drafts)
        if drafts:
            self.reader.memory.widen(self.limits.max_drafts + 1)
        return drafts

    def rest(self) -> str:
        """What was held back for a longer text, where that does not come any more."""
        return "" if self.reply is None else self.reply.text.rest()

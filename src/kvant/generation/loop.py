"""The loop: prompt in, tokens out, one `Step` each.

The memory is always one token behind: after N steps it holds the prompt and N - 1 tokens, and the
next step is computed when it is asked for. So a caller may stop at any step, and memory and tokens
agree. While the drafts of one forward are handed out the memory is ahead by those that are left;
closing the stream takes them back. Knows neither transformers nor a format.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvant.errors import CapacityError, PromptError
from kvant.generation.drafts import Aim, Drafter, NoDrafts
from kvant.generation.reader import Progress, Reader
from kvant.generation.sampling import Draft, Sampler, Sampling
from kvant.generation.stream import FinishReason, Step, Text


@dataclass(frozen=True)
class Limits:
    """Where the loop ends, and how far it guesses."""

    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    end_tokens: frozenset[int] = frozenset()
    max_context: int | None = None
    vocabulary: int | None = None
    max_drafts: int = 8  # tokens that are guessed at once, where there is somebody to guess

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_context", "max_drafts"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: 1 or more is needed")
        if any(not string for string in self.stop):
            raise ValueError(f"stop={list(self.stop)}: strings that are not empty are needed")

    def check_prompt(self, tokens: Sequence[int]) -> None:
        count, most = len(tokens), self.vocabulary
        if count == 0:
            raise PromptError("the prompt has no tokens: give at least one")
        if min(tokens) < 0 or (most is not None and max(tokens) >= most):
            wrong = min(tokens) if min(tokens) < 0 else max(tokens)
            allowed = "0 or more" if most is None else f"0 to {most - 1}"
            raise PromptError(f"the prompt has token {wrong}: {allowed} is needed")
        if self.max_context is not None and count >= self.max_context:
            raise CapacityError(
                f"a prompt of {count} tokens for a context of {self.max_context}: shorten it, or "
                "keep a window (window=N in the spec) and allow a longer context"
            )

    def left(self, said: int, length: int) -> int:
        """How many tokens may still come after `said` of them, with `length` in all."""
        more = self.max_new_tokens - said
        return more if self.max_context is None else min(more, self.max_context - length)


@dataclass
class Run:
    """One generation: the tokens so far, and how the next one comes about."""

    reader: Reader
    sampling: Sampling
    limits: Limits
    tokenizer: Any
    drafter: Drafter = field(default_factory=NoDrafts)
    tokens: list[int] = field(default_factory=list)  # prompt and all that was said
    text: Text | None = None
    said: int = 0
    drafts: int = 0
    drafts_accepted: int = 0

    def steps(
        self, prompt: Sequence[int], progress: Progress | None = None
    ) -> Generator[Step, None, None]:
        """Continue `prompt`; what the memory shares with it is not read again."""
        self.limits.check_prompt(prompt)
        self.tokens = list(prompt)
        self.text = text = Text(self.tokenizer, self.limits.stop, self.tokens)
        sampler, drafts = Sampler(self.sampling), list[Draft]()
        try:
            rows = self.reader.prompt(self.tokens, progress)[None]
            while True:
                for logits, draft in zip(rows, [*drafts, None], strict=True):
                    step = self._step(sampler, logits, draft, text)
                    yield step
                    if step.finish_reason is not None:
                        return
                    if not step.drafted:
                        break
                drafts = self._drafts(Aim(sampler, rows.shape[-1]))
                ahead = [*self.tokens, *(draft.token for draft in drafts)]
                rows = self.reader.next(ahead, len(drafts) + 1)
        finally:
            self.reader.align(self.tokens)

    def _step(self, sampler: Sampler, logits: Any, draft: Draft | None, text: Text) -> Step:
        if draft is None:
            token, logprob = sampler.draw(logits, self.tokens)
        else:
            token, logprob = sampler.verify(logits, self.tokens, draft)
        self.tokens.append(token)
        self.said += 1
        drafted = draft is not None and draft.token == token
        self.drafts_accepted += drafted
        if token in self.limits.end_tokens:
            return Step(token, text.rest(), logprob, "stop", drafted)
        piece, reason = text.add(token), self._reason(text)
        if reason is not None:
            piece += text.rest()
        return Step(token, piece, logprob, "stop" if text.stopped else reason, drafted)

    def _drafts(self, aim: Aim) -> list[Draft]:
        """Guesses, where at least one and the token behind it may still be said."""
        length, capacity = len(self.tokens), self.reader.memory.capacity
        most = min(self.limits.max_drafts, self.limits.left(self.said, length) - 1)
        if capacity is not None:
            most = min(most, capacity - length)
        drafts = self.drafter.drafts(self.tokens, most, aim) if most > 0 else []
        self.drafts += len(drafts)
        if drafts:
            self.reader.memory.widen(self.limits.max_drafts + 1)
        return drafts

    def rest(self) -> str:
        """What was held back for a longer text, where that does not come any more."""
        return "" if self.text is None else self.text.rest()

    def _reason(self, text: Text) -> FinishReason | None:
        if text.stopped:
            return "stop"
        return "length" if self.limits.left(self.said, len(self.tokens)) <= 0 else None

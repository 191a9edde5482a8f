"""The loop: prompt in, tokens out, one `Step` each.

The cache is always one token behind: after N steps it holds the prompt and N - 1 tokens, and the
next step is computed when it is asked for. So a caller may stop at any step, and cache and tokens
agree. Knows neither transformers nor a format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from kvant.errors import CapacityError
from kvant.generation.decoder import Decoder, Memory
from kvant.generation.sampling import Sampler, Sampling
from kvant.generation.step import FinishReason, Step
from kvant.generation.text import Text

Progress = Callable[[int, int], None]  # tokens of the prompt that are read, and all of them


@dataclass(frozen=True)
class Limits:
    """Where the loop ends, and how much of a prompt is read at a time."""

    max_new_tokens: int = 256
    stop: tuple[str, ...] = ()
    end_tokens: frozenset[int] = frozenset()
    max_context: int | None = None
    prefill_chunk: int = 512  # tokens: bounds the memory that reading a prompt takes

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "prefill_chunk", "max_context"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: 1 or more is needed")
        if any(not string for string in self.stop):
            raise ValueError(f"stop={list(self.stop)}: strings that are not empty are needed")

    def check_prompt(self, count: int) -> None:
        if count == 0:
            raise ValueError("the prompt has no tokens: give at least one")
        if self.max_context is not None and count >= self.max_context:
            raise CapacityError(
                f"a prompt of {count} tokens for a context of {self.max_context}: shorten it, or "
                "keep a window (window=N in the spec) and allow a longer context"
            )


def prefill(
    decoder: Decoder,
    memory: Memory,
    ids: Sequence[int],
    chunk: int,
    progress: Progress | None = None,
) -> Tensor:
    """Read `ids` into the memory, in pieces; the logits after the last."""
    logits: Tensor | None = None
    for begin in range(0, len(ids), chunk):
        logits = decoder.logits(list(ids[begin : begin + chunk]), memory)
        if progress is not None:
            progress(min(begin + chunk, len(ids)), len(ids))
    assert logits is not None
    return logits[-1]


@dataclass
class Run:
    """One generation: the tokens so far, and how the next one comes about."""

    decoder: Decoder
    memory: Memory
    sampling: Sampling
    limits: Limits
    tokenizer: Any
    tokens: list[int] = field(default_factory=list)  # prompt and all that was said

    def steps(self, prompt: Sequence[int], progress: Progress | None = None) -> Iterator[Step]:
        """Continue `prompt`, of which the memory holds none, or a beginning, already."""
        self.limits.check_prompt(len(prompt))
        self.tokens = list(prompt)
        sampler, text = Sampler(self.sampling), Text(self.tokenizer, self.limits.stop)
        unread = prompt[self.memory.length :]
        logits = prefill(self.decoder, self.memory, unread, self.limits.prefill_chunk, progress)
        for count in range(1, self.limits.max_new_tokens + 1):
            token, logprob = sampler.draw(logits, self.tokens)
            self.tokens.append(token)
            step = self._step(token, logprob, count, text)
            yield step
            if step.finish_reason is not None:
                return
            logits = self.decoder.logits([token], self.memory)[-1]

    def _step(self, token: int, logprob: float, count: int, text: Text) -> Step:
        if token in self.limits.end_tokens:
            return Step(token, text.rest(), logprob, "stop")
        piece, reason = text.add(token), self._reason(count, text)
        if reason is not None:
            piece += text.rest()
        return Step(token, piece, logprob, "stop" if text.stopped else reason)

    def _reason(self, count: int, text: Text) -> FinishReason | None:
        if text.stopped:
            return "stop"
        most = self.limits.max_context
        full = most is not None and len(self.tokens) >= most
        return "length" if full or count == self.limits.max_new_tokens else None

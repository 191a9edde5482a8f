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

from kvant.generation.drafters import Drafter, DraftTarget, NoDrafter
from kvant.generation.prefill import Prefiller, PrefillProgress
from kvant.generation.sampling import DraftToken, SampledToken, Sampler
from kvant.generation.settings import Sampling, StopConditions

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


class StepStream(Iterator[Step]):
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


REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
DETOKENIZER_CONTEXT_TOKENS = (
    8  # tokens that a tokenizer may look back at when it puts text together
)


class IncrementalDetokenizer:
    """The text of a growing list of tokens."""

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        previous_tokens: Sequence[int] = (),
        *,
        include_special_tokens: bool = False,
    ) -> None:
        """`before` are tokens that it stands behind: a tokenizer may join words to them.

        With `special` the names of special tokens are part of the text.
        """
        self.tokenizer = tokenizer
        self.include_special_tokens = include_special_tokens
        self.stop = tuple(stop)
        self.stopped = False
        self._tokens = list(previous_tokens[-DETOKENIZER_CONTEXT_TOKENS:])
        self._prefix_offset = 0  # of the tokens that are decoded again
        self._read_offset = len(self._tokens)  # tokens whose text is certain
        self._pending_text = ""  # text that may become a stop string

    def append_token(self, token: int) -> str:
        """The text that is certain now and was not before."""
        self._tokens.append(token)
        before = self._decode_range(self._prefix_offset, self._read_offset)
        after = self._decode_range(self._prefix_offset, len(self._tokens))
        if after.endswith(REPLACEMENT_CHARACTER) or len(after) < len(before):
            return ""
        self._prefix_offset = max(
            self._prefix_offset, self._read_offset - DETOKENIZER_CONTEXT_TOKENS
        )
        piece = after[len(before) :]
        self._read_offset = len(self._tokens)
        return self._cut_at_stop(piece) if self.stop else piece

    def flush(self) -> str:
        """What was held back, now that nothing comes any more."""
        if self.stopped:
            return ""
        before = self._decode_range(self._prefix_offset, self._read_offset)
        piece = self._decode_range(self._prefix_offset, len(self._tokens))[len(before) :]
        self._read_offset = len(self._tokens)
        text = self._cut_at_stop(piece)
        text, self._pending_text = text + self._pending_text, ""
        return text

    def _decode_range(self, first: int, stop: int) -> str:
        tokens = self._tokens[first:stop]
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=not self.include_special_tokens
        )
        return text

    def _cut_at_stop(self, piece: str) -> str:
        text = self._pending_text + piece
        ends = [at for at in (text.find(string) for string in self.stop) if at >= 0]
        if ends:
            self.stopped, self._pending_text = True, ""
            return text[: min(ends)]
        keep = max((_count_overlap(text, string) for string in self.stop), default=0)
        self._pending_text = text[len(text) - keep :]
        return text[: len(text) - keep]


def _count_overlap(text: str, string: str) -> int:
    """How many of the last characters are a beginning of the string."""
    most = min(len(text), len(string) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(string[:n])), 0)


@dataclass
class Output:
    """What is said behind a prompt: tokens become steps, and end somewhere."""

    tokenizer: Any
    stop_conditions: StopConditions
    tokens: list[int]  # prompt and all that was said
    num_generated: int = 0

    def __post_init__(self) -> None:
        limits = self.stop_conditions
        self.detokenizer = IncrementalDetokenizer(
            self.tokenizer,
            limits.stop,
            self.tokens,
            include_special_tokens=limits.include_special_tokens,
        )

    @property
    def num_remaining(self) -> int:
        """How many tokens may still come."""
        return self.stop_conditions.count_remaining(self.num_generated, len(self.tokens))

    def append_token(
        self, sampled: SampledToken, *, drafted: bool = False, choice: int = 0
    ) -> Step:
        """The next token: the step it makes, which ends the reply where it has a finish reason."""
        token, text = sampled.token, self.detokenizer
        self.tokens.append(token)
        self.num_generated += 1
        reason: FinishReason | None = None
        if token in self.stop_conditions.end_tokens:
            piece, reason = text.flush(), "stop"
        else:
            piece = text.append_token(token)
            if text.stopped or self.num_remaining <= 0:
                piece += text.flush()
                reason = "stop" if text.stopped else "length"
        return Step(token, piece, sampled.logprob, reason, drafted, sampled.top_logprobs, choice)


@dataclass
class GenerationLoop:
    """One generation: the tokens so far, and how the next one comes about."""

    prefiller: Prefiller
    sampling: Sampling
    stop_conditions: StopConditions
    tokenizer: Any
    drafter: Drafter = field(default_factory=NoDrafter)
    output: Output | None = None
    num_drafts: int = 0
    num_accepted_drafts: int = 0

    @property
    def tokens(self) -> list[int]:
        """Prompt and all that was said."""
        return [] if self.output is None else self.output.tokens

    @property
    def num_generated(self) -> int:
        return 0 if self.output is None else self.output.num_generated

    def generate_steps(
        self,
        prompt: Sequence[int],
        progress: PrefillProgress | None = None,
        branch_points: Sequence[int] = (),
    ) -> Generator[Step, None, None]:
        """Continue `prompt`; what the memory shares with it is not read again.

        At `marks`, lengths, other prompts may begin to differ from this one.
        """
        self.stop_conditions.check_prompt(prompt)
        self.output = reply = Output(self.tokenizer, self.stop_conditions, list(prompt))
        sampler, drafts = Sampler(self.sampling, len(prompt)), list[DraftToken]()
        try:
            rows = self.prefiller.prefill(reply.tokens, progress, branch_points)[None]
            while True:
                for logits, draft in zip(rows, [*drafts, None], strict=True):
                    step = self._sample_step(sampler, logits, draft, reply)
                    yield step
                    if step.finish_reason is not None:
                        return
                    if not step.drafted:
                        break
                drafts = self._propose_drafts(DraftTarget(sampler, rows.shape[-1]), reply)
                ahead = [*reply.tokens, *(draft.token for draft in drafts)]
                rows = self.prefiller.compute_next_logits(ahead, len(drafts) + 1)
        finally:
            self.prefiller.align_cache(reply.tokens)

    def _sample_step(
        self, sampler: Sampler, logits: Tensor, draft: DraftToken | None, output: Output
    ) -> Step:
        if draft is None:
            return output.append_token(sampler.sample(logits, output.tokens))
        drawn = sampler.verify_draft(logits, output.tokens, draft)
        self.num_accepted_drafts += drawn.token == draft.token
        return output.append_token(drawn, drafted=drawn.token == draft.token)

    def _propose_drafts(self, target: DraftTarget, output: Output) -> list[DraftToken]:
        """Guesses, where at least one and the token behind it may still be said."""
        length, capacity = len(output.tokens), self.prefiller.cache.capacity
        most = min(self.stop_conditions.max_drafts, output.num_remaining - 1)
        if capacity is not None:
            most = min(most, capacity - length)
        if (
            room := self.prefiller.cache.tokens_until_prune
        ) is not None:  # and the token before them
            most = min(most, room - 1)
        drafts = self.drafter.propose_drafts(output.tokens, most, target) if most > 0 else []
        self.num_drafts += len(drafts)
        if drafts:
            self.prefiller.cache.ensure_slack(self.stop_conditions.max_drafts + 1)
        return drafts

    def flush(self) -> str:
        """What was held back for a longer text, where that does not come any more."""
        return "" if self.output is None else self.output.detokenizer.flush()

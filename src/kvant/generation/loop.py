"""The generation loop: turn a prompt into a stream of steps, one `Step` per token.

    tokens   |--- prompt ---|-- generated --|
    cache    |----------------------------|      one token behind

The cache is one token behind: the forward of the next step runs only when that step is requested.
So a caller may stop after any step, and cache and tokens agree. While accepted drafts are handed
out, the cache is ahead of the steps; closing the stream rewinds it.

Text is held back while it is uncertain: a token may end inside a character, and the last
characters may begin a stop string, which is never part of the output. The loop needs neither
transformers nor a cache format.
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

# "stop": end token or stop string; "length": token limit or context; "cancelled": by the caller.
FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class Step:
    """One generated token; `text` is the newly certain text, which may be empty.

    >>> step = next(kvant.generate(model, tokenizer, "import "))
    >>> isinstance(step.text, str), step.logprob <= 0, step.finish_reason
    (True, True, None)
    """

    token: int
    text: str
    logprob: float  # of the token, under the distribution that it was sampled from
    finish_reason: FinishReason | None = None
    drafted: bool = False  # an accepted draft
    likeliest: tuple[tuple[int, float], ...] = ()  # alternatives and logprobs, if requested
    choice: int = 0  # index among several continuations of a prompt


class StepStream(Iterator[Step]):
    """An iterator over steps; dropping or closing it ends the reply."""

    def __init__(self, steps: Generator[Step, None, None]) -> None:
        self._steps = steps
        self._ready: deque[Step] = deque()  # computed by `finish`, not yet returned

    def __next__(self) -> Step:
        return self._ready.popleft() if self._ready else next(self._steps)

    def finish(self) -> None:
        """Compute the remaining steps; they can still be iterated."""
        self._ready.extend(self._steps)

    def close(self) -> None:
        """End the reply; do nothing if the generator itself calls this."""
        if getgeneratorstate(self._steps) != GEN_RUNNING:
            self._steps.close()


REPLACEMENT_CHARACTER = "\N{REPLACEMENT CHARACTER}"
DETOKENIZER_CONTEXT_TOKENS = 8  # preceding tokens that affect how a tokenizer joins text


class IncrementalDetokenizer:
    """Turn a growing list of tokens into text.

        _prefix_offset      _read_offset
    ----|-------------------|-------------------> tokens
        | decoded again     | text uncertain
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str] = (),
        previous_tokens: Sequence[int] = (),
        *,
        include_special_tokens: bool = False,
    ) -> None:
        """Continue `previous_tokens`, which affect how a tokenizer joins words.

        With `include_special_tokens` the names of special tokens are part of the text.
        """
        self.tokenizer = tokenizer
        self.include_special_tokens = include_special_tokens
        self.stop = tuple(stop)
        self.stopped = False
        self._tokens = list(previous_tokens[-DETOKENIZER_CONTEXT_TOKENS:])
        self._prefix_offset = 0  # where decoding starts
        self._read_offset = len(self._tokens)  # where the uncertain text starts
        self._pending_text = ""  # possible beginning of a stop string

    def append_token(self, token: int) -> str:
        """Append a token; return the text that became certain."""
        self._tokens.append(token)
        old_text = self._decode_range(self._prefix_offset, self._read_offset)
        new_text = self._decode_range(self._prefix_offset, len(self._tokens))
        if new_text.endswith(REPLACEMENT_CHARACTER) or len(new_text) < len(old_text):
            return ""
        self._prefix_offset = max(
            self._prefix_offset, self._read_offset - DETOKENIZER_CONTEXT_TOKENS
        )
        piece = new_text[len(old_text) :]
        self._read_offset = len(self._tokens)
        return self._cut_at_stop(piece) if self.stop else piece

    def flush(self) -> str:
        """Return the text that was held back: no more tokens follow."""
        if self.stopped:
            return ""
        old_text = self._decode_range(self._prefix_offset, self._read_offset)
        piece = self._decode_range(self._prefix_offset, len(self._tokens))[len(old_text) :]
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
        stop_positions = [at for at in (text.find(string) for string in self.stop) if at >= 0]
        if stop_positions:
            self.stopped, self._pending_text = True, ""
            return text[: min(stop_positions)]
        num_pending = max((_count_overlap(text, string) for string in self.stop), default=0)
        self._pending_text = text[len(text) - num_pending :]
        return text[: len(text) - num_pending]


def _count_overlap(text: str, string: str) -> int:
    """Return the length of the longest suffix of `text` that begins `string`."""
    limit = min(len(text), len(string) - 1)
    return next((n for n in range(limit, 0, -1) if text.endswith(string[:n])), 0)


@dataclass
class Output:
    """The tokens after a prompt as steps, and the conditions that end them."""

    tokenizer: Any
    stop_conditions: StopConditions
    tokens: list[int]  # prompt and generated tokens
    num_generated: int = 0

    def __post_init__(self) -> None:
        conditions = self.stop_conditions
        self.detokenizer = IncrementalDetokenizer(
            self.tokenizer,
            conditions.stop,
            self.tokens,
            include_special_tokens=conditions.include_special_tokens,
        )

    @property
    def num_remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self.stop_conditions.count_remaining(self.num_generated, len(self.tokens))

    def append_token(
        self, sampled: SampledToken, *, drafted: bool = False, choice: int = 0
    ) -> Step:
        """Append a token; return its step, which has a finish reason if it is the last."""
        token, detokenizer = sampled.token, self.detokenizer
        self.tokens.append(token)
        self.num_generated += 1
        reason: FinishReason | None = None
        if token in self.stop_conditions.end_tokens:
            piece, reason = detokenizer.flush(), "stop"
        else:
            piece = detokenizer.append_token(token)
            if detokenizer.stopped or self.num_remaining <= 0:
                piece += detokenizer.flush()
                reason = "stop" if detokenizer.stopped else "length"
        return Step(token, piece, sampled.logprob, reason, drafted, sampled.top_logprobs, choice)


@dataclass
class GenerationLoop:
    """One generation: its tokens, and the forwards and samples of the next ones."""

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
        """The prompt and the generated tokens."""
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
        """Generate the steps after `prompt`; prefill only what the cache does not hold.

        `branch_points` are lengths at which other prompts may differ from this one.
        """
        self.stop_conditions.check_prompt(prompt)
        self.output = output = Output(self.tokenizer, self.stop_conditions, list(prompt))
        sampler, drafts = Sampler(self.sampling, len(prompt)), list[DraftToken]()
        try:
            rows = self.prefiller.prefill(output.tokens, progress, branch_points)[None]
            while True:
                for logits, draft in zip(rows, [*drafts, None], strict=True):
                    step = self._sample_step(sampler, logits, draft, output)
                    yield step
                    if step.finish_reason is not None:
                        return
                    if not step.drafted:
                        break
                drafts = self._propose_drafts(DraftTarget(sampler, rows.shape[-1]), output)
                with_drafts = [*output.tokens, *(draft.token for draft in drafts)]
                rows = self.prefiller.compute_next_logits(with_drafts, len(drafts) + 1)
        finally:
            self.prefiller.align_cache(output.tokens)

    def _sample_step(
        self, sampler: Sampler, logits: Tensor, draft: DraftToken | None, output: Output
    ) -> Step:
        if draft is None:
            return output.append_token(sampler.sample(logits, output.tokens))
        sampled = sampler.verify_draft(logits, output.tokens, draft)
        self.num_accepted_drafts += sampled.token == draft.token
        return output.append_token(sampled, drafted=sampled.token == draft.token)

    def _propose_drafts(self, target: DraftTarget, output: Output) -> list[DraftToken]:
        """Propose drafts, if at least one and the token after it may still be generated."""
        length, capacity = len(output.tokens), self.prefiller.cache.capacity
        limit = min(self.stop_conditions.max_drafts, output.num_remaining - 1)
        if capacity is not None:
            limit = min(limit, capacity - length)
        until_prune = self.prefiller.cache.tokens_until_prune
        if until_prune is not None:  # the forward also has the token before the drafts
            limit = min(limit, until_prune - 1)
        drafts = self.drafter.propose_drafts(output.tokens, limit, target) if limit > 0 else []
        self.num_drafts += len(drafts)
        if drafts:
            self.prefiller.cache.ensure_slack(self.stop_conditions.max_drafts + 1)
        return drafts

    def flush(self) -> str:
        """Return the text held back by the detokenizer; no more tokens follow."""
        return "" if self.output is None else self.output.detokenizer.flush()

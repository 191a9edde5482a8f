"""A request in the engine: its prompt, its continuations, and the stream of its client."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from traceback import clear_frames
from typing import Any

from torch import Tensor

from kvant.engine.batch import EngineSequence
from kvant.engine.scheduler import ScheduledRequest
from kvant.engine.stream import Stream
from kvant.generation.loop import Output
from kvant.generation.sampling import SampledToken, Sampler, sample_batch
from kvant.generation.settings import StopConditions


@dataclass(eq=False)
class RequestChoice:
    """One continuation of a prompt: its output, sampler and cache sequence."""

    index: int
    output: Output
    sampler: Sampler
    sequence: EngineSequence


@dataclass(eq=False)
class Request:
    """A request, its limits, and its unfinished continuations."""

    scheduled: ScheduledRequest
    sequence: EngineSequence
    samplers: list[Sampler]  # one for each continuation
    stop_conditions: StopConditions
    logprobs: int
    stream: Stream
    branch_points: list[int]  # prompt lengths at which other prompts may diverge
    last_token_time: float  # monotonic seconds; before the first token, the time of arrival
    prefill_started: bool = False
    restored_range: range = range(0)  # prompt tokens restored from a store
    choices: list[RequestChoice] = field(default_factory=list)  # unfinished; [] while prefilling

    @property
    def sequences(self) -> list[EngineSequence]:
        """Sequences of the unfinished continuations; before the fork, the one of the prompt."""
        return [choice.sequence for choice in self.choices] or [self.sequence]

    def start_choices(self, tokenizer: Any, forks: Sequence[EngineSequence]) -> None:
        """Make the continuations of a prefilled prompt: its sequence, and forks of it."""
        sequences = zip([self.sequence, *forks], self.samplers, strict=True)
        self.choices = [
            RequestChoice(
                index, Output(tokenizer, self.stop_conditions, sequence.tokens), sampler, sequence
            )
            for index, (sequence, sampler) in enumerate(sequences)
        ]

    def finish(self, error: BaseException | None = None) -> None:
        """Flush the detokenizers and end the stream, with `error` if the request failed."""
        for choice in self.choices:
            self.stream.set_final_text(choice.index, choice.output.detokenizer.flush())
        self.stream.finish(error)


ChoiceOfRequest = tuple[Request, RequestChoice]  # a choice, with its request


def check_counts(**counts: int) -> None:
    """Raise unless these arguments of `submit` are whole numbers in range."""
    for name, value in counts.items():
        if not isinstance(value, int):
            raise TypeError(f"{name}={value!r}: a whole number is needed")
    for name, minimum in (("n", 1), ("logprobs", 0)):
        if counts[name] < minimum:
            raise ValueError(f"{name}={counts[name]}: {minimum} or more is needed")


def sample_tokens(
    choices: Sequence[ChoiceOfRequest], logits: Tensor
) -> list[SampledToken | Exception]:
    """Sample the next token of each choice in one batch; if that fails, one by one."""

    def sample(batch: Sequence[ChoiceOfRequest], rows: Tensor) -> list[SampledToken]:
        samplers, outputs = zip(*((c.sampler, c.output.tokens) for _, c in batch), strict=True)
        return sample_batch(rows, samplers, outputs, [request.logprobs for request, _ in batch])

    try:
        return [*sample(choices, logits)]
    except Exception:
        tokens: list[SampledToken | Exception] = []
        for row, choice in enumerate(choices):
            try:
                tokens += sample([choice], logits[row : row + 1])
            except Exception as error:
                tokens.append(error)
        return tokens


def clear_traceback_frames(error: BaseException | None) -> None:
    """Clear the frames of an error and its causes: a stored error would keep their caches alive."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

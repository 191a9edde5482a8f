"""What somebody asked an engine for, and who still continues it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from traceback import clear_frames

from torch import Tensor

from kvant.engine.batch import EngineSequence
from kvant.engine.scheduler import ScheduledRequest
from kvant.engine.stream import Stream
from kvant.generation.loop import Output
from kvant.generation.sampling import SampledToken, Sampler, sample_batch
from kvant.generation.settings import StopConditions


@dataclass(eq=False)
class RequestChoice:
    """One continuation of a prompt."""

    index: int
    output: Output
    sampler: Sampler
    sequence: EngineSequence


@dataclass(eq=False)
class Request:
    """What was asked, and who still continues it."""

    scheduled: ScheduledRequest
    sequence: EngineSequence
    samplers: list[Sampler]  # one for each continuation
    stop_conditions: StopConditions
    logprobs: int
    stream: Stream
    branch_points: list[int]  # lengths of the prompt at which others may begin to differ
    last_token_time: (
        float  # when the last token came, in seconds; before the first, when it was asked
    )
    prefill_started: bool = False  # has reading its prompt begun?
    restored_range: range = range(0)  # tokens of the prompt that a store had
    choices: list[RequestChoice] = field(default_factory=list)  # those that go on

    @property
    def sequences(self) -> list[EngineSequence]:
        return [choice.sequence for choice in self.choices] or [self.sequence]

    def finish(self, error: BaseException | None = None) -> None:
        """Tell who asked that nothing comes any more."""
        for choice in self.choices:
            self.stream.set_final_text(choice.index, choice.output.detokenizer.flush())
        self.stream.finish(error)


def sample_tokens(
    choices: Sequence[tuple[Request, RequestChoice]], logits: Tensor
) -> list[SampledToken | Exception]:
    """The next token of each, all at once; where that fails, one by one."""

    def draw(some: Sequence[tuple[Request, RequestChoice]], rows: Tensor) -> list[SampledToken]:
        samplers, before = zip(*((c.sampler, c.output.tokens) for _, c in some), strict=True)
        return sample_batch(rows, samplers, before, [request.logprobs for request, _ in some])

    try:
        return [*draw(choices, logits)]
    except Exception:
        found: list[SampledToken | Exception] = []
        for row, one in enumerate(choices):
            try:
                found += draw([one], logits[row : row + 1])
            except Exception as error:
                found.append(error)
        return found


def clear_traceback_frames(error: BaseException | None) -> None:
    """Somebody may keep an error, but not the caches that its frames hold."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

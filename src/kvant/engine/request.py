"""What somebody asked an engine for, and who still continues it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvant.engine.batch import Seat
from kvant.engine.schedule import Job
from kvant.engine.stream import Stream
from kvant.generation.loop import Limits, Reply
from kvant.generation.sampling import Sampler


@dataclass(eq=False)
class Choice:
    """One continuation of a prompt."""

    index: int
    reply: Reply
    sampler: Sampler
    seat: Seat


@dataclass(eq=False)
class Request:
    """What was asked, and who still continues it."""

    job: Job
    seat: Seat
    samplers: list[Sampler]  # one for each continuation
    limits: Limits
    logprobs: int
    stream: Stream
    marks: list[int]  # lengths of the prompt at which others may begin to differ
    since: float  # when the last token came, in seconds; before the first, when it was asked
    served: bool = False  # has reading its prompt begun?
    choices: list[Choice] = field(default_factory=list)  # those that go on

    @property
    def seats(self) -> list[Seat]:
        return [choice.seat for choice in self.choices] or [self.seat]

    def end(self, error: BaseException | None = None) -> None:
        """Tell who asked that nothing comes any more."""
        for choice in self.choices:
            self.stream.hold(choice.index, choice.reply.text.rest())
        self.stream.end(error)
